"""Eviction: from the tails of the least valuable unlocked leaves, just as many blocks as needed, in the order of each policy."""

from __future__ import annotations

from typing import Literal

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from radixkv.cache import Node, PrefixCache, Retention

from .serving import LONG, cached, explaining, held, joined, run, serve

PolicyName = Literal["lru", "lfu", "cost"]
every_policy = pytest.mark.parametrize("policy", ["lru", "lfu", "cost"])


# -- just as many as needed, from the tail


@every_policy
def test_each_block_asked_for_is_taken_from_the_tail_and_no_other(policy: PolicyName):
    cache = cached(16, 4, LONG, LONG + 100, policy=policy)
    for evicted in range(1, 9):
        assert cache.evict(1) == 1
        assert held(cache, LONG) + held(cache, LONG + 100) == 8 - evicted
        cache.check()
    assert cache.evict(1) == 0


@pytest.mark.parametrize("n", range(12))
def test_an_eviction_takes_as_many_as_it_was_asked_for_or_as_there_are(n: int):
    cache = cached(16, 4, LONG, LONG + 100)
    assert cache.evict(n) == min(n, 8)
    assert (held(cache, LONG), held(cache, LONG + 100)) == (max(4 - n, 0), max(min(8 - n, 4), 0))
    assert (cache.pool.num_free, cache.stats().evicted_blocks) == (8 + min(n, 8), min(n, 8))
    cache.check()


@pytest.mark.parametrize(("length", "free", "expected"), [(4, 2, 4), (8, 2, 4), (9, 2, 3), (20, 2, 1), (5, 0, 2)])
def test_an_allocation_evicts_only_what_free_blocks_do_not_cover(length: int, free: int, expected: int):
    cache = cached(4 + free, 4, LONG)
    assert cache.acquire(np.arange(1000, 1000 + length)) is not None
    assert held(cache, LONG) == expected
    cache.check()


def test_growing_evicts_only_when_a_block_is_full_and_none_is_free():
    cache = cached(5, 4, LONG)
    lease = cache.acquire([99])
    assert cache.extend(lease, 3)
    assert held(cache, LONG) == 4
    assert cache.extend(lease, 1)
    assert held(cache, LONG) == 3


def test_children_go_before_their_parent_which_is_then_as_young_as_they_were():
    cache = explaining(32, 4)
    one, other, young = joined(LONG, LONG[:4] + 100), joined(LONG, LONG[:4] + 200), LONG + 300
    for prompt in (one, other, young):
        serve(cache, prompt)
    serve(cache, other)
    cache.evict(1)
    assert [held(cache, prompt) for prompt in (one, other, young)] == [4, 5, 4]
    cache.evict(4)
    assert [held(cache, prompt) for prompt in (one, other, young)] == [4, 5, 0]
    cache.evict(3)
    assert [held(cache, prompt) for prompt in (one, other)] == [2, 2]


def test_a_parent_is_not_a_leaf_while_one_child_has_blocks():
    cache = explaining(32, 4)
    one, other = joined(LONG, LONG[:4] + 100), joined(LONG, LONG[:4] + 200)
    serve(cache, one)
    lease = run(cache, other)
    assert cache.evict(99) == 1, "all else is under the running sequence"
    cache.check()
    cache.release(lease)
    assert cache.evict(99) == 5


def test_what_two_sequences_run_on_is_locked_until_both_have_gone():
    cache = explaining(32, 4)
    first, second = run(cache, LONG), run(cache, joined(LONG, LONG + 100))
    cache.release(first)
    assert cache.evict(99) == 0
    cache.release(second)
    assert cache.evict(99) == 8


def test_blocks_published_by_a_running_sequence_are_locked_at_once():
    cache = cached(32, 4, LONG)
    lease = cache.acquire(joined(LONG, LONG[:8] + 100))
    cache.publish(lease, joined(LONG, LONG[:8] + 100), 20)
    assert cache.evict(99) == 0
    assert cache.num_available_blocks == 32 - 6


Blocks = tuple[tuple[int, int], ...]


