"""Clients of the ZeroMQ door: :class:`Client` for plain code, :class:`AsyncClient` for asyncio.

with Client("tcp://127.0.0.1:5555") as client:
    print(client.generate("The capital of France is", SamplingParams(max_tokens=8)).text)
    for delta in client.stream([{"role": "user", "content": "Tell me a story."}]):
        print(delta.text, end="", flush=True)
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import operator
import re
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypedDict, TypeVar, Unpack

import msgspec
import zmq
import zmq.asyncio

from radixkv.sampling_params import SamplingParams
from radixkv.scheduling.request import FinishReason, TokenLogprobs
from radixkv.server.curve import CurveClient
from radixkv.server.errors import InvalidRequest, Unavailable, UnsupportedVersion
from radixkv.server.messages import (
    Alive,
    Cancel,
    ChatMessage,
    Delta,
    Failed,
    Finished,
    FunctionCall,
    GetInfo,
    GetStats,
    Info,
    Parser,
    ResetCache,
    Stats,
    Submit,
    ToClient,
    ToolCall,
    Usage,
    frames,
    id_of,
    refusal,
    send_now,
)
from radixkv.server.tools import split_calls

__all__ = ["AsyncClient", "AsyncStream", "Choice", "Client", "Completion", "Options", "Stream"]

Prompt = str | Sequence[int] | Sequence[dict[str, Any]]
"""A text or token ids to continue, or a chat's messages (``{"role": ..., "content": ...}``) to answer."""
SILENCE_SECONDS = 10.0
"""A server that does not name a request for so long, though it names all that it has each second, is gone or has lost it."""
HEARTBEAT_MS = 2000
"""ZeroMQ's own pings."""
DEFAULT_PARAMS = SamplingParams()


class Options(TypedDict, total=False):
    """What a request may have beside prompt and params, as docs/protocol.md has it."""

    n: int
    """Choices."""
    namespace: str
    model: str
    retention: tuple[int, float]
    """Priority and seconds: evict the prompt's prefix after others for a while."""
    tools: Sequence[dict[str, Any]]
    """Functions that a chat's answer may call: ``name``, ``description``, ``parameters``, ``strict``."""
    tool_choice: str
    parallel_tool_calls: bool


Inbox = TypeVar("Inbox")
KeyFile = Path | str


