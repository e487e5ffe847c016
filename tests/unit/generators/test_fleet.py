"""A fleet: requests are dealt to its members, and go to others where one is lost."""

import dataclasses
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from automodel_rl.batch import RouterShape
from automodel_rl.errors import RolloutError
from automodel_rl.generator_messages import Request, Sampling
from automodel_rl.generators import fleet as fleet_module
from automodel_rl.generators.protocol import Completion, results
from automodel_rl.generators.rank_listener import RankListener, connect_to_program
from automodel_rl.launch.background import in_thread, then
from automodel_rl.policy.crew import RemoteCall
from tests.fleets import VOCABULARY, Echo, LocalCrew, Waiting, fleet_of

SHAPE = RouterShape(num_layers=2, layers=(0, 1), num_experts=4, top_k=2)


def requests(count: int, conversations: Sequence[int] | None = None) -> list[Request]:
    return [
        Request(
            [1, place], 10 + place, Sampling(2), conversation=None if conversations is None else conversations[place]
        )
        for place in range(count)
    ]


@pytest.fixture
def crew() -> Iterator[LocalCrew]:
    crew = LocalCrew({0: Echo(), 3: Echo(), 5: Echo()})
    yield crew
    crew.close()


def generators(crew: LocalCrew) -> list[Any]:
    return [supervisor.generator for supervisor in crew.supervisors.values()]


def test_requests_are_dealt_to_the_members_and_come_back_in_order(crew: LocalCrew) -> None:
    fleet = fleet_of(crew)
    completions = results(fleet.submit(requests(7)))
    assert [completion.token_ids for completion in completions] == [[place, 10 + place] for place in range(7)]
    assert [completion.writer for completion in completions] == [0, 3, 5, 0, 3, 5, 0]
    assert {completion.versions for completion in completions} == {(1, 1)}  # policy versions, not weight syncs
    assert [len(generator.asked) for generator in generators(crew)] == [3, 2, 2]
    assert results(fleet.submit([])) == []


def test_requests_of_a_prompt_that_takes_longer_to_read_than_to_answer_stay_together(crew: LocalCrew) -> None:
    fleet = fleet_of(crew)
    asked = [Request([prompt, 1, 2], seed, Sampling(2)) for prompt in range(3) for seed in range(4)]
    assert [completion.writer for completion in results(fleet.submit(asked))] == [0] * 4 + [3] * 4 + [5] * 4
    fleet.mark_lost(0, "it is gone")
    assert [completion.writer for completion in results(fleet.submit(asked))] == [3] * 6 + [5] * 6
    conversations = [Request([1, 2, 3], seed, Sampling(2), conversation=seed) for seed in range(4)]
    assert [completion.writer for completion in results(fleet.submit(conversations))] == [3, 3, 5, 5]
    later = [dataclasses.replace(conversations[number], sampling=Sampling(9)) for number in (2, 0)]
    assert [completion.writer for completion in results(fleet.submit(later))] == [5, 3]


def test_turns_of_a_conversation_go_to_one_member(crew: LocalCrew) -> None:
    fleet = fleet_of(crew)
    first = results(fleet.submit(requests(3, [4, 2, 0])))
    assert [completion.writer for completion in first] == [3, 5, 0]
    later = results(fleet.submit(requests(2, [2, 4])))
    assert [completion.writer for completion in later] == [5, 3]


def test_what_a_lost_member_was_to_write_goes_to_the_others_until_it_is_back(crew: LocalCrew) -> None:
    fleet = fleet_of(crew)
    two = generators(crew)[1]
    two.held.clear()
    completions = fleet.submit(requests(6))
    two.lose()
    completions = results(completions)
    assert [completion.token_ids for completion in completions] == [[place, 10 + place] for place in range(6)]
    assert [completion.writer for completion in completions] == [0, 0, 5, 0, 5, 5]
    assert fleet.lost == {3: "ConnectionError: it is gone"}
    assert [completion.writer for completion in results(fleet.submit(requests(3)))] == [0, 5, 0]
    assert len(two.asked) == 2
    fleet.restart()
    assert crew.restarted == [{3: "ConnectionError: it is gone"}]
    assert not fleet.lost
    assert [completion.writer for completion in results(fleet.submit(requests(3)))] == [0, 3, 5]


def test_a_fleet_that_is_lost_says_why(crew: LocalCrew) -> None:
    fleet = fleet_of(crew)
    for generator in generators(crew):
        generator.held.clear()
    completions = fleet.submit(requests(4))
    for generator in generators(crew):
        generator.lose()
    with pytest.raises(RolloutError, match="the generator of rank 0 cannot write: ConnectionError: it is gone"):
        results(completions)
    assert not fleet.can_write
    with pytest.raises(RolloutError, match="rank 0 cannot write"):
        results(fleet.submit(requests(1)))
    fleet.restart()
    assert len(results(fleet.submit(requests(4)))) == 4


