"""The OpenAI API's requests as typed structs, and what they mean to the frontend.

Fields that this server can't honour are refused by name; those that change nothing about the answer (``user``, ``metadata``, ...)
are accepted, and so is a null anywhere, and an unsupported field set to what it does anyway (``echo: false``).
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any, TypeVar

import msgspec

from radixkv.sampling_params import SamplingParams
from radixkv.server.errors import InvalidRequest
from radixkv.server.frontend import Prompt
from radixkv.server.messages import ChatMessage

DEFAULT_COMPLETION_TOKENS = 16
"""``max_tokens`` of a completion that names none, as the OpenAI API documents."""
DEFAULT_CHAT_TOKENS = 1024
"""The same for a chat, where the OpenAI API has no limit but the context."""

_NO_OP: dict[str, tuple[object, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
}
_HARMLESS = (
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "parallel_tool_calls",
)  # fmt: skip


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool = False
    include_obfuscation: bool = False
    """Accepted, does nothing."""


class _Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields of both kinds of request.  Those after ``stream_options`` are extensions, named as in vLLM."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    n: int = 1
    seed: int | None = None
    stop: str | list[str] = []
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[str, float] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    namespace: str = ""
    """The prefix cache's tenant: requests share cached prefixes with their own namespace only."""
    cache_salt: str | None = None
    """Another way to keep caches apart.  Only its hash is kept."""

    @property
    def cache_namespace(self) -> str:
        if self.cache_salt is None:
            return self.namespace
        if self.namespace:
            raise InvalidRequest("cache_salt must be left out where namespace is given", param="cache_salt")
        return "salt-" + hashlib.sha256(self.cache_salt.encode(errors="surrogatepass")).hexdigest()[:16]

    @property
    def include_usage(self) -> bool:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options must be left out unless stream is true", param="stream_options")
        return self.stream_options is not None and self.stream_options.include_usage

    def _sampling(self, max_tokens: int, logprobs: int | None) -> SamplingParams:
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=0 if self.top_k == -1 else self.top_k,  # vLLM's "all"
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            seed=self.seed,
            logit_bias=None if self.logit_bias is None else {_token_id(key): bias for key, bias in self.logit_bias.items()},
            logprobs=logprobs,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
        )


class CompletionRequest(_Request, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/completions``."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None

    @property
    def prompts(self) -> list[Prompt]:
        """One or more texts or token id lists."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        kinds = {type(part) for part in self.prompt}
        if len(kinds) > 1:
            raise InvalidRequest(
                "prompt must be a string, or an array of strings, of token ids, or of arrays of them", param="prompt"
            )
        return [self.prompt] if kinds == {int} else self.prompt  # type: ignore[return-value, list-item]

    @property
    def sampling_params(self) -> SamplingParams:
        return self._sampling(DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens, self.logprobs)


class ChatRequest(_Request, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/chat/completions``."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def sampling_params(self) -> SamplingParams:
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs must be left out unless logprobs is true", param="top_logprobs")
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return self._sampling(DEFAULT_CHAT_TOKENS if self.token_limit is None else self.token_limit, logprobs)


R = TypeVar("R", CompletionRequest, ChatRequest)


def parse(body: bytes, kind: type[R]) -> R:
    """The request in an HTTP body.  Raises ``InvalidRequest`` naming the field, whatever the bytes."""
    value = _json(body)
    if not isinstance(value, dict):
        raise InvalidRequest(f"body must be a JSON object, got {type(value).__name__}")
    fields: dict[str, Any] = _without_nulls(value)
    known = {field.encode_name for field in msgspec.structs.fields(kind)}
    for field in [*fields]:
        if field not in known and (field in _HARMLESS or fields[field] in _NO_OP.get(field, ())):
            del fields[field]
    for message in fields["messages"] if isinstance(fields.get("messages"), list) else ():
        if isinstance(message, dict):  # an answer given back as it came, say
            for field in ("tool_calls", "annotations"):
                if message.get(field) == []:
                    del message[field]
    try:
        return msgspec.convert(fields, kind)
    except (msgspec.ValidationError, OverflowError) as error:
        raise _invalid(str(error)) from None


def _json(body: bytes) -> Any:
    if not body.strip():
        raise InvalidRequest("body must be a JSON object, got an empty body")
    try:
        return msgspec.json.decode(body)
    except RecursionError:
        raise InvalidRequest("body must be JSON of reasonable depth") from None
    except (ValueError, OverflowError) as strict:
        try:
            # Python's own parser also takes NaN and Infinity, which many clients write: better to name the field that holds one.
            value = json.loads(body)
            msgspec.json.encode(value)
            return value
        except UnicodeEncodeError:
            raise InvalidRequest("body must be valid Unicode: it holds half a surrogate pair, like \\ud800 alone") from None
        except (ValueError, OverflowError, RecursionError):
            raise InvalidRequest(f"body must be JSON in UTF-8: {strict}") from None


def _without_nulls(value: Any) -> Any:
    """A copy without the null members of objects, two levels of nesting down (a message in a list in the request)."""
    if isinstance(value, dict):
        return {
            key: _without_nulls(member) if isinstance(member, list) else member
            for key, member in value.items()
            if member is not None
        }
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [_without_nulls(member) for member in value]
    return value


def _invalid(text: str) -> InvalidRequest:
    """From msgspec's words, which end in the path of what is wrong: ``Expected `int`, got `str` - at `$.max_tokens```."""
    reason, _, path = text.partition(" - at `$")
    place = path.rstrip("`").lstrip(".")
    if unknown := re.search(r"unknown field `(.*)`", reason):
        place = f"{place}.{unknown[1]}" if place else unknown[1]
        return InvalidRequest(f"{place} is not a field that this server supports", param=place)
    if missing := re.search(r"missing required field `(.*)`", reason):
        place = f"{place}.{missing[1]}" if place else missing[1]
        return InvalidRequest(f"{place} is required", param=place)
    return InvalidRequest(f"{place or 'body'}: {reason}", param=place or None)


def _token_id(key: str) -> int:
    if not re.fullmatch(r"[0-9]{1,10}", key):
        raise InvalidRequest(f"logit_bias must be keyed by token ids, got {key!r}", param="logit_bias")
    return int(key)
