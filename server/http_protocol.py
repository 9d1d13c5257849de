"""HTTP/1.1 with a time limit for everything that a client can dawdle over, and refusals in the OpenAI API's shape."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import h11
import msgspec
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

HEAD_SECONDS = 10.0
"""What a client gets to send a request's line and headers, from the moment it has connected or been answered."""
BODY_SECONDS = 60.0
"""What it gets to send the body."""
WRITE_SECONDS = 30.0
"""How long it may leave a full write buffer (64 KiB beside the system's) unread before it is taken for gone."""
MAX_HEAD_BYTES = 16 * 2**10
MAX_HEADERS = 100


class TimedProtocol(H11Protocol):
    """A connection that is cut when its client takes too long; then its request ends as if the client had hung up."""

    _reading: asyncio.TimerHandle | None = None
    _writing: asyncio.TimerHandle | None = None
    _state: object = None
    """What the client was last seen to owe us."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        _cancel(self._reading)
        _cancel(self._writing)

    def handle_events(self) -> None:
        super().handle_events()
        self._watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._writing = self.loop.call_later(WRITE_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        _cancel(self._writing)

    def send_400_response(self, msg: str) -> None:
        """What came is no HTTP, or too much of it: called where h11 has just said so."""
        error = sys.exception()
        if isinstance(error, h11.RemoteProtocolError) and error.error_status_hint == 431:
            self._refuse(431, f"headers must be at most {MAX_HEAD_BYTES} bytes with the request line")
        else:
            self._refuse(400, f"this is no HTTP/1.1 request: {error}")

    def _watch(self) -> None:
        """Start the clock of what the client has to send next, unless it runs already: arriving bytes gain it no time."""
        if self._state is self.conn.their_state:
            return
        self._state = self.conn.their_state
        _cancel(self._reading)
        seconds = {h11.IDLE: HEAD_SECONDS, h11.SEND_BODY: BODY_SECONDS}.get(self._state)
        self._reading = None if seconds is None else self.loop.call_later(seconds, self._too_slow, seconds)

    def _too_slow(self, seconds: float) -> None:
        part = "line and headers" if self._state is h11.IDLE else "body"
        self._refuse(408, f"a request's {part} must be sent within {seconds:g} s")

    def _refuse(self, status: int, message: str) -> None:
        """Answer, where no response has begun, and hang up."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE) or self.transport.is_closing():
            self.transport.abort()
            return
        if self.cycle is not None:  # it must say nothing any more
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
        body = msgspec.json.encode({"error": error})
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        events: list[Any] = [
            h11.Response(status_code=status, headers=headers, reason=STATUS_PHRASES[status]),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ]
        self.transport.write(b"".join(self.conn.send(event) or b"" for event in events))
        self.transport.close()


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
