"""The OpenAI-compatible HTTP door: routes, streaming as server-sent events, errors in the OpenAI API's shape."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec
from litestar import Litestar, Request, Response, get, post, route
from litestar.connection import ASGIConnection
from litestar.exceptions import HTTPException
from litestar.handlers import BaseRouteHandler
from litestar.params import FromPath
from litestar.types import ASGIApp
from prometheus_client import CONTENT_TYPE_LATEST

from radixkv.server import access_log
from radixkv.server.access import ANYONE, ApiKeys, Caller, is_loopback
from radixkv.server.dashboard import dashboard_routes
from radixkv.server.errors import Forbidden, ServerError, Unauthorized, Unavailable, renaming
from radixkv.server.frontend import Frontend
from radixkv.server.generation import Generation
from radixkv.server.http_protocol import MAX_HEAD_BYTES, MAX_HEADERS
from radixkv.server.messages import Delta
from radixkv.server.openai.chat import ChatWriter
from radixkv.server.openai.completions import CompletionWriter
from radixkv.server.openai.responses import ResponsesRequest, ResponseWriter
from radixkv.server.openai.schema import ChatRequest, CompletionRequest, StreamOptions, parse
from radixkv.server.openai.tokens import DetokenizeRequest, TokenizeRequest, tokenizer_info

log = logging.getLogger("radixkv.server")

MAX_BODY_BYTES = 16 * 2**20
SCRAPE_SECONDS = 5.0
"""What workers get to answer a scrape: Prometheus itself waits for 10 s, and a worker that hangs must not hide all the rest."""
_STATUS = {
    "invalid_request": 400,
    "invalid_api_key": 401,
    "forbidden": 403,
    "model_not_found": 404,
    "overloaded": 429,
    "unavailable": 503,
    "timeout": 504,
}

Receive = Callable[[], Any]
Send = Callable[[dict[str, Any]], Any]
Writer = CompletionWriter | ChatWriter | ResponseWriter
T = TypeVar("T")


def create_app(frontend: Frontend, keys: ApiKeys | None = None) -> Litestar:
    """The ASGI application over ``frontend``.  With ``keys``, every route asks for one, but for those marked ``open_to_all``."""

    @post("/v1/completions")
    async def completions(request: Request[Any, Any, Any]) -> ASGIApp:
        body = parse(await request.body(), CompletionRequest)
        answer = _Answer(request.receive, CompletionWriter(frontend, body), stream=body.stream, usage=body.usage_chunks)
        with renaming({"prompt_logprobs": "logprobs"}):
            generation = await frontend.submit(
                body.prompts,
                body.sampling_params,
                n=body.num_choices,
                namespace=body.cache_namespace(request.state.caller),
                model=body.model,
                clip_max_tokens=body.max_tokens is None,
                retention=body.cache_retention,
            )
        return await answer.of(generation)

    @post("/v1/chat/completions")
    async def chat_completions(request: Request[Any, Any, Any]) -> ASGIApp:
        body = parse(await request.body(), ChatRequest)
        writer = ChatWriter(frontend, tools=body.tool_use is not None)
        answer = _Answer(request.receive, writer, stream=body.stream, usage=body.usage_chunks)
        return await answer.of(await submit_chat(body, request.state.caller))

    @post("/v1/responses")
    async def responses(request: Request[Any, Any, Any]) -> ASGIApp:
        body = parse(await request.body(), ResponsesRequest)
        answer = _Answer(
            request.receive, ResponseWriter(frontend, body), stream=body.stream, usage=StreamOptions(include_usage=True)
        )
        return await answer.of(await submit_chat(body.chat, request.state.caller, ResponsesRequest.NAMES))

    async def submit_chat(body: ChatRequest, caller: Caller, names: dict[str, str] = {}) -> Generation:  # noqa: B006
        with renaming(names), renaming({"structured_outputs": body.form_field}):
            return await frontend.submit(
                None,
                body.sampling_params,
                messages=body.messages,
                n=body.n,
                namespace=body.cache_namespace(caller),
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

    @get("/tokenizer_info")
    async def tokenizer() -> Response[bytes]:
        return _json(tokenizer_info(frontend))

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
    async def model(model: FromPath[str]) -> Response[bytes]:
        if model.lstrip("/") != frontend.model.lstrip("/"):
            return _error(404, f"model {model.lstrip('/')!r} is not served here; {frontend.model!r} is", "model", "model_not_found")
        return _json(model_card())

    @route("/health", http_method=["GET", "HEAD"], opt={"open_to_all": True})
    async def health() -> Response[bytes]:
        return _json({"status": frontend.status})

    @route("/ready", http_method=["GET", "HEAD"], opt={"open_to_all": True})
    async def ready() -> Response[bytes]:
        frontend.check_ready()  # raises Unavailable: 503
        return _json({"status": "ok"})

    @get("/metrics", opt={"administration": True})
    async def metrics() -> Response[bytes]:
        try:
            workers = await frontend.worker_stats(SCRAPE_SECONDS)
        except Unavailable:
            workers = {}
        return Response(frontend.metrics.render(workers), media_type=CONTENT_TYPE_LATEST)

    @get("/report", opt={"administration": True})
    async def report() -> Response[bytes]:
        return _json(await frontend.stats())

    @post("/reset_prefix_cache", opt={"administration": True})
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
            tokenizer,
            models,
            model,
            health,
            ready,
            metrics,
            report,
            reset_prefix_cache,
            *dashboard_routes(frontend, has_keys=keys is not None),
        ],
        guards=[_Guard(keys)],
        exception_handlers={ServerError: _on_server_error, HTTPException: _on_http_error, Exception: _on_bug},
        request_max_body_size=MAX_BODY_BYTES,
        openapi_config=None,
        logging_config=None,
    )


# --- what a request is answered with -----------------------------------------------------------------------------------------


class _Answer:
    """How a request is to be answered; made, and so checked, before anything is generated."""

    def __init__(self, receive: Receive, writer: Writer, *, stream: bool, usage: StreamOptions) -> None:
        self._receive = receive
        self._writer = writer
        self._stream = stream
        self._usage = usage

    async def of(self, generation: Generation) -> ASGIApp:
        """The response, which owns ``generation`` from here on."""
        access_log.serves(generation)
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
            prompt_token_ids=deltas[0].prompt_token_ids,
            prompt_logprobs=deltas[0].prompt_logprobs,
        )
        for index, deltas in sorted(parts.items())
    ]


async def _events(writer: Writer, generation: Generation, usage: StreamOptions) -> AsyncIterator[bytes]:
    """The stream's events.  An error after the first byte can have no status any more: it is an event, as in the OpenAI API."""
    try:
        async for delta in generation:
            so_far = {"usage": writer.usage_chunk(generation.usage)["usage"]} if usage.continuous_usage_stats else {}
            for chunk in writer.chunks(delta):
                yield _event(chunk | so_far)
        if usage.include_usage:
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


