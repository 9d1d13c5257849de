"""Every field of the API, as the installed ``openai`` package has it, is honoured, taken with a reason, or refused by name."""

from __future__ import annotations

import json
from typing import Any, get_type_hints

import msgspec
import pytest
from openai.types import chat, completion_create_params, responses
from openai.types.chat import (
    ChatCompletionAssistantMessageParam,
    ChatCompletionDeveloperMessageParam,
    ChatCompletionStreamOptionsParam,
    ChatCompletionSystemMessageParam,
    ChatCompletionToolMessageParam,
    ChatCompletionUserMessageParam,
)
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params
from openai.types.shared_params import FunctionDefinition
from openai.types.shared_params.response_format_json_schema import JSONSchema

from radixkv.server.errors import InvalidRequest
from radixkv.server.messages import ChatMessage, TextPart, ToolCall
from radixkv.server.openai.fields import ONLY, REFUSED, TAKEN
from radixkv.server.openai.responses import (
    CallItem,
    CallOutputItem,
    ChosenFunction,
    ChosenFunctions,
    InputText,
    MessageItem,
    OutputText,
    ResponseFunction,
    ResponseSchema,
    ResponsesRequest,
    TextOptions,
)
from radixkv.server.openai.schema import (
    AllowedFunctions,
    ChatRequest,
    CompletionRequest,
    FunctionNames,
    FunctionTool,
    JsonSchema,
    NamedFunction,
    StreamOptions,
    parse,
)
from radixkv.server.tools import Function

STREAMED = "CreateParamsStreaming", "CreateParamsNonStreaming"
KINDS: dict[str, tuple[set[str], type[msgspec.Struct], dict[str, Any]]] = {
    "completions": (
        {field for name in STREAMED for field in get_type_hints(getattr(completion_create_params, f"Completion{name}"))},
        CompletionRequest,
        {"prompt": "x"},
    ),
    "chat": (
        {field for name in STREAMED for field in get_type_hints(getattr(chat_create_params, f"Completion{name}"))},
        ChatRequest,
        {"messages": [{"role": "user", "content": "x"}]},
    ),
    "responses": (
        {field for name in STREAMED for field in get_type_hints(getattr(response_create_params, f"Response{name}"))},
        ResponsesRequest,
        {"input": "x"},
    ),
}
FIELDS = [(kind, field) for kind, (fields, _, _) in KINDS.items() for field in sorted(fields)]


@pytest.mark.parametrize(("kind", "field"), FIELDS, ids=lambda value: value)
def test_each_field_of_the_reference_is_decided_upon(kind: str, field: str) -> None:
    _, struct, body = KINDS[kind]
    if field in struct.__struct_fields__:
        return
    assert field in TAKEN or field in REFUSED, f"{field} is new in the API: implement it, or say in fields.py what becomes of it"
    if field in TAKEN:
        parse(json.dumps(body | {field: "x"}).encode(), struct)
        return
    with pytest.raises(InvalidRequest, match=field) as caught:
        parse(json.dumps(body | {field: "no such value"}).encode(), struct)
    assert caught.value.param == field
    for allowed in ONLY.get(field, ()):
        parse(json.dumps(body | {field: allowed}).encode(), struct)


def test_nothing_is_decided_upon_that_is_no_field_of_the_api() -> None:
    assert not (TAKEN.keys() | REFUSED.keys() | ONLY.keys()) - {field for _, field in FIELDS}


MEMBERS: list[tuple[type[msgspec.Struct], Any, set[str]]] = [
    (StreamOptions, ChatCompletionStreamOptionsParam, set()),
    (Function, FunctionDefinition, set()),
    (JsonSchema, JSONSchema, set()),
    (ChatMessage, ChatCompletionUserMessageParam, set()),
    (ChatMessage, ChatCompletionSystemMessageParam, set()),
    (ChatMessage, ChatCompletionDeveloperMessageParam, set()),
    (ChatMessage, ChatCompletionToolMessageParam, set()),
    (ChatMessage, ChatCompletionAssistantMessageParam, {"audio", "function_call", "refusal"}),
    (TextPart, chat.ChatCompletionContentPartTextParam, {"prompt_cache_breakpoint"}),
    (ToolCall, chat.ChatCompletionMessageFunctionToolCallParam, set()),
    (FunctionTool, chat.ChatCompletionFunctionToolParam, set()),
    (NamedFunction, chat.ChatCompletionNamedToolChoiceParam, set()),
    (AllowedFunctions, chat.ChatCompletionAllowedToolChoiceParam, set()),
    (FunctionNames, chat.ChatCompletionAllowedToolsParam, set()),
    (StreamOptions, response_create_params.StreamOptions, set()),
    (InputText, responses.ResponseInputTextParam, {"prompt_cache_breakpoint"}),
    (OutputText, responses.response_output_text_param.ResponseOutputTextParam, set()),
    (MessageItem, responses.EasyInputMessageParam, set()),
    (MessageItem, responses.ResponseOutputMessageParam, set()),
    (CallItem, responses.ResponseFunctionToolCallParam, {"async", "caller", "namespace"}),
    (CallOutputItem, responses.response_input_param.FunctionCallOutput, {"name", "caller", "namespace"}),
    (ResponseFunction, responses.FunctionToolParam, {"async", "defer_loading", "output_schema", "allowed_callers"}),
    (ResponseSchema, responses.ResponseFormatTextJSONSchemaConfigParam, set()),
    (TextOptions, responses.ResponseTextConfigParam, set()),
    (ChosenFunction, responses.ToolChoiceFunctionParam, set()),
    (ChosenFunctions, responses.ToolChoiceAllowedParam, set()),
]


@pytest.mark.parametrize(("struct", "reference", "refused"), MEMBERS, ids=lambda value: getattr(value, "__name__", ""))
def test_so_is_each_member_of_the_objects_within(struct: type[msgspec.Struct], reference: Any, refused: set[str]) -> None:
    # The member that says which type of object it is, is msgspec's.
    assert {*get_type_hints(reference)} - {*struct.__struct_fields__, struct.__struct_config__.tag_field} == refused
