"""Engine: what it refuses, and that it survives what goes wrong, on a tiny random model."""

from __future__ import annotations

import math
import operator
from pathlib import Path
from typing import get_args

import pytest
import torch

from radixkv.cache.eviction import LFU, EvictionPolicyName
from radixkv.cache.retention import Retention
from radixkv.config import EngineConfig, EvictionPolicy
from radixkv.engine import Engine
from radixkv.sampling_params import SamplingParams

GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


@pytest.fixture
def engine(tiny_model: Path) -> Engine:
    return Engine(EngineConfig(model=str(tiny_model), device="cpu", kv_cache_tokens=512, max_model_len=256, max_batch_tokens=64))


def finish(engine: Engine) -> dict[str, list[int]]:
    outputs: dict[str, list[int]] = {}
    while engine.has_unfinished:
        for output in engine.step():
            outputs.setdefault(output.request_id, []).extend(output.token_ids)
        engine.cache.check()
    return outputs


@pytest.mark.parametrize(
    ("token_ids", "params", "message"),
    [
        ([], {}, "prompt must hold at least 1 token"),
        ([5] * 256, {}, "prompt must be at most 255 tokens here, got 256"),
        ([5] * 250, {}, "max_tokens must be at most 6 after a prompt of 250 tokens"),
        ([5, 10**6], {}, "prompt must be made of token ids from 0 to"),
        ([-1], {}, "prompt must be made of token ids from 0 to"),
        ([5], {"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ([5], {"max_tokens": -3}, "max_tokens must be at least 1, got -3"),
        ([5], {"temperature": math.nan}, "temperature must be between 0 and 100, got nan"),
        ([5], {"top_p": 0.0}, "top_p must be above 0 and at most 1"),
        ([5], {"stop_token_ids": (10**6,)}, "stop_token_ids must hold token ids from 0 to"),
        ([5], {"logit_bias": {10**6: 1.0}}, "logit_bias must hold token ids from 0 to"),
        ([5], {"logit_bias": {1: math.inf}}, r"logit_bias\[1\] must be between -100 and 100"),
        ([5], {"logprobs": 21}, "logprobs must be between 0 and 20"),
        ([5], {"seed": 2**63}, "seed must be a 64-bit integer"),
        ([5], {"seed": 1.5}, "seed has a wrong type: expected `int | null`, got `float`"),
        ([5], {"max_tokens": 2.5}, "max_tokens has a wrong type: expected `int`, got `float`"),
        ([5], {"max_tokens": "5"}, "max_tokens has a wrong type: expected `int`, got `str`"),
        ([5], {"temperature": None}, "temperature has a wrong type: expected `float`, got `null`"),
        ([5], {"stop": "ab"}, "stop has a wrong type: expected `array`, got `str`"),
        ([5], {"repetition_penalty": 1e-38}, "repetition_penalty must be between 0.01 and 10"),
        ([1.9, 2.2], {}, r"prompt must be a flat list of token ids from 0 to \d+, got \[1.9, 2.2\]"),
        ([None], {}, "prompt must be a flat list of token ids"),
        ([2**70], {}, "prompt must be a flat list of token ids"),
        ([[1, 2]], {}, "prompt must be a flat list of token ids"),
        ([[1], [2, 3]], {}, "prompt must be a flat list of token ids"),
        ([2**63], {}, "prompt must be made of token ids from 0 to"),
        ("ab", {}, "prompt must be a flat list of token ids"),
    ],
)
def test_a_bad_request_is_refused_by_field_and_limit_and_queues_nothing(engine: Engine, token_ids, params, message: str):
    with pytest.raises(ValueError, match=message):
        engine.add("bad", token_ids, SamplingParams(**{"max_tokens": 8, **params}))
    assert not engine.has_unfinished


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("block_size", 12),
        ("kv_cache_tokens", 8),
        ("max_batch_tokens", 0),
        ("max_num_seqs", 10**6),
        ("num_threads", 0),
        ("max_model_len", 1),
    ],
)
def test_a_bad_setting_is_refused_by_name(field: str, value: int):
    with pytest.raises(ValueError, match=f"{field} must be"):
        EngineConfig(**{field: value})


def test_a_request_id_in_use_is_refused(engine: Engine):
    engine.add("one", [5, 6, 7], GREEDY)
    with pytest.raises(ValueError, match="request_id must be new"):
        engine.add("one", [5, 6, 7], GREEDY)
    finish(engine)
    engine.add("one", [5, 6, 7], GREEDY)


def test_a_request_may_fill_the_context_to_the_last_token(engine: Engine):
    engine.add("full", [7] * 248, GREEDY)
    assert len(finish(engine)["full"]) == 8


