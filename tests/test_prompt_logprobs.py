"""Log-probabilities of prompts, which take all of a prompt's hidden states, cached or not, on a tiny random model."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from radixkv import LLM, SamplingParams
from radixkv.config import EngineConfig
from radixkv.engine import Engine
from radixkv.scheduling.request import RequestOutput, TokenLogprobs

PROMPT = random.Random(5).choices(range(3, 300), k=150)
GREEDY = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
SCORED = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, prompt_logprobs=3)


def make_engine(model: Path, **config: Any) -> Engine:
    settings = {"device": "cpu", "dtype": "float32", "kv_cache_tokens": 1024, "max_model_len": 256, "max_batch_tokens": 64}
    return Engine(EngineConfig(model=str(model), **(settings | config)))


@pytest.fixture
def engine(tiny_model: Path) -> Engine:
    return make_engine(tiny_model)


def first_outputs(engine: Engine) -> dict[str, RequestOutput]:
    """Run everything; of each request, the output that carries its prompt's log-probabilities."""
    first: dict[str, RequestOutput] = {}
    while engine.has_unfinished:
        for output in engine.step():
            assert output.finish_reason != "error", output.error
            assert first.setdefault(output.request_id, output) is output or output.prompt_logprobs is None
        engine.cache.check()
    return first


def scores(engine: Engine, prompt: list[int] = PROMPT, params: SamplingParams = SCORED) -> list[TokenLogprobs]:
    engine.add("scored", prompt, params)
    found = first_outputs(engine)["scored"].prompt_logprobs
    assert found is not None
    return found


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> list[TokenLogprobs]:
    """Of ``PROMPT``, computed alone, at once, with nothing cached."""
    return scores(make_engine(tiny_model, max_batch_tokens=1024))


def test_they_are_those_of_transformers(tiny_model: Path, expected: list[TokenLogprobs]) -> None:
    with torch.inference_mode():
        logits = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)(torch.tensor([PROMPT])).logits[0]
    theirs = logits.log_softmax(-1)
    assert [token.token_id for token in expected] == PROMPT[1:]
    for i, token in enumerate(expected):
        assert token.logprob == pytest.approx(theirs[i, PROMPT[i + 1]].item(), abs=1e-4)
        assert [logprob for _, logprob in token.top] == pytest.approx(theirs[i].topk(3).values.tolist(), abs=1e-4)


@pytest.mark.parametrize("cached", [1, 15, 16, 17, 100, 149, 150])
def test_a_cached_prefix_changes_none_of_them(engine: Engine, expected: list[TokenLogprobs], cached: int) -> None:
    engine.add("before", PROMPT[:cached], GREEDY)
    tokens = first_outputs(engine)["before"].token_ids
    assert scores(engine) == expected
    assert scores(engine) == expected
    engine.add("after", PROMPT[:cached], GREEDY)
    assert first_outputs(engine)["after"].token_ids == tokens


def test_a_prompt_that_is_scored_counts_as_computed_and_is_found_by_others(engine: Engine) -> None:
    assert scores(engine)
    engine.add("scored", PROMPT, SCORED)
    engine.add("plain", PROMPT, GREEDY)
    first = first_outputs(engine)
    assert first["scored"].num_cached_tokens == 0
    assert first["plain"].num_cached_tokens >= 144
    missed = first["scored"].missed
    assert missed is not None
    assert missed["logprobs"] >= 144
    assert sum(missed.values()) == 150
    assert first["plain"].prompt_logprobs is None


def test_prompts_that_arrive_together_are_scored_as_each_alone(engine: Engine, expected: list[TokenLogprobs]) -> None:
    for i in range(4):
        engine.add(f"scored {i}", PROMPT[: 150 - i], SCORED)
        engine.add(f"plain {i}", PROMPT[: 150 - i], GREEDY)
    first = first_outputs(engine)
    for i in range(4):
        assert first[f"scored {i}"].prompt_logprobs == expected[: 149 - i]
        assert first[f"scored {i}"].token_ids == first[f"plain {i}"].token_ids


def test_a_prompt_preempted_while_it_is_scored_is_scored_once(tiny_model: Path, expected: list[TokenLogprobs]) -> None:
    engine = make_engine(tiny_model, kv_cache_tokens=256, max_batch_tokens=4, max_num_seqs=2)
    engine.add("old", PROMPT[60:0:-1], SamplingParams(max_tokens=60, temperature=0, ignore_eos=True))
    engine.add("scored", PROMPT, SCORED)
    request = engine.scheduler.find("scored")
    assert request is not None
    while not engine.scheduler.num_preemptions:
        engine.step()
    assert request.prompt_logprobs
    assert len(request.prompt_logprobs) < 149
    assert first_outputs(engine)["scored"].prompt_logprobs == expected


def test_a_prompt_of_one_token_has_none_and_their_number_may_be_0(engine: Engine, expected: list[TokenLogprobs]) -> None:
    assert scores(engine, [7]) == []
    bare = scores(engine, params=SamplingParams(max_tokens=1, prompt_logprobs=0))
    assert [token.logprob for token in bare] == [token.logprob for token in expected]
    assert all(token.top == [] for token in bare)


def test_a_request_that_goes_on_behind_tokens_is_not_scored_again(engine: Engine) -> None:
    engine.add("resumed", PROMPT, SCORED, output_token_ids=[5])
    assert first_outputs(engine)["resumed"].prompt_logprobs is None


def test_llm_gives_them(tiny_model: Path, expected: list[TokenLogprobs]) -> None:
    llm = LLM(str(tiny_model), device="cpu", dtype="float32", kv_cache_tokens=1024)
    (output,) = llm.generate([PROMPT], SCORED, use_tqdm=False)
    assert output.prompt_logprobs == expected
    assert llm.generate([PROMPT], GREEDY, use_tqdm=False)[0].prompt_logprobs is None


@pytest.mark.parametrize("count", [-1, 21])
def test_their_number_has_a_limit(engine: Engine, count: int) -> None:
    with pytest.raises(ValueError, match="prompt_logprobs must be between 0 and 20"):
        engine.add("bad", PROMPT, SamplingParams(prompt_logprobs=count))
