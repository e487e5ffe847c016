"""Agents in processes of their own: what they do becomes completions, and whatever they do ends."""

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from automodel_rl.data.template import ChatTemplate
from automodel_rl.errors import InputError
from automodel_rl.generator_messages import Request
from automodel_rl.generators.protocol import Completion
from automodel_rl.rollout.episodes import fork_pool
from automodel_rl.rollout.rollouts import Rollouts
from tests import fleets
from tests.fleets import Echo, LocalCrew
from tests.processes import descendants_of, is_alive
from tests.unit.data.stock_templates import stock_tokenizer
from tests.unit.rollout.agents.agent_runs import LONGEST, agent_rollouts, collected, prompts

TOKENIZER = stock_tokenizer("qwen3")
TURN = [*TOKENIZER("hello you")["input_ids"], TOKENIZER.convert_tokens_to_ids("<|im_end|>")]


class Greeting(Echo):
    """Writes the same turn always."""

    def completion(self, request: Request) -> Completion:
        return Completion(TURN, [-0.5] * len(TURN), "stop", versions=(3, 3))


class WaitingGreeting(Greeting):
    writes_in_background = False


@pytest.fixture(params=[Greeting, WaitingGreeting], ids=["works alone", "when waited for"])
def crew(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalCrew]:
    monkeypatch.setattr(fleets, "VOCABULARY", len(TOKENIZER))
    crew = LocalCrew({0: request.param(), 1: request.param()})
    yield crew
    crew.close()


@pytest.fixture
def rollouts_of(crew: LocalCrew, tmp_path: Path) -> Iterator[Callable[..., Rollouts]]:
    made = []

    def make(*given: Any, **options: Any) -> Rollouts:
        made.append(agent_rollouts(crew, ChatTemplate(TOKENIZER), tmp_path, *given, **options))
        return made[-1]

    yield make
    for rollouts in made:
        rollouts.close()


def test_what_an_agent_does_is_a_completion_with_its_reward(rollouts_of: Any) -> None:
    for rollout in collected(rollouts_of("good"), 2, 3):
        completion = rollout.completion
        assert (completion.finish, rollout.score.total) == ("stop", 9.0)
        assert rollout.text == "hello you"
        (branch,) = rollout.branches(prompts(1)[0])
        assert sum(branch.sampled) == 2 * len(TURN)
        assert completion.conversation is not None
        assert [message["role"] for message in completion.conversation.messages] == ["user", "assistant"] * 2
        assert [turn["kind"] for turn in completion.conversation.tree] == ["first", "extension"]


def test_parallel_calls_become_branches_that_share_their_beginning(rollouts_of: Any) -> None:
    for rollout in collected(rollouts_of("parallel")):
        assert rollout.score.total == 3.0
        branches = rollout.branches(prompts(1)[0])
        assert [sum(branch.sampled) for branch in branches] == [2 * len(TURN), len(TURN), len(TURN)]
        assert len({tuple(branch.prompt + branch.token_ids) for branch in branches}) == 3


@pytest.mark.parametrize(
    ("agent", "error"),
    [
        ("raising", "the agent failed: ValueError: it went wrong"),
        ("dying", "the agent failed: its process exited before it returned"),
        ("silent", "the agent made no call"),
        ("many_metrics", "the agent failed: it returned 3000 metrics, more than 64: return fewer"),
        ("without_reward", "the agent returned no reward: return a number"),
        (
            "odd_reward",
            "the agent failed: TypeError: the agent returned 'many' for steps, which is not a finite number",
        ),
    ],
)
def test_an_agent_that_fails_leaves_its_group_or_gets_a_reward(rollouts_of: Any, agent: str, error: str) -> None:
    for rollout in collected(rollouts_of(agent)):
        assert (rollout.completion.finish, rollout.completion.error) == ("error", error)
        assert not rollout.is_rewarded
    is_failure = "failed" in error
    for rollout in collected(rollouts_of(agent, agent_failed=-1.0)):
        assert rollout.is_rewarded == is_failure
        if is_failure:
            assert (rollout.completion.finish, rollout.score.total) == ("length", -1.0)
            assert sum(rollout.branches(prompts(1)[0])[0].sampled) == len(TURN)


def test_an_agent_without_a_reward_is_judged_by_other_rewards(rollouts_of: Any) -> None:
    for rollout in collected(rollouts_of("without_reward", "tests.unit.rollout.agents.test_agents:num_messages")):
        assert rollout.score.total == 2.0


