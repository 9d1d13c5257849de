"""Tools: how a chat's functions are shown to the model, how calls are enforced, and how they are found in what it writes.

A call is written as in the Hermes and Qwen families: ``<tool_call>``, an object of ``name`` and ``arguments``, ``</tool_call>``.
A chat template that takes tools and writes calls so is given them; for any other they are written into the messages.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from radixkv.detokenizer import overlap
from radixkv.sampling_params import SamplingParams
from radixkv.server.errors import InvalidRequest
from radixkv.server.messages import ChatMessage, Function
from radixkv.structured_outputs import StructuredOutputs, spaced

BEGIN, END = "<tool_call>", "</tool_call>"
MAX_TOOLS = 128
PROMPT = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{signatures}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
"""Qwen2.5's words, for models whose template has none."""


class ToolUse(msgspec.Struct, frozen=True, kw_only=True):
    """What one chat's answer may, or must, call."""

    functions: list[Function]
    """Shown to the model."""
    allowed: list[Function]
    """Those of them that it may call."""
    required: bool = False
    """It must call at least one."""
    parallel: bool = True
    """It may call several."""

    @property
    def definitions(self) -> list[dict[str, Any]]:
        """As chat templates take them."""
        return [{"type": "function", "function": msgspec.to_builtins(function)} for function in self.functions]

    def outputs(self, answer: StructuredOutputs | None) -> StructuredOutputs | None:
        """The form of an output that calls, or else is an ``answer``; None where it is free.  Raises ``InvalidRequest``."""
        strict = any(function.strict for function in self.allowed)
        if not (self.required or strict or answer or len(self.allowed) < len(self.functions)):
            return None
        try:
            return StructuredOutputs(grammar=self._grammar(answer))
        except ValueError as error:
            raise InvalidRequest(f"structured_outputs can't be compiled: {error}", param="structured_outputs") from None

    def shaped(self, params: SamplingParams) -> SamplingParams:
        """``params`` for an output that calls, or is of the form that they ask for.  Raises ``InvalidRequest``."""
        outputs = self.outputs(params.structured_outputs)
        if outputs is None and not self.parallel:
            params = msgspec.structs.replace(params, stop=(*params.stop, END))  # what follows a call would be another one
        return msgspec.structs.replace(params, structured_outputs=outputs)

    def _grammar(self, answer: StructuredOutputs | None) -> str:
        rules = [f"call{i}" for i in range(len(self.allowed))]
        lines = [
            f"call: {' | '.join(rules)}",
            *(
                f'{rule}: "\\n{{\\"name\\": \\"{function.name}\\", \\"arguments\\": " arguments{i} "}}\\n{END}"\n'
                f"arguments{i}: %json {spaced(function.schema, lenient=not function.strict)}"
                for i, (rule, function) in enumerate(zip(rules, self.allowed, strict=True))
            ),
        ]
        more = f'("\\n{BEGIN}" call)*' if self.parallel else ""
        if self.required:
            lines.append(f'start: "{BEGIN}" call {more}')
        elif answer is not None:
            lines += [f'start: "{BEGIN}" call {more} | answer', f"answer: %json {answer.kind_and_text[1]}"]
        else:  # free text until a call begins: the shortest that ends so
            start = "(head call)* tail" if self.parallel else "head call | tail"
            lines += [f"start: {start}", "tail: TEXT", "TEXT: /(.|\\n)*/", f'head[lazy]: TEXT "{BEGIN}"']
        return "\n".join(lines)


def spelled_out(messages: Sequence[ChatMessage], tools: ToolUse | None) -> list[ChatMessage]:
    """A chat for a template that knows no tools: all of it is in the texts of system, user and assistant."""
    turns: list[ChatMessage] = []
    in_results = False
    for message in messages:
        if message.role == "tool":
            text = f"<tool_response>\n{message.text}\n</tool_response>"
            if in_results:  # results of calls made together are one turn
                text = turns.pop().text + "\n" + text
            turns.append(ChatMessage(role="user", content=text))
        elif message.tool_calls:
            calls = [f"{BEGIN}\n{_call_text(call.function.name, call.function.arguments)}\n{END}" for call in message.tool_calls]
            turns.append(ChatMessage(role=message.role, content="\n".join([*([message.text] if message.text else []), *calls])))
        else:
            turns.append(message)
        in_results = message.role == "tool"
    if tools is not None:
        prompt = PROMPT.format(signatures="\n".join(json.dumps(definition, ensure_ascii=False) for definition in tools.definitions))
        if turns and turns[0].role == "system":
            turns[0] = ChatMessage(role="system", content=f"{turns[0].text}\n\n{prompt}")
        else:
            turns.insert(0, ChatMessage(role="system", content=prompt))
    return turns


def template_turns(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """A chat as templates take it: arguments of calls are objects there."""
    turns = []
    for message in messages:
        turn: dict[str, Any] = {"role": message.role, "content": message.text}
        if message.name:
            turn["name"] = message.name
        if message.tool_call_id:
            turn["tool_call_id"] = message.tool_call_id
        if message.tool_calls:
            turn["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
                }
                for call in message.tool_calls
            ]
        turns.append(turn)
    return turns


def _arguments(text: str) -> Any:
    try:
        return json.loads(text or "{}")
    except (ValueError, RecursionError):  # a model may have written anything, and is shown it as it was
        return text


def _call_text(name: str, arguments: str) -> str:
    return f'{{"name": {json.dumps(name)}, "arguments": {arguments or "{}"}}}'


# --- what the model wrote ----------------------------------------------------------------------------------------------------


