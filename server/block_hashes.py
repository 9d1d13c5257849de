"""Names for a prompt's blocks that a log may hold: equal where prompts are equal so far, and telling nothing else."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

import numpy as np

from radixkv.server.access import check_private

MIN_KEY_BYTES, MAX_KEY_BYTES = 16, 64


class BlockHashes:
    """Keyed hashes (BLAKE2b, RFC 7693), each of a block and of the hash before it; the first, of the namespace.

    Who doesn't know the key can't try out what a prompt may have been, nor find out whether two namespaces asked the same.
    """

    def __init__(self, key: bytes | None = None) -> None:
        """A key that nobody knows, unless one is given."""
        self._key = secrets.token_bytes(MAX_KEY_BYTES) if key is None else key

    @classmethod
    def load(cls, path: Path | None) -> BlockHashes:
        """With the bytes of a file as the key.

        Raises ``ValueError`` where others can read it or its length is wrong, ``OSError`` where it can't be read.
        """
        if path is None:
            return cls()
        check_private(path)
        key = path.read_bytes().strip()
        if not MIN_KEY_BYTES <= len(key) <= MAX_KEY_BYTES:
            raise ValueError(f"request-log-key: {path} must hold {MIN_KEY_BYTES} to {MAX_KEY_BYTES} bytes, got {len(key)}")
        return cls(key)

    def __call__(self, token_ids: Sequence[int], block_size: int, namespace: str) -> list[str]:
        """16 hexadecimal digits for each whole block."""
        digest = blake2b(namespace.encode(errors="surrogatepass"), key=self._key, digest_size=32, person=b"namespace").digest()
        tokens, step = np.asarray(token_ids, dtype="<i4").tobytes(), 4 * block_size
        names = []
        for start in range(0, len(tokens) - step + 1, step):
            digest = blake2b(digest + tokens[start : start + step], key=self._key, digest_size=32, person=b"block").digest()
            names.append(digest[:8].hex())
        return names
