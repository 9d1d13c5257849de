"""How many may wait, and that nobody can take all the room."""

from __future__ import annotations

import pytest

from radixkv.server.errors import InvalidRequest, Overloaded
from radixkv.server.waiting_room import WaitingRoom


def fill(room: WaitingRoom, namespace: str) -> int:
    """Take all the seats one by one that a namespace gets."""
    count = 0
    while True:
        try:
            room.enter(namespace, 1)
        except Overloaded:
            return count
        count += 1


def test_one_namespace_gets_as_many_seats_as_the_limit_says_and_is_told_when_to_come_again() -> None:
    room = WaitingRoom(10)
    assert fill(room, "") == 10
    with pytest.raises(Overloaded, match=r"10 and 10 in all .*max-waiting is 10.* in 1 s") as caught:
        room.enter("", 1)
    assert caught.value.retry_after == 1


def test_a_namespace_with_nothing_waiting_finds_a_seat_when_m_others_have_filled_up_where_two_to_the_m_is_at_most_the_limit() -> (
    None
):
    for m in range(1, 9):
        room = WaitingRoom(2**m)
        for greedy in range(m):
            assert fill(room, f"greedy-{greedy}") == 2 ** (m - greedy)
        room.enter("modest", 1)


def test_those_with_more_than_their_share_come_down_to_it_as_the_room_empties() -> None:
    room = WaitingRoom(30)
    waiting = [(name, room.enter(name, 1)) for name in ["a"] * 30]
    for _ in range(300):  # the oldest leaves, and both ask for every seat they can get
        waiting.pop(0)[1].leave()
        for name in ("a", "b"):
            for _ in range(3):
                try:
                    waiting.append((name, room.enter(name, 1)))
                except Overloaded:
                    break
    counts = [sum(name == whose for name, _ in waiting) for whose in ("a", "b")]
    assert all(18 <= count <= 22 for count in counts), counts


def test_seats_go_to_the_one_with_less_when_one_becomes_free() -> None:
    room = WaitingRoom(12)
    taken = [room.enter("a", 1) for _ in range(12)]
    assert fill(room, "b") == 6
    for seats in taken[:3]:
        seats.leave()
    with pytest.raises(Overloaded):
        room.enter("a", 1)  # has 9 of 24 - 15
    assert fill(room, "b") == 1


def test_seats_are_given_back_once_whichever_way_they_are_left() -> None:
    room = WaitingRoom(4)
    seats = room.enter("a", 4)
    with pytest.raises(Overloaded):
        room.enter("a", 1)
    seats.leave()
    seats.leave()
    seats.close()
    seats.close()
    seats.leave()
    assert fill(room, "a") == 4


def test_a_request_larger_than_the_room_is_refused_for_good() -> None:
    with pytest.raises(InvalidRequest, match="n must be at most 4 choices"):
        WaitingRoom(4).enter("a", 5)
