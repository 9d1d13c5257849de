"""Request: one sequence from arrival to its last token, and what a step tells about it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from radixkv.cache import Lease, Parting
from radixkv.cache.retention import Retention
from radixkv.sampling_params import SamplingParams

if TYPE_CHECKING:
    from radixkv.grammar import Grammar

FinishReason = Literal["stop", "length", "abort", "error"]


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Log-probability of one token, and the most probable alternatives, best first."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """What one engine step adds to one request."""

    request_id: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None
    num_prompt_tokens: int
    num_cached_tokens: int
    missed: dict[str, int] | None = None
    """Of a request's first output: its uncached prompt tokens by reason (:attr:`~radixkv.cache.Lease.missed`)."""
    parting: tuple[int, list[int], list[int]] | None = None
    """Of a request's first output, where its prompt diverged: :attr:`~radixkv.cache.Lease.parting`."""
    queued_seconds: float = 0.0
    """Of a request's first output: from its arrival to its first step."""
    prefill_seconds: float = 0.0
    """Of a request's first output: from its first step to its first token."""
    num_preemptions: int = 0
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Of a request's first output: those of all prompt tokens but the first, where ``params.prompt_logprobs`` asks for them."""


class Request:
    """A sequence of tokens that grows.  Owned by the scheduler from ``add`` until it finishes.

    ``tokens`` is one int32 buffer with room for the whole output, so that a step appends without copying and the cache can be
    handed views of it.
    """

    __slots__ = (
        "_buffer", "_read_only", "admission_time", "arrival_time", "grammar", "last_token", "lease", "missed", "namespace",
        "num_cached_tokens", "num_preemptions", "num_prompt_tokens", "num_tokens", "params", "parting", "plain", "prompt_logprobs",
        "request_id", "retention", "stop_token_ids",
    )  # fmt: skip

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: NDArray[np.int32] | list[int],
        params: SamplingParams,
        *,
        output_token_ids: Sequence[int] = (),
        namespace: str = "",
        arrival_time: float = 0.0,
        eos_token_ids: Sequence[int] = (),
        retention: Retention | None = None,
        grammar: Grammar | None = None,
    ) -> None:
        """The output begins with ``output_token_ids``, fewer than ``params.max_tokens``, which another engine has put out."""
        prompt = np.asarray(prompt_token_ids, dtype=np.int32)
        known = len(prompt) + len(output_token_ids)
        self._buffer = np.empty(len(prompt) + params.max_tokens, dtype=np.int32)
        self._buffer[: len(prompt)] = prompt
        self._buffer[len(prompt) : known] = output_token_ids
        self._read_only = self._buffer.view()
        self._read_only.flags.writeable = False
        self.request_id = request_id
        self.params = params
        self.plain = params.plain
        self.stop_token_ids = frozenset(params.stop_token_ids).union(() if params.ignore_eos else eos_token_ids)
        """Tokens that end it."""
        self.grammar = grammar
        """Where the output is in the form that ``params.structured_outputs`` asks for."""
        if grammar is not None:
            for token_id in output_token_ids:
                grammar.accept(token_id)
        self.namespace = namespace
        self.arrival_time = arrival_time
        self.admission_time = arrival_time
        """When it first left the queue."""
        self.num_prompt_tokens = len(prompt)
        self.num_tokens = known
        self.last_token = self._buffer.item(known - 1)
        self.num_cached_tokens = 0
        """Prompt tokens found in the cache when the request was first admitted."""
        self.missed: dict[str, int] | None = None
        """Its other prompt tokens then, by reason; None where nobody asks why."""
        self.parting: Parting | None = None
        """Where it leaves what the cache knew then."""
        self.prompt_logprobs: list[TokenLogprobs] | None = None
        """Of the second prompt token, the third, ... as far as computed; None where they are not wanted, or were put out."""
        if params.prompt_logprobs is not None and not output_token_ids:
            self.prompt_logprobs = []
        self.retention = retention
        self.num_preemptions = 0
        self.lease: Lease | None = None

    @property
    def tokens(self) -> NDArray[np.int32]:
        """Prompt and output so far: a read-only view, int32 ``[num_tokens]``, whose values never change."""
        return self._read_only[: self.num_tokens]

    @property
    def parting_output(self) -> tuple[int, list[int], list[int]] | None:
        """:attr:`parting` as an output has it."""
        parting = self.parting
        return None if parting is None else (parting.position, parting.ours.tolist(), parting.theirs.tolist())

    @property
    def prompt_token_ids(self) -> NDArray[np.int32]:
        return self._buffer[: self.num_prompt_tokens]

    @property
    def output_token_ids(self) -> NDArray[np.int32]:
        return self._buffer[self.num_prompt_tokens : self.num_tokens]

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    def first_to_compute(self, num_cached_tokens: int) -> int:
        """Of its tokens, where the K/V of so many are there.  Log-probabilities of a prompt need more than its K/V."""
        if self.prompt_logprobs is None or len(self.prompt_logprobs) == self.num_prompt_tokens - 1:
            return num_cached_tokens
        return min(num_cached_tokens, len(self.prompt_logprobs))

    def extend(self, token_id: int, grammar: Grammar) -> tuple[list[int], FinishReason | None]:
        """Add a sampled token, and those that its grammar then forces.  Returns them all, and why the last one is the last.

        Nothing is forced where log-probabilities are wanted: only the model could say them.
        """
        finish_reason = self.append(token_id)
        if finish_reason == "stop":
            return [token_id], finish_reason
        grammar.accept(token_id)
        added = [token_id]
        for forced in grammar.forced() if finish_reason is None and self.params.logprobs is None else ():
            added.append(forced)
            grammar.accept(forced)
            if finish_reason := self.append(forced):
                break
        return added, "stop" if grammar.finished else finish_reason

    def append(self, token_id: int) -> FinishReason | None:
        """Add a token.  Returns why it is the last one, or None if another may follow."""
        self._buffer[self.num_tokens] = token_id
        self.num_tokens += 1
        self.last_token = token_id
        if token_id in self.stop_token_ids:
            return "stop"
        return "length" if self.num_tokens == len(self._buffer) else None
