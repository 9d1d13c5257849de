"""What Prometheus scrapes: counters and times kept by the frontend, gauges asked of the engine at each scrape.

What vLLM counts, too, has the name, labels and buckets that it has there (``vllm:...``, as of vLLM 0.32), so that dashboards,
alerts and routers made for vLLM work unchanged.  What only this server tells is called ``radixkv_...``.  docs/operations.md lists
both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from radixkv.cache.miss import MissReason
from radixkv.scheduling.request import FinishReason
from radixkv.server.errors import Overloaded
from radixkv.server.worker_stats import merged

MAX_NAMESPACES = 100
"""Namespaces that get a label of their own; later ones share ``_other``, so that clients can't grow the metrics without bound."""
ENGINE = "0"

_REQUEST_SECONDS = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
                    1920.0, 7680.0)  # fmt: skip
_FIRST_TOKEN_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
                        80.0, 160.0, 640.0, 2560.0)  # fmt: skip
_TOKEN_SECONDS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_CHOICES = (1, 2, 5, 10, 20)
_PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)
# vLLM ends the series at the longest context.  Here it is always this one, so that servers of several models can be added up.
_TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
_HTTP_SECONDS = (0.1, 0.5, 1.0)


class Metrics:
    """A request is one sequence, ``n=4`` counts as four, but for :attr:`request_params_n` and the longest of the n."""

    def __init__(self, model: str) -> None:
        self._registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self._namespaces: set[str] = set()
        names = ("model_name", "engine")
        of_engine = (model, ENGINE)

        def counter(name: str, text: str) -> Counter:
            return Counter(f"vllm:{name}", text, names, registry=registry).labels(*of_engine)

        def counters(name: str, text: str, label: str, values: tuple[str, ...]) -> dict[str, Counter]:
            parent = Counter(f"vllm:{name}", text, (*names, label), registry=registry)
            return {value: parent.labels(*of_engine, value) for value in values}

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"vllm:{name}", text, names, registry=registry).labels(*of_engine)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"vllm:{name}", text, names, registry=registry, buckets=buckets).labels(*of_engine)

        def own_counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"radixkv_{name}", text, labels, registry=registry)

        # As vLLM's.
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests that began.")
        self.prompt_tokens_by_source = counters(
            "prompt_tokens_by_source", "Prompt tokens of requests that began, computed or from the cache.", "source",
            ("local_compute", "local_cache_hit", "external_kv_transfer"),
        )  # fmt: skip
        self.prompt_tokens_cached = counter("prompt_tokens_cached", "Prompt tokens that were cached.")
        self.generation_tokens = counter("generation_tokens", "Tokens generated.")
        self.prefix_cache_queries = counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self.prefix_cache_hits = counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self.preemptions = counter("num_preemptions", "Times that a running request lost its blocks to others and began again.")
        self.request_success = counters(
            "request_success", "Requests that ended, by why; also those that failed.", "finished_reason", get_args(FinishReason)
        )
        self.running = gauge("num_requests_running", "Requests in the running batch.")
        self.waiting = gauge("num_requests_waiting", "Requests in the queue.")
        self.kv_cache_usage = gauge("kv_cache_usage_perc", "Part of the KV blocks that running requests hold; 1 is all.")
        self.time_to_first_token = histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token.", _FIRST_TOKEN_SECONDS
        )
        self.inter_token_latency = histogram("inter_token_latency_seconds", "Between two tokens of a request.", _TOKEN_SECONDS)
        self.time_per_output_token = histogram(
            "request_time_per_output_token_seconds", "A request's mean time between tokens; 0 where it has but one.", _TOKEN_SECONDS
        )
        self.e2e_latency = histogram("e2e_request_latency_seconds", "From arrival to the last token.", _REQUEST_SECONDS)
        self.queue_time = histogram("request_queue_time_seconds", "In the engine's queue before the first step.", _REQUEST_SECONDS)
        self.prefill_time = histogram("request_prefill_time_seconds", "From the first step to the first token.", _REQUEST_SECONDS)
        self.decode_time = histogram("request_decode_time_seconds", "From the first token to the last.", _REQUEST_SECONDS)
        self.inference_time = histogram(
            "request_inference_time_seconds", "From the first step to the last token.", _REQUEST_SECONDS
        )
        self.request_prompt_tokens = histogram("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self.request_generation_tokens = histogram("request_generation_tokens", "Tokens generated for a request.", _TOKENS)
        self.request_computed_tokens = histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens of a request that were not cached.", _TOKENS
        )
        self.request_params_max_tokens = histogram(
            "request_params_max_tokens", "The longest output that a request allows.", _TOKENS
        )
        self.request_preemptions = histogram("request_num_preemptions", "Times that a request was preempted.", _PREEMPTIONS)
        self.request_params_n = histogram("request_params_n", "Choices asked for, once for each prompt.", _CHOICES)
        self.longest_choice = histogram("request_max_num_generation_tokens", "Tokens of a prompt's longest choice.", _TOKENS)
        self._cache_config = Gauge(
            "vllm:cache_config_info", "Always 1; its labels are how the cache is set up.", registry=registry,
            labelnames=(*names, "block_size", "num_gpu_blocks", "kv_cache_size_tokens", "enable_prefix_caching", "cache_dtype"),
        )  # fmt: skip
        self.rejections = Counter(
            "vllm:admission_rejections", "Requests refused because too many waited.", ("model_name", "reason"), registry=registry
        ).labels(model, "max_num_queued_reqs")
        # As prometheus-fastapi-instrumentator's, which vLLM serves beside its own.
        self._http_requests = Counter(
            "http_requests",
            "HTTP requests answered, but for probes and scrapes.",
            ("method", "status", "handler"),
            registry=registry,
        )
        self._http_duration = Histogram(
            "http_request_duration_seconds", "From a request to the end of its answer.", ("method", "handler"), registry=registry,
            buckets=_HTTP_SECONDS,
        )  # fmt: skip
        # Nobody else's.
        self._namespace_queries = own_counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", "namespace")
        self._namespace_hits = own_counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.", "namespace")
        missed = own_counter("prefix_cache_missed", "Prompt tokens not found in the prefix cache, by why.", "reason")
        # "logprobs" is the scheduler's: what was cached of a prompt, and had to be computed all the same.
        self._missed = {reason: missed.labels(reason) for reason in (*get_args(MissReason), "logprobs")}
        first_token = Histogram(
            "radixkv_time_to_first_token_seconds", "From a request's arrival to its first token, by how much was cached.",
            ("cached",), registry=registry, buckets=_FIRST_TOKEN_SECONDS,
        )  # fmt: skip
        self._first_token = {part: first_token.labels(part) for part in ("none", "some", "most")}
        self.request_failure = own_counter("request_failure", "Accepted requests that failed, by kind of error.", "kind")
        self.worker_restarts = own_counter("worker_restarts", "Engine processes started because the last one died or hung.")
        self.requests_resubmitted = own_counter(
            "requests_resubmitted", "Times that a request went on after the engine process died."
        )
        self.kv_blocks_cached = Gauge(
            "radixkv_kv_blocks_cached", "KV blocks of cached prefixes that no running request uses.", registry=registry
        )
        self.evicted_blocks = own_counter("evicted_blocks", "KV blocks of cached prefixes that were given to others.")
        self.up = Gauge("radixkv_engine_up", "1 while an engine process is ready.", registry=registry)
        self._of_worker = {
            stat: Gauge(f"radixkv_{name}", text, ["worker"], registry=registry)
            for stat, name, text in (
                ("running", "worker_requests_running", "Requests in one worker's running batch."),
                ("waiting", "worker_requests_waiting", "Requests in one worker's queue."),
                ("blocks_locked", "worker_kv_blocks_locked", "KV blocks that one worker's running requests hold."),
                ("blocks_cached", "worker_kv_blocks_cached", "KV blocks of one worker's cached prefixes that nobody uses."),
            )
        }
        """By worker that is ready; the gauges without that label are of all together."""
        self._of_engine = of_engine
        self._counted = {"preemptions": self.preemptions, "evicted_blocks": self.evicted_blocks}
        self._seen: dict[tuple[int, str], int] = {}

    def engine_started(self, index: int, stats: dict[str, Any]) -> None:
        """Another engine, set up as its ``stats`` say, which count from zero again; the one of this ``index`` is no more."""
        for name in self._counted:
            self._seen[index, name] = 0
        self._cache_config.labels(
            *self._of_engine,
            block_size := stats["block_size"],
            stats["blocks_total"],
            block_size * stats["blocks_total"],
            stats["prefix_caching"],
            stats["dtype"],
        ).set(1)

    def engine_lost(self, num_open: int) -> None:
        """Until there is another engine, nothing runs and ``num_open`` requests wait."""
        self.waiting.set(num_open)
        for of_the_engine in (self.running, self.kv_cache_usage, self.kv_blocks_cached):
            of_the_engine.set(0)

    def began(self, namespace: str, prompt_tokens: int, cached_tokens: int, missed: dict[str, int] | None, seconds: float) -> None:
        """A request's prompt was looked up in the cache, and its first token came ``seconds`` after its arrival."""
        if namespace not in self._namespaces and len(self._namespaces) >= MAX_NAMESPACES:
            namespace = "_other"
        self._namespaces.add(namespace)
        self.prompt_tokens.inc(prompt_tokens)
        self.prompt_tokens_cached.inc(cached_tokens)
        self.prompt_tokens_by_source["local_compute"].inc(prompt_tokens - cached_tokens)
        self.prompt_tokens_by_source["local_cache_hit"].inc(cached_tokens)
        self.prefix_cache_queries.inc(prompt_tokens)
        self.prefix_cache_hits.inc(cached_tokens)
        self._namespace_queries.labels(namespace).inc(prompt_tokens)
        self._namespace_hits.labels(namespace).inc(cached_tokens)
        for reason, count in (missed or {}).items():
            self._missed[reason].inc(count)
        self.time_to_first_token.observe(seconds)
        part = "most" if 2 * cached_tokens >= prompt_tokens else "some" if cached_tokens else "none"
        self._first_token[part].observe(seconds)

    def finished(
        self,
        reason: FinishReason,
        *,
        prompt_tokens: int,
        cached_tokens: int,
        tokens: int,
        max_tokens: int,
        preemptions: int,
        queued: float,
        prefill: float,
        decode: float,
        total: float,
    ) -> None:
        """A request has got its last token; the last four are seconds."""
        self.request_success[reason].inc()
        self.e2e_latency.observe(total)
        self.queue_time.observe(queued)
        self.prefill_time.observe(prefill)
        self.decode_time.observe(decode)
        self.inference_time.observe(prefill + decode)
        self.time_per_output_token.observe(decode / (tokens - 1) if tokens > 1 else 0.0)
        self.request_prompt_tokens.observe(prompt_tokens)
        self.request_computed_tokens.observe(prompt_tokens - cached_tokens)
        self.request_generation_tokens.observe(tokens)
        self.request_params_max_tokens.observe(max_tokens)
        self.request_preemptions.observe(preemptions)

    def prompt_finished(self, n: int, longest: int) -> None:
        """All ``n`` choices of a prompt have their last tokens, ``longest`` of them at most."""
        self.request_params_n.observe(n)
        self.longest_choice.observe(longest)

    @contextmanager
    def counting_rejections(self) -> Iterator[None]:
        """Counts where ``Overloaded`` passes."""
        try:
            yield
        except Overloaded:
            self.rejections.inc()
            raise

    def failed(self, kind: str, count: int) -> None:
        """So many accepted requests failed."""
        self.request_success["error"].inc(count)
        self.request_failure.labels(kind).inc(count)

    def answered(self, method: str, handler: str, status: int, seconds: float) -> None:
        """An HTTP request was answered, and the answer's end was sent ``seconds`` after its arrival."""
        self._http_requests.labels(method, f"{status // 100}xx", handler).inc()
        self._http_duration.labels(method, handler).observe(seconds)

    def render(self, workers: Mapping[int, dict[str, Any]]) -> bytes:
        """The text that Prometheus reads; ``workers`` is the engine's stats of each worker that is ready."""
        self.up.set(bool(workers))
        for gauge in self._of_worker.values():
            gauge.clear()
        for index, stats in workers.items():
            for name, gauge in self._of_worker.items():
                gauge.labels(index).set(stats[name])
            for name, counter in self._counted.items():
                counter.inc(max(0, stats[name] - self._seen.get((index, name), 0)))
                self._seen[index, name] = stats[name]
        if workers:
            stats = merged(workers)
            self.running.set(stats["running"])
            self.waiting.set(stats["waiting"])
            self.kv_cache_usage.set(stats["blocks_locked"] / stats["blocks_total"])
            self.kv_blocks_cached.set(stats["blocks_cached"])
        return generate_latest(self._registry)
