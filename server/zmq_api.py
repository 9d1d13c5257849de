"""The public ZeroMQ door: a ROUTER socket over the frontend, for clients that want tokens without HTTP.

``docs/protocol.md`` describes it.  A client that has gone is noticed without its help: while it has open requests it is sent
:class:`Alive` once a second, and a ROUTER that must deliver says when there is no one to deliver to.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import zmq
import zmq.asyncio

from radixkv import __version__
from radixkv.server import access_log
from radixkv.server.access import ANYONE, Caller, is_loopback
from radixkv.server.curve import CurveServer
from radixkv.server.errors import InvalidRequest, ServerError, renaming
from radixkv.server.frontend import Frontend
from radixkv.server.messages import (
    MAX_MESSAGE_BYTES,
    PROTOCOL,
    Alive,
    Cancel,
    Chunk,
    Done,
    Failed,
    Finished,
    GetInfo,
    GetStats,
    Info,
    Parser,
    ResetCache,
    Stats,
    Submit,
    ToClient,
    ToFrontend,
    frames,
    id_of,
    send_now,
)
from radixkv.server.tools import ToolUse, tool_use

log = logging.getLogger("radixkv.server")

ALIVE_SECONDS = 1.0
HEARTBEAT_MS = 2000
"""ZeroMQ's own pings, which find a peer whose machine or network has gone; answered by libzmq, not by the client's code."""
MAX_UNREAD = 16384
"""Messages that may wait for a client; one that reads no faster is dropped like one that has gone."""
MAX_OPEN = 1024
"""Open requests of one client."""


class ZmqDoor:
    """Serves an endpoint from ``run`` on; what comes before that waits."""

    def __init__(self, context: zmq.asyncio.Context, endpoint: str, curve: CurveServer | None = None) -> None:
        """Bind.  Raises ``ValueError`` for an endpoint that must not be served, ``OSError`` for one that can't be."""
        check_endpoint(endpoint, secured=curve is not None)
        self._curve = curve
        self._parse: Parser[ToFrontend] = Parser(ToFrontend)
        self._tasks: dict[bytes, dict[str, asyncio.Task[None]]] = {}
        self._socket: zmq.asyncio.Socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._socket.setsockopt(zmq.SNDHWM, MAX_UNREAD)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3 * HEARTBEAT_MS)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, 3 * HEARTBEAT_MS)
        self._socket.setsockopt(zmq.LINGER, 200)
        if endpoint.startswith("tcp://["):
            self._socket.setsockopt(zmq.IPV6, 1)
        self._authenticator = None if curve is None else curve.protect(context, self._socket)
        try:
            with _private_files():
                self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._hang_up()
            raise OSError(error.errno, f"zmq endpoint {endpoint} can't be served: {error.strerror}") from None
        self.endpoint = str(self._socket.getsockopt_string(zmq.LAST_ENDPOINT))

    async def run(self, frontend: Frontend) -> None:
        """Serve until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._keep_alive())
            while True:
                arrived = await self._socket.recv_multipart(copy=False)
                caller = ANYONE if self._curve is None else self._curve.caller(arrived[-1])
                client, *received = [frame.bytes for frame in arrived]
                try:
                    self._handle(frontend, client, caller, self._parse(received), group)
                except ServerError as error:
                    refusal = Failed.of(error, id_of(received))
                    self._send(client, refusal)
                    contextvars.copy_context().run(_log_refusal, refusal)

    def close(self) -> None:
        """Hang up.  libzmq leaves the socket file, so it is removed here."""
        self._hang_up()
        if self.endpoint.startswith("ipc://"):
            Path(self.endpoint.removeprefix("ipc://")).unlink(missing_ok=True)

    def _hang_up(self) -> None:
        self._socket.close()
        if self._authenticator is not None:
            self._authenticator.stop()

    def _handle(self, frontend: Frontend, client: bytes, caller: Caller, message: ToFrontend, group: asyncio.TaskGroup) -> None:
        tasks = self._tasks.get(client, {})
        if isinstance(message, Cancel):
            if task := tasks.get(message.id):
                task.cancel()  # it says nothing more, so its id is free for the next message
                self._forget(client, message.id, task)
            return
        if not 1 <= len(message.id) <= 128:
            raise InvalidRequest(f"id must be 1 to 128 characters, got {len(message.id)}", param="id")
        if message.id in tasks:
            raise InvalidRequest(f"id {message.id!r} must not be that of an open request", param="id")
        if len(tasks) >= MAX_OPEN:
            raise InvalidRequest(f"open requests must be at most {MAX_OPEN} for one client")
        task = group.create_task(self._serve(frontend, client, caller, message))
        self._tasks.setdefault(client, tasks)[message.id] = task
        # Not in the task itself: one that is cancelled before it starts runs none of its code.
        task.add_done_callback(lambda task: self._forget(client, message.id, task))

    def _forget(self, client: bytes, id: str, task: asyncio.Task[None]) -> None:
        tasks = self._tasks.get(client, {})
        if tasks.get(id) is not task:  # cancelled, and its id may be another's by now
            return
        del tasks[id]
        if not tasks:
            del self._tasks[client]

    async def _serve(
        self, frontend: Frontend, client: bytes, caller: Caller, message: Submit | GetInfo | GetStats | ResetCache
    ) -> None:
        entry = access_log.Entry(message.id)
        try:
            match message:
                case Submit():
                    await self._generate(frontend, client, caller, message)
                case GetInfo():
                    info = Info(
                        id=message.id,
                        versions=[PROTOCOL],
                        server=__version__,
                        model=frontend.model,
                        max_model_len=frontend.max_model_len,
                    )
                    self._send(client, info)
                case GetStats():
                    caller.check_administrator()
                    self._send(client, Stats(id=message.id, stats=await frontend.stats()))
                case ResetCache():
                    caller.check_administrator()
                    await frontend.reset_cache()
                    self._send(client, Done(id=message.id))
        except ServerError as error:
            entry.error = error.kind
            self._send(client, Failed.of(error, message.id))
        except asyncio.CancelledError:
            entry.error = "aborted"
            raise
        except Exception:
            entry.error = "internal"
            log.exception("a request failed in the server itself")
            self._send(
                client, Failed(id=message.id, kind="internal", message="the server failed on this request; its log says how")
            )
        finally:
            entry.write(f"zmq {message.__struct_config__.tag}")

    async def _generate(self, frontend: Frontend, client: bytes, caller: Caller, message: Submit) -> None:
        tools = _tool_use(message)
        with renaming({"structured_outputs": "tools"} if tools is not None else {}):
            generation = await frontend.submit(
                None if message.prompt is None else [message.prompt],
                message.params if tools is None else tools.shaped(message.params),
                messages=message.messages,
                n=message.n,
                namespace=caller.namespace_for(message.namespace),
                model=message.model,
                tools=tools,
                retention=message.retention,
            )
        access_log.serves(generation)
        with generation:
            async for delta in generation:
                self._send(client, Chunk(id=message.id, delta=delta))
        self._send(client, Finished(id=message.id, usage=generation.usage))

    async def _keep_alive(self) -> None:
        while True:
            await asyncio.sleep(ALIVE_SECONDS)
            for client, tasks in list(self._tasks.items()):
                self._send(client, Alive(ids=list(tasks)))

    def _send(self, client: bytes, message: ToClient) -> None:
        if not send_now(self._socket, [client, *frames(message)]):
            for task in self._tasks.get(client, {}).values():
                task.cancel()


def _log_refusal(refusal: Failed) -> None:
    """Of a message that is served no further.  To be run in a context of its own, as an entry is its context's."""
    entry = access_log.Entry(refusal.id)
    entry.error = refusal.kind
    entry.write("zmq refused")


