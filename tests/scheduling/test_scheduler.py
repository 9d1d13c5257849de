"""Scheduler and cache against a simulated model whose K/V and next tokens depend on the whole prefix, as a real one's do."""

from __future__ import annotations

import zlib

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from radixkv.cache import PrefixCache
from radixkv.sampling_params import SamplingParams
from radixkv.scheduling.batch import Batch
from radixkv.scheduling.policy import LongestPrefixMatch, queue_policy
from radixkv.scheduling.request import Request
from radixkv.scheduling.scheduler import Scheduler


def next_token(tokens: np.ndarray, vocab: int = 3) -> int:
    return zlib.crc32(tokens.tobytes()) % vocab


class Simulation:
    """What ``Engine`` does, over a dictionary for KV memory."""

    def __init__(
        self,
        num_blocks: int = 64,
        block_size: int = 4,
        *,
        policy: str = "lpm",
        max_batch_tokens: int = 16,
        max_num_seqs: int = 8,
        aging: float = 256.0,
        caching: bool = True,
        most_forced: int = 0,
    ) -> None:
        self.most_forced = most_forced
        self.cache = PrefixCache(num_blocks, block_size, enable_prefix_caching=caching, attribution=True)
        self.scheduler = Scheduler(
            self.cache, queue_policy(policy, aging), max_batch_tokens=max_batch_tokens, max_num_seqs=max_num_seqs
        )
        self.memory: dict[tuple[int, int], tuple[object, ...]] = {}
        self.requests: dict[str, Request] = {}
        self.finished: list[str] = []
        self.computed_tokens = 0
        self.now = 0.0

    def add(self, name: str, tokens: list[int], max_tokens: int = 4, namespace: str = "") -> Request:
        request = Request(name, tokens, SamplingParams(max_tokens=max_tokens), namespace=namespace, arrival_time=self.now)
        self.requests[name] = request
        self.scheduler.add(request)
        return request

    def step(self) -> Batch:
        batch = self.scheduler.schedule()
        self.cache.check()
        self.scheduler._running.check()
        self._check_columns(batch)
        assert batch.num_tokens <= self.scheduler.max_batch_tokens
        assert len(self.scheduler.running) <= self.scheduler.max_num_seqs
        assert len({seq.request.request_id for seq in batch.sequences}) == len(batch.sequences), "a request is in the batch twice"
        for copy in batch.copies:
            for row in range(copy.num_rows):
                self.memory[copy.target, row] = self.memory[copy.source, row]
        for seq in batch.sequences:  # all writes come before all reads, as in a layer of the model
            for position in range(max(seq.start, seq.request.lease.write_start), seq.end):
                self.memory[self._slot(seq.request, position)] = self._content(seq.request, position)
        for seq in batch.sequences:
            for position in range(seq.end):
                assert self.memory[self._slot(seq.request, position)] == self._content(seq.request, position), "wrong K/V read"
        self.computed_tokens += batch.num_tokens
        for seq in [seq for seq in batch.sequences if seq.samples]:
            # The model's token, and as many as a grammar forces: here those that the model would have chosen.
            for _ in range(1 + next_token(seq.request.tokens, self.most_forced + 1)):
                if seq.request.num_output_tokens < seq.request.params.max_tokens:
                    seq.request.append(next_token(seq.request.tokens))
            if seq.request.num_output_tokens == seq.request.params.max_tokens:
                self.scheduler.remove(seq.request)
                self.finished.append(seq.request.request_id)
        self.cache.check()
        self.now += 0.01
        return batch

    def run(self, most_steps: int = 5000) -> None:
        for _ in range(most_steps):
            if not (self.scheduler.running or self.scheduler.waiting):
                break
            assert self.step().sequences, "a step did nothing while requests wait"
        assert sorted(self.finished) == sorted(self.requests), "a request never ended"
        assert self.cache.stats().blocks_locked == 0, "a block leaked"

    def _check_columns(self, batch: Batch) -> None:
        """The batch says of each sequence what its request and lease do."""
        for row, seq in enumerate(batch.sequences):
            lease = seq.request.lease
            held = -(-seq.end // self.cache.block_size)
            assert batch.block_tables[row, :held].tolist() == lease.block_table[:held].tolist()
            assert batch.write_starts[row] == lease.write_start
            assert seq.samples == (seq.end == seq.request.num_tokens)
        in_prompts = [seq.num_tokens for seq in batch.sequences if seq.start < seq.request.num_prompt_tokens]
        assert batch.num_prompt_tokens == sum(in_prompts)
        assert batch.sampling == [seq.request for seq in batch.sequences if seq.samples]

    def _slot(self, request: Request, position: int) -> tuple[int, int]:
        return int(request.lease.block_table[position // self.cache.block_size]), position % self.cache.block_size

    def _content(self, request: Request, position: int) -> tuple[object, ...]:
        return (request.namespace, *request.tokens[: position + 1].tolist())


def expected_output(prompt: list[int], max_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_token(np.array(tokens, dtype=np.int32)))
    return tokens[len(prompt) :]


def sequence(start: int, n: int) -> list[int]:
    return list(range(start, start + n))


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=30), min_size=1, max_size=8),
    max_tokens=st.integers(1, 20),
    block_size=st.sampled_from([1, 2, 4, 8]),
    spare_blocks=st.integers(0, 20),
    max_batch_tokens=st.integers(2, 40),
    policy=st.sampled_from(["lpm", "fcfs", "dfs-weight"]),
    caching=st.booleans(),
    most_forced=st.sampled_from([0, 1, 9]),
    data=st.data(),
)
def test_every_request_ends_with_the_output_it_has_alone(
    prompts, max_tokens, block_size, spare_blocks, max_batch_tokens, policy, caching, most_forced, data
):
    """Whatever the policy, budget and pool, with preemptions, aborts and forced tokens in between."""
    longest = max(map(len, prompts)) + max_tokens
    sim = Simulation(
        -(-longest // block_size) + spare_blocks, block_size,
        policy=policy, max_batch_tokens=max_batch_tokens, max_num_seqs=min(4, max_batch_tokens), caching=caching,
        most_forced=most_forced,
    )  # fmt: skip
    for i, prompt in enumerate(prompts):
        sim.add(str(i), prompt, max_tokens)
    for _ in range(data.draw(st.integers(0, 3))):
        sim.step()
        name = data.draw(st.sampled_from([str(i) for i in range(len(prompts))]))
        request = sim.scheduler.find(name)
        if request is not None:
            sim.scheduler.remove(request)
            sim.cache.check()
            del sim.requests[name]
    sim.run()
    for name, request in sim.requests.items():
        assert request.output_token_ids.tolist() == expected_output(prompts[int(name)], max_tokens)


class CheckedQueue(LongestPrefixMatch):
    """Asserts at each turn that nobody who may overtake has a longer cached prefix than the head, by matching all of them."""

    def __init__(self, aging: float) -> None:
        super().__init__(aging)
        self.aging = aging
        self.waiting: list[Request] = []

    def add(self, request: Request, cache: PrefixCache) -> None:
        super().add(request, cache)
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        super().remove(request)
        self.waiting.remove(request)

    def head(self, cache: PrefixCache) -> Request:
        chosen = super().head(cache)
        cached = {r.request_id: cache.match(r.tokens, r.namespace).num_tokens(cache.block_size) for r in self.waiting}
        oldest = min(request.arrival_time for request in self.waiting)
        eligible = [r for r in self.waiting if cached[r.request_id] >= self.aging * (r.arrival_time - oldest)]
        assert chosen in eligible
        assert cached[chosen.request_id] == max(cached[request.request_id] for request in eligible)
        return chosen


@settings(max_examples=60, deadline=None)
@given(
    arrivals=st.lists(
        st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=30), st.integers(1, 12), st.sampled_from(["", "tenant"])),
        min_size=1, max_size=25,
    ),
    per_step=st.integers(1, 8),
    block_size=st.sampled_from([1, 2, 4]),
    spare_blocks=st.integers(0, 20),
    max_batch_tokens=st.integers(4, 40),
    aging=st.sampled_from([1.0, 100.0, 1000.0]),
)  # fmt: skip
def test_whoever_lpm_admits_has_the_longest_cached_prefix_at_that_moment(
    arrivals, per_step, block_size, spare_blocks, max_batch_tokens, aging
):
    """Though the queue is told of what is computed, chunk by chunk, and of no eviction; outputs are found by later prompts."""
    sim = Simulation(-(-42 // block_size) + spare_blocks, block_size)
    sim.scheduler = Scheduler(sim.cache, CheckedQueue(aging), max_batch_tokens=max_batch_tokens, max_num_seqs=4)
    for i, (tokens, max_tokens, namespace) in enumerate(arrivals):
        sim.add(str(i), tokens, max_tokens, namespace)
        if i % per_step == per_step - 1:
            sim.step()
    sim.run()


@pytest.mark.parametrize("max_batch_tokens", [16, 64, 512])
def test_requests_that_arrive_together_compute_their_common_prefix_once(max_batch_tokens: int):
    sim = Simulation(400, 4, max_batch_tokens=max_batch_tokens, max_num_seqs=16)
    prefix, block_size = sequence(0, 100), 4
    for i in range(16):
        sim.add(str(i), prefix + sequence(1000 * (i + 1), 10), max_tokens=1)
    sim.run()
    assert len(prefix) + 16 * 10 <= sim.computed_tokens <= len(prefix) + 16 * (10 + block_size - 1)


def test_identical_prompts_that_arrive_together_compute_one_token_each_beside_the_first():
    sim = Simulation(100, 4, max_batch_tokens=64)
    for i in range(5):
        sim.add(str(i), sequence(0, 32), max_tokens=1)
    sim.run()
    assert sim.computed_tokens == 32 + 4


def test_a_prefix_that_diverges_inside_a_block_is_reused_token_by_token():
    sim = Simulation(100, 8)
    sim.add("first", sequence(0, 16), max_tokens=1)
    sim.run()
    second = sim.add("second", [*sequence(0, 13), 99, 98], max_tokens=1)
    sim.run()
    assert second.num_cached_tokens == 13


def test_decodes_and_prefill_chunks_share_one_step():
    sim = Simulation(100, 4, max_batch_tokens=8)
    sim.add("decoding", sequence(0, 4), max_tokens=10)
    sim.step()
    sim.add("prefilling", sequence(100, 20), max_tokens=1)
    batch = sim.step()
    assert [(seq.request.request_id, seq.num_tokens) for seq in batch.sequences] == [("decoding", 1), ("prefilling", 7)]


def test_a_decode_calls_the_cache_only_where_it_begins_or_fills_a_block(monkeypatch: pytest.MonkeyPatch):
    sim = Simulation(100, 4)
    sim.add("one", sequence(0, 8), max_tokens=33)
    sim.step()
    calls: list[str] = []
    for name in ("extend", "publish"):
        real = getattr(sim.cache, name)
        monkeypatch.setattr(sim.cache, name, lambda *args, name=name, real=real, **kw: (calls.append(name), real(*args, **kw))[1])
    sim.run()
    assert calls == ["extend", "publish"] * 8


def test_out_of_blocks_the_youngest_is_preempted_and_resumes_from_its_published_prefix():
    sim = Simulation(12, 4, max_batch_tokens=64)
    sim.add("old", sequence(0, 16), max_tokens=20)
    sim.add("young", sequence(100, 16), max_tokens=16)
    sim.run()
    assert sim.scheduler.num_preemptions >= 1
    assert sim.requests["old"].num_preemptions == 0
    assert sim.finished[0] == "old"
    assert sim.cache.stats().total.requests == 2, "a resumed request was counted again"
    for name, start in (("old", 0), ("young", 100)):
        request = sim.requests[name]
        assert request.output_token_ids.tolist() == expected_output(sequence(start, 16), request.params.max_tokens)


def test_lpm_admits_the_longest_cached_prefix_first():
    sim = Simulation(200, 4, max_num_seqs=1, max_batch_tokens=64)
    sim.add("warm-up", sequence(0, 40), max_tokens=1)
    sim.run()
    sim.add("cold", sequence(500, 40), max_tokens=1)
    sim.add("lukewarm", sequence(0, 20) + sequence(900, 20), max_tokens=1)
    sim.add("hot", sequence(0, 36) + sequence(700, 4), max_tokens=1)
    sim.run()
    assert sim.finished[1:] == ["hot", "lukewarm", "cold"]


def test_under_lpm_a_cold_request_waits_a_bounded_time_in_an_endless_hot_stream():
    """A stream that always has a hot request waiting: without aging the cold one would never run."""

    def steps_until_cold_runs(aging: float) -> int | None:
        sim = Simulation(400, 4, max_num_seqs=1, max_batch_tokens=64, aging=aging)
        sim.add("warm-up", sequence(0, 40), max_tokens=1)
        sim.run()
        sim.add("cold", sequence(500, 40), max_tokens=1)
        for i in range(300):
            sim.add(f"hot-{i}", [*sequence(0, 40), 1000 + i], max_tokens=1)
            sim.step()
            if "cold" in sim.finished:
                return i
        return None

    # A step takes 10 ms here, so 40 cached tokens are outweighed after 40 / (100 per second * 0.01 s) = 40 steps.
    waited = steps_until_cold_runs(aging=100.0)
    assert waited is not None
    assert waited <= 42
    assert steps_until_cold_runs(aging=1e-9) is None


def test_fcfs_admits_in_order_of_arrival():
    sim = Simulation(200, 4, policy="fcfs", max_num_seqs=1, max_batch_tokens=64)
    sim.add("warm-up", sequence(0, 40), max_tokens=1)
    sim.run()
    for i, name in enumerate(["cold", "hot"]):
        sim.now += i
        sim.add(name, sequence(0 if name == "hot" else 500, 40), max_tokens=1)
    sim.run()
    assert sim.finished[1:] == ["cold", "hot"]


def test_dfs_weight_runs_branches_one_after_another_the_fullest_first():
    sim = Simulation(300, 4, policy="dfs-weight", max_num_seqs=1)
    branches = {name: sequence(0, 8) + sequence(100 * (i + 1), 8) for i, name in enumerate("ab")}
    for name, tokens in branches.items():
        sim.add(f"warm-up-{name}", tokens, max_tokens=1)
    sim.run()
    for i, name in enumerate("abbab"):
        sim.now += 1
        sim.add(f"{name}{i}", branches[name] + sequence(1000 + 100 * i, 4), max_tokens=1)
    sim.run()
    assert sim.finished[2:] == ["b1", "b2", "b4", "a0", "a3"]


def test_an_aborted_request_gives_its_blocks_back_at_any_point():
    for steps in range(8):
        sim = Simulation(100, 4, max_batch_tokens=8)
        sim.add("aborted", sequence(0, 30), max_tokens=10)
        sim.add("other", sequence(0, 30), max_tokens=3)
        for _ in range(steps):
            sim.step()
        request = sim.scheduler.find("aborted")
        sim.scheduler.remove(request)
        del sim.requests["aborted"]
        sim.cache.check()
        sim.run()


def test_a_large_request_is_not_overtaken_for_ever_by_small_ones_that_fit():
    sim = Simulation(10, 4, policy="fcfs", max_batch_tokens=64, max_num_seqs=4)
    sim.add("running", sequence(0, 8), max_tokens=12)
    sim.step()
    sim.add("large", sequence(100, 36), max_tokens=1)
    for i in range(4):
        sim.now += 0.1
        sim.add(f"small-{i}", sequence(1000 + 10 * i, 4), max_tokens=1)
    sim.run()
    assert sim.finished.index("large") < sim.finished.index("small-0")


def test_namespaces_share_nothing():
    sim = Simulation(100, 4)
    sim.add("mine", sequence(0, 32), max_tokens=1, namespace="a")
    sim.run()
    other = sim.add("other", sequence(0, 32), max_tokens=1, namespace="b")
    own = sim.add("own", sequence(0, 32), max_tokens=1, namespace="a")
    sim.run()
    assert (other.num_cached_tokens, own.num_cached_tokens) == (0, 31)