def _check_head(connection: ASGIConnection[Any, Any, Any, Any]) -> None:
    headers = [name + value for name, value in connection.scope["headers"]]
    if len(headers) > MAX_HEADERS:
        raise HTTPException(status_code=431, detail=f"headers must be at most {MAX_HEADERS}, got {len(headers)}")
    size = len(connection.scope["raw_path"]) + len(connection.scope["query_string"])
    size += sum(map(len, headers))
    if size > MAX_HEAD_BYTES:
        raise HTTPException(
            status_code=431, detail=f"headers must be at most {MAX_HEAD_BYTES} bytes with the request line, got {size}"
        )
    encoding = connection.headers.get("content-encoding", "identity")
    if encoding.strip().lower() != "identity":
        raise HTTPException(status_code=415, detail=f"content-encoding must be identity, got {encoding}: send it uncompressed")


class _Guard:
    """Looks at a request's head before a route is run, so before a body is read, and keeps who asks as ``request.state.caller``.

    A coroutine, like everything that Litestar calls for each request: it runs plain functions in threads, and those wait for the
    interpreter while the event loop is busy.
    """

    def __init__(self, keys: ApiKeys | None) -> None:
        self._keys = keys

    async def __call__(self, connection: ASGIConnection[Any, Any, Any, Any], handler: BaseRouteHandler) -> None:
        _check_head(connection)
        if handler.opt.get("open_to_all"):
            return
        connection.state.caller = caller = ANYONE if self._keys is None else self._known(self._keys, connection)
        if self._keys is None:
            _check_origin(connection)
        if handler.opt.get("administration"):
            caller.check_administrator()

    def _known(self, keys: ApiKeys, connection: ASGIConnection[Any, Any, Any, Any]) -> Caller:
        scheme, _, key = connection.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            raise Unauthorized("an API key must be sent, as in Authorization: Bearer KEY")
        caller = keys.caller(key.strip())
        if caller is None:
            raise Unauthorized("the API key sent is not known here")
        return caller


def _check_origin(connection: ASGIConnection[Any, Any, Any, Any]) -> None:
    """Without keys, everything on this machine may ask, but not the pages of other machines that a browser on it shows."""
    origin = connection.headers.get("origin", "")
    if origin and not is_loopback(urlsplit(origin).hostname or ""):
        raise Forbidden(f"pages of {origin} may not use this server: it asks for no API keys")


# --- errors ------------------------------------------------------------------------------------------------------------------


def _json(value: Any, status: int = 200) -> Response[bytes]:
    return Response(msgspec.json.encode(value), status_code=status, media_type="application/json")


def _event(value: dict[str, Any]) -> bytes:
    name = b"event: " + value["type"].encode() + b"\n" if "type" in value else b""
    return name + b"data: " + msgspec.json.encode(value) + b"\n\n"


def _error_body(status: int, message: str, param: str | None, code: str | None) -> dict[str, Any]:
    types = {403: "permission_error", 429: "rate_limit_error", 503: "service_unavailable_error"}
    type_ = types.get(status, "invalid_request_error" if status < 500 else "internal_server_error")
    return {"error": {"message": message, "type": type_, "param": param, "code": code}}


def _error(status: int, message: str, param: str | None = None, code: str | None = None) -> Response[bytes]:
    return _json(_error_body(status, message, param, code), status)


def _on_server_error(_: Request[Any, Any, Any], error: ServerError) -> Response[bytes]:
    access_log.refused(error.kind)
    response = _error(_STATUS.get(error.kind, 500), error.message, error.param, error.kind)
    if error.retry_after is not None:
        response.headers["retry-after"] = str(error.retry_after)
    if isinstance(error, Unauthorized):
        response.headers["www-authenticate"] = "Bearer"
    return response


def _on_http_error(request: Request[Any, Any, Any], error: HTTPException) -> Response[bytes]:
    """No such route, wrong method, body too large."""
    access_log.refused("invalid_request" if error.status_code < 500 else "internal")
    match error.status_code:
        case 404:
            message = f"no such path: {request.method} {request.url.path}"
        case 413:
            message = f"body must be at most {MAX_BODY_BYTES} bytes"
        case _:
            message = error.detail
    return _error(error.status_code, message)


def _on_bug(_: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    access_log.refused("internal")
    log.error("a request failed in the server itself", exc_info=error)
    return _error(500, "the server failed on this request; its log says how", code="internal")
