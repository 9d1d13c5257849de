"""How much of the hits that are there each queue policy gets, when a burst of requests shares more prefixes than the cache holds."""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import msgspec
import numpy as np
from cyclopts import App, CycloptsError, Parameter
from cyclopts.types import PositiveInt
from rich.console import Console
from rich.progress import Progress
from rich.table import Column, Table

from bench.order_forests import FORESTS, Tokens, burst, most_hits, shared_tokens
from radixkv.cache import PrefixCache
from radixkv.config import EngineConfig, Policy
from radixkv.sampling_params import SamplingParams
from radixkv.scheduling.policy import queue_policy
from radixkv.scheduling.request import Request
from radixkv.scheduling.scheduler import Scheduler

POLICIES: tuple[Policy, ...] = get_args(Policy)
BLOCK_SIZE = 16
FRACTIONS = (0.0, 0.1, 0.25, 0.5)
"""Sizes of the cache, as shares of the burst's distinct tokens; at least the longest request."""
ARRIVAL_GAP = 0.001
"""Seconds between two arrivals of a burst: 300 requests within 0.3 s."""
OUTPUT_TOKENS = 16
STDERR = Console(stderr=True)


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """A burst and a cache that is too small for it."""

    shape: str
    requests: int
    fraction: float
    running: int | None
    """Most requests that run at once in the scheduler; None: one after another, with no scheduler and no output."""
    seed: int

    @property
    def prompts(self) -> list[Tokens]:
        return burst(self.shape, self.requests, self.seed)


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Hit tokens of a case."""

    case: Case
    cache_blocks: int
    prompt_tokens: int
    optimum: int
    """The most that any order can hit."""
    hits: dict[str, int]
    """By policy."""

    def share(self, policy: str) -> float:
        """Of the optimum."""
        return self.hits[policy] / self.optimum


class SmallOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """A case small enough to try every order."""

    outcome: Outcome
    orders: int
    best: int
    """Hit tokens of the best of all orders."""


def cache_blocks(prompts: Sequence[Tokens], fraction: float, output_tokens: int) -> int:
    """That fraction of the distinct tokens, but room for the longest request."""
    ordered = sorted(prompts, key=lambda prompt: prompt.tobytes())
    distinct = sum(map(len, prompts)) - sum(shared_tokens(a, b) for a, b in itertools.pairwise(ordered))
    return math.ceil(max(fraction * distinct, max(map(len, prompts)) + output_tokens) / BLOCK_SIZE)


def serve(cache: PrefixCache, tokens: Tokens) -> int:
    """One request alone, without output: returns its cached tokens."""
    lease = cache.acquire(tokens)
    assert lease is not None, "the cache is smaller than the longest prompt"
    cache.publish(lease, tokens, len(tokens))
    cache.take_copies()
    cache.release(lease)
    return lease.num_cached_tokens


def requests_of(prompts: Sequence[Tokens]) -> list[Request]:
    params = SamplingParams(max_tokens=OUTPUT_TOKENS)
    return [Request(str(i), prompt, params, arrival_time=i * ARRIVAL_GAP) for i, prompt in enumerate(prompts)]


def hits_one_by_one(prompts: Sequence[Tokens], num_blocks: int, policy: Policy, aging: float) -> int:
    """Hit tokens when all wait and each runs alone, in the policy's order."""
    cache, queue = PrefixCache(num_blocks, BLOCK_SIZE), queue_policy(policy, aging)
    for request in requests_of(prompts):
        queue.add(request, cache)
    hits = 0
    for _ in prompts:
        request = queue.head(cache)
        queue.remove(request)
        hits += serve(cache, request.tokens)
        queue.cached(request.tokens[: request.num_tokens // BLOCK_SIZE * BLOCK_SIZE], request.namespace)
    return hits


def hits_in_scheduler(prompts: Sequence[Tokens], num_blocks: int, policy: Policy, aging: float, running: int) -> int:
    """Hit tokens when the scheduler runs several at once, each with ``OUTPUT_TOKENS`` of output."""
    cache = PrefixCache(num_blocks, BLOCK_SIZE)
    scheduler = Scheduler(
        cache, queue_policy(policy, aging), max_batch_tokens=EngineConfig.max_batch_tokens, max_num_seqs=running
    )
    requests = requests_of(prompts)
    for request in requests:
        scheduler.add(request)
    fresh = itertools.count(10**6)  # outputs that no prompt begins with
    while scheduler.running or scheduler.waiting:
        for sequence in scheduler.schedule().sequences:
            if sequence.samples:
                sequence.request.append(next(fresh))
                if sequence.request.num_output_tokens == OUTPUT_TOKENS:
                    scheduler.remove(sequence.request)
    return sum(request.num_cached_tokens for request in requests)


def run_case(case: Case, aging: float) -> Outcome:
    """Serve a case once under every policy."""
    prompts = case.prompts
    num_blocks = cache_blocks(prompts, case.fraction, OUTPUT_TOKENS if case.running else 0)
    return Outcome(
        case=case,
        cache_blocks=num_blocks,
        prompt_tokens=sum(map(len, prompts)),
        optimum=most_hits(prompts, BLOCK_SIZE, OUTPUT_TOKENS if case.running else 0),
        hits={
            policy: hits_in_scheduler(prompts, num_blocks, policy, aging, case.running)
            if case.running
            else hits_one_by_one(prompts, num_blocks, policy, aging)
            for policy in POLICIES
        },
    )


def run_small_case(case: Case, aging: float) -> SmallOutcome:
    """The same, and the best of all orders.  factorial(requests) runs through the real cache."""
    outcome = run_case(case, aging)
    prompts = case.prompts
    best = 0
    for order in itertools.permutations(prompts):
        cache = PrefixCache(outcome.cache_blocks, BLOCK_SIZE)
        best = max(best, sum(serve(cache, tokens) for tokens in order))
    return SmallOutcome(outcome=outcome, orders=math.factorial(len(prompts)), best=best)


def study(sizes: Sequence[int], seeds: Sequence[int]) -> list[Case]:
    """Every shape at every size, in every cache, one by one and through the scheduler."""
    return [
        Case(shape=shape, requests=n, fraction=fraction, running=running, seed=seed)
        for shape in FORESTS for n in sizes for seed in seeds for running in (None, 4, 16) for fraction in FRACTIONS
    ]  # fmt: skip


def small_study(seeds: Sequence[int]) -> list[Case]:
    """Cases to try every order on, in the smallest cache and in a larger one."""
    return [
        Case(shape=shape, requests=6, fraction=fraction, running=None, seed=seed)
        for shape in FORESTS for seed in seeds for fraction in (0.0, 0.5)
    ]  # fmt: skip


def time_ordering(policy: Policy, aging: float, waiting: int, seconds: float) -> dict[str, float]:
    """Microseconds a step of the queue's work when one request is admitted and one arrives, with ``waiting`` in the queue.

    The cache holds a tenth of what waits, so that eviction makes the queue look again.
    """
    prompts = itertools.cycle(burst("few-shot", 2 * waiting, 7) + burst("agents", 2 * waiting, 7))
    first = [next(prompts) for _ in range(waiting)]
    cache, queue = PrefixCache(cache_blocks(first, 0.1, 0), BLOCK_SIZE), queue_policy(policy, aging)
    params = SamplingParams(max_tokens=1)
    arrivals = (Request(str(i), prompt, params, arrival_time=i * 0.01) for i, prompt in enumerate(itertools.chain(first, prompts)))
    for request in itertools.islice(arrivals, waiting):
        queue.add(request, cache)
    steps: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(steps) < waiting:
        arriving = next(arrivals)
        started = time.perf_counter()
        request = queue.head(cache)
        queue.remove(request)
        taken = time.perf_counter() - started
        if cache.num_available_blocks * BLOCK_SIZE < request.num_tokens:
            raise ValueError(f"waiting must be more for this forest, got {waiting}")
        serve(cache, request.tokens)
        started = time.perf_counter()
        queue.cached(request.tokens[: request.num_tokens // BLOCK_SIZE * BLOCK_SIZE], request.namespace)
        queue.add(arriving, cache)
        steps.append(taken + time.perf_counter() - started)
    return {"mean": float(np.mean(steps)) * 1e6, "p50": float(np.median(steps)) * 1e6, "p99": float(np.percentile(steps, 99)) * 1e6}


def _rows(outcomes: Sequence[Outcome]) -> Iterator[tuple[str, list[Outcome]]]:
    """Outcomes by shape and way of running."""
    def key(outcome: Outcome) -> tuple[str, int]:
        return outcome.case.shape, outcome.case.running or 0

    for (shape, running), group in itertools.groupby(sorted(outcomes, key=key), key):
        yield f"{shape}, {f'{running} run at once' if running else 'one by one'}", list(group)


def print_tables(outcomes: Sequence[Outcome], small: Sequence[SmallOutcome], timings: dict[str, dict[str, float]], each: bool,
                 console: Console) -> None:  # fmt: skip
    """Shares of the optimum, every order of small cases, and what ordering costs."""
    right = [Column(heading, justify="right") for heading in ("cases", "optimum / prompt", *POLICIES)]
    table = Table("burst", *right, title="hit tokens, share of the optimum: worst (mean)")

    def add(name: str, group: Sequence[Outcome]) -> None:
        shares = ([outcome.share(policy) for outcome in group] for policy in POLICIES)
        optimum = sum(outcome.optimum for outcome in group) / sum(outcome.prompt_tokens for outcome in group)
        figures = (f"{min(s):.2%}" if len(s) == 1 else f"{min(s):.2%} ({np.mean(s):.2%})" for s in shares)
        table.add_row(name, str(len(group)), f"{optimum:.1%}", *figures)

    for name, group in _rows(outcomes):
        if each:
            for o in group:
                add(f"{name}, {o.case.requests} requests, {o.cache_blocks * BLOCK_SIZE} tokens of cache, seed {o.case.seed}", [o])
        else:
            add(name, group)
    table.add_section()
    add("all", outcomes)
    console.print(table)
    if small:
        attained = sum(s.best == s.outcome.optimum for s in small)
        worst = min(s.best / s.outcome.optimum for s in small)
        console.print(
            f"every order tried: {len(small)} cases of {small[0].outcome.case.requests} requests, {small[0].orders} orders each. "
            f"The best order hits the stated optimum in {attained}, at least {worst:.2%} of it, and more in "
            f"{sum(s.best > s.outcome.optimum for s in small)}. Of the best order, lpm hits at least "
            f"{min(s.outcome.hits['lpm'] / s.best for s in small):.2%}.\n"
        )
    if timings:
        costs = Table("ordering, us a step", *(Column(name, justify="right") for name in ("mean", "p50", "p99")))
        for policy, figures in timings.items():
            costs.add_row(policy, *(f"{figures[name]:.0f}" for name in ("mean", "p50", "p99")))
        console.print(costs)


app = App(name="python -m bench order", print_error=False, exit_on_error=False, result_action="return_value")


@app.default
def order(
    *,
    requests: Annotated[list[PositiveInt] | None, Parameter(consume_multiple=True)] = None,
    seeds: PositiveInt = 1,
    aging: float = EngineConfig.aging_tokens_per_second,
    waiting: PositiveInt = 256,
    each: Annotated[bool, Parameter(negative="")] = False,
    json: Path | None = None,
) -> int:
    """Hit tokens of every queue policy as a share of the optimum; no model, the real cache and scheduler.

    A burst arrives at an empty cache: trees of prompts that share prefixes, in seven shapes (few deep trees, many shallow ones,
    prefixes of Zipf's popularity, few-shot prompts, turns of chats, agents' trees of thought, parallel samples). The cache holds
    only its longest request, or 10, 25 or 50 % of its distinct tokens. Requests run one by one, and several at once.

    The optimum is what the depth-first order hits in a cache that never evicts: every token of the prompts' trie computed once. No
    order can hit more, in no cache. On small bursts every order is tried too, to show that it is within reach of the cache.

    At last, what ordering costs: the queue's work in a step in which one request is admitted and one arrives.

    Parameters
    ----------
    requests
        Sizes of the bursts. 50, 150 and 300 if not given.
    seeds
        Forests of each shape and size.
    aging
        Cached tokens that a second of waiting counts as, under lpm.
    waiting
        Requests in the queue while ordering is timed.
    each
        Print every case instead of the worst and the mean of each shape.
    json
        File to write all figures to.
    """
    if not aging > 0:
        raise ValueError(f"aging must be above 0, got {aging}")
    sizes = requests or [50, 150, 300]
    if min(sizes) < 2:
        raise ValueError(f"requests must be at least 2, got {min(sizes)}")
    cases, small_cases = study(sizes, range(seeds)), small_study(range(3 * seeds))
    outcomes: list[Outcome] = []
    small: list[SmallOutcome] = []
    timings: dict[str, dict[str, float]] = {}
    with Progress(console=STDERR, transient=True, disable=not sys.stderr.isatty()) as progress:
        bar = progress.add_task("bursts", total=len(cases) + len(small_cases) + len(POLICIES))
        for case in cases:
            outcomes.append(run_case(case, aging))
            progress.advance(bar)
        for case in small_cases:
            small.append(run_small_case(case, aging))
            progress.advance(bar)
        for policy in POLICIES:
            timings[policy] = time_ordering(policy, aging, waiting, seconds=1.0)
            progress.advance(bar)
    print_tables(outcomes, small, timings, each, Console(width=None if sys.stdout.isatty() else 130))
    if json is not None:
        figures: dict[str, Any] = {
            "aging": aging, "block_size": BLOCK_SIZE, "outcomes": outcomes, "every_order": small,
            "waiting": waiting, "ordering_us": timings,
        }  # fmt: skip
        json.write_bytes(msgspec.json.format(msgspec.json.encode(figures), indent=1))
    return 0


def main(argv: Sequence[str]) -> int:
    """Exit code: 0; 1 if a file can't be written; 2 for bad input; 130 after Ctrl-C."""
    try:
        code: int = app(argv) or 0
    except KeyboardInterrupt:
        return 130
    except (CycloptsError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return code