def test_an_aborted_request_gives_its_blocks_back_and_says_nothing_more(engine: Engine):
    engine.add("aborted", list(range(3, 80)), GREEDY)
    engine.add("other", list(range(3, 80)), GREEDY)
    engine.step()
    assert engine.abort("aborted")
    assert not engine.abort("aborted")
    engine.cache.check()
    assert set(finish(engine)) == {"other"}
    assert engine.stats()["blocks_locked"] == 0


def test_a_failed_step_ends_its_requests_and_the_cache_forgets_what_was_not_computed(engine: Engine, monkeypatch):
    prompt = list(range(3, 60))
    engine.add("before", prompt, GREEDY)
    expected = finish(engine)["before"]
    engine.reset_cache()

    def fail(batch):
        raise torch.OutOfMemoryError("no memory left")

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "forward", fail)
        engine.add("doomed", prompt, GREEDY)
        (output,) = engine.step()
    assert (output.finish_reason, output.error) == ("error", "OutOfMemoryError: no memory left")
    assert not engine.has_unfinished
    engine.cache.check()
    assert engine.stats()["blocks_free"] == engine.stats()["blocks_total"], "blocks that were never written stayed in the tree"
    engine.add("after", prompt, GREEDY)
    assert finish(engine)["after"] == expected


@pytest.mark.parametrize("where", ["cache.take_copies", "cache.publish", "runner.forward", "_count"])
def test_ctrl_c_anywhere_in_a_step_leaves_nothing_locked_and_nothing_cached_that_was_not_computed(
    engine: Engine, monkeypatch, where: str
):
    prompt = list(range(3, 60))
    engine.add("before", prompt, GREEDY)
    expected = finish(engine)["before"]
    engine.reset_cache()
    engine.add("interrupted", prompt, GREEDY)
    owner, name = operator.attrgetter(where.rpartition(".")[0])(engine) if "." in where else engine, where.rpartition(".")[2]
    real = getattr(owner, name)

    def interrupt(*args, **kwargs):
        real(*args, **kwargs)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    assert not engine.has_unfinished
    assert engine.stats()["blocks_free"] == engine.stats()["blocks_total"]
    engine.cache.check()
    engine.add("after", prompt, GREEDY)
    assert finish(engine)["after"] == expected


def test_a_prompt_that_overflows_fails_alone(engine: Engine, monkeypatch):
    prompt = list(range(3, 60))
    engine.add("fine", prompt, GREEDY)
    expected = finish(engine)["fine"]
    real = engine.runner.forward

    def overflow(batch):
        logits = real(batch).clone()
        logits[[seq.request.request_id for seq in batch.sequences if seq.samples].index("bad")] = float("nan")
        return logits

    engine.add("fine", prompt, GREEDY)
    engine.add("bad", [7, 8, 9], GREEDY)
    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "forward", overflow)
        outputs = {output.request_id: output for output in engine.step()}
    assert outputs["bad"].finish_reason == "error"
    assert "not finite" in outputs["bad"].error
    assert [*outputs["fine"].token_ids, *finish(engine)["fine"]] == expected


def test_a_device_that_is_lost_ends_the_process_not_only_the_requests(engine: Engine, monkeypatch):
    def assert_on_device(batch):
        raise torch.AcceleratorError("device-side assert triggered")

    engine.add("doomed", [5, 6, 7], GREEDY)
    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "forward", assert_on_device)
        with pytest.raises(torch.AcceleratorError):
            engine.step()


def test_a_stop_token_ends_the_output_unless_end_of_sequence_is_ignored(engine: Engine):
    engine.add("free", [5, 6, 7], GREEDY)
    tokens = finish(engine)["free"]
    stop = tokens[3]
    engine.add("stopped", [5, 6, 7], SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, stop_token_ids=(stop,)))
    assert finish(engine)["stopped"] == tokens[: tokens.index(stop) + 1]


