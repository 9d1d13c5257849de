"""``chat.completion`` objects, whole, or as ``chat.completion.chunk`` objects of which each choice's first names the role."""

from __future__ import annotations

import time
import uuid
from typing import Any

from radixkv.server.frontend import Frontend
from radixkv.server.messages import Delta, Usage
from radixkv.server.openai.usage import LOWEST_LOGPROB, usage_json


class ChatWriter:
    """Writes the answer to one ``POST /v1/chat/completions``."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend
        self._begun: set[int] = set()
        self._head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": frontend.model}

    def whole(self, choices: list[Delta], usage: Usage) -> dict[str, Any]:
        answers = [
            {
                "index": delta.index,
                "message": {"role": "assistant", "content": delta.text, "refusal": None},
                "logprobs": chat_logprobs(self._frontend, delta),
                "finish_reason": delta.finish_reason,
            }
            for delta in choices
        ]
        return self._head | {"object": "chat.completion", "choices": answers, "usage": usage_json(usage)}

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        found = []
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            found.append(self._chunk(delta.index, {"role": "assistant", "content": ""}, None, None))
        if delta.text or delta.logprobs:
            logprobs = chat_logprobs(self._frontend, delta)
            found.append(self._chunk(delta.index, {"content": delta.text}, logprobs, None))
        if delta.finish_reason:
            found.append(self._chunk(delta.index, {}, None, delta.finish_reason))
        return found

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        return self._head | {"object": "chat.completion.chunk", "choices": [], "usage": usage_json(usage)}

    def _chunk(self, index: int, delta: dict[str, Any], logprobs: Any, finish_reason: str | None) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return self._head | {"object": "chat.completion.chunk", "choices": [choice]}


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
