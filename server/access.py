"""Who may ask for what: API keys, and what a caller may do whom a key or a certificate has named."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from radixkv.server.errors import Forbidden

API_KEY_VARIABLE = "RADIXKV_API_KEY"
"""Environment variable with what could stand in a file of keys.  `radixkv report` sends the first key in it."""
MIN_KEY_LENGTH = 16


@dataclass(frozen=True)
class Caller:
    """Who asks.  One with a namespace is a tenant: held to that namespace, and no administrator."""

    namespace: str | None = None

    def namespace_for(self, requested: str) -> str:
        """The namespace that a request runs in.  Raises ``Forbidden`` where a tenant asks for another one than its own."""
        if self.namespace is None:
            return requested
        if requested not in ("", self.namespace):
            raise Forbidden(f"namespace must be left out or {self.namespace!r}, which this key is for", param="namespace")
        return self.namespace

    def check_administrator(self) -> None:
        """Raises ``Forbidden`` for a tenant: counters tell about the others, and forgetting the cache harms them."""
        if self.namespace is not None:
            raise Forbidden(f"this needs a key without a namespace; this one is for {self.namespace!r}")


ANYONE = Caller()
"""Where no keys are set."""


class ApiKeys:
    """The keys that a server takes.  Only their hashes are kept."""

    def __init__(self, lines: Iterable[str], source: str) -> None:
        """Each line is a key, or a key and the namespace it is for; ``#`` begins a comment line.

        Raises ``ValueError`` naming ``source`` and the line, never the key.
        """
        self._callers: dict[bytes, Caller] = {}
        for number, line in enumerate(lines, 1):
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            key, *rest = line.split(maxsplit=1)
            if len(key) < MIN_KEY_LENGTH or not key.isascii() or not key.isprintable():
                raise ValueError(f"{source} line {number}: a key must be {MIN_KEY_LENGTH} or more visible ASCII characters")
            digest = _digest(key)
            if digest in self._callers:
                raise ValueError(f"{source} line {number}: this key stands on an earlier line, too")
            self._callers[digest] = Caller(rest[0].strip() if rest else None)
        if not self._callers:
            raise ValueError(f"{source} holds no key: write one a line, or a key and the namespace it is for")

    def caller(self, key: str) -> Caller | None:
        """Whose key this is, or None.  Takes as long for a wrong key as for a right one, whichever it is."""
        digest = _digest(key)
        found = None
        for known, caller in self._callers.items():
            if hmac.compare_digest(known, digest):
                found = caller
        return found

    @classmethod
    def load(cls, path: Path | None) -> ApiKeys | None:
        """From a file and from the environment, which is cleared of them; None where neither has any.

        Raises ``ValueError`` for a file that others can read or that holds something else, ``OSError`` for one that can't be read.
        """
        lines: list[str] = []
        sources = []
        if path is not None:
            check_private(path)
            lines += path.read_text().splitlines()
            sources.append(str(path))
        if given := os.environ.pop(API_KEY_VARIABLE, None):
            lines += given.splitlines()
            sources.append(API_KEY_VARIABLE)
        return cls(lines, " and ".join(sources)) if sources else None


def check_private(path: Path) -> None:
    """Raise ``ValueError`` where users other than the owner and his group can read a file of secrets, or others can write it."""
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o027:
        raise ValueError(f"{path} holds secrets and is open to others (mode {mode:04o}): chmod 600 {path}")


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address.  A name is not, but for ``localhost``."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()
