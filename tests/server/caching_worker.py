"""A worker with the real scheduler and cache, over a model that says the prompt's own tokens over and over, at a model's pace."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from radixkv.cache import Lease, PrefixCache
from radixkv.config import EngineConfig
from radixkv.scheduling.fair_shares import FairShares
from radixkv.scheduling.policy import queue_policy
from radixkv.scheduling.request import Request, RequestOutput
from radixkv.scheduling.scheduler import Scheduler
from radixkv.server.worker import main

STEP_SECONDS = float(os.environ.get("STEP_SECONDS", "0.002"))
TOKEN_SECONDS = float(os.environ.get("TOKEN_SECONDS", "0.00002"))
MAX_MODEL_LEN = 16384
IN_FLIGHT = 11


class CachingEngine:
    """What ``Engine`` does, but for the model: output token ``i`` is prompt token ``i mod length``.

    A prompt that begins with :data:`IN_FLIGHT` is being computed already when it comes, by a sequence that nobody hears of.
    """

    def __init__(self, config: EngineConfig) -> None:
        while Path(tempfile.gettempdir(), "hold").exists():  # lets a test say when it starts
            time.sleep(0.01)
        self.config = config
        self.cache = PrefixCache(
            config.num_blocks, config.block_size, enable_prefix_caching=config.enable_prefix_caching, attribution=True
        )
        self.scheduler = Scheduler(
            self.cache,
            FairShares(lambda: queue_policy(config.policy, config.aging_tokens_per_second), quantum=config.max_batch_tokens),
            max_batch_tokens=config.max_batch_tokens,
            max_num_seqs=config.max_num_seqs,
        )
        self._generated_tokens = self._prefill_tokens = 0
        self._prefill_seconds = 0.0
        self._started = time.monotonic()
        self._unheard: dict[str, Lease] = {}

    def add(self, request_id: str, token_ids: list[int], *what: Any, namespace: str = "", **how: Any) -> None:
        if token_ids[0] == IN_FLIGHT:
            lease = self.cache.acquire(token_ids, namespace=namespace, resumed=True)  # which is not counted
            assert lease is not None
            self._unheard[request_id] = lease
        self.scheduler.add(Request(request_id, token_ids, *what, namespace=namespace, **how, arrival_time=time.monotonic()))

    def abort(self, request_id: str) -> bool:
        request = self.scheduler.find(request_id)
        if request is not None:
            self.scheduler.remove(request)
        return request is not None

    @property
    def has_unfinished(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting)

    def step(self) -> list[RequestOutput]:
        batch = self.scheduler.schedule()
        time.sleep(STEP_SECONDS + TOKEN_SECONDS * batch.num_tokens)
        self._prefill_tokens += batch.num_prompt_tokens
        self._prefill_seconds += TOKEN_SECONDS * batch.num_prompt_tokens
        outputs = []
        for request in [sequence.request for sequence in batch.sequences if sequence.samples]:
            is_first = not request.num_output_tokens
            token = int(request.prompt_token_ids[request.num_output_tokens % request.num_prompt_tokens])
            finish_reason = request.append(token)
            self._generated_tokens += 1
            if finish_reason:
                self.scheduler.remove(request)
                if lease := self._unheard.pop(request.request_id, None):
                    self.cache.release(lease)
            outputs.append(
                RequestOutput(
                    request_id=request.request_id,
                    token_ids=[token],
                    finish_reason=finish_reason,
                    num_prompt_tokens=request.num_prompt_tokens,
                    num_cached_tokens=request.num_cached_tokens,
                    missed=request.missed if is_first else None,
                    parting=request.parting_output if is_first else None,
                )
            )
        return outputs

    def stats(self) -> dict[str, Any]:
        cache = self.cache.stats()
        return {
            "model": self.config.model,
            "max_model_len": MAX_MODEL_LEN,
            "num_threads": self.config.num_threads or 0,
            "running": len(self.scheduler.running),
            "waiting": len(self.scheduler.waiting),
            "requests": cache.total.requests,
            "prompt_tokens": cache.total.prompt_tokens,
            "cached_tokens": cache.total.cached_tokens,
            "missed_tokens": cache.total.missed,
            "prefill_tokens_computed": self._prefill_tokens,
            "prefill_seconds": self._prefill_seconds,
            "uptime_s": time.monotonic() - self._started,
            "generated_tokens": self._generated_tokens,
            "preemptions": self.scheduler.num_preemptions,
            "block_size": self.cache.block_size,
            "prefix_caching": self.config.enable_prefix_caching,
            "kv_bytes_per_token": 1024,
            "dtype": "float32",
            "evicted_blocks": cache.evicted_blocks,
            "blocks_total": cache.blocks_total,
            "blocks_free": cache.blocks_free,
            "blocks_cached": cache.blocks_cached,
            "blocks_locked": cache.blocks_locked,
            "namespaces": {
                name: {"requests": c.requests, "prompt_tokens": c.prompt_tokens, "cached_tokens": c.cached_tokens}
                for name, c in cache.namespaces.items()
            },
        }

    def reset_cache(self) -> None:
        self.cache.reset()


if __name__ == "__main__":
    sys.exit(main(CachingEngine))  # type: ignore[arg-type]
