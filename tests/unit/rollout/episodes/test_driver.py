"""Episodes turn by turn: what the generator is asked with, what is trained, and what ends an episode."""

import threading
from collections.abc import Callable, Sequence

import pytest

from automodel_rl.generator_messages import Request
from automodel_rl.rollout.episodes.driver import EpisodeDriver
from automodel_rl.rollout.episodes.episode import Limits
from automodel_rl.rollout.episodes.protocol import Message, Outcome, Turn
from automodel_rl.rollout.protocol import Completion, OnFinished, do_nothing

END = 99


class Codec:
    """Texts are numbers; a message of a tool is one token."""

    def read(self, opening: Sequence[int], token_ids: Sequence[int]) -> Turn:
        return Turn(" ".join(map(str, token_ids)))

    def suffix(self, messages: Sequence[Message], turn: Turn, stop: int) -> list[int]:
        assert stop == END
        return [int(message["content"]) for message in messages]


class Writer:
    """Writes the length of the prompt, twice, and the end. It works alone, in a thread, or when it is waited for."""

    def __init__(self, works_alone: bool, dies_at: int = -1):
        self.works_alone, self.dies_at = works_alone, dies_at
        self.asked: list[Request] = []

    def submit(
        self, requests: Sequence[Request], on_finished: OnFinished = do_nothing
    ) -> Callable[[], list[Completion]]:
        self.asked += requests
        dies = 0 <= self.dies_at < len(self.asked)
        done: list[Completion] = []

        def write() -> None:
            for place, request in enumerate(requests):
                length = len(request.prompt)
                finish = "length" if request.prompt[0] == 7 else "stop"
                completion = Completion([length, length, END], [-0.5, -0.25, -0.125], finish, versions=(length, length))
                done.append(completion)
                if not dies:
                    on_finished(place, completion)

        thread = threading.Thread(target=write)
        if self.works_alone:
            thread.start()

        def wait() -> list[Completion]:
            thread.join() if self.works_alone else write()
            if dies:
                raise ConnectionError("the generator is gone")
            return done

        return wait

    def close(self) -> None: ...


class Echo:
    """Answers each turn with its number, and ends after some turns."""

    def __init__(self, turns: int, fails_at: int = -1):
        self.turns, self.fails_at, self.number = turns, fails_at, 0
        self.is_closed = False

    def reset(self) -> Sequence[Message]:
        return ()

    def step(self, turn: Turn) -> Outcome:
        self.number += 1
        if self.number == self.fails_at:
            raise ValueError("the world has ended")
        return Outcome([{"role": "tool", "content": str(self.number)}], done=self.number == self.turns, reward=1.0)

    def close(self) -> None:
        self.is_closed = True


def run(
    works_alone: bool, prompts: list[list[int]], worlds: list[Echo], **limits: int
) -> tuple[Writer, list[Completion]]:
    writer, driver = (
        Writer(works_alone),
        EpisodeDriver(Codec(), Limits(**{"turns": 9, "tokens": 99, "turn_tokens": 3} | limits), 2),
    )
    wait = driver.submit(writer, [Request(prompt, 5, 1.0) for prompt in prompts], lambda place: worlds[place])
    completions = wait()
    driver.close()
    return writer, completions


@pytest.mark.parametrize("works_alone", [True, False])
def test_every_turn_is_asked_with_the_tokens_before_it_as_they_were_sampled(works_alone: bool) -> None:
    worlds = [Echo(3), Echo(1)]
    writer, (three, one) = run(works_alone, [[1, 2], [3]], worlds)
    assert three.token_ids == [2, 2, END, 1, 6, 6, END, 2, 10, 10, END]
    assert three.sampled == [True] * 3 + [False] + [True] * 3 + [False] + [True] * 3
    assert three.logprobs == [-0.5, -0.25, -0.125, 0.0] * 2 + [-0.5, -0.25, -0.125]
    assert three.versions == (2, 10)
    assert one.token_ids == [1, 1, END]
    assert all(world.is_closed for world in worlds)
    asked = sorted((request.prompt for request in writer.asked if request.prompt[0] == 1), key=len)
    assert asked == [[1, 2], [1, 2, 2, 2, END, 1], [1, 2, 2, 2, END, 1, 6, 6, END, 2]]
    seeds = {len(request.prompt): request.seed for request in writer.asked if request.prompt[0] == 1}
    assert seeds[2] == 5
    assert len(set(seeds.values())) == 3
    again, _ = run(works_alone, [[1, 2], [3]], [Echo(3), Echo(1)])
    assert {len(r.prompt): r.seed for r in again.asked if r.prompt[0] == 1} == seeds


@pytest.mark.parametrize(
    ("limits", "num_turns"), [({"turns": 2}, 2), ({"tokens": 7}, 2), ({"tokens": 6}, 1), ({"tokens": 99}, 5)], ids=str
)
def test_limits_end_an_episode_after_a_turn(limits: dict[str, int], num_turns: int) -> None:
    _, (completion,) = run(False, [[1, 2]], [Echo(5)], **limits)
    assert completion.sampled is not None
    assert len(completion.token_ids) == 3 * num_turns + num_turns - 1
    assert completion.sampled[-1]  # what nobody answers any more is left out


def test_a_turn_that_was_cut_off_is_the_last() -> None:
    _, (completion,) = run(True, [[7]], [Echo(5)])
    assert (completion.finish, len(completion.token_ids)) == ("length", 3)


@pytest.mark.parametrize("works_alone", [True, False])
def test_an_environment_that_fails_costs_its_own_episode(works_alone: bool) -> None:
    worlds = [Echo(3, fails_at=2), Echo(2)]
    _, (failed, other) = run(works_alone, [[1], [2]], worlds)
    assert (failed.finish, failed.error, failed.token_ids) == ("error", "ValueError: the world has ended", [])
    assert len(other.token_ids) == 7
    assert worlds[0].is_closed


@pytest.mark.parametrize("works_alone", [True, False])
def test_a_generator_that_is_lost_ends_the_wait(works_alone: bool) -> None:
    writer, driver = Writer(works_alone, dies_at=2), EpisodeDriver(Codec(), Limits(9, 99, 3), 2)
    wait = driver.submit(writer, [Request([1], 5, 1.0), Request([2], 5, 1.0)], lambda place: Echo(3))
    with pytest.raises(ConnectionError, match="the generator is gone"):
        wait()
    driver.close()