def test_a_member_whose_rank_ends_is_lost(crew: LocalCrew) -> None:
    fleet = fleet_of(crew)
    three = generators(crew)[2]
    three.held.clear()
    completions = fleet.submit(requests(3))
    crew.relays[5].close()
    assert [completion.writer for completion in results(completions)] == [0, 3, 0]
    assert fleet.lost == {5: "its process has exited"}
    three.held.set()


def test_members_that_do_not_work_alone_write_when_waited_for() -> None:
    crew = LocalCrew({0: Waiting(), 1: Waiting()})
    fleet = fleet_of(crew)
    completions = fleet.submit(requests(4))
    assert not any(generator.asked for generator in generators(crew))
    assert len(fleet.wait(completions)) == 4
    generators(crew)[1].lose()
    assert [completion.writer for completion in fleet.wait(fleet.submit(requests(4)))] == [0, 0, 0, 0]
    crew.close()


def test_all_members_write_alike_but_those_that_are_lost(crew: LocalCrew) -> None:
    fleet = fleet_of(crew)
    generators(crew)[1].lose()
    written = fleet.write_with_each(requests(2))
    assert {rank: [one.token_ids for one in of] for rank, of in written.items()} == {
        rank: [[0, 10], [1, 11]] for rank in (0, 5)
    }
    assert len(fleet.write(requests(3))) == 3  # the others write


def test_ranks_are_looked_after_while_a_program_waits(crew: LocalCrew, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "HEALTH_CHECK_SECONDS", 0.01)
    fleet = fleet_of(crew)
    for generator in generators(crew):
        generator.held.clear()
    completions = fleet.submit(requests(3))

    def release_once_looked_at() -> None:
        while crew.num_looks < 3:
            time.sleep(0.001)
        for generator in generators(crew):
            generator.held.set()

    in_thread(release_once_looked_at, "releasing")
    assert len(fleet.wait(completions)) == 3


def test_an_error_of_what_uses_a_completion_is_raised_where_it_is_waited_for(crew: LocalCrew) -> None:
    def refuse(completion: Completion) -> None:
        raise ValueError("not this one")

    fleet = fleet_of(crew)
    with pytest.raises(ValueError, match="not this one"):
        fleet.wait([then(completion, refuse) for completion in fleet.submit(requests(2))])
    assert len(fleet.wait(fleet.submit(requests(2)))) == 2


class Foreign(Echo):
    """Writes a token that the model does not have."""

    def completion(self, request: Request) -> Completion:
        return Completion([VOCABULARY], [0.0], "stop")


class Routing(Echo):
    """Reports experts: one less row than tokens, the first of them unknown; nonsense for a prompt that ends in 9."""

    def completion(self, request: Request) -> Completion:
        experts = np.tile(np.array([2, 0], dtype=np.int16), (len(request.prompt) + 1, 2, 1))
        experts[0, 1] = -1
        if request.prompt[-1] == 9:
            experts[1] = 7
        return Completion([1, 2], [0.0, 0.0], "stop", routes=experts)


def test_tokens_of_another_model_are_an_error() -> None:
    crew = LocalCrew({0: Foreign()})
    (completion,) = results(fleet_of(crew).submit(requests(1)))
    assert completion.error == f"the generator returned token {VOCABULARY}, but the model has {VOCABULARY} tokens"
    crew.close()


def test_routes_stay_at_the_rank_if_somebody_needs_them() -> None:
    crew = LocalCrew({2: Routing()}, SHAPE)
    fleet = fleet_of(crew)
    asked = [Request([1, 2, last], 0, Sampling(2), rollouts=rollouts) for last, rollouts in ((3, 7), (4, None), (9, 7))]
    kept, plain, wrong = results(fleet.submit(asked))
    (piece,) = kept.routes
    assert (piece.at.rank, piece.at.key[0], piece.at.start, piece.at.stop) == (2, 7, 0, 5)
    assert piece.missing.tolist() == [1, 0, 0, 0, 0]  # the last token's do not count
    assert crew.routes[2]._own[piece.at.key][1].experts.shape == (5, 2, 2)
    assert plain.routes is None
    assert wrong.finish == "error"
    assert "its routes are invalid: ValueError: routes of layer 0, row 1" in wrong.error
    assert len(crew.routes[2]._own) == 1
    later = piece.piece(1, 4)
    assert (later.at.start, later.at.stop, later.missing.tolist()) == (1, 4, [0, 0, 0])
    crew.close()


