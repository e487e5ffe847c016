"""Rollouts: what generators are asked for, and what becomes of what they write."""

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from automodel_rl.batch import RouterShape, Video
from automodel_rl.config import RewardConfig
from automodel_rl.config.generators import TransformersGeneratorConfig, VllmGeneratorConfig
from automodel_rl.errors import InputError, RolloutError
from automodel_rl.generator_messages import Request, Sampling
from automodel_rl.generators.protocol import Completion
from automodel_rl.rollout.rewards.scorer import Scorer, Scoring
from automodel_rl.rollout.rollouts import Rollouts
from tests.fleets import VOCABULARY, Echo, LocalCrew, fleet_of
from tests.unit.data.stock_templates import stock_tokenizer

LONGEST = 60.0
REWARDS = [RewardConfig(function="length", options={"longest": 1})]


def rollouts_of(crew: LocalCrew, *, replay: bool = False, on_missing: str = "live", **options: Any) -> Rollouts:
    rollout = SimpleNamespace(
        **(
            {
                "generator": TransformersGeneratorConfig(),
                "retries": 1,
                "max_staleness": 0,
                "has_turns": False,
                "has_agent": False,
            }
            | options
        )
    )
    config: Any = SimpleNamespace(
        seed=0, rollout=rollout, world_size=1, router_replay=SimpleNamespace(enabled=replay, on_missing=on_missing)
    )
    template: Any = SimpleNamespace(
        # as many words as tokens
        tokenizer=SimpleNamespace(decode=lambda ids, **_: " ".join(map(str, ids)), all_special_ids=[])
    )
    fleet = fleet_of(crew)
    fleet.policy_version = 1
    return Rollouts(config, fleet, REWARDS, template, Path())


def prompts(count: int) -> Any:
    return [SimpleNamespace(token_ids=[1], example={}, messages=(), number=number, media=()) for number in range(count)]


@pytest.fixture
def crew() -> Iterator[LocalCrew]:
    crew = LocalCrew({0: Echo(), 1: Echo()})
    yield crew
    crew.close()


def test_every_completion_of_every_prompt_and_run_has_a_seed_of_its_own(crew: LocalCrew) -> None:
    rollouts = rollouts_of(crew)
    for run in (0, 1, 2, 2):
        rollouts.config.seed = run  # type: ignore[misc]
        rollouts.collect(prompts(20), 8, Sampling(2))
    rollouts.close()
    asked = [request.seed for supervisor in crew.supervisors.values() for request in supervisor.generator.asked]
    assert len(asked) == 4 * 160
    assert len({*asked}) == 3 * 160  # the same in the same run


class Patient(Echo):
    """Writes its last completion only when the first one has been scored."""

    scorings: list[Scoring]

    def complete(self, requests: Sequence[Request], finish: Callable[[int, Completion], None]) -> None:
        completions = [Completion([place, 1], [0.0, 0.0], "stop") for place in range(len(requests))]
        completions[1] = Completion([VOCABULARY], [0.0], "stop")  # a token outside the vocabulary
        for place, completion in enumerate(completions[:-1]):
            finish(place, completion)
        deadline = time.monotonic() + LONGEST
        while not (self.scorings and self.scorings[0].results[0].done()):  # type: ignore[union-attr]
            if time.monotonic() > deadline:
                raise RuntimeError("nothing was scored")
            time.sleep(0.01)
        finish(len(completions) - 1, completions[-1])


def test_completions_are_scored_while_others_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = Patient()
    generator.scorings = []
    submit = Scorer.submit

    def watched(scorer: Scorer, completion: str, example: Any) -> Scoring:
        generator.scorings.append(submit(scorer, completion, example))
        return generator.scorings[-1]

    monkeypatch.setattr(Scorer, "submit", watched)
    crew = LocalCrew({0: generator})
    rollouts = rollouts_of(crew)
    try:
        groups = rollouts.collect(prompts(2), 2, Sampling(3))
    finally:
        rollouts.close()
        crew.close()
    assert len(generator.scorings) == 4  # each once
    written = [rollout for group in groups for rollout in group]
    assert [rollout.key for rollout in written] == [(1, place) for place in range(4)]
    first, foreign, *others = [(rollout.text, rollout.score.total) for rollout in written]
    assert first == ("0 1", -1.0)
    assert foreign == ("", 0.0)
    assert others == [("2 1", -1.0), ("3 1", -1.0)]


def test_what_is_written_is_not_written_again_after_a_loss(crew: LocalCrew) -> None:
    one, two = (supervisor.generator for supervisor in crew.supervisors.values())
    rollouts = rollouts_of(crew)
    two.held.clear()
    number = rollouts.submit(prompts(4), 1, Sampling(2))
    two.lose()
    groups = rollouts.take(number)
    assert [group[0].completion.writer for group in groups] == [0, 0, 0, 0]
    assert len(one.asked) == 4
    assert len(crew.restarted) == 1
    rollouts.close()


