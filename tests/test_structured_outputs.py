"""Outputs in a form that was asked for, through the whole engine, on a tiny random model that would never write it by itself."""

from __future__ import annotations

import json
import re
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from radixkv import LLM, SamplingParams
from radixkv.grammar import check_grammar
from radixkv.structured_outputs import MAX_GRAMMAR_LENGTH, StructuredOutputs, spaced

PERSON = {
    "type": "object",
    "properties": {
        "a_rather_long_name": {"type": "string", "maxLength": 5},
        "favourite_colour": {"enum": ["red", "green"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["a_rather_long_name", "favourite_colour", "age"],
    "additionalProperties": False,
}
FORMS: list[tuple[StructuredOutputs, str]] = [
    (StructuredOutputs(json=PERSON), r'\{"a_rather_long_name": ".*", "favourite_colour": "(red|green)", "age": \d\d?\}'),
    (StructuredOutputs(json=json.dumps(PERSON)), r"\{.*\}"),
    (StructuredOutputs(regex=r"[0-9]{4}-[a-z]{3}"), r"[0-9]{4}-[a-z]{3}"),
    (StructuredOutputs(choice=["yes, of course", 'no, "never"']), r'yes, of course|no, "never"'),
    (StructuredOutputs(grammar='start: "the " noun " fox"\nnoun: "brown" | "quick"'), r"the (brown|quick) fox"),
    (StructuredOutputs(grammar='root ::= "fox " [0-9]'), r"fox [0-9]"),
]


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> LLM:
    return LLM(str(tiny_model), device="cpu", kv_cache_tokens=4096)


def asking(outputs: StructuredOutputs, **params: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 300, "temperature": 0, "structured_outputs": outputs} | params))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("outputs", "form"), FORMS, ids=lambda value: str(value)[:30])
def test_an_output_has_its_form_and_ends_with_it(llm: LLM, outputs: StructuredOutputs, form: str, temperature: float) -> None:
    for ignore_eos in (False, True):
        params = asking(outputs, temperature=temperature, seed=3, ignore_eos=ignore_eos)
        (output,) = llm.generate(["the quick "], params, use_tqdm=False)
        assert re.fullmatch(form, output.text, re.DOTALL), output.text
        assert output.finish_reason == "stop"
    llm.engine.cache.check()


def test_forced_tokens_take_no_step_of_their_own(llm: LLM) -> None:
    before = llm.engine.stats()
    (output,) = llm.generate(["the quick "], asking(StructuredOutputs(json=PERSON)), use_tqdm=False)
    after = llm.engine.stats()
    assert after["generated_tokens"] - before["generated_tokens"] == len(output.token_ids)
    assert after["steps"] - before["steps"] < len(output.token_ids) / 2


def test_with_logprobs_every_token_has_one_and_none_is_forced(llm: LLM) -> None:
    params = asking(StructuredOutputs(json=PERSON), logprobs=2)
    (output,) = llm.generate(["the quick "], params, use_tqdm=False)
    assert output.logprobs is not None
    assert [token.token_id for token in output.logprobs] == output.token_ids
    assert json.loads(output.text).keys() == PERSON["properties"].keys()


def test_the_form_is_kept_in_a_batch_with_chunks_preemption_and_the_cache_off(tiny_model: Path, llm: LLM) -> None:
    prompts = [f"the lazy dog {i} jumps" for i in range(6)]
    params = [asking(outputs, temperature=0.7, seed=i, max_tokens=100) for i, (outputs, _) in enumerate(FORMS)]
    params[3] = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
    alone = [llm.generate([prompt], own, use_tqdm=False)[0].token_ids for prompt, own in zip(prompts, params, strict=True)]
    tight = {"kv_cache_tokens": 128, "max_batch_tokens": 8, "max_num_seqs": 8, "block_size": 4}
    for config in ({}, tight, tight | {"enable_prefix_caching": False}):
        other = LLM(str(tiny_model), device="cpu", **({"kv_cache_tokens": 4096} | config))  # type: ignore[arg-type]
        outputs = other.generate(prompts, params, use_tqdm=False)
        assert [output.token_ids for output in outputs] == alone
        other.engine.cache.check()
        assert other.engine.stats()["blocks_locked"] == 0
        if config:
            assert other.engine.stats()["preemptions"] > 0


def test_an_output_goes_on_in_its_form_behind_tokens_that_another_engine_gave_it(llm: LLM) -> None:
    engine, params = llm.engine, asking(StructuredOutputs(json=PERSON))

    def run(before: list[int]) -> list[list[int]]:
        engine.add("a", [5, 6, 7], params, output_token_ids=before)
        outputs = []
        while engine.has_unfinished:
            outputs += [output.token_ids for output in engine.step()]
        return outputs

    whole = run([])
    assert max(map(len, whole)) > 1, "nothing was forced"
    for done in range(1, len(whole)):
        assert run([*chain(*whole[:done])]) == whole[done:]


