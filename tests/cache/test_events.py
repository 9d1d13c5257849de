"""Events: what is told of blocks that join the cache, leave it and are found in it, and what it costs when nobody listens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from radixkv.cache import Event, Evicted, Hit, PrefixCache, Stored, prefix_cache

from .serving import LONG, explaining, joined, run, serve, tokens


def listened(num_blocks: int = 16, **options: Any) -> tuple[PrefixCache, list[Event]]:
    """A cache with blocks of 4, and the list to which its events are added."""
    cache = explaining(num_blocks, 4, **options)
    heard: list[Event] = []
    cache.subscribe(heard.append)
    return cache, heard


def plain(event: Event) -> tuple[type, str, list[int], int, list[int]]:
    return type(event), event.namespace, event.tokens.tolist(), event.start, event.block_ids.tolist()


def test_stored_tells_each_new_block_once_with_the_tokens_up_to_its_end():
    cache, heard = listened()
    lease = cache.acquire(LONG[:11], namespace="tenant", max_new_tokens=5)
    ids = lease.block_table.tolist()
    cache.publish(lease, LONG[:11], 6)
    cache.publish(lease, LONG[:11], 7)
    cache.publish(lease, LONG, 16)
    assert [plain(event) for event in heard] == [
        (Stored, "tenant", LONG[:4].tolist(), 0, ids[:1]),
        (Stored, "tenant", LONG.tolist(), 4, ids[1:4]),
    ]


def test_blocks_that_another_sequence_stored_first_are_not_stored_again():
    cache, heard = listened()
    first, second = cache.acquire(LONG), cache.acquire(joined(LONG[:8], LONG + 50))
    cache.publish(first, LONG, 16)
    cache.publish(second, joined(LONG[:8], LONG + 50), 24)
    assert [event.start for event in heard] == [0, 8]
    assert heard[1].block_ids.tolist() == second.block_table[2:].tolist()
    third = cache.acquire(LONG + 100)
    fourth = cache.acquire(LONG + 100)
    cache.publish(third, LONG + 100, 16)
    count = len(heard)
    cache.publish(fourth, LONG + 100, 16)
    assert len(heard) == count, "nothing of the fourth is new"


def test_blocks_are_told_as_stored_before_they_are_written():
    cache, heard = listened()
    lease = cache.acquire(LONG)
    cache.publish(lease, LONG, 16, written=False)
    assert [plain(event) for event in heard] == [(Stored, "", LONG.tolist(), 0, lease.block_table.tolist())]


@pytest.mark.parametrize("attribution", [True, False])
def test_evicted_tells_the_tail_that_went_and_all_tokens_up_to_its_end(attribution: bool):
    cache, heard = listened(attribution=attribution)
    ids = serve(cache, LONG, "tenant").block_table.tolist()
    del heard[:]
    cache.evict(1)
    cache.evict(2)
    assert [plain(event) for event in heard] == [
        (Evicted, "tenant", LONG.tolist(), 12, ids[3:]),
        (Evicted, "tenant", LONG[:12].tolist(), 4, ids[1:3]),
    ]


@pytest.mark.parametrize("attribution", [True, False])
def test_evicted_tells_a_leafs_tokens_from_the_namespaces_root_on(attribution: bool):
    cache, heard = listened(attribution=attribution)
    one, other = joined(LONG[:8], [50, 51, 52, 53]), joined(LONG[:8], [60, 61, 62, 63])
    first, second = serve(cache, one), serve(cache, other)
    del heard[:]
    cache.evict(4)
    assert [plain(event) for event in heard] == [
        (Evicted, "", one.tolist(), 8, first.block_table[2:].tolist()),
        (Evicted, "", other.tolist(), 8, second.block_table[2:].tolist()),
        (Evicted, "", LONG[:8].tolist(), 0, first.block_table[:2].tolist()),
    ]


def test_eviction_for_an_allocation_is_told_too():
    cache, heard = listened(num_blocks=4)
    serve(cache, LONG)
    del heard[:]
    lease = cache.acquire(LONG[:5] + 100)
    assert [(type(event), event.start) for event in heard] == [(Evicted, 8)]
    cache.release(lease)
    cache.evict(1)
    del heard[:]
    lease = cache.acquire([7])
    assert cache.extend(lease, 4)
    assert heard == [], "free blocks were enough"
    assert cache.extend(lease, 11)
    assert [(type(event), event.start) for event in heard] == [(Evicted, 0)]


def test_a_reset_tells_all_that_goes():
    cache, heard = listened()
    serve(cache, LONG, "a")
    serve(cache, LONG, "b")
    del heard[:]
    cache.reset()
    assert sorted((type(event), event.namespace, event.start, len(event.block_ids)) for event in heard) == [
        (Evicted, "a", 0, 4),
        (Evicted, "b", 0, 4),
    ]


def test_a_hit_tells_the_whole_blocks_that_a_prompt_found():
    cache, heard = listened()
    ids = serve(cache, LONG, "tenant").block_table.tolist()
    del heard[:]
    cache.acquire(joined(LONG[:10], [99]), namespace="tenant")
    assert [plain(event) for event in heard] == [(Hit, "tenant", LONG[:8].tolist(), 0, ids[:2])]


@pytest.mark.parametrize("prompt", [LONG + 50, LONG[:3], joined(LONG[:3], [99, 98])], ids=["nothing", "short", "rows"])
def test_less_than_a_block_is_no_hit(prompt: np.ndarray):
    cache, heard = listened()
    serve(cache, LONG)
    del heard[:]
    assert cache.acquire(prompt) is not None
    assert heard == []


def test_looking_and_being_refused_tell_nothing():
    cache, heard = listened(num_blocks=4)
    serve(cache, LONG)
    del heard[:]
    cache.match(LONG)
    assert cache.acquire(joined(LONG, [99])) is None
    lease = cache.acquire(LONG)
    del heard[:]
    assert not cache.extend(lease, 1)
    assert heard == []


def test_evictions_are_told_before_the_blocks_are_used_again():
    """A listener that follows along never sees one block hold two things."""
    cache, heard = listened(num_blocks=4)
    serve(cache, LONG)
    serve(cache, LONG + 50)
    holding: dict[int, tuple[int, ...]] = {}
    for event in heard:
        for i, block in enumerate(event.block_ids.tolist()):
            prefix = tuple(event.tokens[: event.start + 4 * (i + 1)].tolist())
            if isinstance(event, Stored):
                assert block not in holding
                holding[block] = prefix
            elif isinstance(event, Evicted):
                assert holding.pop(block) == prefix
    assert sorted(holding.values()) == [tuple((LONG[:end] + 50).tolist()) for end in (4, 8, 12, 16)]


def test_what_a_listener_does_to_an_events_block_ids_harms_nothing():
    cache = explaining(16, 4)

    def vandal(event: Event) -> None:
        if event.block_ids.flags.writeable:
            event.block_ids[:] = 0

    cache.subscribe(vandal)
    first = run(cache, LONG)
    second = run(cache, joined(LONG, [1, 2, 3, 4]))
    cache.check()
    cache.release(first)
    cache.release(second)
    cache.evict(3)
    cache.check()


def test_an_events_tokens_stay_what_they_were_when_the_prompts_buffer_is_used_again():
    cache, heard = listened()
    buffer = LONG.copy()
    serve(cache, buffer)
    cache.release(cache.acquire(buffer))
    buffer[:] = 7
    assert [event.tokens.tolist() for event in heard] == [LONG.tolist()] * 2


def test_every_listener_hears_everything_until_it_ends_that():
    cache = explaining(16, 4)
    first: list[Event] = []
    second: list[Event] = []
    end_first = cache.subscribe(first.append)
    cache.subscribe(second.append)
    serve(cache, LONG)
    end_first()
    cache.evict(1)
    assert [type(event) for event in first] == [Stored]
    assert [type(event) for event in second] == [Stored, Evicted]


def test_a_listener_may_end_its_own_subscription_while_it_is_told():
    cache = explaining(16, 4)
    heard: list[str] = []

    def once(event: Event) -> None:
        heard.append("once")
        end()

    end = cache.subscribe(once)
    cache.subscribe(lambda event: heard.append("always"))
    serve(cache, LONG)
    cache.evict(1)
    assert heard == ["once", "always", "always"]


def test_no_event_is_made_when_nobody_listens(monkeypatch: pytest.MonkeyPatch):
    def refuse(*args: object) -> None:
        raise AssertionError("an event was made")

    for kind in ("Stored", "Evicted", "Hit"):
        monkeypatch.setattr(prefix_cache, kind, refuse)
    cache = explaining(8, 4)
    end = cache.subscribe(lambda event: None)
    end()
    serve(cache, LONG)
    assert cache.acquire(joined(LONG[:8], LONG + 50)) is not None
    cache.evict(2)
    cache.check()


def test_with_caching_off_there_is_nothing_to_tell():
    cache, heard = listened(enable_prefix_caching=False)
    serve(cache, LONG)
    serve(cache, LONG)
    cache.reset()
    assert heard == []


def test_a_sequence_that_grows_past_what_it_shares_tells_only_what_is_its_own():
    cache, heard = listened()
    serve(cache, LONG)
    lease = cache.acquire(joined(LONG[:8], tokens(50)))
    grown = joined(LONG[:8], LONG[:8] + 50)
    cache.take_copies()
    cache.extend(lease, 7)
    del heard[:]
    cache.publish(lease, grown, 12)
    cache.publish(lease, grown, 16)
    assert [(event.start, event.block_ids.tolist()) for event in heard] == [
        (8, lease.block_table[2:3].tolist()),
        (12, lease.block_table[3:].tolist()),
    ]
