"""Engine: schedule, run, sample, publish.  The loop to read first."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from radixkv.cache import PrefixCache
from radixkv.cache.retention import Retention
from radixkv.config import EngineConfig
from radixkv.grammar import Grammars
from radixkv.kernels import backend_for, cpu
from radixkv.model.kv_storage import KVStorage
from radixkv.model.loader import load_model, load_model_config, resolve_model
from radixkv.model.runner import ModelRunner
from radixkv.model.sampler import sample
from radixkv.model.tokenizer import load_tokenizer
from radixkv.platform import choose_device, choose_dtype, torch_threads
from radixkv.sampling_params import SamplingParams
from radixkv.scheduling.batch import Batch
from radixkv.scheduling.fair_shares import FairShares
from radixkv.scheduling.policy import queue_policy
from radixkv.scheduling.request import Request, RequestOutput
from radixkv.scheduling.scheduler import Scheduler

logger = logging.getLogger(__name__)


class Engine:
    """One model, one cache, one queue; speaks token ids only.  One thread at a time.

    Loading is slow and raises ``ValueError`` (a model or setting that can't be used) or ``OSError`` (a model that can't be read).
    """

    def __init__(self, config: EngineConfig) -> None:
        device = choose_device(config.device)
        source = resolve_model(config.model)
        self.config = config
        self.model_config = load_model_config(source)
        dtype = choose_dtype(config.dtype, self.model_config.dtype, device)
        backend = backend_for(device)
        self._torch_threads = config.num_threads or torch.get_num_threads()
        if device.type == "cpu" and cpu.is_native(dtype):
            # torch's threads would go on spinning after each of its own small operations, in the way of the kernels' threads.
            cpu.set_num_threads(self._torch_threads)
            self._torch_threads = 1
        model = load_model(source, self.model_config, dtype=dtype, device=device, backend=backend)
        kv = KVStorage(self.model_config, config.num_blocks, config.block_size, dtype, device, backend)
        self.runner = ModelRunner(model, kv, max_num_seqs=config.max_num_seqs, max_model_len=self._max_model_len())
        self._grammars = Grammars(lambda: load_tokenizer(source), self.model_config.vocab_size, self.model_config.eos_token_ids)
        self._start_empty()
        self.max_model_len = self._max_model_len()
        self.dtype = dtype
        self.device = device
        self._kv_bytes_per_token = kv.num_bytes // (config.num_blocks * config.block_size)
        self._started = time.monotonic()
        self._steps = self._prompt_tokens_computed = self._generated_tokens = 0
        self._prefill_seconds = 0.0

    def _start_empty(self) -> None:
        config = self.config
        self.cache = PrefixCache(
            config.num_blocks,
            config.block_size,
            policy=config.eviction_policy,
            enable_prefix_caching=config.enable_prefix_caching,
            attribution=True,  # microseconds beside a request's milliseconds
        )
        self.scheduler = Scheduler(
            self.cache,
            FairShares(lambda: queue_policy(config.policy, config.aging_tokens_per_second), quantum=config.max_batch_tokens),
            max_batch_tokens=config.max_batch_tokens,
            max_num_seqs=config.max_num_seqs,
        )

    def _max_model_len(self) -> int:
        limits = [self.model_config.max_position_embeddings, self.config.num_blocks * self.config.block_size]
        return min([*limits, self.config.max_model_len] if self.config.max_model_len else limits)

    # -- requests ---------------------------------------------------------------------------------------------------

    def add(
        self,
        request_id: str,
        token_ids: NDArray[np.int32] | list[int],
        params: SamplingParams,
        *,
        namespace: str = "",
        output_token_ids: Sequence[int] = (),
        retention: Retention | None = None,
    ) -> None:
        """Queue a request.  Raises ``ValueError`` naming the field and its limit; then nothing was queued.

        ``output_token_ids`` are tokens that the request has been given already, by an engine that is no more.  It goes on behind
        them as if it had never stopped: ``max_tokens`` and penalties count them, and a seed draws what it would have drawn.
        """
        params.validate()
        if retention is not None:
            retention.validate()
        vocab_size = self.model_config.vocab_size
        if not len(token_ids):
            raise ValueError("prompt must hold at least 1 token, got none")
        try:
            prompt = np.asarray(token_ids)
        except (ValueError, OverflowError):  # lists of different lengths
            prompt = np.empty(0)
        if prompt.ndim != 1 or prompt.dtype.kind not in "iu":
            raise ValueError(f"prompt must be a flat list of token ids from 0 to {vocab_size - 1}, got {str(token_ids)[:80]}")
        if len(prompt) + 1 > self.max_model_len:
            raise ValueError(f"prompt must be at most {self.max_model_len - 1} tokens here, got {len(prompt)}")
        if len(prompt) + params.max_tokens > self.max_model_len:
            raise ValueError(
                f"max_tokens must be at most {self.max_model_len - len(prompt)} after a prompt of {len(prompt)} tokens "
                f"(model and cache hold {self.max_model_len}), got {params.max_tokens}"
            )
        if prompt.min() < 0 or prompt.max() >= vocab_size:
            raise ValueError(f"prompt must be made of token ids from 0 to {vocab_size - 1}, got {prompt.min()} to {prompt.max()}")
        if len(output_token_ids) >= params.max_tokens:
            raise ValueError(f"output_token_ids must be fewer than max_tokens ({params.max_tokens}), got {len(output_token_ids)}")
        if output_token_ids and not 0 <= min(output_token_ids) <= max(output_token_ids) < vocab_size:
            raise ValueError(f"output_token_ids must be token ids from 0 to {vocab_size - 1}")
        for field, ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias or ())):
            if max(ids, default=0) >= vocab_size:
                raise ValueError(f"{field} must hold token ids from 0 to {vocab_size - 1}, got {max(ids)}")
        if self.scheduler.find(request_id) is not None:
            raise ValueError(f"request_id must be new, {request_id!r} is being served")
        request = Request(
            request_id,
            prompt,
            params,
            output_token_ids=output_token_ids,
            namespace=namespace,
            retention=retention,
            arrival_time=time.monotonic(),
            eos_token_ids=self.model_config.eos_token_ids,
            grammar=None if params.structured_outputs is None else self._grammars.start(params.structured_outputs),
        )
        self.scheduler.add(request)

    def abort(self, request_id: str) -> bool:
        """End a request early; its blocks are back when this returns.  False if there is none of that id."""
        request = self.scheduler.find(request_id)
        if request is None:
            return False
        self.scheduler.remove(request)
        return True

    @property
    def has_unfinished(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting)

    # -- the loop ---------------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Compute one batch; return what it adds to each request that got a token or failed.

        Where it raises, all requests are gone and the cache is empty.
        """
        try:
            return self._step()
        except BaseException:
            # Ctrl-C may have cut anything short, and blocks were published whose K/V were never computed.
            self._start_empty()
            raise

    def _step(self) -> list[RequestOutput]:
        batch = self.scheduler.schedule()
        if not batch.requests:
            return []
        started = time.monotonic()
        requests = batch.sampling
        try:
            with torch_threads(self._torch_threads):
                token_ids, logprobs = sample(self.runner.forward(batch), requests)
        except torch.AcceleratorError:  # the device is lost to this process: only another one can go on
            raise
        except Exception as error:
            logger.exception("a step failed; its %d requests are ended", len(batch))
            return self._fail(batch.requests, f"{type(error).__name__}: {error}")
        now = time.monotonic()
        self._count(batch, now - started)
        outputs = []
        if -1 in token_ids:
            failed = [request for request, token_id in zip(requests, token_ids, strict=True) if token_id < 0]
            errors = {request: request.grammar.error for request in failed if request.grammar is not None}
            outputs = [self._end(request, f"structured_outputs can't go on: {error}") for request, error in errors.items() if error]
            if overflowed := [request for request in failed if not errors.get(request)]:
                outputs += self._fail(overflowed, "the model's logits are not finite: it overflowed on this prompt")
        for request, token_id, logprob in zip(requests, token_ids, logprobs, strict=True):
            if token_id < 0:
                continue
            is_first = request.num_tokens == request.num_prompt_tokens
            prompt_logprobs, request.prompt_logprobs = request.prompt_logprobs, None
            if request.grammar is None:
                added, finish_reason = [token_id], request.append(token_id)
            else:
                added, finish_reason = request.extend(token_id, request.grammar)
            if finish_reason:
                self.scheduler.remove(request)
            outputs.append(
                RequestOutput(
                    request_id=request.request_id,
                    token_ids=added,
                    logprobs=None if logprob is None else [logprob],
                    finish_reason=finish_reason,
                    num_prompt_tokens=request.num_prompt_tokens,
                    num_cached_tokens=request.num_cached_tokens,
                    missed=request.missed if is_first else None,
                    parting=request.parting_output if is_first else None,
                    queued_seconds=request.admission_time - request.arrival_time if is_first else 0.0,
                    prefill_seconds=now - request.admission_time if is_first else 0.0,
                    num_preemptions=request.num_preemptions,
                    prompt_logprobs=prompt_logprobs,
                )
            )
        self._generated_tokens += sum([len(output.token_ids) for output in outputs])
        return outputs

    def _fail(self, requests: Sequence[Request], error: str) -> list[RequestOutput]:
        """End requests.  Blocks they published hold no K/V, or bad ones, so the cache must forget them."""
        outputs = [self._end(request, error) for request in requests]
        self.cache.reset()
        return outputs

    def _end(self, request: Request, error: str) -> RequestOutput:
        self.scheduler.remove(request)
        return RequestOutput(
            request_id=request.request_id,
            token_ids=[],
            finish_reason="error",
            error=error,
            num_prompt_tokens=request.num_prompt_tokens,
            num_cached_tokens=request.num_cached_tokens,
        )

    def _count(self, batch: Batch, seconds: float) -> None:
        self._steps += 1
        prefill = batch.num_prompt_tokens
        self._prompt_tokens_computed += prefill
        if prefill:
            self._prefill_seconds += seconds * prefill / batch.num_tokens

    # -- reporting --------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Counters since the start and gauges now, as plain types (documented in docs/reports.md)."""
        cache = self.cache.stats()
        return {
            "model": self.config.model,
            "dtype": str(self.dtype).removeprefix("torch."),
            "device": str(self.device),
            "block_size": self.config.block_size,
            "max_model_len": self.max_model_len,
            "kv_bytes_per_token": self._kv_bytes_per_token,
            "prefix_caching": self.config.enable_prefix_caching,
            "uptime_s": time.monotonic() - self._started,
            "steps": self._steps,
            "requests": cache.total.requests,
            "prompt_tokens": cache.total.prompt_tokens,
            "cached_tokens": cache.total.cached_tokens,
            "missed_tokens": cache.total.missed,
            "generated_tokens": self._generated_tokens,
            "prefill_tokens_computed": self._prompt_tokens_computed,
            "prefill_seconds": self._prefill_seconds,
            "preemptions": self.scheduler.num_preemptions,
            "evicted_blocks": cache.evicted_blocks,
            "running": len(self.scheduler.running),
            "waiting": len(self.scheduler.waiting),
            "blocks_total": cache.blocks_total,
            "blocks_free": cache.blocks_free,
            "blocks_cached": cache.blocks_cached,
            "blocks_locked": cache.blocks_locked,
            "tree_nodes": cache.nodes,
            "namespaces": {
                name: {"requests": c.requests, "prompt_tokens": c.prompt_tokens, "cached_tokens": c.cached_tokens}
                for name, c in cache.namespaces.items()
            },
        }

    def reset_cache(self) -> None:
        """Forget every prefix that no running request uses."""
        self.cache.reset()