def num_messages(completion: str, example: dict[str, Any]) -> float:
    return float(len(example["messages"]) * (completion == "hello you"))


def test_an_agent_that_takes_too_long_is_ended(rollouts_of: Any) -> None:
    for rollout in collected(rollouts_of("hanging", episode_seconds=1.0)):
        assert rollout.completion.error == "the agent failed: it took longer than rollout.episode_seconds=1"


def test_what_agents_start_ends_with_them(rollouts_of: Any, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    assert all(rollout.is_rewarded for rollout in collected(rollouts_of("forking"), 2, pids=str(pids)))
    left = [int(pid) for pid in pids.read_text().split()]
    assert len(left) == 4
    deadline = time.monotonic() + LONGEST
    while any(Path(f"/proc/{pid}").exists() for pid in left):
        assert time.monotonic() < deadline, "a process was left behind"
        time.sleep(0.05)


def test_a_flood_of_calls_is_refused_after_the_limit(rollouts_of: Any) -> None:
    for rollout in collected(rollouts_of("flooding", max_turns=8)):
        assert rollout.score.total == 1.0
        assert rollout.completion.conversation is not None
        assert len(rollout.completion.conversation.tree) == 8
        assert rollout.completion.conversation.end == "rollout.max_turns=8 calls were made"
        assert len(rollout.branches(prompts(1)[0])) == 8


def test_requests_that_would_break_a_generator_are_refused(rollouts_of: Any) -> None:
    for rollout in collected(rollouts_of("odd_requests")):
        assert rollout.score.total == 13.0
        assert rollout.completion.conversation is not None
        assert rollout.completion.conversation.metrics["refused_calls"] == 13


def test_an_agent_that_cannot_be_started_fails_alone(rollouts_of: Any) -> None:
    rollouts = rollouts_of("good")
    begin, calls = rollouts.conversations._runner.begin, []

    def fail_once(*given: Any) -> Any:
        calls.append(given)
        if len(calls) == 1:
            raise OSError(24, "Too many open files")
        return begin(*given)

    rollouts.conversations._runner.begin = fail_once
    first, *others = collected(rollouts, 2)
    assert "it could not be started" in first.completion.error
    assert [rollout.score.total for rollout in others] == [9.0] * 3


def test_agents_call_while_others_are_started(rollouts_of: Any) -> None:
    agents = rollouts_of("good")
    processes, end = agents.conversations._runner._processes, agents.conversations._end
    begin, one_is_over, waited = processes.begin, threading.Event(), []

    def begin_late() -> Any:
        waited.append(not waited or one_is_over.wait(60))
        return begin()

    def end_and_tell(*given: Any) -> None:
        end(*given)
        one_is_over.set()

    processes.begin, agents.conversations._end = begin_late, end_and_tell
    collected(agents, 2)
    assert waited == [True] * 4


def test_an_error_that_is_not_the_agents_reaches_the_run(rollouts_of: Any) -> None:
    agents = rollouts_of("good")

    def fail(*given: Any) -> None:
        raise RuntimeError("nobody saw this")

    agents.conversations._end = fail
    with pytest.raises(RuntimeError, match="nobody saw this"):
        collected(agents, 2)


def test_a_process_that_does_not_say_it_is_there_costs_its_agent_alone(
    rollouts_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_pool, "FORK_SECONDS", 0.0)
    for rollout in collected(rollouts_of("good"), 2):
        assert "did not start within" in rollout.completion.error


def test_a_turn_ends_with_the_token_that_completes_a_stop_text(rollouts_of: Any) -> None:
    for rollout in collected(rollouts_of("stopping")):
        assert rollout.score.total == 1.0
        rows = rollout.branches(prompts(1)[0])
        assert sorted(row.token_ids for row in rows) == [TURN[:1], TURN[:-1], TURN]
        assert all(len(row.logprobs) == len(row.token_ids) for row in rows)


def test_calls_after_the_end_are_refused(rollouts_of: Any, tmp_path: Path) -> None:
    late = tmp_path / "late"
    collected(rollouts_of("after_the_end"), late=str(late))
    # The child is ended with its agent, or is told that the episode is over.
    assert "hello you" not in (late.read_text() if late.exists() else "")


def test_one_that_waits_does_not_hold_up_others(rollouts_of: Any, tmp_path: Path) -> None:
    rollouts = rollouts_of("waiting_first")
    submit, waited_for, num_scored = rollouts.scorer.submit, tmp_path / "others are done", itertools.count(1)

    def count(*given: Any) -> Any:
        if next(num_scored) == 38:  # all but those of the first prompt
            waited_for.touch()
        return submit(*given)

    rollouts.scorer.submit = count
    found = collected(rollouts, 20, 2, waited_for=str(waited_for))
    assert all(rollout.is_rewarded for rollout in found)


def test_agents_go_on_when_a_generator_is_lost(rollouts_of: Any, crew: LocalCrew) -> None:
    rollouts = rollouts_of("good", retries=3)
    generators = [supervisor.generator for supervisor in crew.supervisors.values()]
    for generator in generators:
        generator.held.clear()

    def lose_both() -> None:
        deadline = time.monotonic() + LONGEST
        while not any(generator.asked for generator in generators) and time.monotonic() < deadline:
            time.sleep(0.01)
        for generator in generators:
            generator.lose()

    thread = threading.Thread(target=lose_both)
    thread.start()
    found = collected(rollouts, 4)
    thread.join()
    assert [rollout.score.total for rollout in found] == [9.0] * 8
    assert crew.restarted
    asked: dict[tuple[int, ...], set[int]] = {}
    again = [supervisor.generator for supervisor in crew.supervisors.values()]
    for request in [request for generator in {*generators, *again} for request in generator.asked]:
        asked.setdefault((request.conversation or 0, *request.prompt), set()).add(request.seed)
    assert all(len(seeds) == 1 for seeds in asked.values())  # the same call has the same seed


def test_a_client_that_asks_again_gets_the_answer_that_was_under_way(rollouts_of: Any, crew: LocalCrew) -> None:
    generators = [supervisor.generator for supervisor in crew.supervisors.values()]
    for generator in generators:
        generator.held.clear()
    rollouts = rollouts_of("impatient")
    make, episodes = rollouts.conversations.episode, []
    rollouts.conversations.episode = lambda *given: episodes.append(make(*given)) or episodes[-1]

    def release() -> None:
        """Lets generators write once the client has asked three times."""
        deadline = time.monotonic() + LONGEST
        while time.monotonic() < deadline and not (episodes and episodes[0]._num_replays == 2):
            time.sleep(0.01)
        for generator in generators:
            generator.held.set()

    thread = threading.Thread(target=release)
    thread.start()
    (rollout,) = collected(rollouts, 1, 1)
    thread.join()
    assert rollout.score.total == 9.0
    assert rollout.completion.conversation is not None
    assert len(rollout.completion.conversation.tree) == 2
    assert rollout.completion.conversation.metrics["replays"] == 2
    assert sum(len(generator.asked) for generator in generators) == 2


def test_two_hundred_agents_of_which_a_tenth_is_odd_end_and_leave_nothing(rollouts_of: Any, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    rollouts = rollouts_of("mixed", episode_seconds=16.0, max_turns=6)
    found = collected(rollouts, 200, 1, pids=str(pids))
    by_number = dict(enumerate(found))
    assert sum(rollout.is_rewarded for rollout in found) >= 188
    assert all(by_number[number].score.total == 9.0 for number in range(200) if number % 10)
    assert any("agent_server" in name for name in _names_of_descendants())
    rollouts.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids.read_text().split())
    assert not any("agent_server" in name for name in _names_of_descendants())


def _names_of_descendants() -> list[str]:
    """Names and command lines of processes that descend from this one; a fork has the name of its module."""
    alive = [Path(f"/proc/{pid}") for pid in descendants_of(os.getpid()) if is_alive(pid)]
    return [f"{(one / 'comm').read_text().strip()} {(one / 'cmdline').read_text()}" for one in alive]


@pytest.mark.parametrize(
    ("agent", "why"),
    [
        ("nobody", "cannot import it"),
        ("MIXED", "is not a function"),
        ("user", "cannot be called as function(endpoint, example)"),
    ],
)
def test_what_is_no_agent_is_refused_at_the_start(rollouts_of: Any, agent: str, why: str) -> None:
    with pytest.raises(InputError) as error:
        rollouts_of(agent)
    assert "rollout.agent=" in str(error.value)
    assert why in str(error.value)
