"""What Prometheus scrapes: names, labels and buckets as dashboards know them, and numbers that are exactly right."""

from __future__ import annotations

import time
from typing import Any

import httpx
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from radixkv.server.errors import Overloaded
from radixkv.server.metrics import MAX_NAMESPACES, Metrics

OF_REQUEST = "0.3 0.5 0.8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680"
TO_FIRST = "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1 2.5 5 7.5 10 20 40 80 160 640 2560"
BETWEEN_TWO = "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5 5 7.5 10 20 40 80"
TOKENS = "1 2 5 10 20 50 100 200 500 1000 2000 5000 10000 20000 50000 100000 200000 500000"

# As vLLM 0.32 serves them (vllm/v1/metrics/loggers.py, buckets.py), without the prefix; their labels begin with these two.
LABELS = ("model_name", "engine")
OF_VLLM = {
    "num_requests_running": "gauge",
    "num_requests_waiting": "gauge",
    "kv_cache_usage_perc": "gauge",
    "cache_config_info": "gauge block_size num_gpu_blocks kv_cache_size_tokens enable_prefix_caching cache_dtype",
    "prompt_tokens": "counter",
    "prompt_tokens_by_source": "counter source",
    "prompt_tokens_cached": "counter",
    "generation_tokens": "counter",
    "prefix_cache_queries": "counter",
    "prefix_cache_hits": "counter",
    "num_preemptions": "counter",
    "request_success": "counter finished_reason",
}
HISTOGRAMS_OF_VLLM = {
    "time_to_first_token_seconds": TO_FIRST,
    "inter_token_latency_seconds": BETWEEN_TWO,
    "request_time_per_output_token_seconds": BETWEEN_TWO,
    "e2e_request_latency_seconds": OF_REQUEST,
    "request_queue_time_seconds": OF_REQUEST,
    "request_prefill_time_seconds": OF_REQUEST,
    "request_decode_time_seconds": OF_REQUEST,
    "request_inference_time_seconds": OF_REQUEST,
    "request_prompt_tokens": TOKENS,
    "request_generation_tokens": TOKENS,
    "request_prefill_kv_computed_tokens": TOKENS,
    "request_params_max_tokens": TOKENS,
    "request_max_num_generation_tokens": TOKENS,
    "request_params_n": "1 2 5 10 20",
    "request_num_preemptions": "1 2 3 4 5 10 20",
}
OTHERS = {
    "vllm:admission_rejections": "counter model_name reason",
    "http_requests": "counter method status handler",
    "radixkv_prefix_cache_queries": "counter namespace",
    "radixkv_prefix_cache_hits": "counter namespace",
    "radixkv_prefix_cache_missed": "counter reason",
    "radixkv_request_failure": "counter kind",
    "radixkv_worker_restarts": "counter",
    "radixkv_requests_resubmitted": "counter",
    "radixkv_evicted_blocks": "counter",
    "radixkv_kv_blocks_cached": "gauge",
    "radixkv_engine_up": "gauge",
    "radixkv_worker_requests_running": "gauge worker",
    "radixkv_worker_requests_waiting": "gauge worker",
    "radixkv_worker_kv_blocks_locked": "gauge worker",
    "radixkv_worker_kv_blocks_cached": "gauge worker",
}
OTHER_HISTOGRAMS = {
    "radixkv_time_to_first_token_seconds": ("cached", TO_FIRST),
    "http_request_duration_seconds": ("method handler", "0.1 0.5 1"),
}
STATS = {"running": 1, "waiting": 2, "blocks_locked": 3, "blocks_total": 12, "blocks_cached": 4, "preemptions": 5,
         "evicted_blocks": 6, "block_size": 16, "prefix_caching": True, "dtype": "float32"}  # fmt: skip
SECONDS = {"queued": 0.1, "prefill": 0.2, "decode": 0.3, "total": 0.6}


def scrape(text: str) -> dict[str, Metric]:
    families = text_string_to_metric_families(text)
    return {family.name: family for family in families if not family.name.endswith("_created")}


def value(families: dict[str, Metric], name: str, **labels: str) -> float:
    """The sum of all samples of that name that have these labels."""
    samples = [sample for family in families.values() for sample in family.samples if sample.name == name]
    return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())


def busy_metrics() -> Metrics:
    """Metrics in which everything has happened once."""
    metrics = Metrics("a model")
    metrics.engine_started(0, STATS)
    metrics.began("tenant", 10, 4, {"new": 5, "last_token": 1}, 0.2)
    metrics.finished("stop", prompt_tokens=10, cached_tokens=4, tokens=3, max_tokens=8, preemptions=0, **SECONDS)
    metrics.prompt_finished(1, 3)
    metrics.inter_token_latency.observe(0.1)
    metrics.failed("internal", 1)
    metrics.answered("POST", "/v1/completions", 200, 0.6)
    return metrics


