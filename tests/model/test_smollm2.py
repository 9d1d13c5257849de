"""The default model itself: its tokenizer, and its logits against transformers reading the same file."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from radixkv.model.loader import ModelSource, load_model_config
from radixkv.model.sampler import sample
from radixkv.model.tokenizer import load_tokenizer

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def tokenizer(default_model: ModelSource) -> Any:
    return load_tokenizer(default_model)


def test_the_config_is_the_models(default_model: ModelSource) -> None:
    config = load_model_config(default_model)
    assert (config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim) == (30, 576, 9, 3, 64)
    assert (config.vocab_size, config.max_position_embeddings, config.rope.theta) == (49152, 8192, 100000.0)
    assert config.tie_word_embeddings
    assert config.kv_bytes_per_token("bfloat16") == 23040


def test_end_of_turn_is_the_end_of_sequence(default_model: ModelSource, tokenizer: Any) -> None:
    assert load_model_config(default_model).eos_token_ids == (tokenizer.convert_tokens_to_ids("<|im_end|>"),) == (2,)
    assert tokenizer.eos_token == "<|im_end|>"  # noqa: S105


def test_special_tokens_are_single_ids_and_skipped_on_request(tokenizer: Any) -> None:
    assert tokenizer("<|im_start|>user\n<|im_end|><|endoftext|>").input_ids == [1, 4093, 198, 2, 0]
    assert tokenizer.decode([1, 4093, 2], skip_special_tokens=True) == "user"
    assert tokenizer("plain").input_ids[0] != tokenizer.bos_token_id, "SmolLM2 starts no text with <|im_start|> by itself"


def test_the_chat_template_adds_the_models_own_system_prompt(tokenizer: Any) -> None:
    text = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, tokenize=False)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n")


def test_each_digit_is_a_token_and_does_not_take_the_space_before_it(tokenizer: Any) -> None:
    assert tokenizer.tokenize("in 2024") == ["in", "Ġ", "2", "0", "2", "4"]
    assert tokenizer.tokenize("a   12") == ["a", "ĠĠĠ", "1", "2"]


TEXTS = [
    "Hello, wörld! It's €5.",
    "def f(x):\n\treturn x**2  # ok\n\n\n    y",
    "Привет こんにちは 世界 안녕 مرحبا",
    "🙂👩\u200d👩\u200d👧 ½ x²  \r\n",
    "  lead",
    "",
    "\x00\x7f",
]


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_a_round_trip(text: str, tokenizer: Any) -> None:
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_the_model_answers(default_model: ModelSource, tokenizer: Any, kit: SimpleNamespace) -> None:
    driver = kit.Driver(str(default_model.path))
    prompt = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True).input_ids
    assert "Paris" in tokenizer.decode(_greedy(kit, driver, prompt, 8))


def _greedy(kit: SimpleNamespace, driver: Any, prompt: list[int], count: int) -> list[int]:
    request = driver.request(prompt, count)
    computed = 0
    while request.num_output_tokens < count:
        logits = driver.runner.forward(kit.batch_of((request, computed, request.num_tokens - computed)))
        computed = request.num_tokens
        request.append(sample(logits, [request])[0][0])
    return request.output_token_ids.tolist()


@pytest.mark.full
def test_logits_and_greedy_tokens_equal_transformers_on_the_same_file(
    default_model: ModelSource, transformers_default_model: Any, tokenizer: Any, kit: SimpleNamespace
) -> None:
    driver = kit.Driver(str(default_model.path), num_blocks=400)
    texts = ["def fibonacci(n):\n    ", "The 3 laws of thermodynamics are: 1."]
    prompts = [
        tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True).input_ids,
        *(tokenizer(text).input_ids for text in texts),
    ]
    num_decoded = 4
    for tokens, ours in zip(prompts, driver.logits(prompts, num_decoded, chunk=16), strict=True):
        theirs = kit.reference_logits(transformers_default_model, tokens)[len(tokens) - num_decoded - 1 :]
        torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=1e-3)
        expected = transformers_default_model.generate(
            torch.tensor([tokens]), max_new_tokens=20, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        assert _greedy(kit, driver, tokens, 20) == expected[0, len(tokens) :].tolist()
