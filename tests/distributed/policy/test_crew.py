"""A program leads any number of ranks: jobs go down a tree, and answers come back."""

import dataclasses
import os
import pickle
import signal
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from automodel_rl.batch import TokenSequence
from automodel_rl.errors import InputError, RolloutError
from automodel_rl.launch.process_group import join_process_group
from automodel_rl.launch.stop_signal import StopSignal
from automodel_rl.policy.crew import TreeCrew
from automodel_rl.policy.jobs import Job
from automodel_rl.policy.shares import Share
from tests.rank_pool import RankPool


@dataclasses.dataclass(frozen=True)
class Ask(Job):
    """Each rank answers with its rank, what it was told, and the rows that it got."""

    answered_by = "all"

    told: Any


@dataclasses.dataclass(frozen=True)
class Refuse(Job):
    ranks: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class SignalYourself(Job):
    rank: int


def do(job: Job, share: Share | None) -> Any:
    rank = dist.get_rank()
    if isinstance(job, Refuse) and rank in job.ranks:
        raise InputError("no")
    if isinstance(job, SignalYourself) and rank == job.rank:
        os.kill(os.getpid(), signal.SIGTERM)
    if isinstance(job, Ask):
        return rank, job.told(rank), None if share is None else share.rows[rank % 2].input_ids.tolist()
    return rank


def lead(size: int, program: Any) -> Any:
    """A crew in which ranks of even number are data rank 0, others data rank 1, and rank 2 an outsider."""
    join_process_group(size)
    rank = dist.get_rank()
    layout: Any = SimpleNamespace(
        world_control=dist.new_group(backend="gloo"), is_outsider=rank == 2, data_rank=rank % 2
    )
    crew = TreeCrew(layout, do)
    if rank:
        with StopSignal() as stop:
            return crew.follow(stop)
    try:
        found = program(crew)
    except BaseException as error:
        crew.end(error)
        raise
    crew.end(value=found)
    return found


def share_of(number: int) -> Share:
    row = TokenSequence(torch.tensor([number]), torch.tensor([True]))
    return Share([[number]], {number: row}, row, {})


def ask(crew: TreeCrew) -> Any:
    offset = 100  # a function of a program's own goes to ranks with what it refers to
    return crew.ask(Ask(lambda rank: rank + offset), [share_of(0), share_of(1)] if crew.size > 1 else [share_of(0)])


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7])
def test_every_rank_gets_its_share_and_answers(ranks: RankPool, size: int) -> None:
    found = ranks(size).run(lead, size, ask)
    expected = [(rank, rank + 100, None if rank == 2 else [rank % 2]) for rank in range(size)]
    assert found == [expected] * size


def refuse(crew: TreeCrew) -> str:
    with pytest.raises(InputError, match="no"):
        crew.ask(Refuse(tuple(range(crew.size))))
    assert len(ask(crew)) == crew.size
    with pytest.raises(InputError, match="no"):  # by one rank, as of a reward that one machine lacks
        crew.ask(Refuse((1,)))
    assert len(ask(crew)) == crew.size
    with pytest.raises((AttributeError, TypeError, pickle.PicklingError)):
        crew.ask(Ask(threading.Lock()))
    assert len(ask(crew)) == crew.size
    return "refused"


def test_ranks_go_on_after_a_refusal_of_all_or_some_and_after_what_cannot_be_sent(ranks: RankPool) -> None:
    assert ranks(3).run(lead, 3, refuse) == ["refused"] * 3


def end_with_error(crew: TreeCrew) -> None:
    raise RolloutError("nothing to learn")


def ended(size: int) -> str:
    with pytest.raises(RolloutError) as error:
        lead(size, end_with_error)
    return str(error.value)


def test_an_error_of_the_program_ends_every_rank_with_the_same_error(ranks: RankPool) -> None:
    assert ranks(3).run(ended, 3) == ["nothing to learn"] * 3


def listen(crew: TreeCrew) -> list[str]:
    crew.ask(SignalYourself(2))
    crew.ask(Refuse(()))
    return crew.signals


def test_a_signal_to_another_rank_is_told_once(ranks: RankPool) -> None:
    assert ranks(4).run(lead, 4, listen)[0] == ["SIGTERM"]