class BlockModel:
    """LRU over single blocks of 2 tokens: a release uses every block of its sequence; of those with none behind the oldest goes."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.last_use: dict[Blocks, int] = {}
        self.tick = 0

    def serve(self, prompt: tuple[int, ...]) -> None:
        path = self.path(prompt)
        cached = set(path) & set(self.last_use)
        needed = -(-len(prompt) // 2) - len(cached)
        self.evict(needed - (self.capacity - len(self.last_use)), locked=cached)
        self.tick += 1
        self.last_use.update(dict.fromkeys(path, self.tick))

    def evict(self, n: int, locked: set[Blocks] = frozenset()) -> None:
        for _ in range(n):
            inner = {key[:-1] for key in self.last_use}
            leaves = [key for key in self.last_use if key not in inner | locked]
            if leaves:
                del self.last_use[min(leaves, key=self.last_use.__getitem__)]

    def path(self, prompt: tuple[int, ...]) -> list[Blocks]:
        """The keys of its full blocks."""
        blocks = tuple(zip(prompt[::2], prompt[1::2], strict=False))
        return [blocks[:end] for end in range(1, len(blocks) + 1)]


@settings(deadline=None)
@given(
    st.integers(8, 16),
    st.booleans(),
    st.lists(st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=16), st.integers(0, 3)), max_size=30),
)
def test_lru_evicts_what_a_model_of_single_blocks_evicts(capacity: int, attribution: bool, steps: list[tuple[list[int], int]]):
    cache, model = PrefixCache(capacity, 2, attribution=attribution), BlockModel(capacity)
    for prompt, n in steps:
        serve(cache, np.array(prompt))
        model.serve(tuple(prompt))
        cache.evict(n)
        model.evict(n)
        assert cache.stats().blocks_cached == len(model.last_use)
        for other, _ in steps:
            assert held(cache, np.array(other)) == sum(key in model.last_use for key in model.path(tuple(other)))


def test_lru_stays_exact_through_thousands_of_uses_that_leave_stale_entries():
    random = np.random.default_rng(2)
    cache, model = explaining(400, 2), BlockModel(400)
    prompts = [tuple(random.integers(0, 3, random.integers(2, 12)).tolist()) for _ in range(150)]
    for i in range(2000):
        prompt = prompts[random.integers(len(prompts))]
        serve(cache, np.array(prompt))
        model.serve(prompt)
        if i % 250 == 249:
            n = int(random.integers(len(model.last_use)))
            cache.evict(n)
            model.evict(n)
            cache.check()
            for other in prompts:
                assert held(cache, np.array(other)) == sum(key in model.last_use for key in model.path(other))


# -- policies


def use(cache: PrefixCache, prompt: np.ndarray, times: int) -> None:
    for _ in range(times):
        serve(cache, prompt)


def test_lfu_evicts_the_least_used_and_of_equals_the_least_recent():
    cache = explaining(32, 4, policy="lfu")
    thrice, once, twice, once_later = (LONG[:8] + 100 * i for i in range(4))
    use(cache, thrice, 3)
    use(cache, once, 1)
    use(cache, twice, 2)
    use(cache, once_later, 1)
    left = []
    while cache.evict(2):
        left.append([held(cache, prompt) > 0 for prompt in (thrice, once, twice, once_later)])
    assert left == [[1, 0, 1, 1], [1, 0, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]]


def test_lfu_stays_exact_through_many_uses_that_leave_stale_entries():
    random = np.random.default_rng(4)
    cache = explaining(200, 4, policy="lfu")
    candidates = [LONG[:8] + 100 * i for i in range(60)]
    uses, last_use = [0] * 60, [0] * 60
    for tick in range(1500):
        i = tick if tick < 60 else int(60 * random.random() ** 3)
        serve(cache, candidates[i])
        uses[i], last_use[i] = uses[i] + 1, tick
    order: list[int] = []
    while cache.evict(2):
        order += [i for i in range(60) if i not in order and not held(cache, candidates[i])]
    assert order == sorted(range(60), key=lambda i: (uses[i], last_use[i]))


def test_lfu_keeps_a_popular_prefix_through_a_scan_that_lru_would_lose_it_to():
    for policy, expected in (("lfu", 2), ("lru", 0)):
        cache = explaining(8, 4, policy=policy)
        use(cache, LONG[:8], 8)
        for i in range(1, 5):
            serve(cache, LONG[:8] + 100 * i)
        assert held(cache, LONG) == expected, policy


@pytest.mark.parametrize("policy", ["lfu", "cost"])
def test_what_was_popular_once_gives_way_in_the_end(policy: PolicyName):
    """Ageing: each eviction raises what newer prefixes are worth."""
    cache = explaining(8, 4, policy=policy)
    use(cache, LONG[:8], 100)
    for i in range(1, 1000):
        serve(cache, LONG[:8] + 100 * i)
        if i == 10:
            assert held(cache, LONG) == 2
    assert held(cache, LONG) == 0


@pytest.mark.parametrize("policy", ["lfu", "cost"])
def test_an_evicted_prefix_that_comes_back_has_its_uses_still(policy: PolicyName):
    cache = PrefixCache(16, 4, policy=policy, attribution=False)
    popular, twice = LONG[:8], LONG[:8] + 100
    use(cache, popular, 8)
    cache.evict(2)
    serve(cache, popular)
    use(cache, twice, 2)
    cache.evict(2)
    assert (held(cache, popular), held(cache, twice)) == (2, 0)


def test_a_node_takes_over_the_uses_of_what_was_evicted_behind_it():
    cache = explaining(32, 4, policy="lfu")
    serve(cache, LONG[:8])
    use(cache, joined(LONG[:8], LONG[:4] + 50), 4)
    use(cache, joined(LONG[:8], LONG[:4] + 60), 4)
    use(cache, LONG[:8] + 100, 5)
    cache.evict(2)
    assert [held(cache, prompt) for prompt in (LONG, LONG[:8] + 100)] == [2, 2]
    cache.evict(2)
    assert [held(cache, prompt) for prompt in (LONG, LONG[:8] + 100)] == [2, 0], "9 uses against 5"


def test_cost_evicts_short_sequences_before_long_ones_used_as_often():
    """A block far into a sequence costs more attention to compute again."""
    short, long = LONG[:4] + 100_000, np.arange(4000, dtype=np.int32)
    for policy, expected in (("cost", (0, 1000)), ("lru", (1, 999))):
        cache = cached(2000, 4, long, short, policy=policy)
        cache.evict(1)
        assert (held(cache, short), held(cache, long)) == expected, policy


def test_cost_counts_all_that_comes_before_a_block_and_not_only_its_own_edge():
    long, short = np.arange(4000, dtype=np.int32), LONG[:4] + 100_000
    cache = cached(2000, 4, joined(long, LONG[:4] + 5000), joined(long, LONG[:4] + 6000), short, policy="cost")
    cache.evict(1)
    assert held(cache, short) == 0, "the tails were used as often, and longer ago"


def test_cost_weighs_uses_against_length():
    often, long = LONG[:4] + 100_000, np.arange(4000, dtype=np.int32)
    cache = explaining(2000, 4, policy="cost")
    use(cache, often, 2)
    serve(cache, long)
    cache.evict(1)
    assert (held(cache, often), held(cache, long)) == (1, 999), "4,000 tokens into a sequence attention costs 6 % more, no more"


class MostRecentFirst:
    """A policy of a user's own."""

    uses_history = False

    def __init__(self) -> None:
        self.told: list[float] = []

    def value(self, leaf: Node) -> float:
        return -leaf.last_use

    def evicted(self, value: float) -> None:
        self.told.append(value)