def test_max_tokens_cuts_even_in_the_middle_of_what_is_forced(llm: LLM) -> None:
    whole = llm.generate(["x"], asking(StructuredOutputs(json=PERSON)), use_tqdm=False)[0].token_ids
    for count in range(1, len(whole)):
        (output,) = llm.generate(["x"], asking(StructuredOutputs(json=PERSON), max_tokens=count), use_tqdm=False)
        assert (output.token_ids, output.finish_reason) == (whole[:count], "length")
    llm.engine.cache.check()


BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "one of json, json_object, regex, choice and grammar, got none"),
    ({"regex": "a", "choice": ["b"]}, "got regex and choice"),
    ({"choice": []}, "choice must hold at least 1"),
    ({"regex": "a(b"}, "unclosed group"),
    ({"grammar": "start: nope"}, "nope"),
    ({"grammar": "root ::= nope ("}, "can't be compiled"),
    ({"json": "[1"}, "must be a JSON schema"),
    ({"json": "[1]"}, "must be a JSON schema"),
    ({"json": {"type": "wizard"}}, "wizard"),
    ({"json": {"$ref": "http://127.0.0.1:1/x"}}, "not present"),
    ({"json": {"type": "string", "format": "wizard"}}, "wizard"),
    ({"regex": "a" * (MAX_GRAMMAR_LENGTH + 1)}, f"at most {MAX_GRAMMAR_LENGTH}"),
]


@pytest.mark.parametrize(("fields", "message"), BAD, ids=lambda value: str(value)[:40])
def test_a_form_that_can_not_be_is_refused_by_both_doors(llm: LLM, fields: dict[str, Any], message: str) -> None:
    outputs = StructuredOutputs(**fields)
    with pytest.raises(ValueError, match=message):
        check_grammar(outputs)
    with pytest.raises(ValueError, match=message):
        llm.engine.add("bad", [5], asking(outputs))
    assert not llm.engine.has_unfinished


def test_a_lenient_schema_leaves_what_can_not_be_enforced(llm: LLM) -> None:
    outputs = StructuredOutputs(json={"type": "string", "format": "wizard", "maxLength": 3}, lenient=True)
    check_grammar(outputs)
    (output,) = llm.generate(["x"], asking(outputs), use_tqdm=False)
    assert isinstance(json.loads(output.text), str)


POINT = {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"]}


@pytest.mark.parametrize(
    "schema",
    [
        POINT,
        {"type": "object", "properties": {"at": {"$ref": "#/$defs/Point"}}, "required": ["at"], "$defs": {"Point": POINT}},
        {"type": "array", "items": POINT, "minItems": 2, "maxItems": 2},
        {"anyOf": [POINT]},
    ],
    ids=lambda schema: next(iter(schema)),
)
def test_a_lenient_schemas_objects_have_no_properties_but_those_named(llm: LLM, schema: dict[str, Any]) -> None:
    form = {"json": schema, "lenient": True}
    for seed in range(3):
        (output,) = llm.generate(["x"], asking(StructuredOutputs(**form), temperature=1.0, seed=seed), use_tqdm=False)
        assert output.finish_reason == "stop"
        assert {*re.findall(r'"(\w+)":', output.text)} <= {"x", "at"}


@pytest.mark.parametrize(
    "more",
    [
        {"additionalProperties": {"type": "null"}},
        {"additionalProperties": True},
        {"required": ["x", "y"]},
        {"minProperties": 2},
        {"allOf": [{"properties": {"y": {"type": "null"}}, "required": ["y"]}]},
        {"anyOf": [{"properties": {"y": {"type": "null"}}, "required": ["y"]}]},
    ],
    ids=lambda more: next(iter(more)),
)
def test_an_object_that_must_or_may_have_others_is_left_as_it_is(more: dict[str, Any]) -> None:
    text = spaced(POINT | more, lenient=True)
    assert {key: value for key, value in json.loads(text).items() if key != "x-guidance"} == POINT | more
    assert '"additionalProperties"' not in spaced(POINT, lenient=False)


def test_a_grammar_that_hits_a_limit_ends_its_own_request_alone(llm: LLM) -> None:
    good = StructuredOutputs(choice=["one two three four five six"])
    llm.engine.reset_cache()
    llm.engine.add("good", [5, 6, 7] * 20, asking(good, logprobs=0))
    llm.engine.add("bad", [5, 6], asking(StructuredOutputs(regex="a+")))
    request = llm.engine.scheduler.find("bad")
    assert request is not None
    assert request.grammar is not None
    request.grammar.accept(0)  # not an "a": the grammar is in error from here on, as after a limit
    outputs: dict[str, list[Any]] = {"good": [], "bad": []}
    while llm.engine.has_unfinished:
        for output in llm.engine.step():
            outputs[output.request_id].append(output)
        llm.engine.cache.check()
    assert outputs["bad"][-1].finish_reason == "error"
    assert "structured_outputs" in outputs["bad"][-1].error
    assert outputs["good"][-1].finish_reason == "stop"
    assert llm.engine.stats()["blocks_cached"] > 0, "what others had cached is gone"
