"""``chat.completion`` objects, whole, or as ``chat.completion.chunk`` objects of which each choice's first names the role."""

from __future__ import annotations

import time
import uuid
from typing import Any, ClassVar

from radixkv.server.frontend import Frontend
from radixkv.server.messages import Delta, Usage
from radixkv.server.openai.usage import LOWEST_LOGPROB, usage_json
from radixkv.server.tools import CallParser, CallPart, split_calls


class ChatWriter:
    """Writes the answer to one ``POST /v1/chat/completions``."""

    ends_with_done: ClassVar[bool] = True

    def __init__(self, frontend: Frontend, *, tools: bool) -> None:
        """With ``tools``, calls are looked for in what the model writes."""
        self._frontend = frontend
        self._tools = tools
        self._parsers: dict[int, CallParser] = {}
        """Of the choices that have begun."""
        self._head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": frontend.model}

    def whole(self, choices: list[Delta], usage: Usage) -> dict[str, Any]:
        return self._head | {
            "object": "chat.completion",
            "choices": [self._choice(delta) for delta in choices],
            "usage": usage_json(usage),
        }

    def _choice(self, delta: Delta) -> dict[str, Any]:
        text, calls = split_calls(delta.text) if self._tools else (delta.text, [])
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            message["content"] = text or None
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in calls
            ]
        return {
            "index": delta.index,
            "message": message,
            "logprobs": chat_logprobs(self._frontend, delta),
            "finish_reason": _finish_reason(delta, called=bool(calls)),
        }

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        found = []
        if delta.index not in self._parsers:
            self._parsers[delta.index] = CallParser()
            found.append(self._chunk(delta.index, {"role": "assistant", "content": ""}, None, None))
        parser = self._parsers[delta.index]
        pieces: list[str | CallPart] = [delta.text] if delta.text else []
        if self._tools:
            pieces = parser.feed(delta.text, final=delta.finish_reason is not None)
        logprobs = chat_logprobs(self._frontend, delta)
        if logprobs and not pieces:  # tokens whose text is held back
            pieces = [""]
        for piece in pieces:
            content = {"content": piece} if isinstance(piece, str) else {"tool_calls": [_call_chunk(piece)]}
            found.append(self._chunk(delta.index, content, logprobs, None))
            logprobs = None
        if delta.finish_reason:
            found.append(self._chunk(delta.index, {}, None, _finish_reason(delta, called=parser.num_calls > 0)))
        return found

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        return self._head | {"object": "chat.completion.chunk", "choices": [], "usage": usage_json(usage)}

    def _chunk(self, index: int, delta: dict[str, Any], logprobs: Any, finish_reason: str | None) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return self._head | {"object": "chat.completion.chunk", "choices": [choice]}


def _call_chunk(part: CallPart) -> dict[str, Any]:
    if part.id is None:
        return {"index": part.index, "function": {"arguments": part.arguments}}
    return {
        "index": part.index,
        "id": part.id,
        "type": "function",
        "function": {"name": part.name, "arguments": part.arguments},
    }


def _finish_reason(delta: Delta, *, called: bool) -> str | None:
    return "tool_calls" if called and delta.finish_reason == "stop" else delta.finish_reason


def chat_logprobs(frontend: Frontend, delta: Delta) -> dict[str, Any] | None:
    """The ``logprobs`` of a chat choice."""
    if delta.logprobs is None:
        return None

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        raw = frontend.token_bytes.raw(token_id)
        return {"token": raw.decode(errors="replace"), "logprob": max(logprob, LOWEST_LOGPROB), "bytes": list(raw)}

    return {
        "content": [
            {**entry(token.token_id, token.logprob), "top_logprobs": [entry(*alternative) for alternative in token.top]}
            for token in delta.logprobs
        ]
    }
