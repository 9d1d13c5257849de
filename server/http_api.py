"""The OpenAI-compatible HTTP door: routes, streaming as server-sent events, errors in the OpenAI API's shape."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from litestar import Litestar, Request, Response, get, post, route
from litestar.exceptions import HTTPException
from litestar.types import ASGIApp
from prometheus_client import CONTENT_TYPE_LATEST

from radixkv.server.errors import ServerError, Unavailable
from radixkv.server.frontend import Frontend, Generation
from radixkv.server.messages import Delta
from radixkv.server.openai.chat import ChatWriter
from radixkv.server.openai.completions import CompletionWriter
from radixkv.server.openai.responses import ResponsesRequest, ResponseWriter
from radixkv.server.openai.schema import ChatRequest, CompletionRequest, parse, renaming
from radixkv.server.openai.tokens import DetokenizeRequest, TokenizeRequest

log = logging.getLogger("radixkv.server")

MAX_BODY_BYTES = 16 * 2**20
_STATUS = {"invalid_request": 400, "model_not_found": 404, "unavailable": 503}

Receive = Callable[[], Any]
Send = Callable[[dict[str, Any]], Any]
Writer = CompletionWriter | ChatWriter | ResponseWriter
T = TypeVar("T")


def create_app(frontend: Frontend) -> Litestar:
    """The ASGI application over ``frontend``."""

    @post("/v1/completions")
    async def completions(request: Request[Any, Any, Any]) -> ASGIApp:
        body = parse(await request.body(), CompletionRequest)
        answer = _Answer(request.receive, CompletionWriter(frontend, body), stream=body.stream, usage=body.include_usage)
        generation = await frontend.submit(
            body.prompts,
            body.sampling_params,
            n=body.num_choices,
            namespace=body.cache_namespace,
            model=body.model,
            clip_max_tokens=body.max_tokens is None,
            retention=body.cache_retention,
        )
        return await answer.of(generation)

    @post("/v1/chat/completions")
    async def chat_completions(request: Request[Any, Any, Any]) -> ASGIApp:
        body = parse(await request.body(), ChatRequest)
        writer = ChatWriter(frontend, tools=body.tool_use is not None)
        answer = _Answer(request.receive, writer, stream=body.stream, usage=body.include_usage)
        return await answer.of(await submit_chat(body))

    @post("/v1/responses")
    async def responses(request: Request[Any, Any, Any]) -> ASGIApp:
        body = parse(await request.body(), ResponsesRequest)
        answer = _Answer(request.receive, ResponseWriter(frontend, body), stream=body.stream, usage=True)
        return await answer.of(await submit_chat(body.chat, ResponsesRequest.NAMES))

    async def submit_chat(body: ChatRequest, names: dict[str, str] = {}) -> Generation:  # noqa: B006
        with renaming(names), renaming({"structured_outputs": body.form_field}):
            return await frontend.submit(
                None,
                body.sampling_params,
                messages=body.messages,
                n=body.n,
                namespace=body.cache_namespace,
                model=body.model,
                clip_max_tokens=body.token_limit is None,
                tools=body.tool_use,
                retention=body.cache_retention,
            )

    @post("/tokenize")
    async def tokenize(request: Request[Any, Any, Any]) -> Response[bytes]:
        body = parse(await request.body(), TokenizeRequest)
        return _json(await body.answer(frontend))

    @post("/detokenize")
    async def detokenize(request: Request[Any, Any, Any]) -> Response[bytes]:
        body = parse(await request.body(), DetokenizeRequest)
        return _json(body.answer(frontend))

    def model_card() -> dict[str, Any]:
        return {
            "id": frontend.model,
            "object": "model",
            "created": frontend.started,
            "owned_by": "radixkv",
            "max_model_len": frontend.max_model_len,
        }

    @get("/v1/models")
    async def models() -> Response[bytes]:
        return _json({"object": "list", "data": [model_card()]})

    @get("/v1/models/{model:path}")
    async def model(model: str) -> Response[bytes]:
        if model.lstrip("/") != frontend.model.lstrip("/"):
            return _error(404, f"model {model.lstrip('/')!r} is not served here; {frontend.model!r} is", "model", "model_not_found")
        return _json(model_card())

    @route("/health", http_method=["GET", "HEAD"])
    async def health() -> Response[bytes]:
        frontend.worker  # noqa: B018  raises Unavailable: 503
        return _json({"status": "ok"})

    @get("/metrics")
    async def metrics() -> Response[bytes]:
        try:
            stats = await frontend.stats()
        except Unavailable:
            stats = None
        return Response(frontend.metrics.render(stats), media_type=CONTENT_TYPE_LATEST)

    @get("/report")
    async def report() -> Response[bytes]:
        return _json(await frontend.stats())

    @post("/reset_prefix_cache")
    async def reset_prefix_cache() -> Response[bytes]:
        await frontend.reset_cache()
        return _json({"status": "ok"})

    return Litestar(
        [
            completions,
            chat_completions,
            responses,
            tokenize,
            detokenize,
            models,
            model,
            health,
            metrics,
            report,
            reset_prefix_cache,
        ],
        before_request=_check_encoding,
        exception_handlers={ServerError: _on_server_error, HTTPException: _on_http_error, Exception: _on_bug},
        request_max_body_size=MAX_BODY_BYTES,
        openapi_config=None,
        logging_config=None,
    )


# --- what a request is answered with -----------------------------------------------------------------------------------------


class _Answer:
    """How a request is to be answered; made, and so checked, before anything is generated."""

    def __init__(self, receive: Receive, writer: Writer, *, stream: bool, usage: bool) -> None:
        self._receive = receive
        self._writer = writer
        self._stream = stream
        self._usage = usage

    async def of(self, generation: Generation) -> ASGIApp:
        """The response, which owns ``generation`` from here on."""
        if self._stream:
            return EventStream(_events(self._writer, generation, self._usage), generation)  # type: ignore[return-value]
        with generation:
            choices = await unless_gone(self._receive, _collect(generation))
        if choices is None:
            return Response(b"", status_code=499)  # type: ignore[return-value]  # nobody reads it
        return _json(self._writer.whole(choices, generation.usage))  # type: ignore[return-value]


async def _collect(generation: Generation) -> list[Delta]:
    """Every choice's deltas joined into one, ordered by index."""
    parts: dict[int, list[Delta]] = {}
    async for delta in generation:
        parts.setdefault(delta.index, []).append(delta)
    return [
        Delta(
            index=index,
            text="".join(delta.text for delta in deltas),
            token_ids=[id for delta in deltas for id in delta.token_ids],
            logprobs=None if deltas[0].logprobs is None else [token for delta in deltas for token in delta.logprobs or ()],
            finish_reason=deltas[-1].finish_reason,
        )
        for index, deltas in sorted(parts.items())
    ]


