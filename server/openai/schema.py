"""The OpenAI API's requests as typed structs, and what they mean to the frontend.

A null counts as a field left out, anywhere.  ``fields`` says what becomes of those that are no members of these structs.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from typing import Any, Literal, TypeVar

import msgspec

from radixkv.cache.retention import Retention
from radixkv.sampling_params import SamplingParams
from radixkv.server.access import Caller
from radixkv.server.errors import Forbidden, InvalidRequest
from radixkv.server.frontend import MAX_N, Prompt
from radixkv.server.messages import ChatMessage, Function
from radixkv.server.openai.depth import check_depth
from radixkv.server.openai.fields import drop_unneeded
from radixkv.server.tools import ToolUse, tool_use
from radixkv.structured_outputs import StructuredOutputs

DEFAULT_COMPLETION_TOKENS = 16
"""``max_tokens`` of a completion that names none, as the OpenAI API documents."""
DEFAULT_CHAT_TOKENS = 1024
"""The same for a chat, where the OpenAI API has no limit but the context."""


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool = False
    include_obfuscation: bool = False
    continuous_usage_stats: bool = False
    """Usage so far in every chunk: an extension, as in vLLM, that load generators count tokens by."""

    def __post_init__(self) -> None:
        if self.include_obfuscation:
            raise ValueError("include_obfuscation must be false: events are not padded")


class RetentionField(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Evict the request's prefix after others for a while: ``priority`` falls by one whenever ``seconds`` pass without a hit."""

    priority: int = 1
    seconds: float


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
    retention: RetentionField | None = None
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None
    """``24h`` is a retention of priority 1 for a day."""
    structured_outputs: StructuredOutputs | None = None

    def cache_namespace(self, caller: Caller) -> str:
        """The namespace that ``caller``'s request runs in.  Raises ``Forbidden`` where it is another's."""
        if self.cache_salt is None:
            return caller.namespace_for(self.namespace)
        if self.namespace:
            raise InvalidRequest("cache_salt must be left out where namespace is given", param="cache_salt")
        if caller.namespace is not None:
            raise Forbidden(f"cache_salt must be left out: this key is for namespace {caller.namespace!r}", param="cache_salt")
        return "salt-" + hashlib.sha256(self.cache_salt.encode(errors="surrogatepass")).hexdigest()[:16]

    @property
    def usage_chunks(self) -> StreamOptions:
        """Which chunks of a stream say the usage."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options must be left out unless stream is true", param="stream_options")
        return self.stream_options or StreamOptions()

    @property
    def cache_retention(self) -> Retention | None:
        if self.retention is not None:
            return Retention(self.retention.priority, self.retention.seconds)
        return Retention(1, 86400.0) if self.prompt_cache_retention == "24h" else None

    def _sampling(self, max_tokens: int, logprobs: int | None, outputs: StructuredOutputs | None) -> SamplingParams:
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
            structured_outputs=outputs,
        )


class CompletionRequest(_Request, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/completions``."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    best_of: int | None = None
    """Generate this many choices, and answer with the ``n`` whose tokens have the highest mean log-probability."""
    echo: bool = False
    """Put the prompt before the text, and its tokens' log-probabilities before those of the text's."""

    @property
    def num_choices(self) -> int:
        """Choices to generate."""
        if self.best_of is None:
            return self.n
        if not self.n <= self.best_of <= MAX_N:
            raise InvalidRequest(f"best_of must be between n, which is {self.n}, and {MAX_N}, got {self.best_of}", param="best_of")
        if self.best_of > self.n and self.stream:
            raise InvalidRequest("best_of must be n where stream is true: the best are known at the end", param="best_of")
        return self.best_of

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
        logprobs = 0 if self.logprobs is None and self.num_choices > self.n else self.logprobs
        max_tokens = DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens
        params = self._sampling(1 if self.only_echo else max_tokens, logprobs, self.structured_outputs)
        return msgspec.structs.replace(params, prompt_logprobs=self.logprobs) if self.echo else params

    @property
    def only_echo(self) -> bool:
        """Whether the prompt is all that is wanted.  The engine gives one token with it, which the writer leaves out."""
        return self.echo and self.max_tokens == 0


class TextFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """Free text."""


class JsonObjectFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="json_object"):
    """Any JSON object."""


class JsonSchema(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    """Not shown to the model, nor is the description."""
    description: str | None = None
    schema: dict[str, Any] = {}
    strict: bool | None = None
    """Refuse a schema with keywords that can't be enforced, rather than leave those unenforced."""


class JsonSchemaFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="json_schema"):
    json_schema: JsonSchema


class FunctionTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="function"):
    function: Function


class FunctionName(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str


class NamedFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="function"):
    """Call this function."""

    function: FunctionName


class FunctionNames(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    mode: Literal["auto", "required"]
    tools: list[NamedFunction]


class AllowedFunctions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="allowed_tools"):
    """Call none but these."""

    allowed_tools: FunctionNames


class ChatRequest(_Request, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/chat/completions``."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    response_format: TextFormat | JsonObjectFormat | JsonSchemaFormat = TextFormat()
    tools: list[FunctionTool] = []
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | AllowedFunctions | None = None
    parallel_tool_calls: bool = True

    @property
    def tool_use(self) -> ToolUse | None:
        functions = [tool.function for tool in self.tools]
        match self.tool_choice:
            case NamedFunction(function):
                return tool_use(functions, "required", [function.name], parallel=False)
            case AllowedFunctions(allowed):
                names = [tool.function.name for tool in allowed.tools]
                return tool_use(functions, allowed.mode, names, parallel=self.parallel_tool_calls)
            case mode:
                return tool_use(functions, mode or "auto", None, parallel=self.parallel_tool_calls)

    @property
    def form_field(self) -> str:
        """The field that a form of the output comes from, for errors."""
        if self.structured_outputs is not None:
            return "structured_outputs"
        return "response_format" if self.tool_use is None else "tools"

    @property
    def _outputs(self) -> StructuredOutputs | None:
        wanted = self.structured_outputs
        match self.response_format:
            case JsonObjectFormat():
                wanted = StructuredOutputs(json_object=True)
            case JsonSchemaFormat(schema):
                wanted = StructuredOutputs(json=schema.schema, lenient=not schema.strict)
        if self.structured_outputs is not None and (wanted is not self.structured_outputs or self.tool_use is not None):
            raise InvalidRequest(
                "structured_outputs must be left out where response_format or tools are given", param="structured_outputs"
            )
        return wanted

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def sampling_params(self) -> SamplingParams:
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs must be left out unless logprobs is true", param="top_logprobs")
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        params = self._sampling(DEFAULT_CHAT_TOKENS if self.token_limit is None else self.token_limit, logprobs, self._outputs)
        return params if self.tool_use is None else self.tool_use.shaped(params)


R = TypeVar("R", bound=msgspec.Struct)


def parse(body: bytes, kind: type[R]) -> R:
    """The request in an HTTP body.  Raises ``InvalidRequest`` naming the field, whatever the bytes."""
    check_depth(body)
    value = _json(body)
    if not isinstance(value, dict):
        raise InvalidRequest(f"body must be a JSON object, got {type(value).__name__}")
    fields: dict[str, Any] = _without_nulls(value)
    drop_unneeded(fields, _known_fields(kind))
    for message in fields["messages"] if isinstance(fields.get("messages"), list) else ():
        if isinstance(message, dict):
            _clean_answer(message)
    for item in fields["input"] if isinstance(fields.get("input"), list) else ():
        if isinstance(item, dict) and "role" in item:
            item.setdefault("type", "message")
    try:
        return msgspec.convert(fields, kind)
    except (msgspec.ValidationError, OverflowError) as error:
        raise _invalid(str(error)) from None


def _clean_answer(message: dict[str, Any]) -> None:
    """An answer may be given back as it came: take out what says nothing, and what the ``openai`` package has put in."""
    for field in ("tool_calls", "annotations"):
        if message.get(field) == []:
            del message[field]
    message.pop("parsed", None)
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        if isinstance(call, dict) and isinstance(call.get("function"), dict):
            call["function"].pop("parsed_arguments", None)


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


@functools.cache
def _known_fields(kind: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(field.encode_name for field in msgspec.structs.fields(kind))  # takes a millisecond


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
