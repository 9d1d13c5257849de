"""Lease: a sequence's hold on its blocks."""

from __future__ import annotations

from radixkv.cache.block_pool import BlockIds
from radixkv.cache.miss import Finding, Miss, Parting
from radixkv.cache.node import Node
from radixkv.cache.retention import Retention
from radixkv.cache.stats import HitCounts
from radixkv.cache.tokens import NO_TOKENS, Tokens


class Lease:
    """A sequence's hold on its blocks, from ``acquire`` or ``fork`` until ``release``.  Only the cache changes it."""

    __slots__ = (
        "_counts", "_finding", "_node", "_num_blocks", "_num_published", "_prompt", "_released", "_retention", "_table",
        "block_table", "namespace", "num_cached_tokens", "num_computed_tokens", "num_matched_tokens", "num_tokens", "write_start",
    )  # fmt: skip

    def __init__(
        self, node: Node, namespace: str, table: BlockIds, num_published: int, num_tokens: int, num_matched: int, num_cached: int
    ) -> None:
        self._node = node
        """Where its published blocks end."""
        self._table = table
        """With room to grow."""
        self.block_table = table
        """Block ids in order of position: int32 ``[num_blocks]``.  ``publish`` and ``extend`` may change it."""
        self._num_blocks = len(table)
        self._num_published = num_published
        """Leading blocks that are the tree's; the others are its own."""
        self._released = False
        self._prompt: Tokens = NO_TOKENS
        """Kept for miss attribution."""
        self._finding: Finding | None = None
        self._counts: HitCounts | None = None
        """Where its prompt was counted."""
        self._retention: Retention | None = None
        self.namespace = namespace
        self.num_tokens = num_tokens
        """Tokens there is room for, as promised by ``acquire`` and ``extend``."""
        self.num_matched_tokens = num_matched
        """Leading tokens whose K/V were found in the cache."""
        self.num_cached_tokens = num_cached
        """The same, less the last token of the prompt, which is always computed for its logits."""
        self.num_computed_tokens = num_cached
        """As last told by ``publish``."""
        self.write_start = num_matched
        """K/V at positions before this are there already, mostly in blocks of another sequence: never write them."""

    @property
    def missed(self) -> dict[str, int] | None:
        """The tokens of :attr:`miss` by reason, those with none left out; None where that is."""
        return self._finding.by_reason() if self._finding is not None else None

    @property
    def parting(self) -> Parting | None:
        """That of :attr:`miss`, where it has diverged tokens."""
        return self._finding.parting(self._prompt) if self._finding is not None else None

    @property
    def miss(self) -> Miss | None:
        """Why the prompt's other tokens were not found; None for a fork, and without ``attribution``."""
        return self._finding.miss(self._prompt) if self._finding is not None else None
