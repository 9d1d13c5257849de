"""A cache hit, the batch, the chunk size or a preemption never changes an output; and the outputs are transformers'.

The whole grid is marked ``full``; the quick suite runs a sample of it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from radixkv.config import EngineConfig
from radixkv.engine import Engine
from radixkv.model.loader import ModelSource
from radixkv.model.tokenizer import load_tokenizer
from radixkv.platform import torch_threads
from radixkv.sampling_params import SamplingParams

pytestmark = pytest.mark.usefixtures("weights_are_loaded_once")

MODEL = "smollm2-135m"
MAX_TOKENS = 64
TIE = 1e-4
"""Two candidates whose logits are this close may be ordered either way by another order of float32 additions."""

SHORT = [
    "The capital of France is", "Once upon a time", "1, 1, 2, 3, 5, 8,", "To be, or not to be,", "Water boils at", "A", "\n\n",
    "Q: Why?", "My favourite colour", "In 1969,", "The quick brown fox", "E = m", "Dear Sir or Madam,", "Ingredients: 2 eggs,",
]  # fmt: skip
MULTILINGUAL = [
    "Die Hauptstadt von Deutschland ist", "La capitale de l'Italie est", "El perro corre por", "Столица России —", "日本の首都は",
    "中国的首都是", "عاصمة مصر هي", "भारत की राजधानी", "Η πρωτεύουσα της Ελλάδας", "서울은 대한민국의", "🙂🙃🙂🙃",
    "Zażółć gęślą jaźń",
]  # fmt: skip
CODE = [
    "def fibonacci(n):\n    ", "#include <stdio.h>\nint main(void) {\n", "SELECT name, COUNT(*) FROM",
    "fn main() {\n    let v: Vec<i32> =", '{"name": "radix", "children": [', "class Node:\n    def __init__(self, key):\n",
    "for i in range(10):\n    if i % 2", "<html>\n<body>\n<h1>",
]  # fmt: skip
QUESTIONS = [
    "What is the capital of Italy?", "Write a haiku about rain.", "How many legs has a spider?", "Explain gravity in one sentence.",
    "Translate 'good morning' to French.", "Name three primes.", "What is 17 + 25?", "Who wrote Hamlet?",
]  # fmt: skip
FEW_SHOT = "\n\n".join(
    f"Question: A box holds {a} apples and {b} pears. How much fruit is in {c} boxes?\n"
    f"Answer: {a} + {b} = {a + b}, times {c} is {c * (a + b)}."
    for a, b, c in itertools.islice(itertools.product((3, 5, 8), (2, 7), (4, 6)), 10)
)


def varied_prompts(tokenizer) -> list[list[int]]:
    """50 prompts: short, multilingual, code, chat, few-shot with a shared prefix, and three of over 2,000 tokens."""
    texts = SHORT + MULTILINGUAL + CODE
    prompts = [tokenizer.encode(text) for text in texts]
    for question in QUESTIONS:
        chat = [{"role": "user", "content": question}]
        prompts.append(tokenizer.encode(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)))
    for apples in (4, 6, 9, 12, 15):
        text = f"{FEW_SHOT}\n\nQuestion: A box holds {apples} apples and 3 pears. How much fruit is in 5 boxes?\nAnswer:"
        prompts.append(tokenizer.encode(text))
    story = " ".join(f"On day {day}, the ship sailed {day * 7 % 31} miles and met {day * 3 % 11} whales." for day in range(1, 200))
    story_ids = tokenizer.encode(story)
    prompts += [story_ids[:2010], [*story_ids[:1500], *story_ids[1700:2300]], story_ids[5:2200]]
    assert len(prompts) == 50
    assert sum(len(prompt) > 2000 for prompt in prompts) == 3
    return prompts


@pytest.fixture(scope="module")
def prompts(default_model: ModelSource) -> list[list[int]]:
    return varied_prompts(load_tokenizer(default_model))


@dataclasses.dataclass(frozen=True)
class Mode:
    """A way to run the same prompts."""

    name: str
    caching: bool = True
    warm: bool = False
    batch: int = 16
    chunk: int = 512
    kv_cache_tokens: int = 16384
    preempts: bool = False
    block_size: int = 16
    longest: int = 4096
    """Longer prompts are left out."""

    def takes(self, items: list[list[int]], prompts: list[list[int]]) -> list[list[int]]:
        """Those of ``items`` that belong to prompts which this mode runs."""
        return [item for item, prompt in zip(items, prompts, strict=True) if len(prompt) <= self.longest]


ALONE = Mode("alone, cache off", caching=False, batch=1)
MODES = [
    Mode("batch of 16, cache off", caching=False),
    Mode("batch of 16, cold"),
    Mode("batch of 16, warm", warm=True),
    Mode("chunks of 16", chunk=16),
    Mode("chunks of 100, blocks of 32", chunk=100, block_size=32),
    Mode("pool so small that short prompts are preempted", kv_cache_tokens=640, preempts=True, longest=500),
    Mode("pool so small that long prompts are preempted", kv_cache_tokens=2688, preempts=True),
]


def run(mode: Mode, prompts: list[list[int]], max_tokens: int, dtype: str) -> list[list[int]]:
    """Greedy outputs; the cache is checked after every step, and at the end that nothing is held."""
    engine = Engine(
        EngineConfig(
            model=MODEL, dtype=dtype, device="cpu", kv_cache_tokens=mode.kv_cache_tokens, block_size=mode.block_size,
            enable_prefix_caching=mode.caching, max_num_seqs=mode.batch, max_batch_tokens=max(mode.chunk, mode.batch),
        )
    )  # fmt: skip
    outputs: list[list[int]] = []
    for _ in range(1 + mode.warm):
        outputs = [[] for _ in prompts]
        for i, prompt in enumerate(prompts):
            engine.add(str(i), prompt, SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True))
        while engine.has_unfinished:
            for output in engine.step():
                assert output.finish_reason != "error", output.error
                outputs[int(output.request_id)] += output.token_ids
            engine.cache.check()
    stats = engine.stats()
    assert stats["blocks_locked"] == 0
    assert stats["blocks_free"] + stats["blocks_cached"] == stats["blocks_total"]
    assert mode.caching or stats["cached_tokens"] == 0
    assert not mode.preempts or stats["preemptions"] > 0, "the pool was large enough: nothing was preempted"
    if mode.warm:
        assert stats["cached_tokens"] > 0.4 * stats["prompt_tokens"]
    return outputs


def batches_of_like_length(prompts: list[list[int]], most: int) -> Iterator[list[int]]:
    """Indices of prompts, where the longest of a batch is at most twice as long as the shortest, or short anyway."""
    batch: list[int] = []
    for i in sorted(range(len(prompts)), key=lambda i: len(prompts[i])):
        if len(batch) == most or (batch and len(prompts[i]) > max(32, 2 * len(prompts[batch[0]]))):
            yield batch
            batch = []
        batch.append(i)
    yield batch


def transformers_outputs(model: Any, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """transformers' own greedy ``generate``, in batches padded on the left."""
    outputs: dict[int, list[int]] = {}
    for batch in batches_of_like_length(prompts, 16):
        longest = max(len(prompts[i]) for i in batch)
        ids = torch.tensor([[0] * (longest - len(prompts[i])) + prompts[i] for i in batch])
        mask = torch.tensor([[0] * (longest - len(prompts[i])) + [1] * len(prompts[i]) for i in batch])
        # torch's threads wait for each other in every operation, which takes ages when other tests keep the cores busy.
        with torch.inference_mode(), torch_threads(1):
            generated = model.generate(
                ids, attention_mask=mask, max_new_tokens=max_tokens, min_new_tokens=max_tokens, do_sample=False, eos_token_id=None,
                pad_token_id=0,
            )  # fmt: skip
        outputs.update(zip(batch, generated[:, longest:].tolist(), strict=True))
    return [outputs[i] for i in range(len(prompts))]


