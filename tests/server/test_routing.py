"""Which worker gets a request: the promises of the router against a plain model of what workers cache, and names of prefixes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.cache import PrefixCache
from radixkv.server.prefix_hashes import CacheNews, PrefixHashes
from radixkv.server.routing import EXPECTED_OUTPUT, SLACK, Route, Router

KEY = b"sixteen bytes...!"
BLOCK = 4


def router_of(*workers: str, block_size: int | None = BLOCK) -> Router[str]:
    router: Router[str] = Router(block_size)
    for worker in workers:
        router.attach(worker)
    return router


def tell(router: Router[str], worker: str, tokens: list[int], namespace: str = "", *, cached: bool = True) -> None:
    """As a worker whose cache has got, or lost, all of ``tokens``."""
    assert router.hashes is not None
    names = router.hashes(tokens, namespace).tobytes()
    router.cache_changed(worker, names if cached else b"", b"" if cached else names)


# --- names of prefixes -------------------------------------------------------------------------------------------------------

tokens = st.lists(st.integers(0, 3), max_size=40)


@given(tokens, tokens, st.sampled_from(["", "a", "b"]), st.sampled_from(["", "a", "b"]))
def test_two_prefixes_have_one_name_where_tokens_and_namespace_are_the_same_and_nowhere_else(
    one: list[int], other: list[int], namespace: str, its: str
) -> None:
    mine, theirs = PrefixHashes(KEY, BLOCK)(one, namespace), PrefixHashes(KEY, BLOCK)(np.array(other, dtype=np.int32), its)
    assert len(mine) == len(one) // BLOCK
    for i, name in enumerate(mine.tolist(), 1):
        for j, another in enumerate(theirs.tolist(), 1):
            assert (name == another) == (one[: i * BLOCK] == other[: j * BLOCK] and namespace == its)


def test_names_do_not_depend_on_what_was_named_before() -> None:
    long = list(range(10_000))
    grown = PrefixHashes(KEY, 16)
    grown(long[:100], "")
    assert (grown(long, "x") == PrefixHashes(KEY, 16)(long, "x")).all()
    assert (PrefixHashes(bytes(16), 16)(long, "x") != grown(long, "x")).all()


@settings(deadline=None)
@given(st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=30), st.sampled_from(["", "a"]), st.booleans())))
def test_what_a_worker_tells_is_what_its_cache_holds_after_every_message(steps: list[tuple[list[int], str, bool]]) -> None:
    """With evictions, and several changes in one message."""
    cache, router = PrefixCache(12, BLOCK), router_of("w")
    assert router.hashes is not None
    news = CacheNews(PrefixHashes(router.hashes.key, BLOCK))
    cache.subscribe(news.listen)
    seen = set()
    for prompt, namespace, send in steps:
        lease = cache.acquire(prompt, namespace=namespace)
        assert lease is not None
        cache.publish(lease, prompt, len(prompt))
        cache.take_copies()
        cache.release(lease)
        seen.add((namespace, tuple(prompt)))
        if send:
            router.cache_changed("w", *news.take())
            for its, tokens in seen:
                route = router.route(list(tokens), its, 1, ["w"])
                computed = max(1, len(tokens) - cache.match(np.array(tokens, dtype=np.int32), its).num_blocks * BLOCK)
                assert router.load("w") == computed + 1
                route.end()
    assert len(router._workers["w"].cached) <= 12


# --- where a request goes ----------------------------------------------------------------------------------------------------


def test_a_prompt_goes_where_most_of_it_is_cached_and_else_where_there_is_least_to_do() -> None:
    router = router_of("a", "b")
    prompt = list(range(100))
    tell(router, "a", prompt[:20])
    tell(router, "b", prompt[:60])
    assert router.route(prompt, "", 10, "ab").worker == "b"
    assert router.route([7] * 50, "", 10, "ab").worker == "a"
    tell(router, "b", prompt[20:60], cached=False)  # names of other prefixes: nothing changes
    assert router.route(prompt, "", 10, "ab").worker == "b"


def test_a_prefix_cached_in_one_namespace_does_not_draw_requests_of_another() -> None:
    router = router_of("a", "b")
    prompt = list(range(100))
    tell(router, "b", prompt, "tenant")
    assert router.route(prompt, "", 10, "ab").worker == "a"
    assert router.route(prompt, "tenant", 10, "ab").worker == "b"


def test_what_a_worker_lost_draws_nobody_and_one_that_was_replaced_holds_nothing() -> None:
    router = router_of("a", "b")
    prompt = list(range(100))
    tell(router, "b", prompt)
    tell(router, "b", prompt, cached=False)
    assert router.route(prompt, "", 10, "ab").worker == "a"
    router = router_of("a", "b")
    tell(router, "b", prompt)
    router.detach("b")
    router.attach("b")
    assert router.route(prompt, "", 10, "ab").worker == "a"


def test_a_burst_with_a_common_prefix_goes_to_one_worker_until_that_has_too_much_to_do() -> None:
    router = router_of("a", "b")
    prefix = list(range(400))
    burst = [router.route([*prefix, 1000 + i], "", 20, "ab") for i in range(60)]
    first_away = [route.worker for route in burst].index("b")
    # It brings 421 tokens to do, each later one what the last partial block and the output make.
    assert 421 + 21 * (first_away - 1) > SLACK
    assert 421 + 21 * (first_away - 2) <= SLACK
    assert abs(router.load("a") - router.load("b")) <= SLACK + 421
    for route in burst:
        route.end()
    assert router.load("a") == router.load("b") == 0


def test_a_conversation_stays_where_it_is_cached_while_that_worker_is_behind_by_no_more_than_the_slack() -> None:
    router = router_of("a", "b")
    history = list(range(800))
    tell(router, "b", history)
    busy = [router.route([9000 + i] * 200, "", 0, ["b"]) for i in range(SLACK // 200)]
    assert router.route([*history, 1], "", 0, "ab").worker == "b"
    busy.append(router.route([9999] * 200, "", 0, ["b"]))
    assert router.route([*history, 1], "", 0, "ab").worker == "a"  # 1,225 to do there, 801 here
    assert router.route([5, *history], "", 0, "ab").worker == "a"


def test_a_prefix_longer_than_the_load_draws_its_requests_however_far_the_worker_is_behind() -> None:
    router = router_of("a", "b")
    long = list(range(30_000))
    tell(router, "b", long)
    router.route([9] * 20_000, "", 0, ["b"])
    assert router.route([*long, 1], "", 0, "ab").worker == "b"
    router.route([8] * 20_000, "", 0, ["b"])
    assert router.route([*long, 1], "", 0, "ab").worker == "a"


def test_a_request_counts_for_its_prompt_until_its_first_token_and_for_its_output_until_its_end() -> None:
    router = router_of("a")
    route = router.route(list(range(50)), "", 10**6, ["a"])
    assert router.load("a") == 50 + EXPECTED_OUTPUT
    again = router.route(list(range(50)), "", 7, ["a"])
    assert router.load("a") == 50 + EXPECTED_OUTPUT + 2 + 7
    route.began()
    route.began()
    assert router.load("a") == EXPECTED_OUTPUT + 2 + 7
    again.end()  # aborted in its prefill
    again.end()
    assert router.load("a") == EXPECTED_OUTPUT
    route.end()
    assert router.load("a") == 0
    # Nothing is known to be cached: the worker has not said so.
    assert not router._workers["a"].coming
    router.route(list(range(50)), "", 0, ["a"])
    assert router.load("a") == 50


def test_workers_that_cache_nothing_get_requests_by_load_alone() -> None:
    router = router_of("a", "b", block_size=None)
    chosen = [router.route([1] * 100, "", 10, "ab").worker for _ in range(6)]
    assert chosen == ["a", "b"] * 3


events = st.one_of(
    st.tuples(
        st.just("route"), st.integers(0, 5), st.integers(1, 2000), st.integers(1, 400), st.sets(st.sampled_from("abc"), min_size=1)
    ),
    st.tuples(st.just("begin"), st.integers(0, 99)),
    st.tuples(st.just("end"), st.integers(0, 99)),
    st.tuples(st.just("cached"), st.sampled_from("abc"), st.integers(0, 5), st.integers(1, 2000)),
    st.tuples(st.just("replace"), st.sampled_from("abc")),
)


@pytest.mark.parametrize("block_size", [BLOCK, None])
@settings(max_examples=70, deadline=None)
@given(st.lists(events, max_size=60))
def test_no_worker_is_chosen_that_is_too_far_behind_and_nothing_of_what_is_over_is_counted(
    block_size: int | None, steps: list[tuple[object, ...]]
) -> None:
    router = router_of(*"abc", block_size=block_size)
    prompts = [[i] * 2000 for i in range(6)]
    open_routes: list[Route[str]] = []
    for kind, *arguments in steps:
        if kind == "route":
            i, length, max_tokens, among = arguments
            before = {worker: router.load(worker) for worker in among}
            route = router.route(prompts[i][:length], "", max_tokens, sorted(among))
            assert route.worker in among
            assert before[route.worker] <= min(before.values()) + max(SLACK, length)
            open_routes.append(route)
        elif kind == "cached" and router.hashes is not None:
            tell(router, arguments[0], prompts[arguments[1]][: arguments[2]])
        elif kind == "replace":  # requests of the one that died may end later
            router.detach(arguments[0])
            router.attach(arguments[0])
            assert router.load(arguments[0]) == 0
        elif kind in ("begin", "end") and open_routes:
            at = arguments[0] % len(open_routes)
            if kind == "begin":
                open_routes[at].began()
            else:
                open_routes.pop(at).end()
    for route in open_routes:
        route.end()
    for worker in "abc":
        assert router.load(worker) == 0
        assert not router._workers[worker].coming
