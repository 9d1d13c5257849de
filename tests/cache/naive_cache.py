"""What the prefix cache should hold, as token tuples: a model that hears the cache's events and believes nothing."""

from __future__ import annotations

from collections.abc import Iterator

from radixkv.cache import Event, Evicted, Hit, Stored

Key = tuple[str, tuple[int, ...]]


class NaiveCache:
    """Every cached block by namespace and all tokens up to its end."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.blocks: dict[Key, int] = {}
        self.ever_stored: set[Key] = set()
        self.num_evicted = 0

    def hear(self, event: Event) -> None:
        keys = list(self._keys(event))
        ids = event.block_ids.tolist()
        assert len(keys) == len(ids) > 0, "an event's tokens and blocks differ in number"
        if isinstance(event, Stored):
            for key, block in zip(keys, ids, strict=True):
                assert key not in self.blocks, "a block was stored twice"
                assert block not in self.blocks.values(), "a block holds two prefixes"
                assert self._parent(key) is None or self._parent(key) in self.blocks, "a block was stored without those before it"
                self.blocks[key] = block
                self.ever_stored.add(key)
        elif isinstance(event, Evicted):
            for key, block in reversed(list(zip(keys, ids, strict=True))):
                assert not any(self._parent(other) == key for other in self.blocks), "a block was evicted before one behind it"
                assert self.blocks.pop(key) == block, "another block was evicted than was stored"
                self.num_evicted += 1
        else:
            assert isinstance(event, Hit)
            assert [self.blocks[key] for key in keys] == ids, "a hit on blocks that hold something else"

    def match(self, namespace: str, tokens: tuple[int, ...]) -> list[int]:
        """The blocks of the longest cached prefix."""
        found = []
        for end in range(self.block_size, len(tokens) + 1, self.block_size):
            block = self.blocks.get((namespace, tokens[:end]))
            if block is None:
                break
            found.append(block)
        return found

    def longest_known(self, namespace: str, tokens: tuple[int, ...]) -> int:
        """Leading tokens that were ever stored, in whole blocks."""
        ends = range(self.block_size, len(tokens) + 1, self.block_size)
        return max((end for end in ends if (namespace, tokens[:end]) in self.ever_stored), default=0)

    def was_stored(self, namespace: str, tokens: tuple[int, ...]) -> bool:
        """Whether some stored sequence began with ``tokens``."""
        return any(name == namespace and stored[: len(tokens)] == tokens for name, stored in self.ever_stored)

    def _keys(self, event: Event) -> Iterator[Key]:
        tokens = tuple(event.tokens.tolist())
        assert (len(tokens) - event.start) % self.block_size == 0, "an event's tokens end inside a block"
        for end in range(event.start + self.block_size, len(tokens) + 1, self.block_size):
            yield event.namespace, tokens[:end]

    def _parent(self, key: Key) -> Key | None:
        namespace, tokens = key
        return (namespace, tokens[: -self.block_size]) if len(tokens) > self.block_size else None