class CallPart(msgspec.Struct, frozen=True):
    """A piece of call ``index`` of an answer: its first has ``id`` and ``name``."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')


class CallParser:
    """Finds calls in a growing text.  The pieces do not depend on how the text was cut, but for where they are cut themselves.

    What is between the tags and is no call (no JSON object with a name and arguments) stays text, tags and all.
    """

    def __init__(self) -> None:
        self._state: Literal["text", "head", "arguments", "tail"] = "text"
        self._held = ""
        self._blanks = ""
        """Those before what may be a call."""
        self._depth = 0
        self._in_string = self._escaped = False
        self._after_call = False
        """Blanks that follow a call are not part of the answer, unless words follow them."""
        self.num_calls = 0

    def feed(self, text: str, *, final: bool = False) -> list[str | CallPart]:
        """Text and calls that are certain now."""
        self._held += text
        found: list[str | CallPart] = []
        while True:
            before = self._state, len(self._held)
            {"text": self._text, "head": self._head, "arguments": self._in_arguments, "tail": self._tail}[self._state](found, final)
            if (self._state, len(self._held)) == before:
                return found

    def _text(self, found: list[str | CallPart], final: bool) -> None:
        begin = self._held.find(BEGIN)
        if begin >= 0:
            text = self._held[:begin].rstrip()
            self._say(found, text)
            self._after_call = self._after_call and not text
            self._blanks = self._held[len(text) : begin]
            self._held, self._state = self._held[begin + len(BEGIN) :], "head"
            return
        if self._after_call and not self._held.strip():
            if final:
                self._held = ""
            return
        keep = 0 if final else overlap(self._held, BEGIN)
        safe = self._held[: len(self._held) - keep]
        if not final:  # blanks before a call are not part of the answer
            safe = safe.rstrip()
        self._say(found, safe)
        self._after_call = self._after_call and not safe
        self._held = self._held[len(safe) :]

    def _head(self, found: list[str | CallPart], final: bool) -> None:
        if head := _HEAD.match(self._held):
            self._begin(found, json.loads(head[1], strict=False), "")
            self._held, self._state = self._held[head.end() :], "arguments"
            self._depth, self._in_string, self._escaped = 0, False, False
            return
        end = self._held.find(END)
        if end < 0 and not final:
            return
        body = self._held[:end] if end >= 0 else self._held
        rest = self._held[end + len(END) :] if end >= 0 else ""
        try:
            call = json.loads(body)
            name, arguments = call["name"], call.get("arguments", call.get("parameters", {}))
            if not isinstance(name, str):
                raise TypeError
            self._begin(found, name, arguments if isinstance(arguments, str) else json.dumps(arguments))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            self._after_call = False
            self._say(found, self._blanks + BEGIN + body + (END if end >= 0 else ""))
        self._held, self._state = rest, "text"

    def _in_arguments(self, found: list[str | CallPart], final: bool) -> None:
        for i, character in enumerate(self._held):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == '"':
                    self._in_string = False
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if not self._depth:
                    found.append(CallPart(self.num_calls - 1, self._held[: i + 1]))
                    self._held, self._state = self._held[i + 1 :], "tail"
                    return
        if self._held:
            found.append(CallPart(self.num_calls - 1, self._held))
            self._held = ""

    def _tail(self, found: list[str | CallPart], final: bool) -> None:
        end = self._held.find(END)
        if end >= 0:
            self._held, self._state = self._held[end + len(END) :], "text"
        elif final:
            self._held = ""

    def _begin(self, found: list[str | CallPart], name: str, arguments: str) -> None:
        found.append(CallPart(self.num_calls, arguments, f"call_{uuid.uuid4().hex[:24]}", name))
        self.num_calls += 1
        self._after_call = True

    @staticmethod
    def _say(found: list[str | CallPart], text: str) -> None:
        if text:
            found.append(text)


def split_calls(text: str) -> tuple[str, list[CallPart]]:
    """A whole answer's text, and its calls."""
    texts, calls = [], []
    for piece in CallParser().feed(text, final=True):
        if isinstance(piece, str):
            texts.append(piece)
        elif piece.id is not None:
            calls.append(piece)
        else:
            calls[-1] = msgspec.structs.replace(calls[-1], arguments=calls[-1].arguments + piece.arguments)
    return "".join(texts), calls


# --- what a request says -----------------------------------------------------------------------------------------------------


def tool_use(
    functions: Sequence[Function], mode: Literal["none", "auto", "required"], names: Sequence[str] | None, *, parallel: bool
) -> ToolUse | None:
    """What these fields of a request amount to; ``names`` are those of the functions that may be called, None for all.

    None where nothing may be called: the model is then not told of the functions.  Raises ``InvalidRequest``.
    """
    if len(functions) > MAX_TOOLS:
        raise InvalidRequest(f"tools must be at most {MAX_TOOLS}, got {len(functions)}", param="tools")
    known = {function.name: function for function in functions}
    if len(known) < len(functions):
        raise InvalidRequest("tools must have names that differ", param="tools")
    for name in names or ():
        if name not in known:
            raise InvalidRequest(f"tool_choice must name functions that tools define, got {name!r}", param="tool_choice")
    if names == []:
        raise InvalidRequest("tool_choice.allowed_tools must name at least 1 function, got none", param="tool_choice")
    if mode == "required" and not functions:
        raise InvalidRequest("tool_choice must not be required where tools is empty", param="tool_choice")
    if mode == "none" or not functions:
        return None
    allowed = list(functions) if names is None else [known[name] for name in names]
    return ToolUse(functions=list(functions), allowed=allowed, required=mode == "required", parallel=parallel)
