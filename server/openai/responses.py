"""The Responses API over the same chat: its requests become chat requests, and its answers ``response`` objects or their events.

Nothing is kept between requests: a conversation is given whole in ``input``.
"""

from __future__ import annotations

import time
import uuid
from typing import Any, ClassVar, Literal

import msgspec

from radixkv.server.errors import InvalidRequest
from radixkv.server.frontend import Frontend
from radixkv.server.messages import ChatMessage, Delta, Function, FunctionCall, ToolCall, Usage
from radixkv.server.openai.chat import chat_logprobs
from radixkv.server.openai.schema import (
    AllowedFunctions,
    ChatRequest,
    FunctionName,
    FunctionNames,
    FunctionTool,
    JsonObjectFormat,
    JsonSchema,
    JsonSchemaFormat,
    NamedFunction,
    RetentionField,
    StreamOptions,
    TextFormat,
)
from radixkv.server.tools import CallParser, CallPart
from radixkv.structured_outputs import StructuredOutputs

# --- requests ----------------------------------------------------------------------------------------------------------------


class _Item(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An earlier answer's items come back with these, which say nothing to the model."""

    id: str | None = None
    status: str | None = None


class InputText(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="input_text"):
    text: str


class OutputText(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any] = []
    logprobs: list[Any] | None = None


class MessageItem(_Item, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="message"):
    role: str
    content: str | list[InputText | OutputText]
    phase: str | None = None


class CallItem(_Item, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="function_call"):
    call_id: str
    name: str
    arguments: str


class CallOutputItem(_Item, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="function_call_output"):
    call_id: str
    output: str | list[InputText]


class ResponseFunction(Function, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="function"):
    """A tool; here its definition is not wrapped."""

    @property
    def plain(self) -> Function:
        return Function(name=self.name, description=self.description, parameters=self.parameters, strict=self.strict)


class ResponseSchema(JsonSchema, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="json_schema"):
    """A format; likewise."""


class TextOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format: TextFormat | JsonObjectFormat | ResponseSchema = TextFormat()
    verbosity: Literal["medium"] = "medium"


class ChosenFunction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="function"):
    name: str


class ChosenFunctions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="allowed_tools"):
    mode: Literal["auto", "required"]
    tools: list[ChosenFunction]


class ResponsesRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/responses``.  The fields after ``stream_options`` are extensions, as in a chat."""

    NAMES: ClassVar[dict[str, str]] = {"messages": "input", "max_tokens": "max_output_tokens", "response_format": "text"}
    """What the fields of :attr:`chat` are here."""

    input: str | list[MessageItem | CallItem | CallOutputItem]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    text: TextOptions = TextOptions()
    tools: list[ResponseFunction] = []
    tool_choice: Literal["none", "auto", "required"] | ChosenFunction | ChosenFunctions = "auto"
    parallel_tool_calls: bool = True
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] = []
    """Of these, answers have log-probabilities; there is no reasoning apart from the text."""
    top_logprobs: int | None = None
    metadata: dict[str, str] = {}
    """Given back in the response."""
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    seed: int | None = None
    top_k: int = 0
    min_p: float = 0.0
    ignore_eos: bool = False
    namespace: str = ""
    cache_salt: str | None = None
    retention: RetentionField | None = None
    structured_outputs: StructuredOutputs | None = None

    @property
    def chat(self) -> ChatRequest:
        """The same as a chat.  Raises ``InvalidRequest``."""
        logprobs = "message.output_text.logprobs" in self.include
        if self.top_logprobs is not None and not logprobs:
            raise InvalidRequest(
                "top_logprobs must be left out unless include has message.output_text.logprobs", param="top_logprobs"
            )
        options = self.stream_options or StreamOptions()
        if options.include_usage or options.continuous_usage_stats:
            raise InvalidRequest("stream_options must not ask for usage here: it comes at the end anyway", param="stream_options")
        form = self.text.format
        choice = self.tool_choice
        return ChatRequest(
            model=self.model,
            messages=self._messages(),
            max_completion_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=self.seed,
            top_k=self.top_k,
            min_p=self.min_p,
            ignore_eos=self.ignore_eos,
            logprobs=logprobs,
            top_logprobs=self.top_logprobs,
            stream=self.stream,
            namespace=self.namespace,
            cache_salt=self.cache_salt,
            retention=self.retention,
            prompt_cache_retention=self.prompt_cache_retention,
            structured_outputs=self.structured_outputs,
            response_format=JsonSchemaFormat(form) if isinstance(form, ResponseSchema) else form,
            tools=[FunctionTool(tool.plain) for tool in self.tools],
            tool_choice=_named(choice)
            if isinstance(choice, ChosenFunction)
            else AllowedFunctions(FunctionNames(choice.mode, [_named(tool) for tool in choice.tools]))
            if isinstance(choice, ChosenFunctions)
            else choice,
            parallel_tool_calls=self.parallel_tool_calls,
        )

    def _messages(self) -> list[ChatMessage]:
        turns = [] if self.instructions is None else [ChatMessage(role="system", content=self.instructions)]
        if isinstance(self.input, str):
            return [*turns, ChatMessage(role="user", content=self.input)]
        for item in self.input:
            match item:
                case MessageItem():
                    turns.append(ChatMessage(role=item.role, content=_joined(item.content)))
                case CallItem():
                    call = ToolCall(id=item.call_id, function=FunctionCall(name=item.name, arguments=item.arguments))
                    # What an answer said and called is one turn.
                    last = turns.pop() if turns and turns[-1].role == "assistant" else ChatMessage(role="assistant", content="")
                    turns.append(ChatMessage(role="assistant", content=last.content, tool_calls=[*(last.tool_calls or ()), call]))
                case CallOutputItem():
                    turns.append(ChatMessage(role="tool", content=_joined(item.output), tool_call_id=item.call_id))
        return turns


def _named(choice: ChosenFunction) -> NamedFunction:
    return NamedFunction(FunctionName(choice.name))


def _joined(content: str | list[Any]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


# --- answers -----------------------------------------------------------------------------------------------------------------


class ResponseWriter:
    """Writes the answer to one ``POST /v1/responses``."""

    ends_with_done: ClassVar[bool] = False

    def __init__(self, frontend: Frontend, request: ResponsesRequest) -> None:
        self._frontend = frontend
        self._request = request
        self._tools = request.chat.tool_use is not None
        self._id = f"resp_{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._parser = CallParser()
        self._output: list[dict[str, Any]] = []
        """The last one grows until it is closed."""
        self._open = False
        self._logprobs: list[Any] = []
        """Of tokens that belong to the open message, or to the next one."""
        self._finish_reason: str | None = None
        self._sequence = 0

    def whole(self, choices: list[Delta], usage: Usage) -> dict[str, Any]:
        self.chunks(choices[0])
        return self._response(usage)

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        """The events of a delta, which change :attr:`_output` as they say."""
        found: list[dict[str, Any]] = []
        if self._sequence == 0:
            found += [self._event(f"response.{name}", response=self._response(None)) for name in ("created", "in_progress")]
        final = delta.finish_reason is not None
        pieces: list[str | CallPart] = [delta.text] if delta.text else []
        if self._tools:
            pieces = self._parser.feed(delta.text, final=final)
        logprobs = chat_logprobs(self._frontend, delta)
        self._logprobs += logprobs["content"] if logprobs else []
        for piece in pieces:
            found += self._text(piece) if isinstance(piece, str) else self._call(piece)
        if final:
            self._finish_reason = delta.finish_reason
            if not self._output:  # an answer of no words is one all the same
                found += self._begin_message()
            found += self._close()
        return found

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        """The last event."""
        response = self._response(usage)
        return self._event(f"response.{response['status']}", response=response)

    def _text(self, text: str) -> list[dict[str, Any]]:
        found = []
        if not (self._open and self._output[-1]["type"] == "message"):
            found += self._close()
            found += self._begin_message()
        item = self._output[-1]
        part = item["content"][0]
        part["text"] += text
        logprobs, self._logprobs = self._logprobs, []
        part["logprobs"] += logprobs
        place = {"item_id": item["id"], "output_index": len(self._output) - 1, "content_index": 0}
        return [*found, self._event("response.output_text.delta", **place, delta=text, logprobs=logprobs)]

    def _call(self, piece: CallPart) -> list[dict[str, Any]]:
        found = []
        if piece.id is not None:
            found += self._close()
            call = {"type": "function_call", "id": f"fc_{uuid.uuid4().hex}", "call_id": piece.id, "name": piece.name}
            found += self._begin(call | {"arguments": "", "status": "in_progress"})
        item = self._output[-1]
        item["arguments"] += piece.arguments
        if piece.arguments:
            place = {"item_id": item["id"], "output_index": len(self._output) - 1}
            found.append(self._event("response.function_call_arguments.delta", **place, delta=piece.arguments))
        return found

    def _begin_message(self) -> list[dict[str, Any]]:
        item: dict[str, Any] = {"type": "message", "id": f"msg_{uuid.uuid4().hex}", "role": "assistant", "status": "in_progress"}
        found = self._begin(item | {"content": []})
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        item = self._output[-1]
        item["content"].append(part)
        place = {"item_id": item["id"], "output_index": len(self._output) - 1, "content_index": 0}
        return [*found, self._event("response.content_part.added", **place, part=part)]

    def _begin(self, item: dict[str, Any]) -> list[dict[str, Any]]:
        self._output.append(item)
        self._open = True
        return [self._event("response.output_item.added", output_index=len(self._output) - 1, item=item)]

    def _close(self) -> list[dict[str, Any]]:
        """End the item that is open, if one is."""
        if not self._open:
            return []
        self._open = False
        item = self._output[-1]
        item["status"] = "incomplete" if self._finish_reason == "length" else "completed"
        place = {"item_id": item["id"], "output_index": len(self._output) - 1}
        if item["type"] == "message":
            part = item["content"][0]
            logprobs, self._logprobs = self._logprobs, []
            part["logprobs"] += logprobs
            place["content_index"] = 0
            found = [
                self._event("response.output_text.done", **place, text=part["text"], logprobs=part["logprobs"]),
                self._event("response.content_part.done", **place, part=part),
            ]
        else:
            name, arguments = item["name"], item["arguments"]
            found = [self._event("response.function_call_arguments.done", **place, name=name, arguments=arguments)]
        return [*found, self._event("response.output_item.done", output_index=place["output_index"], item=item)]

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        event = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return msgspec.json.decode(msgspec.json.encode(event))  # type: ignore[no-any-return]  # items go on growing

    def _response(self, usage: Usage | None) -> dict[str, Any]:
        request = self._request
        cut = self._finish_reason == "length"
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": "in_progress" if usage is None else "incomplete" if cut else "completed",
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata,
            "model": self._frontend.model,
            "output": self._output,
            "parallel_tool_calls": request.parallel_tool_calls,
            "previous_response_id": None,
            "store": False,
            "temperature": request.temperature,
            "text": msgspec.to_builtins(request.text),
            "tool_choice": msgspec.to_builtins(request.tool_choice),
            "tools": [{"parameters": None, "strict": None} | msgspec.to_builtins(tool) for tool in request.tools],
            "top_logprobs": request.top_logprobs,
            "top_p": request.top_p,
            "truncation": "disabled",
            "usage": None if usage is None else _usage_json(usage),
        }


def _usage_json(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0, "miss_reasons": usage.missed},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
