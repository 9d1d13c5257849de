"""The wire: every message that crosses a ZeroMQ socket, as MessagePack of typed structs, and how a message is framed.

A message is two frames: :data:`HEADER`, which names the protocol's version, and the body, a map whose ``type`` says which struct
it is.  The same structs serve both sockets: frontend to worker (token ids only), and client to frontend (text or token ids).
``docs/protocol.md`` describes the second for people who write clients.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Any, Generic, Literal, TypeVar, cast

import msgspec
import zmq
import zmq.asyncio

from radixkv import __version__
from radixkv.cache import Snapshot
from radixkv.cache.retention import Retention
from radixkv.sampling_params import SamplingParams
from radixkv.scheduling.request import FinishReason, RequestOutput, TokenLogprobs
from radixkv.server.errors import InvalidRequest, ServerError, UnsupportedVersion, error_of

T = TypeVar("T")

PROTOCOL = "radixkv/1"
"""The protocol and its version.  A change that old peers can't read takes the next number; framing and ``failed`` never change."""
HEADER = PROTOCOL.encode()
"""First frame of every message."""
MAX_MESSAGE_BYTES = 16 * 2**20
BEAT_SECONDS = 1.0
"""A worker that is busy says something after each step, or so long after it last did: so a long prompt is no worker that hangs."""


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """Base of all messages.  Fields that a reader doesn't know are ignored in answers, which a newer server may say more in."""


class Request(Message, frozen=True, forbid_unknown_fields=True):
    """Base of what is asked for: a field that would be ignored here is a misspelt one."""


# --- either socket -----------------------------------------------------------------------------------------------------------


class GetStats(Request, frozen=True, kw_only=True, tag="get_stats"):
    id: str


class GetSnapshot(Request, frozen=True, kw_only=True, tag="get_snapshot"):
    id: str
    max_nodes: int


class ResetCache(Request, frozen=True, kw_only=True, tag="reset_cache"):
    id: str


class Stats(Message, frozen=True, kw_only=True, tag="stats"):
    """Answers :class:`GetStats` with ``Engine.stats()``."""

    id: str
    stats: dict[str, Any]


class TreeSnapshot(Message, frozen=True, kw_only=True, tag="tree_snapshot"):
    """Answers :class:`GetSnapshot` with ``PrefixCache.snapshot()``."""

    id: str
    snapshot: Snapshot


class Done(Message, frozen=True, kw_only=True, tag="done"):
    """Answers :class:`ResetCache`."""

    id: str


class Failed(Message, frozen=True, kw_only=True, tag="failed"):
    """Request ``id`` failed and is over; ``id`` is empty where the message was too broken to tell."""

    id: str = ""
    kind: str
    """As in :mod:`radixkv.server.errors`."""
    message: str
    param: str | None = None

    @classmethod
    def of(cls, error: ServerError, id: str) -> Failed:
        return cls(id=id, kind=error.kind, message=error.message, param=error.param)

    @property
    def error(self) -> ServerError:
        return error_of(self.kind, self.message, self.param)


# --- frontend and worker -----------------------------------------------------------------------------------------------------


class Generate(Request, frozen=True, kw_only=True, tag="generate"):
    """One sequence to continue.  ``params.stop`` is empty: stop strings are text, and the worker knows none."""

    request_id: str
    token_ids: list[int]
    params: SamplingParams
    namespace: str = ""
    output_token_ids: list[int] = []
    """What a worker that died has put out of it: it goes on behind these."""
    retention: Retention | None = None


class Abort(Request, frozen=True, kw_only=True, tag="abort"):
    """Forget these requests.  Ids that are not running are ignored; there is no answer."""

    request_ids: list[str]


class WatchCache(Request, frozen=True, kw_only=True, tag="watch_cache"):
    """Say from now on which prefixes join and leave the cache; there is no answer.  Sent where a router has a choice of workers."""

    key: bytes
    """Of the names of prefixes (:class:`~radixkv.server.prefix_hashes.PrefixHashes`)."""