def assert_as_transformers(model: Any, prompts: list[list[int]], outputs: list[list[int]], max_tokens: int) -> int:
    """Token for token, but for ties; returns how many prompts met one."""
    ties = 0
    for prompt, output, expected in zip(prompts, outputs, transformers_outputs(model, prompts, max_tokens), strict=True):
        if output == expected:
            continue
        ties += 1
        first = next(i for i, (ours, theirs) in enumerate(zip(output, expected, strict=True)) if ours != theirs)
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + expected[:first]])).logits[0, -1]
        gap = (logits[expected[first]] - logits[output[first]]).item()
        assert abs(gap) <= TIE, f"token {first} after {prompt[:8]}...: {output[first]} for {expected[first]}, logits {gap} apart"
    return ties


def test_a_sample_of_prompts_gives_transformers_tokens_in_every_mode(transformers_default_model, prompts):
    sample, max_tokens = [prompts[i] for i in (0, 18, 26, 42, 43)], 24
    outputs = run(ALONE, sample, max_tokens, "float32")
    assert_as_transformers(transformers_default_model, sample[1:4], [output[:16] for output in outputs[1:4]], 16)
    barely_enough = 16 * (max(map(len, sample)) // 16 + 7)
    for mode in (MODES[1], MODES[2], dataclasses.replace(MODES[-1], kv_cache_tokens=barely_enough)):
        assert run(mode, sample, max_tokens, "float32") == outputs, mode.name


# Classes, so that the two dtypes can be run by two processes.


@pytest.mark.full
@pytest.mark.timeout(1800)
class TestFloat32:
    @pytest.fixture(scope="class")
    def alone(self, prompts) -> list[list[int]]:
        """Outputs of prompts run one by one without a cache."""
        return run(ALONE, prompts, MAX_TOKENS, "float32")

    def test_50_prompts_of_64_tokens_equal_transformers(self, transformers_default_model, prompts, alone, record_property):
        ties = assert_as_transformers(transformers_default_model, prompts, alone, MAX_TOKENS)
        equal = f"{len(prompts) - ties} of {len(prompts)} prompts equal transformers token for token, {ties} up to a tie"
        record_property("finding", f"float32: {equal}")

    @pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
    def test_outputs_are_the_same_in_every_mode(self, mode, prompts, alone):
        outputs = run(mode, mode.takes(prompts, prompts), MAX_TOKENS, "float32")
        assert outputs == mode.takes(alone, prompts)


@pytest.mark.full
@pytest.mark.timeout(1800)
class TestBfloat16:
    def test_outputs_are_the_same_in_every_mode(self, prompts, record_property):
        alone = run(ALONE, prompts, MAX_TOKENS, "bfloat16")
        differing: set[tuple[int, ...]] = set()
        for mode in MODES:
            outputs = run(mode, mode.takes(prompts, prompts), MAX_TOKENS, "bfloat16")
            expected = mode.takes(alone, prompts)
            here = {tuple(b) for a, b in zip(outputs, expected, strict=True) if a != b}
            record_property("finding", f"bfloat16, {mode.name}: {len(here)} of {len(expected)} prompts differ from alone")
            differing |= here
        record_property("finding", f"bfloat16: {len(differing) / len(prompts):.1%} of prompts differ in any mode")
        assert not differing
