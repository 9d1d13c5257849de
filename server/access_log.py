"""One line for each request that a door has answered: what it was, how it ended, how long it took.  Never what was said in it."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any

from radixkv.server import logs
from radixkv.server.generation import Generation
from radixkv.server.metrics import Metrics

log = logging.getLogger("radixkv.access")

QUIET = frozenset({"/health", "/ready", "/metrics", "/dashboard/data", "/snapshot"})
"""What probes, scrapers and the live page ask every few seconds."""
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
"""Called by their names; a client may send any word as a method, and all others are one to us."""


class Entry:
    """What becomes the line of the request that is being served; doors add what they know."""

    def __init__(self, proposed_id: str) -> None:
        self.request_id = logs.choose_request_id(proposed_id)
        self.generation: Generation | None = None
        self.error: str | None = None
        """Kind of what it was refused for."""
        self._began = time.monotonic()
        logs.request_id.set(self.request_id)
        _current.set(self)

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.monotonic() - self._began

    def write(self, what: str, **fields: object) -> None:
        """Write the line, with what a generation says."""
        fields["duration"] = round(self.seconds, 4)
        error = self.error
        if (generation := self.generation) is not None:
            usage = generation.usage
            if generation.first_token_seconds is not None:
                fields["ttft"] = round(generation.first_token_seconds, 4)
            fields |= {
                "prompt_tokens": usage.prompt_tokens,
                "cached_tokens": usage.cached_tokens,
                "completion_tokens": usage.completion_tokens,
            }
            error = error or generation.failure
        if error is not None:
            fields["error"] = error
        log.info(what, extra={"fields": fields})


_current: ContextVar[Entry | None] = ContextVar("entry", default=None)


def serves(generation: Generation) -> None:
    """The request that is being served is answered with this generation."""
    if (entry := _current.get()) is not None:
        entry.generation = generation


def refused(kind: str) -> None:
    """The request that is being served is answered with an error."""
    if (entry := _current.get()) is not None:
        entry.error = entry.error or kind


class AccessLog:
    """An ASGI application around another: gives every request an id, which its answer carries, and logs and counts it."""

    def __init__(self, app: Any, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Any, receive: Any, send: Callable[[Any], Awaitable[None]]) -> None:
        proposed = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        entry = Entry(proposed.decode("latin-1"))
        status = None

        async def receive_and_note() -> Any:
            nonlocal status
            message = await receive()
            if message["type"] == "http.disconnect" and status is None:  # whatever the answer will be, nobody reads it
                status, entry.error = 499, "aborted"
            return message

        async def send_with_id(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = status or message["status"]
                message = {**message, "headers": [*message["headers"], (b"x-request-id", entry.request_id.encode())]}
            await send(message)

        try:
            await self._app(scope, receive_and_note, send_with_id)
        finally:
            # The route, not the path: what a client writes there is not ours to log, and would make labels without bound.
            handler, status = scope.get("path_template", "none"), status or 500
            method = scope["method"] if scope["method"] in METHODS else "other"
            if handler not in QUIET:
                self._metrics.answered(method, handler, status, entry.seconds)
                entry.write(f"{method} {handler} {status}", method=method, route=handler, status=status)
