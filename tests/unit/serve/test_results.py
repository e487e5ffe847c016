"""Which results are kept, and which are let go."""

import asyncio
from typing import Any

import pytest

from automodel_rl.errors import InputError
from automodel_rl.serve.results import Results
from automodel_rl.serve.tables import BusyError


async def keep_and_let_go() -> None:
    results = Results(seconds=1000.0, most=3, max_bytes=2**20)
    old, slow = results.open("old", b""), results.open("slow", b"")
    old.set_result({"of": "old"})
    results.open("fresh", b"").set_result({"of": "fresh"})
    with pytest.raises(BusyError, match="limits.waiting, limits.waiting_gib"):
        results.open("fourth", b"")
    for name in ("old", "slow"):
        results._entries[name].since -= 999.0
    results.forget_old()
    assert [name in results._entries for name in ("old", "slow", "fresh")] == [True, True, True]
    for name in ("old", "slow"):
        results._entries[name].since -= 2.0
    results.open("more", b"")  # makes room first
    assert [name in results._entries for name in ("old", "slow", "fresh", "more")] == [False, True, True, True]
    assert results.find("fresh").result() == {"of": "fresh"}
    assert results.find("slow") is slow
    with pytest.raises(InputError, match="unknown request 'old': its result is older than limits.result_minutes"):
        results.find("old")
    slow.set_result({"of": "slow"})
    results.forget_old()
    assert [name in results._entries for name in ("slow", "fresh", "more")] == [False, True, True]


def test_a_result_is_kept_for_its_time_and_until_it_is_there() -> None:
    asyncio.run(keep_and_let_go())


def fill(results: Results, session: str, **options: Any) -> int:
    """Opens requests until there is no room for a further one, and gives their number."""
    for number in range(1000):
        try:
            results.open(f"{session}:{number}", b"", **options)
        except BusyError:
            return number
    return 1000


async def take_turns() -> None:
    results = Results(seconds=1000.0, most=40, max_bytes=40 * 2**20)
    assert fill(results, "greedy", is_early=True) == 14
    results.open("greedy:due", b"")  # the request that the others wait for has room
    assert fill(results, "other") == 13
    large = Results(seconds=1000.0, most=1000, max_bytes=40 * 2**20)
    assert fill(large, "greedy", size=2**20) == 19
    assert fill(large, "other", size=2**20) == 10
    large.find("greedy:0").set_result({"of": "greedy"})
    await asyncio.sleep(0)
    large.take_result("greedy:0")  # what a client has got makes room
    for _ in range(2):
        with pytest.raises(BusyError):
            large.open("greedy:x", b"", 2**21)
    assert len(large) == 28


def test_no_client_takes_the_room_of_all() -> None:
    asyncio.run(take_turns())