class Hello(Message, frozen=True, kw_only=True, tag="hello"):
    """The worker's first message: it has connected."""

    pid: int


class Ready(Message, frozen=True, kw_only=True, tag="ready"):
    """The worker's second message: the model is loaded."""

    stats: dict[str, Any]


class Tokens(Message, frozen=True, kw_only=True, tag="tokens"):
    """What one engine step added to every request in it; without outputs it is but a sign of life.

    ``joined`` and ``left`` name the prefixes that the cache got and lost since the last message, where :class:`WatchCache` asked.
    """

    outputs: list[RequestOutput]
    joined: bytes = b""
    left: bytes = b""


ToWorker = Generate | Abort | WatchCache | GetStats | GetSnapshot | ResetCache
FromWorker = Hello | Ready | Tokens | Failed | Stats | TreeSnapshot | Done


# --- client and frontend -----------------------------------------------------------------------------------------------------


class TextPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A piece of a chat message's content, as the OpenAI API allows it."""

    text: str
    type: Literal["text"] = "text"


class Function(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema of the arguments, an object; none where the function takes no arguments."""
    strict: bool | None = None
    """Calls follow ``parameters`` to the letter, also where the model is free not to call."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", self.name):
            raise ValueError(f"name must be 1 to 64 letters, digits, underscores and dashes, got {self.name[:80]!r}")

    @property
    def schema(self) -> dict[str, Any]:
        if self.parameters is None:
            return {"type": "object", "properties": {}, "additionalProperties": False}
        return {"type": "object"} | self.parameters


class FunctionCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    arguments: str
    """JSON, as the model wrote it."""


class ToolCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A function that an assistant's turn called."""

    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One turn of a conversation.  Which roles exist is up to the model's chat template; ``developer`` is ``system`` to it.

    A turn with ``tool_calls`` may have no content; one with the role ``tool`` answers the call that ``tool_call_id`` names.
    """

    role: str
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    def __post_init__(self) -> None:
        if self.content is None and not self.tool_calls:
            raise ValueError("Object missing required field `content`")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("tool_calls must be left out unless role is assistant")
        if (self.tool_call_id is None) == (self.role == "tool"):
            raise ValueError("tool_call_id must be given where role is tool, and only there")

    @property
    def text(self) -> str:
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        return "".join(part.text for part in self.content)


class Submit(Request, frozen=True, kw_only=True, tag="submit"):
    """Generate from ``prompt`` (text or token ids) or from ``messages`` (a chat): one of the two."""

    id: str
    """Chosen by the client, unique among its open requests, 1 to 128 characters."""
    prompt: str | list[int] | None = None
    messages: list[ChatMessage] | None = None
    params: SamplingParams = SamplingParams()
    n: int = 1
    namespace: str = ""
    model: str | None = None
    retention: Retention | None = None
    """Priority and seconds."""
    tools: list[Function] = []
    """What the answer to a chat may call.  Calls are in its text, as the model writes them."""
    tool_choice: str = "auto"
    """Or ``none``, ``required``, or the name of the function that must be called."""
    parallel_tool_calls: bool = True
    """Whether there may be several calls."""


class GetInfo(Request, frozen=True, kw_only=True, tag="get_info"):
    id: str


class Info(Message, frozen=True, kw_only=True, tag="info"):
    """Answers :class:`GetInfo`: who serves what."""

    id: str
    versions: list[str]
    """Of the protocol, as in a message's first frame: those that are spoken here."""
    server: str
    """The version of radixkv that serves."""
    model: str
    max_model_len: int
    """Tokens of prompt and output together."""


class Cancel(Request, frozen=True, kw_only=True, tag="cancel"):
    """Stop request ``id`` and hear no more of it.  An id that is not open is ignored; there is no answer."""

    id: str


