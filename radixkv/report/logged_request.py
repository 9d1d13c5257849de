"""One line of a request log: what the server writes about a sequence when it ends, and what reports read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

VERSION = 1
"""Of the format.  It changes where a field changes its meaning or goes; fields may be added without."""
_LARGEST_TOKEN_ID = 2**31 - 1


class LoggedRequest(msgspec.Struct, kw_only=True, gc=False):
    """A sequence that ended: a request with ``n=4`` has four.  The fields are explained in docs/reports.md."""

    version: Literal[1] = 1
    time: float
    """Arrival, in seconds since the epoch."""
    request_id: str = ""
    model: str = ""
    namespace: str = ""
    prompt_tokens: int
    cached_tokens: int | None = None
    """None where it ended before its prompt was looked up and computed, or where nobody knows."""
    missed: dict[str, int] = {}
    """The other prompt tokens by reason."""
    output_tokens: int
    finish_reason: str | None = None
    error: str | None = None
    """Kind of what it failed of, ``aborted`` where its client left it."""
    queued_seconds: float | None = None
    ttft_seconds: float | None = None
    """From arrival to the first token."""
    seconds: float | None = None
    """From arrival to its end."""
    block_size: int
    cache_blocks: int | None = None
    """KV blocks of the server, all workers together."""
    kv_bytes_per_token: int | None = None
    dropped: int = 0
    """Lines lost just before this one, because they could not be written fast enough."""
    block_hashes: list[int | str]
    """One for each whole block of the prompt; equal where the block, all before it and the namespace are equal."""
    token_ids: Sequence[int] | msgspec.UnsetType = msgspec.UNSET
    """The prompt, where the operator has asked for it."""

    def check(self) -> None:
        """Raise ``ValueError`` naming a field that contradicts another or has no meaning."""
        for field, value, least in (
            ("prompt_tokens", self.prompt_tokens, 1),
            ("output_tokens", self.output_tokens, 0),
            ("block_size", self.block_size, 1),
            ("cached_tokens", self.cached_tokens, 0),
            ("cache_blocks", self.cache_blocks, 1),
            ("kv_bytes_per_token", self.kv_bytes_per_token, 1),
            ("dropped", self.dropped, 0),
            *((f"missed.{reason}", count, 0) for reason, count in self.missed.items()),
        ):
            if value is not None and value < least:
                raise ValueError(f"{field}: must be at least {least}, got {value}")
        blocks = self.prompt_tokens // self.block_size
        if len(self.block_hashes) != blocks:
            raise ValueError(
                f"block_hashes: {self.prompt_tokens} prompt tokens have {blocks} whole blocks of {self.block_size}, "
                f"got {len(self.block_hashes)} hashes"
            )
        if self.token_ids is not msgspec.UNSET:
            if len(self.token_ids) != self.prompt_tokens:
                raise ValueError(f"token_ids: must be prompt_tokens={self.prompt_tokens} of them, got {len(self.token_ids)}")
            for worst in (min(self.token_ids), max(self.token_ids)):
                if not 0 <= worst <= _LARGEST_TOKEN_ID:
                    raise ValueError(f"token_ids: must be between 0 and {_LARGEST_TOKEN_ID}, got {worst}")
        if self.cached_tokens is not None and self.cached_tokens + sum(self.missed.values()) > self.prompt_tokens:
            raise ValueError(
                f"missed: {self.cached_tokens} cached and {sum(self.missed.values())} missed tokens are more than "
                f"prompt_tokens={self.prompt_tokens}"
            )