async def _events(writer: Writer, generation: Generation, usage: bool) -> AsyncIterator[bytes]:
    """The stream's events.  An error after the first byte can have no status any more: it is an event, as in the OpenAI API."""
    try:
        async for delta in generation:
            for chunk in writer.chunks(delta):
                yield _event(chunk)
        if usage:
            yield _event(writer.usage_chunk(generation.usage))
    except ServerError as error:
        yield _event(_error_body(_STATUS.get(error.kind, 500), error.message, error.param, error.kind))
    if writer.ends_with_done:
        yield b"data: [DONE]\n\n"


class EventStream:
    """An ASGI response of server-sent events that aborts its generation when it ends, above all when the client goes away."""

    def __init__(self, events: AsyncIterator[bytes], generation: Generation) -> None:
        self._events = events
        self._generation = generation

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        with self._generation:
            await unless_gone(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """Do ``work``, but give it up and return None when the client disconnects first."""
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        return await working if working.done() else None
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _check_encoding(request: Request[Any, Any, Any]) -> None:
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.strip().lower() != "identity":
        raise HTTPException(status_code=415, detail=f"content-encoding must be identity, got {encoding}: send it uncompressed")


# --- errors ------------------------------------------------------------------------------------------------------------------


def _json(value: Any, status: int = 200) -> Response[bytes]:
    return Response(msgspec.json.encode(value), status_code=status, media_type="application/json")


def _event(value: dict[str, Any]) -> bytes:
    name = b"event: " + value["type"].encode() + b"\n" if "type" in value else b""
    return name + b"data: " + msgspec.json.encode(value) + b"\n\n"


def _error_body(status: int, message: str, param: str | None, code: str | None) -> dict[str, Any]:
    type_ = "invalid_request_error" if status < 500 else "service_unavailable_error" if status == 503 else "internal_server_error"
    return {"error": {"message": message, "type": type_, "param": param, "code": code}}


def _error(status: int, message: str, param: str | None = None, code: str | None = None) -> Response[bytes]:
    return _json(_error_body(status, message, param, code), status)


def _on_server_error(_: Request[Any, Any, Any], error: ServerError) -> Response[bytes]:
    return _error(_STATUS.get(error.kind, 500), error.message, error.param, error.kind)


def _on_http_error(request: Request[Any, Any, Any], error: HTTPException) -> Response[bytes]:
    """No such route, wrong method, body too large."""
    match error.status_code:
        case 404:
            message = f"no such path: {request.method} {request.url.path}"
        case 413:
            message = f"body must be at most {MAX_BODY_BYTES} bytes"
        case _:
            message = error.detail
    return _error(error.status_code, message)


def _on_bug(_: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    log.error("a request failed in the server itself", exc_info=error)
    return _error(500, "the server failed on this request; its log says how", code="internal")