def test_strangers_are_no_members() -> None:
    with (
        RankListener("localhost") as listener,
        socket.create_connection(("127.0.0.1", listener.address.port)) as stranger,
    ):
        stranger.sendall(b"\0\0\0\4nonsense")
        with socket.create_connection(("127.0.0.1", listener.address.port)):  # says nothing
            ours = connect_to_program(listener.address, 4)
            theirs = listener.connection(4)
            theirs.send("welcome")
            assert ours.recv() == "welcome"
            ours.close()
            theirs.close()


def test_a_member_that_is_slow_to_tell_is_not_lost_twice(crew: LocalCrew) -> None:
    """What arrives from a member after its loss counts neither as a completion nor as another loss."""
    fleet = fleet_of(crew)
    two = generators(crew)[1]
    two.held.clear()
    completions = fleet.submit(requests(3))
    fleet.mark_lost(3, "too old")
    assert [completion.writer for completion in results(completions)] == [0, 0, 5]
    fleet.restart()
    two.lose()  # the generator of before
    assert [completion.writer for completion in results(fleet.submit(requests(3)))] == [0, 3, 5]
    assert not fleet.lost


class Refusing(Echo):
    """Is lost with a request whose seed is 11, and with no other."""

    def complete(self, requests: Sequence[Request], finish: Callable[[int, Completion], None]) -> None:
        if any(request.seed == 11 for request in requests):
            raise ConnectionError("it is gone")
        super().complete(requests, finish)


def test_a_request_with_which_generators_are_lost_does_not_take_all_of_them() -> None:
    crew = LocalCrew({rank: Refusing() for rank in range(6)})
    fleet = fleet_of(crew)
    completions = results(fleet.submit(requests(6)))
    assert [completion.finish for completion in completions] == ["stop", "error", *["stop"] * 4]
    assert completions[1].error.startswith("3 generators that it was assigned to were lost, the last: ConnectionError")
    assert len(fleet.lost) == 3
    crew.close()


def test_a_member_that_hears_nothing_for_too_long_is_lost(crew: LocalCrew, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "HEALTH_CHECK_SECONDS", 0.01)
    monkeypatch.setattr(fleet_module.watchdog, "hang_seconds", 0.3)
    fleet = fleet_of(crew)
    generators(crew)[1].held.clear()
    completions = fleet.wait(fleet.submit(requests(3)))
    assert [completion.writer for completion in completions] == [0, 0, 5]
    assert fleet.lost == {3: "it has sent nothing for 0.005 minutes (failures.hang_minutes)"}
    generators(crew)[1].held.set()


def test_requests_are_held_while_generators_that_share_memory_are_started_again(crew: LocalCrew) -> None:
    fleet = fleet_of(crew)
    fleet.spec.shares_memory = True  # type: ignore[misc]
    fleet.mark_lost(3, "it is broken")
    submitted: list[Future[Completion]] = []
    call, asked = crew.call, list[int]()

    def restarting(given: RemoteCall, shares: Sequence[Any]) -> dict[int, Any]:
        submitted.extend(fleet.submit(requests(3)))
        asked.append(sum(len(generator.asked) for generator in generators(crew)))
        return call(given, shares)

    crew.call = restarting  # type: ignore[method-assign]
    fleet.restart()
    assert asked == [0]
    assert [completion.writer for completion in results(submitted)] == [0, 3, 5]


def test_a_completion_counts_once_even_if_its_member_is_lost_meanwhile(crew: LocalCrew) -> None:
    fleet = fleet_of(crew)
    finished: list[int] = []

    def lose_it(completion: Completion) -> Completion:
        finished.append(completion.token_ids[0])
        if completion.writer == 3:
            fleet.mark_lost(3, "too old")
        return completion

    completions = fleet.wait([then(completion, lose_it) for completion in fleet.submit(requests(9))])
    assert sorted(finished) == [*range(9)]
    assert [completion.token_ids[0] for completion in completions] == [*range(9)]


def test_a_member_that_came_back_is_tried_at_once_when_it_is_lost_again(crew: LocalCrew) -> None:
    fleet = fleet_of(crew)
    fleet.policy_version = 4
    fleet.mark_lost(3, "it is broken")
    fleet.postpone_restarts()
    assert (fleet.lost, fleet.postponed) == ({}, {3: "it is broken"})
    fleet.policy_version = 5
    assert fleet.lost == {3: "it is broken"}
    fleet.postpone_restarts()
    fleet.policy_version = 6
    assert fleet.postponed
    fleet.policy_version = 7
    assert fleet.lost
    fleet.restart()
    fleet.mark_lost(3, "it is broken again")
    fleet.postpone_restarts()
    fleet.policy_version += 1
    assert fleet.lost == {3: "it is broken again"}