def test_a_policy_of_ones_own_decides_and_is_told():
    policy = MostRecentFirst()
    cache = cached(32, 4, LONG, LONG + 100, LONG + 200, policy=policy)
    cache.evict(5)
    assert [held(cache, LONG + base) for base in (0, 100, 200)] == [4, 3, 0]
    assert policy.told == [-3, -2]


def test_a_policy_is_told_of_retained_leaves_too():
    policy = MostRecentFirst()
    cache = explaining(32, 4, policy=policy)
    serve(cache, LONG, retention=Retention(1, 1e6))
    serve(cache, LONG + 100)
    cache.evict(8)
    assert policy.told == [-2, -1]


class Uses:
    """Evicts what was used least, and notes how often that was."""

    uses_history = True

    def __init__(self) -> None:
        self.told: list[float] = []

    def value(self, leaf: Node) -> float:
        return leaf.uses

    def evicted(self, value: float) -> None:
        self.told.append(value)


def test_uses_that_went_up_to_a_parent_come_back_down_with_the_blocks():
    policy = Uses()
    cache = explaining(32, 4, policy=policy)
    longer = joined(LONG, LONG[:4] + 100)
    serve(cache, LONG)
    lease = run(cache, LONG)  # so that what follows becomes a node of its own
    use(cache, longer, 3)
    cache.release(lease)
    cache.evict(1)
    serve(cache, longer)
    cache.evict(2)
    assert policy.told == [3, 3 + 1, 2 + 4]


def test_the_part_of_an_evicted_edge_that_comes_back_later_has_the_edges_uses():
    policy = Uses()
    cache = explaining(32, 4, policy=policy)
    use(cache, LONG, 5)
    cache.evict(4)
    use(cache, joined(LONG[:8], LONG[:4] + 100), 7)
    serve(cache, LONG)
    cache.evict(2)
    assert policy.told == [5, 5 + 1]


def test_an_unknown_policy_is_refused_by_name():
    with pytest.raises(ValueError, match="policy must be one of lru, lfu, cost or an EvictionPolicy, got 'fifo'"):
        explaining(8, 4, policy="fifo")


# -- the order of eviction stays small


def entries(cache: PrefixCache) -> int:
    order = cache.tree.order
    return len(order._run) + len(order._heap) + len(order._retained) + len(order._deadlines)


@pytest.mark.parametrize("retention", [None, Retention(3, 1000)])
def test_hits_alone_do_not_grow_the_order_of_eviction(retention: Retention | None):
    cache = explaining(64, 4)
    for _ in range(2000):
        serve(cache, LONG, retention=retention)
    assert entries(cache) < 200


@every_policy
def test_hits_and_evictions_keep_the_order_of_eviction_small(policy: PolicyName):
    cache = explaining(16, 4, policy=policy)
    for i in range(600):
        use(cache, LONG[:4], 3)
        serve(cache, LONG[:8] + 100 * (i % 20))
        cache.evict(1)
    cache.check()
    assert entries(cache) < 200
