"""A worker whose engine answers with the prompt's own tokens, over and over: quick to start, and every answer is foreseeable."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from radixkv.cache import PrefixCache
from radixkv.cache.retention import Retention
from radixkv.config import EngineConfig
from radixkv.sampling_params import SamplingParams
from radixkv.scheduling.request import RequestOutput, TokenLogprobs
from radixkv.server.worker import main

STEP_SECONDS = 0.002


class EchoEngine:
    """Output token ``i`` is prompt token ``(i + seed) mod length``; its log-probability is ``-i``, prompt token ``i`` has ``-i/8``.

    A prompt seen before in the same namespace counts as cached but for its last token, or, where its log-probabilities are wanted,
    as missed for them.  Blocks are only counted.

    Bad prompts: ``[4, 4, n]`` kills the worker when it is to get output token ``n``, and ``[4, 5, n]`` after every ``n`` tokens.
    ``[7, 7, 7]`` is refused by an exception that says nothing to users.
    A long one: ``[6, 6, n]`` takes ``n / 10`` seconds of steps that give it nothing.
    """

    def __init__(self, config: EngineConfig) -> None:
        if config.policy == "fcfs":  # lets a test see a worker that can't start
            raise ValueError("model folder lacks everything")
        if config.policy == "dfs-weight":  # or one that takes its time
            time.sleep(60)
        if Path(tempfile.gettempdir(), "broken").exists():
            raise ValueError("model folder was lost")
        while Path(tempfile.gettempdir(), "hold").exists():  # or one that starts when the test says so
            time.sleep(0.01)
        self._config = config
        self._running: dict[str, tuple[list[int], SamplingParams, int, int]] = {}
        self._seen: set[tuple[str, tuple[int, ...]]] = set()
        self._requests = 0
        self.cache = PrefixCache(1)
        self._begun: dict[str, int] = {}
        self._rescored: dict[str, int] = {}
        self._arrived: dict[str, float] = {}

    def add(
        self,
        request_id: str,
        token_ids: list[int],
        params: SamplingParams,
        *,
        namespace: str = "",
        output_token_ids: Sequence[int] = (),
        retention: Retention | None = None,
    ) -> None:
        if token_ids == [3, 3, 3]:  # a limit that only the engine knows
            raise ValueError("prompt must not be three threes")
        if token_ids == [7, 7, 7]:  # a bug
            raise RuntimeError("three sevens")
        key = (namespace, tuple(token_ids))
        cached = len(token_ids) - 1 if key in self._seen else 0
        self._seen.add(key)
        self._requests += 1
        self._rescored[request_id] = 0
        if params.prompt_logprobs is not None and not output_token_ids:
            self._rescored[request_id], cached = cached, 0
        self._running[request_id] = (token_ids, params, len(output_token_ids), cached)
        self._begun[request_id] = len(output_token_ids)
        self._arrived[request_id] = time.monotonic()

    def abort(self, request_id: str) -> bool:
        return self._running.pop(request_id, None) is not None

    @property
    def has_unfinished(self) -> bool:
        return bool(self._running)

    def step(self) -> list[RequestOutput]:
        time.sleep(STEP_SECONDS)
        outputs = []
        for request_id, (prompt, params, count, cached) in list(self._running.items()):
            if prompt == [5, 5, 5]:  # one that gets no token, however long it waits
                continue
            if prompt[:2] == [6, 6] and time.monotonic() < self._arrived[request_id] + prompt[2] / 10:
                continue
            self._misbehave(prompt, count, count - self._begun[request_id])
            token = prompt[(count + (params.seed or 0)) % len(prompt)]
            finished = count + 1 == params.max_tokens
            top = [(token, -float(count)), (0, -100.0)][: params.logprobs or 0]
            outputs.append(
                RequestOutput(
                    request_id=request_id,
                    token_ids=[token],
                    logprobs=None if params.logprobs is None else [TokenLogprobs(token, -float(count), top)],
                    prompt_logprobs=self._prompt_logprobs(prompt, params) if count == self._begun[request_id] == 0 else None,
                    finish_reason="length" if finished else None,
                    num_prompt_tokens=len(prompt),
                    num_cached_tokens=cached,
                    missed=self._missed(request_id, len(prompt) - cached) if count == self._begun[request_id] else None,
                )
            )
            if finished:
                del self._running[request_id]
            else:
                self._running[request_id] = (prompt, params, count + 1, cached)
        return outputs

    def _missed(self, request_id: str, count: int) -> dict[str, int]:
        rescored = self._rescored[request_id]
        return ({"logprobs": rescored} if rescored else {}) | {"new": count - rescored - 1, "last_token": 1}

    @staticmethod
    def _prompt_logprobs(prompt: list[int], params: SamplingParams) -> list[TokenLogprobs] | None:
        if params.prompt_logprobs is None:
            return None
        return [TokenLogprobs(token, -i / 8, [(0, 0.0)][: params.prompt_logprobs]) for i, token in enumerate(prompt) if i]

    def _misbehave(self, prompt: list[int], count: int, since: int) -> None:
        match prompt:
            case [4, 4, at] if at == count:
                os.kill(os.getpid(), signal.SIGKILL)
            case [4, 5, at] if at == since:
                os.kill(os.getpid(), signal.SIGKILL)

    def stats(self) -> dict[str, Any]:
        used = sum(-(-(len(prompt) + count) // 16) for prompt, _, count, _ in self._running.values())
        return {
            "model": self._config.model,
            "dtype": "float32",
            "block_size": 16,
            "prefix_caching": True,
            "kv_bytes_per_token": 1024,
            "max_model_len": 2048,
            "running": len(self._running),
            "waiting": 0,
            "requests": self._requests,
            "preemptions": 0,
            "evicted_blocks": 0,
            "blocks_total": self._config.num_blocks,
            "blocks_free": self._config.num_blocks - used,
            "blocks_cached": 0,
            "blocks_locked": used,
        }

    def reset_cache(self) -> None:
        self._seen.clear()


if __name__ == "__main__":
    sys.exit(main(EchoEngine))  # type: ignore[arg-type]
