"""What several workers say of themselves, added up."""

from __future__ import annotations

from typing import Any

from radixkv.report.report import Report
from radixkv.server.metrics import Metrics
from radixkv.server.worker_stats import merged


def stats(**fields: Any) -> dict[str, Any]:
    return {
        "model": "m", "block_size": 16, "max_model_len": 2048, "kv_bytes_per_token": 100, "prefix_caching": True, "uptime_s": 5.0,
        "requests": 2, "prompt_tokens": 100, "cached_tokens": 40, "generated_tokens": 7, "preemptions": 1, "running": 1,
        "waiting": 0, "prefill_tokens_computed": 60, "prefill_seconds": 0.5, "missed_tokens": {"new": 50, "last_token": 10},
        "blocks_total": 10, "evicted_blocks": 0, "dtype": "float32", "blocks_free": 4, "blocks_cached": 3, "blocks_locked": 3,
        "namespaces": {"": {"requests": 2, "prompt_tokens": 100, "cached_tokens": 40}},
    } | fields  # fmt: skip


def test_counters_of_workers_add_up_what_they_share_stays_and_a_report_reads_it() -> None:
    mine = {"requests": 1, "prompt_tokens": 50, "cached_tokens": 0}
    other = stats(requests=1, uptime_s=9.0, missed_tokens={"evicted": 5}, namespaces={"": mine, "tenant": mine})
    total = merged({0: stats(), 1: other})
    assert (total["requests"], total["blocks_total"], total["prefill_seconds"]) == (3, 20, 1.0)
    assert (total["block_size"], total["max_model_len"], total["prefix_caching"], total["uptime_s"]) == (16, 2048, True, 9.0)
    assert total["missed_tokens"] == {"new": 50, "last_token": 10, "evicted": 5}
    assert total["namespaces"] == {"": {"requests": 3, "prompt_tokens": 150, "cached_tokens": 40}, "tenant": mine}
    assert [(worker["worker"], worker["requests"]) for worker in total["workers"]] == [(0, 2), (1, 1)]
    report = Report.from_stats(total)
    assert (report.hit_tokens, report.prompt_tokens, report.blocks.locked) == (80, 200, 6)


def test_one_worker_is_reported_as_it_is() -> None:
    assert merged({0: stats()}) == stats()


def test_metrics_count_preemptions_of_each_worker_on_through_its_restarts_and_forget_workers_that_are_gone() -> None:
    metrics = Metrics("model")
    metrics.render({0: stats(preemptions=5), 1: stats(preemptions=2)})
    text = metrics.render({1: stats(preemptions=3)}).decode()  # the first is being replaced
    total = 'vllm:num_preemptions_total{engine="0",model_name="model"}'
    assert f"{total} 8.0" in text
    assert 'radixkv_worker_requests_running{worker="1"} 1.0' in text
    assert 'worker="0"' not in text
    metrics.engine_started(0, stats(preemptions=0))
    assert f"{total} 10.0" in metrics.render({0: stats(preemptions=2), 1: stats(preemptions=3)}).decode()
    assert "radixkv_engine_up 0.0" in metrics.render({}).decode()
