"""Rollouts are scored while others are still written."""

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from automodel_rl.batch import Video
from automodel_rl.config import RewardConfig
from automodel_rl.config.generators import TransformersGeneratorConfig, VllmGeneratorConfig
from automodel_rl.errors import InputError
from automodel_rl.generator_messages import Request, Sampling
from automodel_rl.generators.engine_ranks import EngineRanks
from automodel_rl.generators.protocol import Completion, OnFinished
from automodel_rl.launch.process_group import join_process_group
from automodel_rl.rollout.collect import RolloutCollector
from automodel_rl.rollout.rewards.scorer import Scorer, Scoring
from automodel_rl.rollout.rollouts import Rollouts
from tests.rank_pool import RankPool

LONGEST = 60.0


class Patient:
    """A generator that writes its last completion only when the first one has been scored."""

    def __init__(self, scorings: list[Scoring]):
        self.scorings = scorings

    def submit(self, requests: list[Request], on_finished: OnFinished) -> Callable[[], list[Completion]]:
        completions = [Completion([place, 1], [0.0, 0.0], "stop") for place in range(len(requests))]
        completions[1] = Completion([99], [0.0], "stop")  # a token outside the vocabulary

        def wait() -> list[Completion]:
            for place, completion in enumerate(completions[:-1]):
                on_finished(place, completion)
            deadline = time.monotonic() + LONGEST
            while not (self.scorings and self.scorings[0].results[0].done()):
                if time.monotonic() > deadline:
                    raise RuntimeError("nothing was scored")
                time.sleep(0.01)
            return completions

        return wait


class WatchedScorer(Scorer):
    """A scorer that keeps what was submitted."""

    submitted: list[Scoring]

    def submit(self, completion: str, example: Any) -> Scoring:
        scoring = super().submit(completion, example)
        self.submitted.append(scoring)
        return scoring


def collected() -> list[tuple[str, float]]:
    join_process_group(1)
    scorer = WatchedScorer([RewardConfig(function="length", options={"longest": 1})])
    scorer.submitted = []
    supervisor = SimpleNamespace(
        handle=SimpleNamespace(config=SimpleNamespace(vocab_size=50), router_shape=None),
        ranks=EngineRanks((0,)),
        world=dist.group.WORLD,
        generator=Patient(scorer.submitted),
        problem="",
        policy_version=0,
    )
    rollout = SimpleNamespace(generator=TransformersGeneratorConfig(), retries=0, max_staleness=0, sampling=Sampling(3))
    tokenizer = SimpleNamespace(decode=lambda ids, **_: " ".join(map(str, ids)))
    config: Any = SimpleNamespace(seed=0, rollout=rollout, router_replay=SimpleNamespace(enabled=False))
    collector = RolloutCollector(config, supervisor, tokenizer, scorer)  # type: ignore[arg-type]
    prompts: Any = [SimpleNamespace(token_ids=[1], example={}, number=number, media=()) for number in range(2)]
    try:
        written = collector.take(collector.submit(prompts, 2, config.rollout.sampling), 7)
    finally:
        scorer.close()
    assert len(scorer.submitted) == 4  # each once
    assert [*written.rollouts] == [0, 1, 2, 3]
    assert [rollout.key for rollout in written.rollouts.values()] == [(7, place) for place in range(4)]
    return [(rollout.text, rollout.score.total) for rollout in written.rollouts.values()]


def test_videos_are_not_sent_to_vllm() -> None:
    config: Any = SimpleNamespace(rollout=SimpleNamespace(generator=VllmGeneratorConfig(), has_turns=False))
    nobody: Any = SimpleNamespace(crew=SimpleNamespace(ask=lambda job: [None]))
    prompt: Any = SimpleNamespace(number=3, media=(Video(0, 4, (2, 2, 2), torch.zeros(0)),))
    with pytest.raises(InputError, match="prompt 3 has a video: rollout.generator=vllm gets images only"):
        Rollouts(config, nobody, ()).submit([prompt], 1, Sampling(3))


def test_completions_are_scored_while_others_are_written(ranks: RankPool) -> None:
    ((first, foreign, *others),) = ranks(1).run(collected)
    assert first == ("0 1", -1.0)
    assert foreign == ("", 0.0)
    assert others == [("2 1", -1.0), ("3 1", -1.0)]