def _tool_use(message: Submit) -> ToolUse | None:
    if message.tools and message.messages is None:
        raise InvalidRequest("tools must be left out unless messages are given", param="tools")
    if message.tools and message.params.structured_outputs is not None:
        raise InvalidRequest("structured_outputs must be left out where tools are given", param="structured_outputs")
    match message.tool_choice:
        case "auto" | "none" | "required" as mode:
            return tool_use(message.tools, mode, None, parallel=message.parallel_tool_calls)
        case name:
            return tool_use(message.tools, "required", [name], parallel=False)


def check_endpoint(endpoint: str, *, secured: bool = False, keys: bool = False) -> None:
    """Raise ``ValueError`` unless only those can use it who may, and ``OSError`` where its socket file is someone else's.

    TCP must be ``secured`` by CURVE beyond loopback, and where HTTP asks for ``keys``.
    """
    scheme, _, rest = endpoint.partition("://")
    if scheme == "tcp":
        if not secured and not is_loopback(urlsplit(endpoint).hostname or ""):
            raise ValueError(
                f"zmq must be a loopback address or ipc://, got {endpoint}: without CURVE, nothing on this wire is encrypted or "
                "authenticated (give --zmq-server-key and --zmq-client-keys, or forward the port over SSH)"
            )
        if not secured and keys:
            raise ValueError(
                f"zmq must be ipc:// where API keys are set, got {endpoint}: every user of this machine could use it without one "
                "(or give --zmq-server-key and --zmq-client-keys)"
            )
        port = endpoint.rpartition(":")[2]
        if port != "*" and not (port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= 65535):
            # libzmq would take the lowest 16 bits.
            raise ValueError(f"zmq port must be between 0 and 65535, or * for any that is free, got {endpoint}")
    elif scheme == "ipc" and rest.startswith("@"):
        raise ValueError(
            f"zmq must be the path of a socket file, got {endpoint}: an abstract socket has no permissions, "
            "so every user of this machine could use it"
        )
    elif scheme == "ipc" and rest:
        # libzmq would delete whatever is there.
        path = Path(rest)
        if path.exists() and not stat.S_ISSOCK(path.stat().st_mode):
            raise OSError(f"zmq endpoint {endpoint}: {path} exists and is no socket")
        if path.exists() and _is_listening(path):
            raise OSError(f"zmq endpoint {endpoint} is taken: something listens there")
        if not path.parent.is_dir():
            raise OSError(f"zmq endpoint {endpoint}: there is no directory {path.parent}")
    else:
        raise ValueError(f"zmq must be an endpoint like ipc:///tmp/radixkv.sock or tcp://127.0.0.1:5555, got {endpoint!r}")


def _is_listening(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
        return True


@contextmanager
def _private_files() -> Iterator[None]:
    """Files made inside are their owner's alone."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)
