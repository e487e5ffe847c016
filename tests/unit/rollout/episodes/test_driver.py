"""Episodes turn by turn: what the generator is asked with, what is trained, and what ends an episode."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import ClassVar

import pytest

from automodel_rl.errors import InputError
from automodel_rl.generator_messages import Request, Sampling
from automodel_rl.generators.protocol import Completion, fail_unfinished, results
from automodel_rl.rollout.episodes.driver import EpisodeDriver
from automodel_rl.rollout.episodes.episode import Episode, Limits
from automodel_rl.rollout.episodes.protocol import Message, Outcome, Turn
from automodel_rl.rollout.seeds import turn_seed

END = 99


class Codec:
    """Texts are numbers; a message of a tool is one token. The token 8 before the end is a call that cannot be read."""

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        return [int(token) for message in messages for token in str(message["content"]).split()]

    def read(self, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> Turn:
        return Turn(" ".join(map(str, token_ids)))

    def suffix(self, messages: Sequence[Message], turn: Turn, stop: int) -> list[int]:
        assert stop == END
        return [int(token) for message in messages for token in str(message["content"]).split()]


class Writer:
    """Writes the length of the prompt, twice, and the end. It works alone, in a thread, or at once."""

    def __init__(self, writes_in_background: bool, dies_at: int = -1):
        self.writes_in_background, self.dies_at = writes_in_background, dies_at
        self.asked: list[Request] = []

    def submit(self, requests: Sequence[Request]) -> "list[Future[Completion]]":
        self.asked += requests
        completions: list[Future[Completion]] = [Future() for _ in requests]

        def write() -> None:
            if 0 <= self.dies_at < len(self.asked):
                fail_unfinished(completions, ConnectionError("the generator is gone"))
                return
            for request, completion in zip(requests, completions, strict=True):
                length = len(request.prompt)
                finish = "length" if request.prompt[0] == 7 else "stop"
                completion.set_result(
                    Completion([length, length, END], [-0.5, -0.25, -0.125], finish, versions=(length, length))
                )

        if self.writes_in_background:
            threading.Thread(target=write).start()
        else:
            write()
        return completions

    def close(self) -> None: ...


class Echo:
    """Answers each turn with its number, and ends after some turns."""

    def __init__(self, turns: int, fails_at: int = -1, begins_with: Sequence[int] = ()):
        self.turns, self.fails_at, self.number = turns, fails_at, 0
        self.begins_with, self.is_closed = begins_with, False

    def reset(self) -> Sequence[Message]:
        return [{"role": "user", "content": f" {token}"} for token in self.begins_with]

    def step(self, turn: Turn) -> Outcome:
        self.number += 1
        if self.number == self.fails_at:
            raise ValueError("the world has ended")
        return Outcome([{"role": "tool", "content": str(self.number)}], done=self.number == self.turns, reward=1.0)

    def close(self) -> None:
        self.is_closed = True


class Silent(Echo):
    """Answers nothing, and does not say that it is done."""

    def step(self, turn: Turn) -> Outcome:
        return Outcome([], reward=1.0)


def episode_of(prompt: list[int], world: Echo, **limits: float) -> Episode:
    given = {"prompt_tokens": 9, "turns": 9, "tokens": 99, "turn_tokens": 3} | limits
    messages = [{"role": "user", "content": str(token)} for token in prompt]
    return Episode(Request(prompt, 5, Sampling(10)), messages, world, Codec(), Limits(**given))  # type: ignore[arg-type]


def drive(writer: Writer, episodes: Sequence[Episode], max_concurrent: int = 2) -> list[Completion]:
    driver = EpisodeDriver(max_concurrent)
    try:
        return results(driver.submit(writer, episodes))
    finally:
        driver.close()


def run(
    writes_in_background: bool, prompts: list[list[int]], worlds: list[Echo], **limits: float
) -> tuple[Writer, list[Completion]]:
    writer = Writer(writes_in_background)
    pairs = zip(prompts, worlds, strict=True)
    return writer, drive(writer, [episode_of(prompt, world, **limits) for prompt, world in pairs])


@pytest.mark.parametrize("writes_in_background", [True, False])
def test_every_turn_is_asked_with_the_tokens_before_it_as_they_were_sampled(writes_in_background: bool) -> None:
    worlds = [Echo(3), Echo(1)]
    writer, (three, one) = run(writes_in_background, [[1, 2], [3]], worlds)
    assert three.token_ids == [2, 2, END, 1, 6, 6, END, 2, 10, 10, END]
    assert three.sampled == [True] * 3 + [False] + [True] * 3 + [False] + [True] * 3
    assert three.logprobs == [-0.5, -0.25, -0.125, 0.0] * 2 + [-0.5, -0.25, -0.125]
    assert three.versions == (2, 10)
    assert one.token_ids == [1, 1, END]
    assert all(world.is_closed for world in worlds)
    asked = sorted((request.prompt for request in writer.asked if request.prompt[0] == 1), key=len)
    assert asked == [[1, 2], [1, 2, 2, 2, END, 1], [1, 2, 2, 2, END, 1, 6, 6, END, 2]]
    seeds = {len(request.prompt): request.seed for request in writer.asked if request.prompt[0] == 1}
    assert seeds[2] == turn_seed(5, [1, 2])
    assert len(set(seeds.values())) == 3
    again, _ = run(writes_in_background, [[1, 2], [3]], [Echo(3), Echo(1)])
    assert {len(r.prompt): r.seed for r in again.asked if r.prompt[0] == 1} == seeds


@pytest.mark.parametrize(
    ("limits", "num_turns"),
    [({"turns": 2}, 2), ({"tokens": 7}, 2), ({"tokens": 6}, 1), ({"seconds": 0.0}, 1), ({"tokens": 99}, 5)],
    ids=str,
)
def test_limits_end_an_episode_after_a_turn(limits: dict[str, float], num_turns: int) -> None:
    _, (completion,) = run(False, [[1, 2]], [Echo(5)], **limits)
    assert completion.finish == ("stop" if num_turns == 5 else "length")
    assert completion.conversation is not None
    assert completion.conversation.reward == num_turns
    assert len(completion.token_ids) == 3 * num_turns + num_turns - 1
    assert completion.sampled[-1]  # what nobody answers any more is left out


@pytest.mark.parametrize(
    ("prompt", "world", "end", "finish"),
    [
        ([7], lambda: Echo(5), "turn_tokens", "length"),
        ([7], lambda: Echo(1), "done", "length"),
        ([7], lambda: Silent(5), "done", "length"),
        ([1], lambda: Echo(1), "done", "stop"),
        ([1], lambda: Silent(5), "done", "stop"),
    ],
    ids=["cut, answered", "cut, done", "cut, not answered", "whole, done", "whole, not answered"],
)
def test_a_turn_that_was_cut_off_is_the_last_and_its_conversation_is_cut(
    prompt: list[int], world: Callable[[], Echo], end: str, finish: str
) -> None:
    _, (completion,) = run(True, [prompt], [world()])
    assert completion.conversation is not None
    assert (completion.conversation.end, completion.finish, len(completion.token_ids)) == (end, finish, 3)


@pytest.mark.parametrize(("prompt", "end", "finish"), [([1], "template", "stop"), ([7], "turn_tokens", "length")])
def test_a_turn_that_the_template_lets_nothing_follow_ends_a_whole_conversation(
    prompt: list[int], end: str, finish: str
) -> None:
    class Mute(Codec):
        def suffix(self, messages: Sequence[Message], turn: Turn, stop: int) -> list[int]:
            raise InputError("nothing follows")

    episode = episode_of(prompt, Echo(5))
    episode.codec = Mute()
    (completion,) = drive(Writer(True), [episode])
    assert completion.conversation is not None
    assert (completion.conversation.end, completion.finish, len(completion.token_ids)) == (end, finish, 3)


@pytest.mark.parametrize("writes_in_background", [True, False])
def test_an_environment_that_fails_costs_its_own_episode(writes_in_background: bool) -> None:
    worlds = [Echo(3, fails_at=2), Echo(2)]
    _, (failed, other) = run(writes_in_background, [[1], [2]], worlds)
    assert (failed.finish, failed.error, failed.token_ids) == (
        "error",
        "its environment failed: ValueError: the world has ended",
        [],
    )
    assert failed.conversation is not None
    assert failed.conversation.metrics["environment_errors"] == 1
    assert len(other.token_ids) == 7
    assert worlds[0].is_closed


@pytest.mark.parametrize("writes_in_background", [True, False])
def test_another_generator_goes_on_where_a_lost_one_ended(writes_in_background: bool) -> None:
    def episodes() -> list[Episode]:
        return [episode_of([1, 2], Echo(3)), episode_of([3], Echo(2)), episode_of([4], Echo(4))]

    steady = Writer(writes_in_background)
    expected = drive(steady, episodes())
    for dies_at in range(len(steady.asked)):
        same = episodes()
        with pytest.raises(ConnectionError, match="the generator is gone"):
            drive(Writer(writes_in_background, dies_at), same)
        other = Writer(writes_in_background)
        found = drive(other, same)
        assert [(c.token_ids, c.finish) for c in found] == [(c.token_ids, c.finish) for c in expected]
        every = {(tuple(request.prompt), request.seed) for request in steady.asked}
        assert {(tuple(request.prompt), request.seed) for request in other.asked} <= every
        assert len(other.asked) <= len(steady.asked) - (2 if dies_at >= 2 else 0)


class World(Echo):
    """Counts the environments that are open at once."""

    is_open: ClassVar[set[int]] = set()
    most = 0

    def reset(self) -> Sequence[Message]:
        World.is_open.add(id(self))
        World.most = max(World.most, len(World.is_open))
        return ()

    def close(self) -> None:
        World.is_open.discard(id(self))


def test_no_more_environments_are_open_than_asked_for() -> None:
    World.most = 0
    completions = drive(Writer(True), [episode_of([1], World(2)) for _ in range(7)], max_concurrent=3)
    assert [len(completion.token_ids) for completion in completions] == [7] * 7
    assert (World.most, len(World.is_open)) == (3, 0)


def test_room_for_environments_is_that_of_all_who_ask() -> None:
    """Batches ahead and validation may be under way together."""
    World.most = 0
    driver = EpisodeDriver(3)
    submitted = [driver.submit(Writer(True), [episode_of([1], World(2)) for _ in range(4)]) for _ in range(3)]
    assert [len(results(completions)) for completions in submitted] == [4, 4, 4]
    assert (World.most, len(World.is_open)) == (3, 0)
    with pytest.raises(ConnectionError):  # what was under way gives its room back
        results(driver.submit(Writer(True, dies_at=0), [episode_of([1], World(2)) for _ in range(4)]))
    assert len(results(driver.submit(Writer(True), [episode_of([1], World(2)) for _ in range(4)]))) == 4
    driver.close()


def test_what_an_environment_begins_with_is_part_of_the_prompt() -> None:
    writer, (completion, *_) = run(True, [[1]], [Echo(1, begins_with=[4, 5])])
    assert writer.asked[0].prompt == [1, 4, 5]
    assert completion.conversation is not None
    assert completion.conversation.prompt == [1, 4, 5]
    assert completion.token_ids == [3, 3, END]
    _, (failed,) = run(True, [[1]], [Echo(1, begins_with=[4, 5])], prompt_tokens=2)
    assert "3 tokens, more than rollout.max_prompt_tokens=2" in failed.error
