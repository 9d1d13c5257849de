"""How many of the possible hits each queue policy gets, when a burst shares more prefixes than the cache holds."""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args

import msgspec
import numpy as np
from cyclopts import App, CycloptsError, Parameter
from cyclopts.types import PositiveInt
from rich.console import Console
from rich.progress import Progress
from rich.table import Column, Table

from bench.order_forests import FORESTS, Tokens, burst, depth_first, most_hits, shared_tokens
from radixkv.cache import PrefixCache
from radixkv.config import EngineConfig, Policy
from radixkv.sampling_params import SamplingParams
from radixkv.scheduling.policy import FirstComeFirstServed, WaitingQueue, queue_policy
from radixkv.scheduling.request import Request
from radixkv.scheduling.scheduler import Scheduler

POLICIES: tuple[Policy, ...] = get_args(Policy)
ORDERS = ("depth-first", *POLICIES)
BLOCK_SIZE = 16
FRACTIONS = (0.0, 0.1, 0.25, 0.5)
"""Sizes of the cache, as shares of the burst's distinct tokens; at least the longest request."""
OUTPUT_TOKENS = 16
SPREAD = 0.25
TIMING_SECONDS = 1.0
STDERR = Console(stderr=True)


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """A burst and a cache that is too small for it."""

    shape: str
    requests: int
    fraction: float
    running: int | None
    """Most requests that run at once in the scheduler; None: one after another, with no scheduler and no output."""
    spread: float
    """Seconds over which the burst arrived; all of it waits when the first is admitted."""
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
    """More than this no order can hit, in no cache."""
    hits: dict[str, int]
    """By order: ``depth-first`` and the policies' names."""

    def share(self, order: str, of: str | None = None) -> float:
        """An order's hits over those ``of`` another, or over the optimum."""
        return self.hits[order] / (self.hits[of] if of else self.optimum)


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


def hits(case: Case, prompts: Sequence[Tokens], num_blocks: int, queue: WaitingQueue) -> int:
    """Hit tokens of ``prompts`` that arrive in this order at an empty cache, one by one or in the scheduler as the case has it."""
    params = SamplingParams(max_tokens=OUTPUT_TOKENS)
    gap = case.spread / len(prompts)
    requests = [Request(str(i), prompt, params, arrival_time=i * gap) for i, prompt in enumerate(prompts)]
    cache = PrefixCache(num_blocks, BLOCK_SIZE)
    if case.running is None:
        return _hits_one_by_one(requests, cache, queue)
    return _hits_in_scheduler(requests, cache, queue, case.running)


def _hits_one_by_one(requests: Sequence[Request], cache: PrefixCache, queue: WaitingQueue) -> int:
    for request in requests:
        queue.add(request, cache)
    total = 0
    for _ in requests:
        request = queue.head(cache)
        queue.remove(request)
        total += serve(cache, request.tokens)
        queue.cached(_whole_blocks(request), request.namespace)
    return total


def _hits_in_scheduler(requests: Sequence[Request], cache: PrefixCache, queue: WaitingQueue, running: int) -> int:
    scheduler = Scheduler(cache, queue, max_batch_tokens=EngineConfig.max_batch_tokens, max_num_seqs=running)
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
    """Serve a case depth first and under every policy."""
    prompts = case.prompts
    num_blocks = cache_blocks(prompts, case.fraction, OUTPUT_TOKENS if case.running else 0)
    return Outcome(
        case=case,
        cache_blocks=num_blocks,
        prompt_tokens=sum(map(len, prompts)),
        optimum=most_hits(prompts, BLOCK_SIZE, OUTPUT_TOKENS if case.running else 0),
        hits={
            "depth-first": hits(case, depth_first(prompts), num_blocks, FirstComeFirstServed()),
            **{policy: hits(case, prompts, num_blocks, queue_policy(policy, aging)) for policy in POLICIES},
        },
    )


def run_small_case(case: Case, aging: float) -> SmallOutcome:
    """The same, and the best of all orders: factorial(requests) runs."""
    outcome = run_case(case, aging)
    orders = list(itertools.permutations(case.prompts))
    best = max(hits(case, order, outcome.cache_blocks, FirstComeFirstServed()) for order in orders)
    return SmallOutcome(outcome=outcome, orders=len(orders), best=best)