def test_a_generator_that_never_comes_back_is_left_out_if_others_can_write(
    crew: LocalCrew, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollouts = rollouts_of(crew)
    rollouts.fleet.mark_lost(1, "it is broken")
    tries: list[int] = []
    monkeypatch.setattr(rollouts.fleet, "restart", lambda: tries.append(1))
    groups = rollouts.collect(prompts(2), 2, Sampling(2))
    assert {rollout.completion.writer for group in groups for rollout in group} == {0}
    assert (rollouts.fleet.lost, rollouts.fleet.postponed) == ({}, {1: "it is broken"})
    assert len(tries) == 1
    rollouts.collect(prompts(2), 2, Sampling(2))
    assert len(tries) == 1  # not in the same step
    for version, more in ((2, 1), (3, 0), (4, 1), (5, 0), (7, 0), (8, 1)):
        tries.clear()
        rollouts.fleet.policy_version = version
        rollouts.config.rollout.max_staleness = version
        rollouts.collect(prompts(2), 2, Sampling(2))
        assert len(tries) == more, version
    rollouts.fleet.mark_lost(0, "it is broken, too")
    with pytest.raises(RolloutError, match="the generator of rank 0 failed 2 times: it is broken, too"):
        rollouts.collect(prompts(2), 2, Sampling(2))
    rollouts.close()


def test_rollouts_that_were_asked_for_before_a_loss_are_asked_for_again(crew: LocalCrew) -> None:
    """Generators may be some batches ahead when they are lost."""
    one, two = (supervisor.generator for supervisor in crew.supervisors.values())
    rollouts = rollouts_of(crew)
    for generator in (one, two):
        generator.held.clear()
    numbers = [rollouts.submit(prompts(3), 1, Sampling(2)) for _ in range(3)]
    for generator in (one, two):
        generator.lose()
    for number in numbers:
        assert len(rollouts.take(number)) == 3
    assert len(crew.restarted) == 1
    rollouts.close()


class Old(Echo):
    """Writes with the weights of two syncs before, the first time."""

    instances = 0

    def __init__(self) -> None:
        super().__init__()
        Old.instances += 1
        self.number = Old.instances

    def completion(self, request: Request) -> Completion:
        version = 1 if self.number == 1 else 3
        return Completion([5], [0.0], "stop", versions=(version, version))


def test_a_generator_with_weights_too_old_is_started_again_and_writes_again() -> None:
    Old.instances = 0
    crew = LocalCrew({0: Old()})
    rollouts = rollouts_of(crew)
    ((rollout,),) = rollouts.collect(prompts(1), 1, Sampling(2))
    assert rollout.completion.versions == (1, 1)
    why = "the generator used weights 2 policy versions old, more than rollout.max_staleness=0"
    assert crew.restarted == [{0: why}]
    rollouts.close()
    crew.close()


class Forgetful(Echo):
    """Does not tell the experts of the first token."""

    def completion(self, request: Request) -> Completion:
        experts = np.tile(np.array([1, 0], dtype=np.int16), (2, 3, 1))
        experts[0] = -1
        return Completion([1, 2], [0.0, 0.0], "stop", routes=experts)


@pytest.mark.parametrize("on_missing", ["live", "error"])
def test_experts_that_are_not_told_are_counted_or_refused(on_missing: str) -> None:
    crew = LocalCrew({0: Forgetful()}, RouterShape(num_layers=3, layers=(0, 1, 2), num_experts=4, top_k=2))
    rollouts = rollouts_of(crew, replay=True, on_missing=on_missing)
    ((rollout,),) = rollouts.take(rollouts.submit(prompts(1), 1, Sampling(2), keeps_routes=True))
    if on_missing == "live":
        (branch,) = rollout.branches(prompts(1)[0])
        assert branch.num_missing == 3
        assert [(kept.at.rank, kept.at.start, kept.at.stop) for kept in branch.routes or ()] == [(0, 0, 3)]
        assert rollouts.numbers_taken() == {1}
        assert rollouts.numbers_taken() == set()
    else:
        assert "3 of its expert choices are missing" in rollout.completion.error
    ((plain,),) = rollouts.collect(prompts(1), 1, Sampling(2))
    assert plain.completion.routes is None
    rollouts.close()
    crew.close()


def test_videos_are_not_sent_to_vllm(crew: LocalCrew) -> None:
    rollouts = rollouts_of(crew, generator=VllmGeneratorConfig())
    prompt: Any = SimpleNamespace(number=3, media=(Video(0, 4, (2, 2, 2), torch.zeros(0)),))
    with pytest.raises(InputError, match="prompt 3 has a video: rollout.generator=vllm accepts only images"):
        rollouts.submit([prompt], 1, Sampling(3))
    rollouts.close()


@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("gptoss", "<|channel|>analysis<|message|>2 + 1<|end|><|start|>assistant<|channel|>final<|message|>3"),
        ("qwen3", "<think>2 + 1</think>3"),
        ("llama3_1", "3"),
    ],
)
def test_rewards_see_marks_and_not_the_end_of_the_turn(template: str, text: str, is_cut: bool) -> None:
    tokenizer = stock_tokenizer(template)
    special = [token for token in ("<|return|>", "<|im_end|>", "<|eot_id|>") if token in tokenizer.get_vocab()]
    ids = tokenizer(text + ("" if is_cut else special[0]), add_special_tokens=False)["input_ids"]
    rollouts: Any = SimpleNamespace(tokenizer=tokenizer)
    assert Rollouts._text(rollouts, Completion(ids, [-1.0] * len(ids), "stop")) == text
    assert Rollouts._text(rollouts, Completion([], [], "error", "gone")) == ""
