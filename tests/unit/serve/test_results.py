"""Which results are kept, and which are let go."""

import asyncio

import pytest

from automodel_rl.errors import InputError
from automodel_rl.serve.results import Results


async def keep_and_let_go() -> None:
    results = Results(seconds=1000.0, most=3)
    old, slow = results.open("old", b""), results.open("slow", b"")
    old.set_result({"of": "old"})
    results.open("fresh", b"").set_result({"of": "fresh"})
    assert results.are_full
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
    with pytest.raises(InputError, match="there is no request 'old': its result is older than limits.result_minutes"):
        results.find("old")
    slow.set_result({"of": "slow"})
    results.forget_old()
    assert [name in results._entries for name in ("slow", "fresh", "more")] == [False, True, True]


def test_a_result_is_kept_for_its_time_and_until_it_is_there() -> None:
    asyncio.run(keep_and_let_go())