def _whole_blocks(request: Request) -> Tokens:
    return request.tokens[: request.num_tokens // BLOCK_SIZE * BLOCK_SIZE]


def study(sizes: Sequence[int], seeds: Sequence[int], spread: float) -> list[Case]:
    """Every shape at every size, in every cache, one by one and through the scheduler."""
    return [
        Case(shape=shape, requests=n, fraction=fraction, running=running, spread=spread, seed=seed)
        for shape in FORESTS for n in sizes for seed in seeds for running in (None, 4, 16) for fraction in FRACTIONS
    ]  # fmt: skip


def small_study(seeds: Sequence[int], spread: float) -> list[Case]:
    """Cases to try every order on: in the smallest cache and in a larger one, and (fewer, they take longer) in the scheduler."""
    return [
        Case(shape=shape, requests=n, fraction=fraction, running=running, spread=spread, seed=seed)
        for shape in FORESTS for seed in seeds for running, n in ((None, 6), (4, 5)) for fraction in (0.0, 0.5)
    ]  # fmt: skip


def time_ordering(policy: Policy, aging: float, waiting: int, seconds: float) -> dict[str, float]:
    """CPU microseconds of the queue's work in a step that admits one request, while one arrives and ``waiting`` wait.

    Few-shot prompts and agents' thoughts, of 800 to 1,700 tokens mostly.  The cache holds a twentieth of what is distinct in them,
    so that eviction makes the queue look again.
    """
    pairs = zip(burst("few-shot", 2 * waiting, 7), burst("agents", 2 * waiting, 7), strict=True)
    forest = [prompt for pair in pairs for prompt in pair]
    cache, queue = PrefixCache(cache_blocks(forest, 0.05, 0), BLOCK_SIZE), queue_policy(policy, aging)
    params = SamplingParams(max_tokens=1)
    arrivals = (Request(str(i), prompt, params, arrival_time=i * 0.01) for i, prompt in enumerate(itertools.cycle(forest)))
    for request in itertools.islice(arrivals, waiting):
        queue.add(request, cache)
    steps: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(steps) < waiting:
        arriving = next(arrivals)
        started = time.thread_time()
        request = queue.head(cache)
        queue.remove(request)
        taken = time.thread_time() - started
        serve(cache, request.tokens)
        started = time.thread_time()
        queue.cached(_whole_blocks(request), request.namespace)
        queue.add(arriving, cache)
        steps.append(taken + time.thread_time() - started)
    return {"p50": float(np.median(steps)) * 1e6, "mean": float(np.mean(steps)) * 1e6, "p99": float(np.percentile(steps, 99)) * 1e6}


def _rows(outcomes: Sequence[Outcome]) -> Iterator[tuple[str, list[Outcome]]]:
    """Outcomes by shape and way of running."""

    def key(outcome: Outcome) -> tuple[str, int]:
        return outcome.case.shape, outcome.case.running or 0

    for (shape, running), group in itertools.groupby(sorted(outcomes, key=key), key):
        yield f"{shape}, {f'{running} run at once' if running else 'one by one'}", list(group)


def print_tables(outcomes: Sequence[Outcome], small: Sequence[SmallOutcome], timings: dict[str, dict[str, float]], waiting: int,
                 each: bool, console: Console) -> None:  # fmt: skip
    """Shares of the optimum, every order of small cases, and what ordering costs."""
    right = [Column(heading, justify="right", no_wrap=True) for heading in ("cases", *ORDERS)]
    table = Table("burst", *right, title="hit tokens, share of the optimum: worst (mean)")

    def add(name: str, group: Sequence[Outcome]) -> None:
        shares = ([outcome.share(order) for outcome in group] for order in ORDERS)
        figures = (f"{min(s):.2%}" if len(s) == 1 else f"{min(s):.2%} ({np.mean(s):.2%})" for s in shares)
        table.add_row(name, str(len(group)), *figures)

    for name, group in _rows(outcomes):
        if each:
            for o in group:
                add(f"{name}: {o.case.requests} requests, {o.cache_blocks * BLOCK_SIZE} tokens, seed {o.case.seed}", [o])
        else:
            add(name, group)
    table.add_section()
    add("all one by one", [outcome for outcome in outcomes if not outcome.case.running])
    add("all in the scheduler", [outcome for outcome in outcomes if outcome.case.running])
    console.print(table)
    in_scheduler = [outcome.share("lpm", of="depth-first") for outcome in outcomes if outcome.case.running]
    console.print(f"lpm over depth first in the scheduler: worst {min(in_scheduler):.2%}, mean {np.mean(in_scheduler):.2%}\n")

    trials = Table("every order of small bursts", *(Column(heading, justify="right") for heading in (
        "cases", "orders each", "best = optimum", "best / optimum", "best / depth-first", "lpm / best")),
        title="worst of the cases; best: of all orders")  # fmt: skip
    for name, running in (("one by one", False), ("in the scheduler", True)):
        tried = [s for s in small if bool(s.outcome.case.running) == running]
        trials.add_row(
            name, str(len(tried)), str(tried[0].orders), str(sum(s.best == s.outcome.optimum for s in tried)),
            f"{min(s.best / s.outcome.optimum for s in tried):.2%}",
            f"{max(s.best / s.outcome.hits['depth-first'] for s in tried):.2%}",
            f"{min(s.outcome.hits['lpm'] / s.best for s in tried):.2%}",
        )  # fmt: skip
    console.print(trials)
    costs = Table(
        f"ordering with {waiting} waiting, CPU us a step", *(Column(name, justify="right") for name in ("p50", "mean", "p99"))
    )
    for policy, figures in timings.items():
        costs.add_row(policy, *(f"{figures[name]:.0f}" for name in ("p50", "mean", "p99")))
    console.print(costs)


app = App(name="python -m bench order", print_error=False, exit_on_error=False, result_action="return_value")


@app.default
def order(
    *,
    requests: Annotated[list[PositiveInt] | None, Parameter(consume_multiple=True, negative="")] = None,
    seeds: PositiveInt = 1,
    aging: float = EngineConfig.aging_tokens_per_second,
    spread: float = SPREAD,
    waiting: PositiveInt = 256,
    each: Annotated[bool, Parameter(negative="")] = False,
    json: Path | None = None,
) -> int:
    """Hit tokens of every queue policy as a share of the optimum; no model, the real cache and scheduler.

    A burst arrives at an empty cache: trees of prompts that share prefixes, in seven shapes (few deep trees, many shallow ones,
    prefixes of Zipf's popularity, few-shot prompts, turns of chats, agents' trees of thought, parallel samples). The cache holds
    only its longest request, or 10, 25 or 50 % of its distinct tokens. Requests run one by one, and several at once.

    The optimum counts every token of the prompts' trie as computed once and hit by all others, which no order can exceed in any
    cache. The depth-first order, which knows all prompts and takes the longest of each subtree first, reaches it one by one. In the
    scheduler it mostly does not, and no other order does: requests admitted in one step share only whole blocks with each other. On
    small bursts every order is tried. fcfs, lpm and dfs-weight are the engine's policies; lpm is its default.

    At last, what ordering costs: the queue's work in a step in which one request is admitted and one arrives.

    Parameters
    ----------
    requests
        Sizes of the bursts. 50 and 250 if not given.
    seeds
        Forests of each shape and size.
    aging
        Cached tokens that a second of waiting counts as, under lpm.
    spread
        Seconds over which a burst arrives, all of it before the first request is admitted. Above (shared prefix / aging), fairness
        costs lpm hits.
    waiting
        Requests in the queue while ordering is timed.
    each
        Print every case instead of the worst and the mean of each shape.
    json
        File to write all figures to.
    """
    if not aging > 0:
        raise ValueError(f"aging must be above 0, got {aging}")
    if not 0 <= spread < math.inf:
        raise ValueError(f"spread must be at least 0 and finite, got {spread}")
    sizes = requests or [50, 250]
    if min(sizes) < 2:
        raise ValueError(f"requests must be at least 2, got {min(sizes)}")
    cases, small_cases = study(sizes, range(seeds), spread), small_study(range(seeds), spread)
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
            timings[policy] = time_ordering(policy, aging, waiting, TIMING_SECONDS)
            progress.advance(bar)
    print_tables(outcomes, small, timings, waiting, each, Console(width=None if sys.stdout.isatty() else 130))
    if json is not None:
        figures: dict[str, Any] = {
            "aging": aging, "spread": spread, "block_size": BLOCK_SIZE, "outcomes": outcomes, "every_order": small,
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
