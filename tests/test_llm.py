"""LLM: the offline API, on a tiny random model."""

from __future__ import annotations

from pathlib import Path

import pytest

from radixkv import LLM, SamplingParams

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> LLM:
    return LLM(str(tiny_model), device="cpu", kv_cache_tokens=4096)


def test_outputs_keep_the_order_of_prompts_given_as_text_or_token_ids(llm: LLM):
    texts = ["the lazy dog", "the quick brown fox jumps over", "a"]
    outputs = llm.generate(texts, GREEDY)
    assert [output.num_prompt_tokens for output in outputs] == [len(llm.tokenizer.encode(text)) for text in texts]
    from_ids = llm.generate([llm.tokenizer.encode(text) for text in texts], GREEDY)
    assert [output.token_ids for output in from_ids] == [output.token_ids for output in outputs]
    assert all(len(output.token_ids) == 12 and output.finish_reason == "length" for output in outputs)


def test_one_prompt_may_be_a_string_and_each_prompt_may_have_its_own_parameters(llm: LLM):
    (output,) = llm.generate("the quick", GREEDY)
    short = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
    outputs = llm.generate(["the quick", "the quick"], [GREEDY, short])
    assert [len(o.token_ids) for o in outputs] == [12, 3]
    assert outputs[1].token_ids == output.token_ids[:3]
    with pytest.raises(ValueError, match="params must be one for all or one for each of 2 prompts, got 1"):
        llm.generate(["a", "b"], [GREEDY])


def test_the_text_is_the_decoded_tokens_and_deltas_join_to_it(llm: LLM):
    (output,) = llm.generate(["the quick"], GREEDY)
    assert output.text == llm.tokenizer.decode(output.token_ids, skip_special_tokens=True)
    assert "".join(delta.text for delta in llm.stream(["the quick"], GREEDY)) == output.text


def test_a_stop_string_ends_the_output_before_it(llm: LLM):
    (output,) = llm.generate(["the quick"], GREEDY)
    stop = output.text[4:6]
    (stopped,) = llm.generate(["the quick"], SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, stop=(stop,)))
    assert stopped.text == output.text[: output.text.index(stop)]
    assert stopped.finish_reason == "stop"
    assert llm.engine.stats()["blocks_locked"] == 0


def test_a_second_prompt_that_begins_alike_is_served_from_the_cache(llm: LLM):
    prefix = "the quick brown fox jumps over the lazy dog. " * 4
    llm.generate([prefix + "one"], GREEDY)
    (output,) = llm.generate([prefix + "two"], GREEDY)
    assert output.num_cached_tokens >= len(llm.tokenizer.encode(prefix)) - 1
    report = llm.report()
    assert report.hit_tokens > 0
    assert "hit rate" in str(report)


def test_a_bad_prompt_is_named_and_leaves_nothing_running(llm: LLM):
    with pytest.raises(ValueError, match="prompt 1: prompt must hold at least 1 token"):
        llm.generate([[5, 6], []], GREEDY)
    assert not llm.engine.has_unfinished


def test_text_that_is_no_unicode_is_refused_by_name(llm: LLM):
    with pytest.raises(ValueError, match="prompt 1: prompt must be valid Unicode text"):
        llm.generate(["fine", "\ud800"], GREEDY)
    assert not llm.engine.has_unfinished


def test_closing_a_stream_aborts_what_still_runs(llm: LLM):
    stream = llm.stream(["the quick", "brown fox"], GREEDY)
    next(stream)
    stream.close()
    assert not llm.engine.has_unfinished
    assert llm.engine.stats()["blocks_locked"] == 0


def test_streams_may_be_open_side_by_side(llm: LLM):
    expected = [output.token_ids for output in llm.generate(["the quick", "brown fox"], GREEDY)]
    first, second = llm.stream(["the quick"], GREEDY), llm.stream(["brown fox"], GREEDY)
    tokens: tuple[list[int], list[int]] = ([], [])
    tokens[0].extend(next(first).token_ids)
    assert llm.generate(["brown fox"], GREEDY)[0].token_ids == expected[1]
    tokens[1].extend(next(second).token_ids)
    for stream, own in zip((first, second), tokens, strict=True):
        for delta in stream:
            own.extend(delta.token_ids)
    assert list(tokens) == expected
    assert llm.engine.stats()["blocks_locked"] == 0


def test_a_stream_whose_requests_were_interrupted_in_another_says_so(llm: LLM, monkeypatch):
    def interrupt():
        raise KeyboardInterrupt

    stream = llm.stream(["the quick"], GREEDY)
    next(stream)
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "_step", interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["brown fox"], GREEDY)
    with pytest.raises(RuntimeError, match="interrupted"):
        next(stream)


def test_chat_answers_one_conversation_or_several(llm: LLM):
    conversation = [{"role": "user", "content": "the quick brown fox?"}]
    (one,) = llm.chat(conversation, GREEDY)
    several = llm.chat([conversation, conversation], GREEDY)
    assert [output.token_ids for output in several] == [one.token_ids] * 2


def test_logprobs_come_one_a_token_best_first(llm: LLM):
    (output,) = llm.generate(["the quick"], SamplingParams(max_tokens=5, temperature=0, ignore_eos=True, logprobs=3))
    assert [entry.token_id for entry in output.logprobs] == output.token_ids
    for entry in output.logprobs:
        assert len(entry.top) == 3
        assert entry.top[0] == (entry.token_id, entry.logprob)
