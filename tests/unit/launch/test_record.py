"""Which of many failures is shown as the cause."""

import dataclasses

import pytest

from automodel_rl.launch.rank_processes import RankFailures
from automodel_rl.launch.record import FailureRecord

LOST = "error: rank 1: RuntimeError: Connection closed by peer [127.0.0.1]:3000"


def record_of(rank: int, time: float, line: str = "error: out of memory") -> FailureRecord:
    return FailureRecord(rank, 1, line, where="step 3", host="here", pid=7, time=time, flight="")


def ends_of(
    *records: FailureRecord, silent: tuple[int, ...] = (), killed: bool = False, noticed: float = 10.0
) -> RankFailures:
    gone = [record_of(rank, 10.0, f"error: rank {rank} was killed") for rank in silent]
    return RankFailures([*records], gone, "", killed, noticed)


@pytest.mark.parametrize(
    ("ends", "rank"),
    [
        (ends_of(record_of(0, 5.0), record_of(1, 4.0), record_of(2, 6.0)), 1),
        (ends_of(record_of(0, 3.0, LOST), record_of(1, 5.0), record_of(2, 4.0)), 2),
        (ends_of(record_of(0, 3.0, LOST), record_of(1, 2.0, LOST)), 1),
        (ends_of(record_of(0, 3.0, LOST), silent=(3, 2)), 3),
        (ends_of(record_of(0, 3.0), silent=(3,)), 0),
        (ends_of(record_of(0, 9.9), silent=(3,), killed=True), 3),
        (ends_of(record_of(0, 9.0), silent=(3,), killed=True), 0),
    ],
    ids=[
        "the first",
        "no loss of a peer",
        "the first loss where there is nothing else",
        "a silent rank before losses",
        "a cause before a silent rank",
        "a killed rank before what came of it",
        "a cause before the kill",
    ],
)
def test_the_cause_is_the_first_failure_that_is_none_of_a_peer(ends: RankFailures, rank: int) -> None:
    assert ends.cause.rank == rank


def test_a_block_ends_with_the_line_that_matters_and_an_asked_end_is_that_line_alone() -> None:
    assert record_of(2, 1.0).block().splitlines()[-1] == "error: out of memory"
    assert "step 3" in record_of(2, 1.0).block()
    assert dataclasses.replace(record_of(2, 1.0), exit_code=2).block() == "error: out of memory"
    assert record_of(2, 1.0, "stopped by SIGTERM after step 3").block() == "stopped by SIGTERM after step 3"