def test_names_types_labels_and_buckets_are_those_that_dashboards_for_vllm_query() -> None:
    expected = {f"vllm:{name}": (kind.split()[0], {*LABELS, *kind.split()[1:]}, "") for name, kind in OF_VLLM.items()}
    expected |= {f"vllm:{name}": ("histogram", set(LABELS), buckets) for name, buckets in HISTOGRAMS_OF_VLLM.items()}
    expected |= {name: (kind.split()[0], set(kind.split()[1:]), "") for name, kind in OTHERS.items()}
    expected |= {name: ("histogram", set(labels.split()), buckets) for name, (labels, buckets) in OTHER_HISTOGRAMS.items()}
    served = {}
    for name, family in scrape(busy_metrics().render({0: STATS}).decode()).items():
        if name.startswith("process_"):
            continue
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        buckets = list(dict.fromkeys(f"{float(sample.labels['le']):g}" for sample in family.samples if "le" in sample.labels))
        buckets = [format_bucket(bucket) for bucket in buckets if bucket != "inf"]
        served[name] = (family.type, labels, " ".join(buckets))
    assert served == expected


def format_bucket(text: str) -> str:
    number = float(text)
    return str(int(number)) if number == int(number) else str(number)


def test_a_series_is_there_before_anything_happens_so_that_its_first_event_shows_as_an_increase() -> None:
    families = scrape(Metrics("a model").render({}).decode())
    for reason in ("stop", "length", "abort", "error"):
        assert reason in [sample.labels["finished_reason"] for sample in families["vllm:request_success"].samples if sample.labels]
    assert {sample.labels["source"] for sample in families["vllm:prompt_tokens_by_source"].samples} == {
        "local_compute", "local_cache_hit", "external_kv_transfer"}  # fmt: skip
    assert value(families, "vllm:prompt_tokens_total", model_name="a model", engine="0") == 0
    assert value(families, "vllm:e2e_request_latency_seconds_count", model_name="a model") == 0
    assert len(families["radixkv_prefix_cache_missed"].samples) >= 7
    assert value(families, "process_resident_memory_bytes") > 0


def test_gauges_are_the_engines_and_counters_of_a_new_engine_go_on_from_the_old_ones() -> None:
    metrics = busy_metrics()
    families = scrape(metrics.render({0: STATS}).decode())
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "radixkv_kv_blocks_cached")
    assert [value(families, name) for name in names] == [1, 2, 0.25, 4]
    config = families["vllm:cache_config_info"].samples[0].labels
    assert config == {"model_name": "a model", "engine": "0", "block_size": "16", "num_gpu_blocks": "12",
                      "kv_cache_size_tokens": "192", "enable_prefix_caching": "True", "cache_dtype": "float32"}  # fmt: skip
    metrics.engine_lost(7)
    families = scrape(metrics.render({}).decode())
    assert [value(families, name) for name in names] == [0, 7, 0, 0]
    assert value(families, "radixkv_engine_up") == 0
    metrics.engine_started(0, STATS)
    for _ in range(2):
        families = scrape(metrics.render({0: STATS}).decode())
        assert value(families, "vllm:num_preemptions_total") == 10
        assert value(families, "radixkv_evicted_blocks_total") == 12


def test_namespaces_beyond_the_limit_share_a_label() -> None:
    metrics = Metrics("a model")
    for i in range(MAX_NAMESPACES + 5):
        metrics.began(f"tenant-{i}", 3, 1, None, 0.1)
    families = scrape(metrics.render({}).decode())
    totals = [sample for sample in families["radixkv_prefix_cache_queries"].samples if sample.name.endswith("_total")]
    assert len(totals) == MAX_NAMESPACES + 1
    assert value(families, "radixkv_prefix_cache_queries_total", namespace="_other") == 15
    assert value(families, "vllm:prefix_cache_queries_total") == 3 * (MAX_NAMESPACES + 5)


@pytest.mark.parametrize(("cached", "part"), [(0, "none"), (1, "some"), (4, "some"), (5, "most"), (9, "most")])
def test_first_tokens_are_told_apart_by_how_much_was_cached(cached: int, part: str) -> None:
    metrics = Metrics("a model")
    metrics.began("", 10, cached, None, 0.2)
    assert value(scrape(metrics.render({}).decode()), "radixkv_time_to_first_token_seconds_count", cached=part) == 1


def test_a_request_that_finds_no_seat_is_a_rejection() -> None:
    metrics = Metrics("a model")
    with pytest.raises(Overloaded), metrics.counting_rejections():
        raise Overloaded("too many")
    assert value(scrape(metrics.render({}).decode()), "vllm:admission_rejections_total", reason="max_num_queued_reqs") == 1


# --- a real server -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def counted(http: httpx.Client) -> Any:
    """Says by how much a sample has grown since the test began."""
    before = scrape(http.get("/metrics").text)
    return lambda name, **labels: value(scrape(http.get("/metrics").text), name, **labels) - value(before, name, **labels)