class Choice(msgspec.Struct, frozen=True):
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Of all prompt tokens but the first, if asked for."""

    def without_calls(self) -> tuple[str, list[ToolCall]]:
        """The text without the calls of tools that it holds, and these, as a turn of the assistant gives them back."""
        text, calls = split_calls(self.text)
        return text, [
            ToolCall(id=call.id or "", function=FunctionCall(name=call.name or "", arguments=call.arguments)) for call in calls
        ]


class Completion(msgspec.Struct, frozen=True):
    """A finished request: one choice, or ``n`` of them."""

    choices: list[Choice]
    usage: Usage

    @property
    def text(self) -> str:
        """Of the first choice."""
        return self.choices[0].text


@dataclass
class _Waiting(Generic[Inbox]):
    """An open request."""

    inbox: Inbox
    deadline: float
    heard: float
    """When it was sent, or the server last named it."""


class _Base(Generic[Inbox]):
    """What both clients share: what they put on their socket, for whom an answer is, and how long they wait for it."""

    def __init__(self, endpoint: str, timeout: float | None, server_key: KeyFile | None, client_key: KeyFile | None) -> None:
        if (server_key is None) != (client_key is None):
            raise ValueError("server_key and client_key must be given both or neither")
        self.endpoint = endpoint
        self.timeout = timeout
        self._curve = None if server_key is None or client_key is None else CurveClient.load(server_key, client_key)
        self._parse: Parser[ToClient] = Parser(ToClient)
        self._ids = map(str, itertools.count())
        self._waiting: dict[str, _Waiting[Inbox]] = {}

    def _connect(self, socket: zmq.Socket[Any]) -> None:
        if self._curve is not None:
            self._curve.protect(socket)
        socket.setsockopt(zmq.LINGER, 500)  # so that a last Cancel arrives
        socket.setsockopt(zmq.RCVHWM, 0)
        # Without pings, a connection whose other end has vanished is kept for hours, and nothing else is tried.
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3 * HEARTBEAT_MS)
        socket.setsockopt(zmq.IPV6, self.endpoint.startswith("tcp://["))
        socket.connect(self.endpoint)

    def _submit(self, prompt: Prompt, params: SamplingParams, options: Options) -> Submit:
        if unknown := options.keys() - Options.__annotations__:
            raise TypeError(f"{min(unknown)!r} is no option of a request: {', '.join(Options.__annotations__)} are")
        try:
            submit = msgspec.convert({"id": next(self._ids)} | options, Submit)
        except msgspec.ValidationError as error:
            problem, _, path = str(error).partition(" - at `$.")
            field = re.match(r"\w*", path)
            raise InvalidRequest(f"{path.rstrip('`')}: {problem}", param=field[0] if field else None) from None
        submit = msgspec.structs.replace(submit, params=params)
        if isinstance(prompt, str):
            return msgspec.structs.replace(submit, prompt=prompt)
        try:
            if isinstance(prompt, bytes | bytearray):  # whose items would pass for token ids
                raise TypeError(f"{type(prompt).__name__!r} object must be decoded first")
            items: list[Any] = list(prompt)
            if not items or not isinstance(items[0], dict):
                # Integers of any make, such as numpy's, which MessagePack can't carry.
                return msgspec.structs.replace(submit, prompt=[operator.index(item) for item in items])
        except TypeError as error:
            raise InvalidRequest(f"prompt must be a text, token ids or a chat's messages: {error}", param="prompt") from None
        try:
            return msgspec.structs.replace(submit, messages=msgspec.convert(items, list[ChatMessage]))
        except msgspec.ValidationError as error:
            raise InvalidRequest(f"messages: {error}", param="messages") from None

    def _new(self, inbox: Inbox) -> _Waiting[Inbox]:
        now = time.monotonic()
        return _Waiting(inbox, deadline=float("inf") if self.timeout is None else now + self.timeout, heard=now)

    def _patience(self, waiting: _Waiting[Inbox]) -> float:
        """Seconds to wait for the next message.  Raises ``TimeoutError`` or ``Unavailable`` where none are left."""
        now = time.monotonic()
        if now >= waiting.deadline:
            raise TimeoutError(f"{self.endpoint}: not done within {self.timeout:g} s")
        if now >= waiting.heard + SILENCE_SECONDS:
            raise Unavailable(
                f"{self.endpoint}: no sign of life of this request for {SILENCE_SECONDS:g} s: "
                "the server is gone, or was restarted and has lost it"
            )
        return min(waiting.heard + SILENCE_SECONDS, waiting.deadline) - now

    def _addressed(self, received: list[bytes]) -> tuple[ToClient, list[Inbox]]:
        """A message, and where it belongs.  One that can't be read fails the request it names, or all where it names none."""
        message: ToClient
        try:
            message = self._parse(received)
            named = message.ids if isinstance(message, Alive) else [message.id]
        except UnsupportedVersion as error:
            id = id_of(received)
            message = refusal(received) or Failed.of(UnsupportedVersion(f"{self.endpoint}: {error}"), id)
            named = [id] if id else list(self._waiting)
        except InvalidRequest as error:
            id = id_of(received)
            message = Failed(id=id, kind="internal", message=f"{self.endpoint} sent an answer that can't be read: {error}")
            named = [id] if id else list(self._waiting)
        waiting = [self._waiting[id] for id in named if id in self._waiting]
        now = time.monotonic()
        for request in waiting:
            request.heard = now
        return message, [] if isinstance(message, Alive) else [request.inbox for request in waiting]


