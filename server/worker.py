"""The worker process: an engine behind a ZeroMQ socket.  It speaks token ids only, and lives no longer than its parent.

``python -P -m radixkv.server.worker ENDPOINT PARENT`` reads the engine's configuration as one line of JSON from standard input and
connects to the frontend at ``ENDPOINT``, whose process id is ``PARENT``.  Standard input stays open as long as the frontend lives.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
import zmq

from radixkv.config import EngineConfig
from radixkv.server import logs
from radixkv.server.errors import InvalidRequest, ServerError
from radixkv.server.messages import (
    BEAT_SECONDS,
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
    id_of,
)
from radixkv.server.prefix_hashes import CacheNews, PrefixHashes
from radixkv.server.use_times import UseTimes

if TYPE_CHECKING:
    from radixkv.engine import Engine

log = logging.getLogger("radixkv.worker")

STDIN = 0
_PR_SET_PDEATHSIG = 1


class Worker:
    """Drains messages, steps the engine, sends what the step gave; sleeps in ``poll`` while there is nothing to do."""

    def __init__(self, engine: Engine, socket: zmq.Socket[bytes]) -> None:
        self._engine = engine
        self._socket = socket
        self._parse: Parser[ToWorker] = Parser(ToWorker)
        self._news: CacheNews | None = None
        self._use_times = UseTimes()

    def run(self) -> None:
        """Serve until the parent closes standard input, by intent or by dying."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(STDIN, zmq.POLLIN)
        self._send(Ready(stats=self._engine.stats()))
        sent = time.monotonic()
        while True:
            events = dict(poller.poll(0 if self._engine.has_unfinished else None))
            if STDIN in events:
                return
            self._drain()
            # A step that fails ends its own requests; what escapes it ends the process, and the launcher starts another.
            busy = self._engine.has_unfinished
            outputs = self._engine.step() if busy else []
            joined, left = (b"", b"") if self._news is None else self._news.take()
            now = time.monotonic()
            self._use_times.note(self._engine.cache.num_ended, now, idle=not self._engine.has_unfinished)
            if outputs or joined or left or (busy and now - sent > BEAT_SECONDS):
                self._send(Tokens(outputs=outputs, joined=joined, left=left))
                sent = now

    def _drain(self) -> None:
        while self._socket.poll(0):
            received = self._socket.recv_multipart()
            try:
                self._handle(self._parse(received))
            except ServerError as error:
                self._send(Failed.of(error, id_of(received)))

    def _handle(self, message: ToWorker) -> None:
        engine = self._engine
        match message:
            case Generate():
                try:
                    engine.add(
                        message.request_id,
                        message.token_ids,
                        message.params,
                        namespace=message.namespace,
                        output_token_ids=message.output_token_ids,
                        retention=message.retention,
                    )
                except ValueError as error:
                    self._send(Failed.of(InvalidRequest.of(error), message.request_id))
                except Exception as error:  # one bad request must not end all others
                    log.exception("request %s failed in the engine", message.request_id)
                    self._send(Failed.of(ServerError(f"the engine refused the request: {error!r}"), message.request_id))
            case Abort():
                for request_id in message.request_ids:
                    engine.abort(request_id)
            case WatchCache():
                self._news = CacheNews(PrefixHashes(message.key, engine.config.block_size))
                engine.cache.subscribe(self._news.listen)
            case GetStats():
                self._send(Stats(id=message.id, stats=engine.stats()))
            case GetSnapshot():
                snapshot = engine.cache.snapshot(message.max_nodes)
                self._use_times.fill(snapshot, engine.cache.num_ended, time.monotonic())
                self._send(TreeSnapshot(id=message.id, snapshot=snapshot))
            case ResetCache():
                engine.reset_cache()
                self._send(Done(id=message.id))

    def _send(self, message: FromWorker) -> None:
        self._socket.send_multipart(frames(message))


def main(make_engine: Callable[[EngineConfig], Engine] | None = None) -> int:
    """Run a worker as the command line says; ``make_engine`` is :class:`radixkv.engine.Engine` if not given."""
    for number in (signal.SIGINT, signal.SIGTERM):  # `pkill radixkv` reaches this process too; the parent decides
        signal.signal(number, signal.SIG_IGN)
    _die_with_parent(int(sys.argv[2]))
    logs.set_up()
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=EngineConfig)
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        # The frontend always reads, so nothing may ever be dropped or block here.
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.LINGER, 500)
        socket.connect(sys.argv[1])
        socket.send_multipart(frames(Hello(pid=os.getpid())))
        try:
            if make_engine is None:
                from radixkv.engine import Engine

                make_engine = Engine
            engine = make_engine(config)
        except Exception as error:
            if not isinstance(error, ValueError | OSError):  # those are worded for users
                log.exception("the engine did not start")
            socket.send_multipart(frames(Failed(kind="unavailable", message=str(error) or repr(error))))
            return 1
        try:
            Worker(engine, socket).run()
        except Exception:
            log.exception("the engine failed")
            return 1
    return 0


def _die_with_parent(parent: int) -> None:
    """Have Linux kill this process with its parent, even in the middle of a step.  Elsewhere closed standard input must do."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died while this process was starting
            sys.exit(0)


if __name__ == "__main__":
    sys.exit(main())
