"""Events: what a router or an outer cache tier must hear of to know which K/V this cache holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from radixkv.cache.block_pool import BlockIds
from radixkv.cache.tokens import Tokens


class Stored(NamedTuple):
    """Blocks have joined the cache: block ``i`` of ``block_ids`` holds the ``block_size`` tokens from ``start + i * block_size``
    on."""

    namespace: str
    tokens: Tokens
    """The sequence up to the end of the last block, int32."""
    start: int
    """Tokens before the first block."""
    block_ids: BlockIds


class Evicted(NamedTuple):
    """Blocks have left the cache; the fields are those of :class:`Stored`."""

    namespace: str
    tokens: Tokens
    start: int
    block_ids: BlockIds


class Hit(NamedTuple):
    """A prompt found ``tokens`` cached, in whole blocks; ``start`` is 0."""

    namespace: str
    tokens: Tokens
    start: int
    block_ids: BlockIds


Event = Stored | Evicted | Hit
Listener = Callable[[Event], None]