class Client(_Base[deque[ToClient]]):
    """A blocking client, for one thread.

    It connects by itself, again and again: a request that was open while the server went away fails as ``Unavailable``, later ones
    are served by whichever server is there then.

    :class:`Options` are what a request may have beside prompt and params.

    ``timeout`` is the most seconds that a request may take (``TimeoutError``); without it only a server that is gone or has lost
    the request ends the waiting (``Unavailable``).  Bad input raises ``InvalidRequest``, a ``ValueError`` that names field and
    limit.

    A server that asks for CURVE keys (docs/security.md) takes two files: its own ``.key`` as ``server_key``, which proves to the
    client that it is the right server, and the client's ``.key_secret`` as ``client_key``.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        timeout: float | None = None,
        server_key: KeyFile | None = None,
        client_key: KeyFile | None = None,
    ) -> None:
        super().__init__(endpoint, timeout, server_key, client_key)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._connect(self._socket)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Hang up; the server aborts what is still open."""
        self._socket.close()
        self._context.term()

    def generate(self, prompt: Prompt, params: SamplingParams = DEFAULT_PARAMS, **options: Unpack[Options]) -> Completion:
        """Generate, and wait for all of it."""
        with self.stream(prompt, params, **options) as stream:
            return _joined(list(stream), stream.usage)

    def stream(self, prompt: Prompt, params: SamplingParams = DEFAULT_PARAMS, **options: Unpack[Options]) -> Stream:
        """Generate, and read it as it grows.  Several streams may be open, and read in any order."""
        return Stream(self, self._submit(prompt, params, options))

    def info(self) -> Info:
        """Who serves what: versions, model, context length."""
        reply = self._call(GetInfo(id=next(self._ids)))
        assert isinstance(reply, Info)
        return reply

    def stats(self) -> dict[str, Any]:
        """The engine's counters and gauges."""
        reply = self._call(GetStats(id=next(self._ids)))
        assert isinstance(reply, Stats)
        return reply.stats

    def reset_cache(self) -> None:
        """Forget all cached prefixes that no running request uses."""
        self._call(ResetCache(id=next(self._ids)))

    def _call(self, message: GetInfo | GetStats | ResetCache) -> ToClient:
        self._open(message)
        try:
            return self._receive(message.id)
        finally:
            self._close(message.id, cancel=False)

    def _open(self, message: Submit | GetInfo | GetStats | ResetCache) -> None:
        parts = frames(message)
        waiting = self._new(deque())
        while not self._socket.poll(_milliseconds(self._patience(waiting)), zmq.POLLOUT):
            pass
        self._socket.send_multipart(parts, zmq.NOBLOCK)
        waiting.heard = time.monotonic()
        self._waiting[message.id] = waiting

    def _close(self, id: str, *, cancel: bool) -> None:
        self._waiting.pop(id, None)
        if cancel and not self._socket.closed:
            with contextlib.suppress(zmq.Again):  # who takes nothing more is as good as gone
                self._socket.send_multipart(frames(Cancel(id=id)), zmq.NOBLOCK)

    def _receive(self, id: str) -> ToClient:
        """The next message about ``id``; others are kept for whoever asks for them."""
        waiting = self._waiting[id]
        if time.monotonic() >= waiting.deadline:
            self._patience(waiting)
        while not waiting.inbox:
            # Look before judging a silence: the time since the last read may have been the caller's own.
            if self._socket.poll(0) or self._socket.poll(_milliseconds(self._patience(waiting))):
                message, inboxes = self._addressed(self._socket.recv_multipart())
                for inbox in inboxes:
                    inbox.append(message)
        return _checked(waiting.inbox.popleft())


class AsyncClient(_Base[asyncio.Queue[ToClient]]):
    """The same for asyncio: any number of requests at once, on one event loop.  Open it with ``async with``."""

    def __init__(
        self,
        endpoint: str,
        *,
        timeout: float | None = None,
        server_key: KeyFile | None = None,
        client_key: KeyFile | None = None,
    ) -> None:
        super().__init__(endpoint, timeout, server_key, client_key)
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket = self._context.socket(zmq.DEALER)
        self._connect(self._socket)
        self._reader: asyncio.Task[None] | None = None

    async def __aenter__(self) -> AsyncClient:
        self._reader = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Hang up; the server aborts what is still open."""
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        self._socket.close()
        await asyncio.to_thread(self._context.term)  # which lingers where the server takes nothing

    async def generate(self, prompt: Prompt, params: SamplingParams = DEFAULT_PARAMS, **options: Unpack[Options]) -> Completion:
        """Generate, and wait for all of it."""
        async with self.stream(prompt, params, **options) as stream:
            return _joined([delta async for delta in stream], stream.usage)

    def stream(self, prompt: Prompt, params: SamplingParams = DEFAULT_PARAMS, **options: Unpack[Options]) -> AsyncStream:
        """Generate, and read it as it grows."""
        return AsyncStream(self, self._submit(prompt, params, options))

    async def info(self) -> Info:
        """Who serves what: versions, model, context length."""
        reply = await self._call(GetInfo(id=next(self._ids)))
        assert isinstance(reply, Info)
        return reply

    async def stats(self) -> dict[str, Any]:
        """The engine's counters and gauges."""
        reply = await self._call(GetStats(id=next(self._ids)))
        assert isinstance(reply, Stats)
        return reply.stats

    async def reset_cache(self) -> None:
        """Forget all cached prefixes that no running request uses."""
        await self._call(ResetCache(id=next(self._ids)))

    async def _call(self, message: GetInfo | GetStats | ResetCache) -> ToClient:
        self._open(message)
        try:
            return await self._receive(message.id)
        finally:
            self._close(message.id, cancel=False)

    async def _read(self) -> None:
        while True:
            message, inboxes = self._addressed(await self._socket.recv_multipart())
            for inbox in inboxes:
                inbox.put_nowait(message)

    def _open(self, message: Submit | GetInfo | GetStats | ResetCache) -> None:
        if not send_now(self._socket, frames(message)):
            raise Unavailable(f"{self.endpoint}: takes no more messages")
        self._waiting[message.id] = self._new(asyncio.Queue())

    def _close(self, id: str, *, cancel: bool) -> None:
        self._waiting.pop(id, None)
        if cancel and not self._socket.closed:
            send_now(self._socket, frames(Cancel(id=id)))  # who takes nothing more is as good as gone

    async def _receive(self, id: str) -> ToClient:
        waiting = self._waiting[id]
        while True:
            patience = self._patience(waiting)
            try:
                return _checked(await asyncio.wait_for(waiting.inbox.get(), patience))
            except TimeoutError:  # no message, but the request may have been named meanwhile
                continue