class Delta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What choice ``index`` grew by.

    ``text`` may lag behind ``token_ids``: characters that are not whole yet, and what could still become a stop string, are held
    back.  ``finish_reason`` is set on a choice's last delta.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    prompt_token_ids: list[int] | None = None
    """Of a choice's first delta, where its prompt's log-probabilities are wanted; so is the next."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Of all prompt tokens but the first."""


class Usage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Tokens counted over all choices; a prompt counts once however many choices it has."""

    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens that no choice had to compute."""
    completion_tokens: int
    missed: dict[str, int] = {}
    """The prompt tokens that were computed, by the reason why they were not cached (docs/cache.md)."""


class Chunk(Message, frozen=True, kw_only=True, tag="chunk"):
    id: str
    delta: Delta


class Finished(Message, frozen=True, kw_only=True, tag="finished"):
    """All choices of request ``id`` have finished."""

    id: str
    usage: Usage


class Alive(Message, frozen=True, kw_only=True, tag="alive"):
    """Sent once a second to every client with open requests, so that either side can tell that the other is gone.

    A request that the client waits for and the server does not name is lost, unless it is still on its way.
    """

    ids: list[str]
    """The client's open requests: all of them."""


ToFrontend = Submit | Cancel | GetInfo | GetStats | ResetCache
ToClient = Chunk | Finished | Failed | Info | Stats | Done | Alive

_encoder = msgspec.msgpack.Encoder()


def frames(message: Message) -> list[bytes]:
    """Header and body, as ``send_multipart`` takes them.  Raises ``InvalidRequest`` for what MessagePack can't carry."""
    try:
        return [HEADER, _encoder.encode(message)]
    except (OverflowError, UnicodeEncodeError) as error:
        raise InvalidRequest(f"message: {error}") from None


def send_now(socket: zmq.asyncio.Socket, parts: Sequence[bytes]) -> bool:
    """Send without waiting; False where the peer is gone, or has not read what it was sent before."""
    sent = cast("asyncio.Future[object]", socket.send_multipart(parts, zmq.NOBLOCK))
    return not sent.done() or sent.exception() is None


class Parser(Generic[T]):
    """Turns received frames into one of the structs of the union ``T``."""

    def __init__(self, union: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(union)

    def __call__(self, received: Sequence[bytes]) -> T:
        """Raise ``InvalidRequest`` that says what is wrong with the message; never anything else, whatever the bytes."""
        if len(received) != 2 or not re.fullmatch(rb"radixkv/[0-9]{1,9}", received[0]):
            raise InvalidRequest(f"a message is two frames, {HEADER!r} and a MessagePack map: this is {_describe(received)}")
        if received[0] != HEADER:
            raise UnsupportedVersion(
                f"{PROTOCOL} is spoken here, by radixkv {__version__}, and the message is {received[0].decode()}"
            )
        try:
            return self._decoder.decode(received[1])
        except (msgspec.MsgspecError, RecursionError, OverflowError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"message, as radixkv {__version__} reads it: {error}") from None


def refusal(received: Sequence[bytes]) -> Failed | None:
    """The ``failed`` in a message of whatever version; None where it is something else."""
    try:
        return msgspec.msgpack.decode(received[-1], type=Failed)
    except (msgspec.MsgspecError, RecursionError, OverflowError, UnicodeDecodeError, IndexError):
        return None


def id_of(received: Sequence[bytes]) -> str:
    """The ``id`` of a message that would not parse, so that whoever waits for its answer gets one; else an empty string."""
    try:
        body = msgspec.msgpack.decode(received[-1])
    except (msgspec.MsgspecError, RecursionError, OverflowError, UnicodeDecodeError, IndexError):
        return ""
    id = body.get("id", body.get("request_id", "")) if isinstance(body, dict) else ""
    return id if isinstance(id, str) and len(id) <= 128 else ""


def _describe(received: Sequence[bytes]) -> str:
    return f"{len(received)} frames beginning {received[0][:16]!r}" if received else "empty"
