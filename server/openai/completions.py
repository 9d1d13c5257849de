"""``text_completion`` objects, whole or in chunks."""

from __future__ import annotations

import time
import uuid
from typing import Any, ClassVar

from msgspec.structs import replace

from radixkv.detokenizer import Detokenizer
from radixkv.server.frontend import Frontend
from radixkv.server.messages import Delta, Usage
from radixkv.server.openai.schema import CompletionRequest
from radixkv.server.openai.usage import LOWEST_LOGPROB, usage_json


class CompletionWriter:
    """Writes the answer to one ``POST /v1/completions``."""

    ends_with_done: ClassVar[bool] = True

    def __init__(self, frontend: Frontend, request: CompletionRequest) -> None:
        self._frontend = frontend
        self._request = request
        self._logprobs: dict[int, CompletionLogprobs] = {}
        self._echoed: set[int] = set()
        self._head = {"id": f"cmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": frontend.model}

    def whole(self, choices: list[Delta], usage: Usage) -> dict[str, Any]:
        return self._object([self._choice(self._echo(delta)) for delta in self._best(choices)]) | {"usage": self._usage(usage)}

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        delta = self._echo(delta)
        if delta.text or delta.finish_reason or delta.logprobs:
            return [self._object([self._choice(delta)])]
        return []

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        return self._object([]) | {"usage": self._usage(usage)}

    def _usage(self, usage: Usage) -> dict[str, Any]:
        return usage_json(replace(usage, completion_tokens=0) if self._request.only_echo else usage)

    def _best(self, choices: list[Delta]) -> list[Delta]:
        """Of each prompt's choices the ``n`` best, numbered anew."""
        n, made = self._request.n, self._request.num_choices
        if made == n:
            return choices
        prompts = [choices[i : i + made] for i in range(0, len(choices), made)]
        best = [delta for each in prompts for delta in sorted(each, key=_mean_logprob, reverse=True)[:n]]
        wanted = self._request.logprobs is not None
        return [replace(delta, index=i, logprobs=delta.logprobs if wanted else None) for i, delta in enumerate(best)]

    def _echo(self, delta: Delta) -> Delta:
        """With the prompt before it, where that is wanted and this is the choice's first."""
        if self._request.only_echo:
            delta = replace(delta, text="", token_ids=[], logprobs=delta.logprobs and [], finish_reason="length")
        if not self._request.echo or delta.index in self._echoed:
            return delta
        self._echoed.add(delta.index)
        prompt = self._request.prompts[delta.index // self._request.n]
        return replace(delta, text=self._frontend.prompt_text(prompt) + delta.text)

    def _object(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._head | {"object": "text_completion", "choices": choices}

    def _choice(self, delta: Delta) -> dict[str, Any]:
        logprobs = self._logprobs.setdefault(delta.index, CompletionLogprobs(self._frontend))
        return {"index": delta.index, "text": delta.text, "logprobs": logprobs(delta), "finish_reason": delta.finish_reason}


def _mean_logprob(delta: Delta) -> float:
    return sum(token.logprob for token in delta.logprobs or ()) / max(len(delta.logprobs or ()), 1)


class CompletionLogprobs:
    """The ``logprobs`` of a completion choice's deltas, in order; keeps count of where in the text each token begins."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend
        self._detokenizer = Detokenizer(frontend.token_bytes)
        self._offset = 0

    def __call__(self, delta: Delta) -> dict[str, Any] | None:
        if delta.logprobs is None:
            return None
        name = self._frontend.token_text
        first = (delta.prompt_token_ids or [])[:1]
        """Of an echoed prompt; nothing comes before it, so it has no probability."""
        known = [*(delta.prompt_logprobs or ()), *delta.logprobs]
        token_ids = [*first, *(token.token_id for token in known)]
        offsets = []
        for token_id in token_ids:
            offsets.append(self._offset)
            self._offset += len(self._detokenizer.feed([token_id]))
        nothing: list[None] = [None] * len(first)
        tops = [{name(id): max(logprob, LOWEST_LOGPROB) for id, logprob in token.top} for token in known]
        return {
            "tokens": [name(token_id) for token_id in token_ids],
            "token_logprobs": [*nothing, *(max(token.logprob, LOWEST_LOGPROB) for token in known)],
            "top_logprobs": [*nothing, *tops],
            "text_offset": offsets,
        }
