"""A program calls methods on any number of ranks: calls go down a tree, and answers come back."""

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
from automodel_rl.policy.crew import POLICY, TreeCrew
from automodel_rl.policy.shares import Share
from tests.rank_pool import RankPool


class Rank:
    """What the program calls on each rank."""

    def answer(self, share: Share | None, told: Any) -> Any:
        """The rank, what it was told, and the rows that it got."""
        rank = dist.get_rank()
        return rank, told(rank), None if share is None else share.rows[rank % 2].input_ids.tolist()

    def refuse(self, ranks: tuple[int, ...]) -> None:
        if dist.get_rank() in ranks:
            raise InputError("no")

    def signal_yourself(self, rank: int) -> int:
        if dist.get_rank() == rank:
            os.kill(os.getpid(), signal.SIGTERM)
        return dist.get_rank()


def lead(size: int, program: Any) -> Any:
    """A crew in which ranks of even number are data rank 0, others data rank 1, and rank 2 an outsider."""
    join_process_group(size)
    rank = dist.get_rank()
    layout: Any = SimpleNamespace(
        world_control=dist.new_group(backend="gloo"), is_outsider=rank == 2, data_rank=rank % 2
    )
    crew = TreeCrew(layout, {POLICY: Rank()})
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
    shares = [share_of(0), share_of(1)] if crew.size > 1 else [share_of(0)]
    return crew.gather(POLICY, "answer", lambda rank: rank + offset, shares=shares)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7])
def test_every_rank_gets_its_share_and_answers(ranks: RankPool, size: int) -> None:
    found = ranks(size).run(lead, size, ask)
    expected = [(rank, rank + 100, None if rank == 2 else [rank % 2]) for rank in range(size)]
    assert found == [expected] * size


def refuse(crew: TreeCrew) -> str:
    with pytest.raises(InputError, match="no"):
        crew.ask(POLICY, "refuse", tuple(range(crew.size)))
    assert len(ask(crew)) == crew.size
    with pytest.raises(InputError, match="no"):  # by one rank, as of a reward that one machine lacks
        crew.ask(POLICY, "refuse", (1,))
    assert len(ask(crew)) == crew.size
    with pytest.raises((AttributeError, TypeError, pickle.PicklingError)):
        crew.ask(POLICY, "refuse", threading.Lock())
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
    assert crew.ask(POLICY, "signal_yourself", 2) == 0, "rank 0 answers, whatever others return"
    crew.ask(POLICY, "refuse", ())
    return crew.signals


def test_a_signal_to_another_rank_is_told_once(ranks: RankPool) -> None:
    assert ranks(4).run(lead, 4, listen)[0] == ["SIGTERM"]
