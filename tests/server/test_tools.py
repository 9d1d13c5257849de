"""Tools: what the model is shown, what it is held to, and what is found in what it wrote."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from radixkv.grammar import check_grammar
from radixkv.server.errors import InvalidRequest
from radixkv.server.messages import ChatMessage, FunctionCall, ToolCall
from radixkv.server.tools import CallParser, CallPart, Function, ToolUse, spelled_out, split_calls, template_turns, tool_use
from radixkv.structured_outputs import StructuredOutputs

WEATHER = Function(
    name="get_weather",
    description="The weather of a city.",
    parameters={"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
)
TIME = Function(name="get_time")


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def calls_in(text: str) -> tuple[str, list[tuple[str | None, Any]]]:
    said, calls = split_calls(text)
    return said, [(part.name, json.loads(part.arguments)) for part in calls]


@pytest.mark.parametrize(
    ("text", "said", "calls"),
    [
        ("Hello.\n", "Hello.\n", []),
        (call("f", x=1), "", [("f", {"x": 1})]),
        ("See.\n" + call("f", x='a}"</tool_call>b') + "\n" + call("g"), "See.", [("f", {"x": 'a}"</tool_call>b'}), ("g", {})]),
        ('<tool_call>{"arguments": {"x": [1]}, "name": "f"}</tool_call>', "", [("f", {"x": [1]})]),
        ('<tool_call>{"name": "f", "parameters": {"x": 1}}</tool_call>', "", [("f", {"x": 1})]),
        ('<tool_call>{"name": "f"}</tool_call>', "", [("f", {})]),
        ('<tool_call>\n{"name": "f", "arguments": {"x": 1}', "", [("f", {"x": 1})]),
        ("<tool_call>junk</tool_call> so", "<tool_call>junk</tool_call> so", []),
        ("a <tool_call", "a <tool_call", []),
        ("<tool_call>[1]</tool_call>", "<tool_call>[1]</tool_call>", []),
        ('<tool_call>{"name": 3}</tool_call>', '<tool_call>{"name": 3}</tool_call>', []),
        (call("f") + "\n\n", "", [("f", {})]),
        (call("f") + "\nDone.\n", "\nDone.\n", [("f", {})]),
    ],
)  # fmt: skip
def test_calls_are_found_and_all_else_is_text(text: str, said: str, calls: list[Any]) -> None:
    assert calls_in(text) == (said, calls)


PIECES = st.lists(
    st.sampled_from(
        ["<tool_call>", "</tool_call>", '{"name": "f", "arguments": ', '{"x": "}\\""}', "}", "\n", " ", "a", "<", "[1]", '"']
    )
)


@settings(max_examples=150, deadline=None)
@example(["<tool_call>", '{"name": "f", "arguments": ', '{"x": "}\\""}', "}", "</tool_call>", "a", "\n"], 1)
@given(PIECES, st.integers(1, 12))
def test_a_stream_says_what_the_whole_says_however_it_is_cut(pieces: list[str], size: int) -> None:
    text = "".join(pieces)
    whole_text, whole_calls = split_calls(text)
    parser, said, calls = CallParser(), "", []
    for start in range(0, len(text) or 1, size):
        for piece in parser.feed(text[start : start + size], final=start + size >= len(text)):
            if isinstance(piece, CallPart):
                if piece.id is not None:
                    calls.append([piece.name, ""])
                assert piece.index == len(calls) - 1
                calls[-1][1] += piece.arguments
            else:
                assert piece
                said += piece
    assert said == whole_text
    assert calls == [[part.name, part.arguments] for part in whole_calls]
    if not whole_calls:
        assert said == text


def test_arguments_are_streamed_before_the_call_is_complete() -> None:
    parser = CallParser()
    (first, second) = parser.feed('<tool_call>\n{"name": "f", "arguments": {"x": "lo')
    assert isinstance(first, CallPart)
    assert isinstance(second, CallPart)
    assert (first.name, first.arguments, second.arguments) == ("f", "", '{"x": "lo')
    assert [piece.arguments for piece in parser.feed('ng"}') if isinstance(piece, CallPart)] == ['ng"}']


@pytest.mark.parametrize("required", [True, False])
@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("answer", [None, StructuredOutputs(json_object=True)])
@pytest.mark.parametrize("functions", [[WEATHER], [WEATHER, Function(name="strict", strict=True)]])
def test_every_demand_on_calls_compiles(required: bool, parallel: bool, answer: Any, functions: list[Function]) -> None:
    use = ToolUse(functions=functions, allowed=functions, required=required, parallel=parallel)
    outputs = use.outputs(answer)
    if outputs is None:
        assert functions == [WEATHER]
        assert (required, answer) == (False, None)
    else:
        check_grammar(outputs)


@pytest.mark.parametrize(
    ("arguments", "param"),
    [
        (([TIME], "auto", ["nope"]), "tool_choice"),
        (([], "required", None), "tool_choice"),
        (([TIME], "auto", []), "tool_choice"),
        (([TIME, TIME], "auto", None), "tools"),
        (([Function(name=f"f{i}") for i in range(129)], "auto", None), "tools"),
    ],
)
def test_a_choice_that_can_not_be_is_refused(arguments: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        tool_use(*arguments, parallel=True)
    assert caught.value.param == param


def test_where_only_some_may_be_called_no_other_can_be() -> None:
    use = tool_use([TIME, WEATHER], "auto", ["get_weather"], parallel=True)
    assert use is not None
    outputs = use.outputs(None)
    assert outputs is not None
    check_grammar(outputs)
    assert outputs.grammar is not None
    assert "get_weather" in outputs.grammar
    assert "get_time" not in outputs.grammar
    assert [each["function"]["name"] for each in use.definitions] == ["get_time", "get_weather"]


def test_with_none_to_call_the_model_is_told_of_none() -> None:
    assert tool_use([TIME], "none", None, parallel=True) is None
    assert tool_use([], "auto", None, parallel=True) is None


CHAT = [
    ChatMessage(role="user", content="Weather and time?"),
    ChatMessage(
        role="assistant",
        tool_calls=[
            ToolCall(id="1", function=FunctionCall(name="get_weather", arguments='{"city": "Köln"}')),
            ToolCall(id="2", function=FunctionCall(name="get_time", arguments="")),
        ],
    ),
    ChatMessage(role="tool", content="sunny", tool_call_id="1"),
    ChatMessage(role="tool", content="noon", tool_call_id="2"),
]


def test_a_template_that_knows_no_tools_gets_them_as_text() -> None:
    turns = spelled_out(CHAT, ToolUse(functions=[WEATHER], allowed=[WEATHER]))
    assert [turn.role for turn in turns] == ["system", "user", "assistant", "user"]
    assert '"name": "get_weather", "description": "The weather of a city."' in turns[0].text
    said, calls = calls_in(turns[2].text)
    assert (said, calls) == ("", [("get_weather", {"city": "Köln"}), ("get_time", {})])
    assert turns[3].text == "<tool_response>\nsunny\n</tool_response>\n<tool_response>\nnoon\n</tool_response>"
    system = ChatMessage(role="system", content="Be brief.")
    (turn, *_) = spelled_out([system, *CHAT], ToolUse(functions=[WEATHER], allowed=[WEATHER]))
    assert turn.text.startswith("Be brief.\n\n# Tools")
    assert spelled_out([system], None) == [system]


def test_a_template_that_takes_tools_gets_arguments_as_objects() -> None:
    turns = template_turns(CHAT)
    assert turns[1]["content"] == ""
    assert [call["function"]["arguments"] for call in turns[1]["tool_calls"]] == [{"city": "Köln"}, {}]
    assert turns[2] == {"role": "tool", "content": "sunny", "tool_call_id": "1"}
