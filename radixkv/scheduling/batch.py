"""Batch: the work of one engine step, as the model runner needs it."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import compress

import msgspec
import numpy as np
from numpy.typing import NDArray

from radixkv.cache import BlockCopy
from radixkv.scheduling.request import Request

Column = NDArray[np.int64]
"""int64 ``[S]``: a number for each sequence."""


def _no_sequences() -> Column:
    return np.empty(0, dtype=np.int64)


class ScheduledSequence(msgspec.Struct, gc=False):
    """Tokens ``start .. start + num_tokens`` of a request are computed in this step."""

    request: Request
    start: int
    num_tokens: int
    samples: bool
    """Whether the chunk ends with the last known token, so that its logits choose the next one."""

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def scored(self) -> range:
        """Positions of the prompt tokens whose log-probabilities are wanted from this chunk: each from the row before its own."""
        known = self.request.prompt_logprobs
        if known is None:
            return range(0)
        return range(max(self.start, len(known)) + 1, min(self.end + 1, self.request.num_prompt_tokens))


@dataclass(slots=True)
class Batch:
    """What one step runs, as columns: an entry for each of ``S`` sequences, of which some tokens are computed.

    ``copies`` must be carried out, in order, before anything is written.
    """

    requests: list[Request] = field(default_factory=list)
    starts: Column = field(default_factory=_no_sequences)
    """Position of the first token that is computed."""
    counts: Column = field(default_factory=_no_sequences)
    """How many are: 1 for a decode, any number for a prefill chunk."""
    samples: NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, dtype=np.bool_))
    """bool ``[S]``: whether the last of them is the last known token, so that its logits choose the next one."""
    write_starts: Column = field(default_factory=_no_sequences)
    """Rows before this position are another sequence's and must not be written."""
    block_tables: NDArray[np.int32] = field(default_factory=lambda: np.empty((0, 0), dtype=np.int32))
    """int32 ``[S, max_blocks]``: the blocks of all positions so far; entries past a sequence's last one mean nothing."""
    num_prompt_tokens: int = 0
    """Those of the computed tokens that are of prompts."""
    copies: list[BlockCopy] = field(default_factory=list)
    tree_segments: NDArray[np.int32] | None = None
    """As :attr:`~radixkv.kernels.AttentionMetadata.tree_segments`; None where nothing is shared."""
    scores_prompts: bool = False
    """Whether a sequence may have :attr:`ScheduledSequence.scored` tokens."""

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def num_tokens(self) -> int:
        return int(self.counts.sum())

    @property
    def sampling(self) -> list[Request]:
        """The requests that get a token, in order."""
        return self.requests if self.samples.all() else list(compress(self.requests, self.samples))

    @property
    def sequences(self) -> list[ScheduledSequence]:
        """The same one by one."""
        return list(map(ScheduledSequence, self.requests, self.starts.tolist(), self.counts.tolist(), self.samples.tolist()))