class _Streaming:
    """What both kinds of stream share: being open, and ending once."""

    def __init__(self, client: Client | AsyncClient, submit: Submit) -> None:
        self.usage: Usage | None = None
        """There when the iteration has ended."""
        self._id = submit.id
        self._end_request = client._close
        self._open = True
        client._open(submit)

    def cancel(self) -> None:
        """Stop the request, if it still runs; no more deltas come."""
        self._end(cancel=True)

    def _end(self, *, cancel: bool) -> None:
        if self._open:
            self._open = False
            self._end_request(self._id, cancel=cancel)

    def _delta(self, message: ToClient) -> Delta | None:
        """The delta in a message, or None where it is the last one."""
        if not isinstance(message, Finished):
            return message.delta  # type: ignore[union-attr]
        self.usage = message.usage
        self._end(cancel=False)
        return None


class Stream(_Streaming):
    """Iterate it for deltas.  Leave its ``with`` block, or :meth:`cancel`, to stop early."""

    def __init__(self, client: Client, submit: Submit) -> None:
        super().__init__(client, submit)
        self._client = client

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.cancel()

    def __iter__(self) -> Iterator[Delta]:
        while self._open:
            try:
                delta = self._delta(self._client._receive(self._id))
            except BaseException:
                self.cancel()
                raise
            if delta is not None:
                yield delta


class AsyncStream(_Streaming):
    """:class:`Stream` for asyncio.  A task that is cancelled while it waits for a delta cancels the request."""

    def __init__(self, client: AsyncClient, submit: Submit) -> None:
        super().__init__(client, submit)
        self._client = client

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.cancel()

    async def __aiter__(self) -> AsyncIterator[Delta]:
        while self._open:
            try:
                delta = self._delta(await self._client._receive(self._id))
            except BaseException:
                self.cancel()
                raise
            if delta is not None:
                yield delta


def _milliseconds(seconds: float) -> int:
    """Rounded up: a poll of none would not wait."""
    return int(1000 * seconds) + 1


def _checked(message: ToClient) -> ToClient:
    if isinstance(message, Failed):
        raise message.error
    return message


def _joined(deltas: Iterable[Delta], usage: Usage | None) -> Completion:
    """Deltas as the completion that they add up to."""
    assert usage is not None
    choices: dict[int, list[Delta]] = {}
    for delta in deltas:
        choices.setdefault(delta.index, []).append(delta)
    return Completion([_choice(parts) for _, parts in sorted(choices.items())], usage)


def _choice(parts: list[Delta]) -> Choice:
    assert parts[-1].finish_reason is not None
    return Choice(
        text="".join(delta.text for delta in parts),
        token_ids=[token_id for delta in parts for token_id in delta.token_ids],
        finish_reason=parts[-1].finish_reason,
        logprobs=None if parts[0].logprobs is None else [token for delta in parts for token in delta.logprobs or ()],
        prompt_logprobs=parts[0].prompt_logprobs,
    )
