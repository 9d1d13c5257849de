"""The frontend's end of a worker's socket: sends requests, hands each output to whoever asked for it."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import zmq
import zmq.asyncio

from radixkv.cache import Snapshot
from radixkv.scheduling.request import RequestOutput
from radixkv.server.errors import InvalidRequest, ServerError, Unavailable
from radixkv.server.messages import (
    Abort,
    Done,
    Failed,
    FromWorker,
    Generate,
    GetSnapshot,
    GetStats,
    Hello,
    Parser,
    Ready,
    ResetCache,
    Stats,
    Tokens,
    ToWorker,
    TreeSnapshot,
    WatchCache,
    frames,
    send_now,
)

log = logging.getLogger("radixkv.server")

Sink = Callable[[RequestOutput | ServerError], None]
"""Takes a request's outputs as they come; after one with a finish reason, or an error, no more."""
CacheListener = Callable[[bytes, bytes], None]
"""Takes what joined a worker's cache and what left it (:meth:`~radixkv.server.prefix_hashes.CacheNews.take`)."""
M = TypeVar("M", Hello, Ready)
CALL_TIMEOUT = 30.0
"""Seconds to wait for an answer that comes between two engine steps."""


class WorkerClient:
    """Speaks to one worker, from its birth to its death.  All methods belong to one event loop."""

    def __init__(self, context: zmq.asyncio.Context, endpoint: str, index: int = 0) -> None:
        """``index`` tells which of the server's workers it is, whichever process that is at the time."""
        self.index = index
        self._socket: zmq.asyncio.Socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(endpoint)
        self._parse: Parser[FromWorker] = Parser(FromWorker)
        self._sinks: dict[str, Sink] = {}
        self._on_cache: CacheListener | None = None
        self._calls: dict[str, asyncio.Future[Stats | TreeSnapshot | Done]] = {}
        self._call_ids = map(str, itertools.count())
        self._heard = time.monotonic()
        """When the worker last said something, or got something to do while it had nothing to do."""

    async def expect(self, kind: type[M]) -> M:
        """The next message, before ``run``; raises ``Unavailable`` with the worker's reason where it couldn't load its model."""
        message = self._parse(await self._socket.recv_multipart())
        if isinstance(message, kind):
            return message
        raise message.error if isinstance(message, Failed) else ServerError(f"the engine process said {message!r}")

    async def run(self) -> None:
        """Receive until cancelled."""
        while True:
            received = await self._socket.recv_multipart()
            self._heard = time.monotonic()
            try:
                self._dispatch(self._parse(received))
            except InvalidRequest as error:  # our own worker: a bug, but the other requests need not suffer
                log.error("dropped a message from the engine process: %s", error)

    async def hung(self, seconds: float) -> None:
        """Return when the worker, while it had something to do, has said nothing for so long."""
        while True:
            await asyncio.sleep(max(seconds / 20, self._heard + seconds - time.monotonic()))
            late = time.monotonic() - self._heard >= seconds
            # If something is there to be read, it was this process that slept.
            if late and self._busy and not await self._socket.poll(0):
                return

    @property
    def _busy(self) -> bool:
        return bool(self._sinks or self._calls)

    def generate(self, request: Generate, sink: Sink) -> None:
        """Raises ``InvalidRequest``, and nothing was sent, where MessagePack can't carry the request."""
        if not self._busy:
            self._heard = time.monotonic()
        self._send(request)
        self._sinks[request.request_id] = sink

    def abort(self, request_ids: Sequence[str]) -> None:
        """Forget these requests; their sinks hear nothing more."""
        for request_id in request_ids:
            self._sinks.pop(request_id, None)
        self._send(Abort(request_ids=list(request_ids)))

    def watch_cache(self, key: bytes, listener: CacheListener) -> None:
        """Have ``listener`` hear of all that the worker caches from now on, before outputs that came with it are passed on."""
        self._on_cache = listener
        self._send(WatchCache(key=key))

    async def stats(self, timeout: float = CALL_TIMEOUT) -> dict[str, Any]:
        reply = await self._call(GetStats(id=next(self._call_ids)), timeout)
        assert isinstance(reply, Stats)
        return reply.stats

    async def snapshot(self, max_nodes: int) -> Snapshot:
        reply = await self._call(GetSnapshot(id=next(self._call_ids), max_nodes=max_nodes), CALL_TIMEOUT)
        assert isinstance(reply, TreeSnapshot)
        return reply.snapshot

    async def reset_cache(self) -> None:
        await self._call(ResetCache(id=next(self._call_ids)), CALL_TIMEOUT)

    def close(self, error: ServerError) -> None:
        """Fail every open call with ``error``, forget the requests, and close the socket."""
        self._sinks.clear()
        for call in self._calls.values():
            if not call.done():
                call.set_exception(error)
        self._socket.close()

    async def _call(self, message: GetStats | GetSnapshot | ResetCache, timeout: float) -> Stats | TreeSnapshot | Done:
        if not self._busy:
            self._heard = time.monotonic()
        future = self._calls[message.id] = asyncio.get_running_loop().create_future()
        self._send(message)
        try:
            return await asyncio.wait_for(future, timeout)
        except TimeoutError:
            raise Unavailable(f"the engine process did not answer within {timeout:g} s") from None
        finally:
            del self._calls[message.id]

    def _dispatch(self, message: FromWorker) -> None:
        match message:
            case Tokens():
                if self._on_cache is not None and (message.joined or message.left):
                    self._on_cache(message.joined, message.left)
                for output in message.outputs:
                    sink = self._sinks.get(output.request_id)
                    if output.finish_reason is not None:
                        self._sinks.pop(output.request_id, None)
                    if sink is not None:  # else it was aborted while this was on its way
                        sink(output)
            case Failed():
                if sink := self._sinks.pop(message.id, None):
                    sink(message.error)
                else:
                    log.error("the engine process refused a message: %s", message.message)
            case Stats() | TreeSnapshot() | Done():
                call = self._calls.get(message.id)
                if call is not None and not call.done():
                    call.set_result(message)
            case Hello() | Ready():
                log.error("the engine process said %r out of turn", message)

    def _send(self, message: ToWorker) -> None:
        # Without a high-water mark this fails only where the worker is gone, and then `close` tells the sinks.
        if not self._socket.closed:
            send_now(self._socket, frames(message))
