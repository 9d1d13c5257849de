"""What Prometheus scrapes: counters and times kept by the frontend, gauges asked of the engine at each scrape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from radixkv.server.worker_stats import merged

MAX_NAMESPACES = 100
"""Namespaces that get a label of their own; later ones share ``_other``, so that clients can't grow the metrics without bound."""

_FIRST_TOKEN_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0)
_TOKEN_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)
_REQUEST_SECONDS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0, 600.0)


class Metrics:
    """Named as vLLM names its own, with ``radixkv_`` for ``vllm:``.  A request is one sequence: ``n=4`` counts as four."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._namespaces: set[str] = set()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"radixkv_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"radixkv_{name}", text, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"radixkv_{name}", text, buckets=buckets, registry=registry)

        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests that began.")
        self.generation_tokens = counter("generation_tokens", "Tokens generated.")
        self.prefix_cache_queries = counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", "namespace")
        self.prefix_cache_hits = counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.", "namespace")
        self.request_success = counter("request_success", "Requests that ended, by why.", "finished_reason")
        self.request_failure = counter("request_failure", "Accepted requests that failed, by kind of error.", "kind")
        self.preemptions = counter("num_preemptions", "Times that a running request lost its blocks to others and began again.")
        self.worker_restarts = counter("worker_restarts", "Engine processes started because the last one died or hung.")
        self.requests_resubmitted = counter("requests_resubmitted", "Times that a request went on after the engine process died.")
        self.running = gauge("num_requests_running", "Requests in the running batch.")
        self.waiting = gauge("num_requests_waiting", "Requests in the queue.")
        self.kv_cache_usage = gauge("kv_cache_usage_perc", "Part of the KV blocks that running requests hold; 1 is all.")
        self.kv_blocks_cached = gauge("kv_blocks_cached", "KV blocks of cached prefixes that no running request uses.")
        self.up = gauge("engine_up", "1 while an engine process is ready.")
        self.of_worker = {
            stat: Gauge(f"radixkv_{name}", text, ["worker"], registry=registry)
            for stat, name, text in (
                ("running", "worker_requests_running", "Requests in one worker's running batch."),
                ("waiting", "worker_requests_waiting", "Requests in one worker's queue."),
                ("blocks_locked", "worker_kv_blocks_locked", "KV blocks that one worker's running requests hold."),
                ("blocks_cached", "worker_kv_blocks_cached", "KV blocks of one worker's cached prefixes that nobody uses."),
            )
        }
        """By worker that is ready; the gauges without that label are of all together."""
        self.time_to_first_token = histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token.", _FIRST_TOKEN_SECONDS
        )
        self.inter_token_latency = histogram("inter_token_latency_seconds", "Between two tokens of a request.", _TOKEN_SECONDS)
        self.e2e_latency = histogram("e2e_request_latency_seconds", "From a request's arrival to its last token.", _REQUEST_SECONDS)
        self._preemptions_seen: dict[int, int] = {}

    def began(self, namespace: str, prompt_tokens: int, cached_tokens: int) -> None:
        """A request's prompt was looked up in the cache."""
        if namespace not in self._namespaces and len(self._namespaces) >= MAX_NAMESPACES:
            namespace = "_other"
        self._namespaces.add(namespace)
        self.prompt_tokens.inc(prompt_tokens)
        self.prefix_cache_queries.labels(namespace).inc(prompt_tokens)
        self.prefix_cache_hits.labels(namespace).inc(cached_tokens)

    def engine_lost(self, num_open: int) -> None:
        """Until there is another engine, nothing runs and ``num_open`` requests wait."""
        self.waiting.set(num_open)
        for of_the_engine in (self.running, self.kv_cache_usage, self.kv_blocks_cached):
            of_the_engine.set(0)

    def render(self, workers: Mapping[int, dict[str, Any]]) -> bytes:
        """The text that Prometheus reads; ``workers`` is the engine's stats of each worker that is ready."""
        self.up.set(bool(workers))
        for gauge in self.of_worker.values():
            gauge.clear()
        for index, stats in workers.items():
            for name, gauge in self.of_worker.items():
                gauge.labels(index).set(stats[name])
            preemptions, seen = stats["preemptions"], self._preemptions_seen.get(index, 0)
            self.preemptions.inc(preemptions - seen if preemptions >= seen else preemptions)  # it was restarted since
            self._preemptions_seen[index] = preemptions
        if workers:
            stats = merged(workers)
            self.running.set(stats["running"])
            self.waiting.set(stats["waiting"])
            self.kv_cache_usage.set(stats["blocks_locked"] / stats["blocks_total"])
            self.kv_blocks_cached.set(stats["blocks_cached"])
        return generate_latest(self._registry)
