"""Bursts of prompts that share prefixes, in several shapes, and the most tokens of them that any order can hit.

Every forest is made of random token ids from a seed, so prefixes end anywhere in a block, as real ones do.  Prompts come in random
order.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]
Forest = Callable[[np.random.Generator, int], list[Tokens]]
VOCABULARY = 32_000


def _text(rng: np.random.Generator, least: int, most: int) -> Tokens:
    return rng.integers(0, VOCABULARY, int(rng.integers(least, most + 1)), dtype=np.int32)


def _joined(*parts: Tokens) -> Tokens:
    return np.concatenate(parts)


def few_deep(rng: np.random.Generator, n: int) -> list[Tokens]:
    """Three trees of five levels with two or three branches each; requests are at the leaves."""
    prompts: list[Tokens] = []

    def grow(prefix: Tokens, level: int, wanted: int) -> None:
        if level == 5 or wanted == 1:
            prompts.extend(_joined(prefix, _text(rng, 20, 80)) for _ in range(wanted))
            return
        branches = min(wanted, int(rng.integers(2, 4)))
        for share in rng.multinomial(wanted - branches, [1 / branches] * branches) + 1:
            grow(_joined(prefix, _text(rng, 60, 400)), level + 1, int(share))

    for tree in range(3):
        grow(_text(rng, 200, 800), 1, n // 3 + (tree < n % 3))
    return prompts


def many_shallow(rng: np.random.Generator, n: int) -> list[Tokens]:
    """A prefix of 100 to 600 tokens for every five requests or so."""
    prefixes = [_text(rng, 100, 600) for _ in range(max(1, n // 5))]
    return [_joined(prefixes[rng.integers(len(prefixes))], _text(rng, 20, 80)) for _ in range(n)]


def skewed(rng: np.random.Generator, n: int) -> list[Tokens]:
    """Prefixes as popular as Zipf's law has it: a few have most of the requests, many have one."""
    weights = 1 / np.arange(1, max(2, n // 4) + 1)
    prefixes = [_text(rng, 100, 1500) for _ in weights]
    return [_joined(prefixes[i], _text(rng, 20, 150)) for i in rng.choice(len(prefixes), n, p=weights / weights.sum())]


def few_shot(rng: np.random.Generator, n: int) -> list[Tokens]:
    """One header for all, four tasks, three sets of worked examples of each, a question at the end."""
    header = _text(rng, 30, 60)
    tasks = [_joined(header, _text(rng, 100, 300)) for _ in range(4)]
    sets = [_joined(task, _text(rng, 400, 1000)) for task in tasks for _ in range(3)]
    return [_joined(sets[rng.integers(len(sets))], _text(rng, 20, 100)) for _ in range(n)]


def chats(rng: np.random.Generator, n: int) -> list[Tokens]:
    """Two system prompts, conversations of one to eight turns; every turn's prompt begins with the whole one before."""
    systems = [_text(rng, 150, 400) for _ in range(2)]
    prompts: list[Tokens] = []
    while len(prompts) < n:
        prompt = systems[rng.integers(2)]
        for _ in range(min(n - len(prompts), int(rng.integers(1, 9)))):
            prompt = _joined(prompt, _text(rng, 40, 250))
            prompts.append(prompt)
    return prompts


def agents(rng: np.random.Generator, n: int) -> list[Tokens]:
    """A tree of thought for each of a few agents behind one system prompt: a request at every node, grown at random."""
    system = _text(rng, 800, 1200)
    tasks = [_joined(system, _text(rng, 50, 200)) for _ in range(max(1, n // 40))]
    thoughts = tasks.copy()
    while len(thoughts) < n + len(tasks):
        thoughts.append(_joined(thoughts[rng.integers(len(thoughts))], _text(rng, 40, 160)))
    return thoughts[len(tasks) :]


def samples(rng: np.random.Generator, n: int) -> list[Tokens]:
    """Parallel sampling: each prompt four times, every other prompt behind one of two shared prefixes."""
    prefixes = [_text(rng, 300, 900) for _ in range(2)]
    questions = [_joined(*([prefixes[i % 4 // 2]] if i % 2 else []), _text(rng, 50, 500)) for i in range(-(-n // 4))]
    return [questions[i // 4] for i in range(n)]


FORESTS: dict[str, Forest] = {
    "few-deep": few_deep, "many-shallow": many_shallow, "skewed": skewed, "few-shot": few_shot, "chats": chats, "agents": agents,
    "samples": samples,
}  # fmt: skip


def burst(shape: str, n: int, seed: int) -> list[Tokens]:
    """``n`` prompts of a forest, in random order; the same for the same arguments."""
    rng = np.random.default_rng([seed, n, list(FORESTS).index(shape)])
    prompts = FORESTS[shape](rng, n)
    return [prompts[i] for i in rng.permutation(len(prompts))]


def shared_tokens(a: Tokens, b: Tokens) -> int:
    """Leading tokens in common."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n


def most_hits(prompts: Sequence[Tokens], block_size: int, output_tokens: int = 0) -> int:
    """The most tokens that any order can hit, whatever the size of the cache.

    Each token of the prompts' trie has to be computed by the first that comes by, and can be hit by all others.  Two things are
    lost to everyone: only whole blocks are kept, so tokens after the last whole block of every sequence through them are never hit;
    and the last token of a prompt is always computed.  A sequence is a prompt and its ``output_tokens``, of which the last is not
    computed.  The depth-first order that takes the longest prompt of each subtree first loses nothing else (Zheng et al. 2023,
    theorem 3.1), if requests run one by one and the cache holds the longest prompt, and one block more to copy rows from.
    """
    ordered = sorted(prompts, key=lambda prompt: prompt.tobytes())
    lengths = np.array([len(prompt) for prompt in ordered])
    shared = np.array([0] + [shared_tokens(a, b) for a, b in itertools.pairwise(ordered)])
    kept = (lengths + max(output_tokens - 1, 0)) // block_size * block_size
    total = 0
    nodes = [(0, len(ordered), 0)]
    while nodes:
        start, stop, depth = nodes.pop()  # these prompts share ``depth`` tokens, which are counted
        if stop - start == 1:
            continue
        end = int(shared[start + 1 : stop].min())
        last = min(end, int(kept[start:stop].max()))
        total += max(last - depth, 0) * (stop - start - 1)
        if depth < last == end:  # those that end here compute their last token; the first to come may be one that keeps it
            ending = np.flatnonzero(lengths[start:stop] == end)
            if len(ending):
                total -= len(ending) - int(kept[start + ending[0]] >= end or len(ending) == stop - start)
        forks = [start, *(start + 1 + np.flatnonzero(shared[start + 1 : stop] == end)).tolist(), stop]
        nodes.extend((low, high, end) for low, high in itertools.pairwise(forks))
    return total


def depth_first(prompts: Sequence[Tokens]) -> list[Tokens]:
    """The prompts in a depth-first order that takes the longest prompt of each subtree first: what :func:`most_hits` counts."""
    rest = sorted(prompts, key=lambda prompt: prompt.tobytes())

    def order(group: list[Tokens], depth: int) -> list[Tokens]:
        branches: dict[int, list[Tokens]] = {}
        for prompt in group:
            branches.setdefault(int(prompt[depth]) if depth < len(prompt) else -1, []).append(prompt)
        done = branches.pop(-1, [])
        longest_first = sorted(branches.values(), key=lambda branch: -max(map(len, branch)))
        ordered: list[Tokens] = []
        for branch in longest_first:
            shared = min(shared_tokens(branch[0], prompt) for prompt in branch)
            ordered += branch if len(branch) == 1 else order(branch, shared)
        return ordered + done

    return order(rest, 0)