def test_after_so_many_requests_every_count_is_exactly_right(http: httpx.Client, counted: Any) -> None:
    namespace = f"counts-{time.monotonic_ns()}"
    asked = {"prompt": "metrics test", "max_tokens": 5, "namespace": namespace}
    usage = [http.post("/v1/completions", json=asked).json()["usage"] for _ in range(2)]
    http.post("/v1/completions", json=asked | {"n": 3, "max_tokens": 2, "stream": True})
    prompt = usage[0]["prompt_tokens"]
    hits = 4 * (prompt - 1)  # all but the first request found all but the last token
    assert usage[1]["prompt_tokens_details"]["cached_tokens"] == prompt - 1
    tokens = 2 * 5 + 3 * 2
    assert {name: counted(f"vllm:{name}") for name in (
        "prompt_tokens_total", "prefix_cache_queries_total", "prefix_cache_hits_total", "prompt_tokens_cached_total",
        "generation_tokens_total", "num_preemptions_total",
    )} == {
        "prompt_tokens_total": 5 * prompt, "prefix_cache_queries_total": 5 * prompt, "prefix_cache_hits_total": hits,
        "prompt_tokens_cached_total": hits, "generation_tokens_total": tokens, "num_preemptions_total": 0,
    }  # fmt: skip
    assert counted("vllm:prompt_tokens_by_source_total", source="local_compute") == 5 * prompt - hits
    assert counted("vllm:prompt_tokens_by_source_total", source="local_cache_hit") == hits
    assert counted("vllm:request_success_total") == counted("vllm:request_success_total", finished_reason="length") == 5
    for name in HISTOGRAMS_OF_VLLM:
        count = {"inter_token_latency_seconds": tokens - 5, "request_params_n": 3, "request_max_num_generation_tokens": 3}.get(
            name, 5
        )
        assert counted(f"vllm:{name}_count") == count, name
    assert counted("vllm:request_prompt_tokens_sum") == 5 * prompt
    assert counted("vllm:request_prefill_kv_computed_tokens_sum") == 5 * prompt - hits
    assert counted("vllm:request_generation_tokens_sum") == counted("vllm:request_params_max_tokens_sum") == tokens
    assert counted("vllm:request_params_n_sum") == 1 + 1 + 3
    assert counted("vllm:request_max_num_generation_tokens_sum") == 5 + 5 + 2
    assert counted("radixkv_prefix_cache_queries_total", namespace=namespace) == 5 * prompt
    assert counted("radixkv_prefix_cache_hits_total", namespace=namespace) == hits
    assert counted("radixkv_prefix_cache_missed_total", reason="last_token") == 5
    assert counted("radixkv_prefix_cache_missed_total", reason="new") == prompt - 1
    assert counted("radixkv_time_to_first_token_seconds_count", cached="none") == 1
    assert counted("radixkv_time_to_first_token_seconds_count", cached="most") == 4


def test_what_was_cached_and_is_computed_again_for_its_log_probabilities_is_counted_as_missed_for_them(
    http: httpx.Client, counted: Any
) -> None:
    body = {"prompt": f"scored {time.monotonic_ns()}", "max_tokens": 1}
    prompt = http.post("/v1/completions", json=body).json()["usage"]["prompt_tokens"]
    usage = http.post("/v1/completions", json=body | {"echo": True, "logprobs": 1}).json()["usage"]
    details = {"cached_tokens": 0, "miss_reasons": {"logprobs": prompt - 1, "new": 0, "last_token": 1}}
    assert usage["prompt_tokens_details"] == details
    assert counted("radixkv_prefix_cache_missed_total", reason="logprobs") == prompt - 1
    assert counted("vllm:prefix_cache_hits_total") == 0


def test_what_fails_is_counted_by_why(http: httpx.Client, counted: Any) -> None:
    assert http.post("/v1/completions", json={"prompt": [3, 3, 3], "max_tokens": 1}).status_code == 400  # the engine refuses it
    assert counted("vllm:request_success_total", finished_reason="error") == 1
    assert counted("radixkv_request_failure_total", kind="invalid_request") == 1
    assert counted("vllm:e2e_request_latency_seconds_count") == 0


def test_requests_over_http_are_counted_by_route_and_status_but_for_probes_and_scrapes(http: httpx.Client, counted: Any) -> None:
    assert http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200
    assert http.post("/v1/completions", json={"prompt": "x", "max_tokens": 0}).status_code == 400
    assert http.get("/v1/models/nobody").status_code == 404
    assert http.get("/no/such/path").status_code == 404
    for path in ("/health", "/ready", "/metrics"):
        http.get(path)
    assert counted("http_requests_total", method="POST", handler="/v1/completions", status="2xx") == 1
    assert counted("http_requests_total", method="POST", handler="/v1/completions", status="4xx") == 1
    assert counted("http_requests_total", method="GET", handler="/v1/models/{model}", status="4xx") == 1
    assert counted("http_requests_total", method="GET", handler="none", status="4xx") == 1
    assert counted("http_requests_total") == 4
    assert counted("http_request_duration_seconds_count") == 4
