"""Names for cached prefixes that a worker and the frontend agree on, so that a router can tell what a worker's cache holds."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from radixkv.cache.events import Event, Evicted, Stored

Hashes = NDArray[np.uint64]

_GROWTH = 4096


class PrefixHashes:
    """Gives every whole-block prefix of a sequence a name of 64 bits.

    A multilinear hash (Carter and Wegman 1979): the sum of each token times a random factor of its position, and of a number for
    the namespace.  So the names of all prefixes of a sequence are one running sum.  Factors come from ``key``; who doesn't know it
    can make two prefixes collide by chance only, of 2**-32 at most for a pair.

    One thread at a time: the factors are drawn as far as they are needed.
    """

    def __init__(self, key: bytes, block_size: int) -> None:
        self.key = key
        self.block_size = block_size
        self._random = np.random.Generator(np.random.PCG64(int.from_bytes(key)))
        self._factors = np.empty(0, dtype=np.uint64)

    def __call__(self, tokens: Sequence[int] | NDArray[np.int32], namespace: str) -> Hashes:
        """uint64 ``[len(tokens) // block_size]``: the name of the first block, of the first two, and so on.  O(tokens) in numpy."""
        n = len(tokens) // self.block_size * self.block_size
        while len(self._factors) < n:
            drawn = self._random.integers(0, 2**64, _GROWTH, dtype=np.uint64)
            self._factors = np.concatenate((self._factors, drawn))
        terms = np.array(tokens[:n], dtype=np.uint64)
        terms += np.uint64(1)  # or leading zeros would count for nothing
        terms *= self._factors[:n]
        return terms.cumsum()[self.block_size - 1 :: self.block_size] + self._number(namespace)

    def _number(self, namespace: str) -> np.uint64:
        digest = hashlib.blake2b(namespace.encode(errors="surrogatepass"), key=self.key, digest_size=8).digest()
        return np.uint64(int.from_bytes(digest))


class CacheNews:
    """Listens to a cache and says, each time it is asked, which prefixes have joined it and left it since the last time."""

    def __init__(self, hashes: PrefixHashes) -> None:
        self._hashes = hashes
        self._is_cached: dict[int, bool] = {}
        """Of prefixes that joined or left: what they did last."""

    def listen(self, event: Event) -> None:
        """To be given to :meth:`PrefixCache.subscribe <radixkv.cache.prefix_cache.PrefixCache.subscribe>`."""
        if isinstance(event, Stored | Evicted):
            names = self._hashes(event.tokens, event.namespace)[event.start // self._hashes.block_size :]
            self._is_cached.update(dict.fromkeys(names.tolist(), isinstance(event, Stored)))

    def take(self) -> tuple[bytes, bytes]:
        """Joined and left, each as the bytes of a uint64 array, in this machine's byte order; both empty if there is no news."""
        if not self._is_cached:
            return b"", b""
        joined = np.array([name for name, cached in self._is_cached.items() if cached], dtype=np.uint64)
        left = np.array([name for name, cached in self._is_cached.items() if not cached], dtype=np.uint64)
        self._is_cached = {}
        return joined.tobytes(), left.tobytes()
