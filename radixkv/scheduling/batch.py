"""Batch: the work of one engine step, as the model runner needs it."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from radixkv.cache import BlockCopy, PrefixCache
from radixkv.scheduling.request import Request


class ScheduledSequence(msgspec.Struct, gc=False):
    """Tokens ``start .. start + num_tokens`` of a request are computed in this step.

    A decode has ``num_tokens == 1``; a prefill chunk may have any number.  The blocks are in ``request.lease.block_table`` and
    rows before ``request.lease.write_start`` are another sequence's and must not be written.
    """

    request: Request
    start: int
    num_tokens: int

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def samples(self) -> bool:
        """Whether the chunk ends with the last known token, so that its logits choose the next one."""
        return self.start + self.num_tokens == self.request.num_tokens

    @property
    def scored(self) -> range:
        """Positions of the prompt tokens whose log-probabilities are wanted from this chunk: each from the row before its own."""
        known = self.request.prompt_logprobs
        if known is None:
            return range(0)
        return range(max(self.start, len(known)) + 1, min(self.end + 1, self.request.num_prompt_tokens))


@dataclass(slots=True)
class Batch:
    """What one step runs.  ``copies`` must be carried out, in order, before anything is written."""

    sequences: list[ScheduledSequence] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    tree_segments: NDArray[np.int32] | None = None
    """As :attr:`~radixkv.kernels.AttentionMetadata.tree_segments`; None where nothing is shared."""
    scores_prompts: bool = False
    """Whether a sequence may have :attr:`ScheduledSequence.scored` tokens."""

    def put_in_tree_order(self, cache: PrefixCache) -> None:
        """Make neighbours of sequences that share blocks, and note which blocks they share.  O(sequences) in most steps."""
        leases = [lease for seq in self.sequences if (lease := seq.request.lease) is not None]
        assert len(leases) == len(self.sequences), "a scheduled sequence holds no lease"
        order, segments = cache.tree_order(leases)
        if len(segments):
            self.sequences = [self.sequences[i] for i in order]
            self.tree_segments = segments

    @property
    def num_tokens(self) -> int:
        return sum(seq.num_tokens for seq in self.sequences)