def test_seeded_sampling_gives_the_same_tokens_alone_batched_and_preempted(tiny_model: Path):
    params = [SamplingParams(max_tokens=40, temperature=1.0, seed=seed, ignore_eos=True) for seed in range(6)]
    prompts = [list(range(3 + 20 * i, 43 + 20 * i)) for i in range(6)]

    def outputs(kv_cache_tokens: int, max_num_seqs: int) -> tuple[dict[str, list[int]], int]:
        engine = Engine(
            EngineConfig(model=str(tiny_model), device="cpu", kv_cache_tokens=kv_cache_tokens, max_num_seqs=max_num_seqs)
        )
        for i, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
            engine.add(str(i), prompt, own)
        return finish(engine), engine.scheduler.num_preemptions

    alone, _ = outputs(4096, 1)
    batched, _ = outputs(4096, 6)
    preempted, num_preemptions = outputs(320, 6)
    assert num_preemptions > 0
    assert alone == batched == preempted
    assert len({tuple(tokens) for tokens in alone.values()}) == 6


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0},
        {"temperature": 1.5, "seed": 7},
        {"temperature": 0, "repetition_penalty": 1.3, "presence_penalty": 1.0, "frequency_penalty": 0.5},
        {"temperature": 1.0, "seed": -1, "top_k": 20, "frequency_penalty": 1.0, "logprobs": 2},
    ],
    ids=["greedy", "seeded", "penalties", "seeded with penalties and logprobs"],
)
@pytest.mark.parametrize("done", [1, 15, 16, 39])
def test_a_request_goes_on_behind_tokens_it_was_given_before_as_if_it_had_never_stopped(engine: Engine, params, done: int):
    prompt, sampling = list(range(5, 27)), SamplingParams(max_tokens=40, ignore_eos=True, **params)

    def run(output_token_ids: list[int]) -> list:
        engine.reset_cache()
        engine.add("a", prompt, sampling, output_token_ids=output_token_ids)
        outputs = []
        while engine.has_unfinished:
            outputs += engine.step()
            engine.cache.check()
        assert outputs[-1].finish_reason == "length"
        return outputs

    whole = run([])
    tokens = [output.token_ids[0] for output in whole]
    assert len(set(tokens)) > 1
    assert run(tokens[:done]) == whole[done:]


@pytest.mark.parametrize(
    ("output_token_ids", "message"),
    [
        ([5] * 8, r"output_token_ids must be fewer than max_tokens \(8\), got 8"),
        ([-1], "token ids from 0"),
        ([10**6], "token ids from 0"),
    ],
)
def test_tokens_given_before_are_checked_too(engine: Engine, output_token_ids, message: str):
    with pytest.raises(ValueError, match=message):
        engine.add("a", [5, 6], GREEDY, output_token_ids=output_token_ids)
    assert not engine.has_unfinished


def test_a_cache_larger_than_the_memory_is_refused_saying_what_it_takes_and_what_there_is(tiny_model: Path) -> None:
    words = r"kv_cache_tokens must fit into memory: \d+ tokens of this model take 47683\.7 GiB, and \d+\.\d GiB are available"
    with pytest.raises(ValueError, match=words):
        Engine(EngineConfig(model=str(tiny_model), device="cpu", dtype="float32", kv_cache_tokens=10**11))


def test_the_engine_says_why_prompts_missed_and_evicts_by_the_policy_of_its_configuration(tiny_model: Path):
    config = EngineConfig(model=str(tiny_model), device="cpu", kv_cache_tokens=512, max_model_len=256, eviction_policy="lfu")
    engine = Engine(config)
    for name in ("first", "again"):
        engine.add(name, list(range(3, 60)), GREEDY)
        finish(engine)
    assert isinstance(engine.cache.tree.order.policy, LFU)
    stats = engine.stats()
    assert sum(stats["missed_tokens"].values()) == stats["prompt_tokens"] - stats["cached_tokens"]
    assert stats["missed_tokens"]["new"] == 57


def test_the_configuration_offers_every_eviction_policy_of_the_cache():
    assert get_args(EvictionPolicy) == get_args(EvictionPolicyName)


def test_the_first_output_says_why_the_prompt_was_not_cached(engine: Engine):
    missed = []
    for name, prompt in (("cold", range(3, 60)), ("warm", range(3, 60)), ("other", [*range(3, 30), *range(100, 140)])):
        engine.add(name, list(prompt), GREEDY)
        while engine.has_unfinished:
            for output in engine.step():
                if output.missed is not None:
                    missed.append(output.missed)
                    assert sum(output.missed.values()) == output.num_prompt_tokens - output.num_cached_tokens
    assert len(missed) == 3, "said once a request"
    assert missed[0] == {"new": 57}
    assert missed[2] == {"diverged": 40}


def test_a_prefix_with_retention_outlives_those_without(engine: Engine):
    def cached(name: str, first: int, retention: Retention | None = None) -> int:
        engine.add(name, list(range(first, first + 100)), GREEDY, retention=retention)
        found = 0
        while engine.has_unfinished:
            for output in engine.step():
                found = output.num_cached_tokens
        return found

    with pytest.raises(ValueError, match=r"retention\.priority"):
        engine.add("bad", [5], GREEDY, retention=Retention(0, 1.0))
    cached("kept", 3, Retention(5, 1000.0))
    cached("not", 110)
    for i in range(8):  # more than the cache holds
        cached(str(i), 120 + 10 * i)
    assert cached("kept again", 3) > 90
    assert cached("not again", 110) < 90
