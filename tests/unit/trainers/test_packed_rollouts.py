"""What completions become in an optimizer step: masks, advantages of their groups, and a penalty in the reward."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from automodel_rl.batch import Microbatch, TokenSequence, pack, unpack
from automodel_rl.config.algorithms import GRPOConfig
from automodel_rl.data import loader
from automodel_rl.generators.protocol import Completion, Conversation
from automodel_rl.losses import TokenOutputs
from automodel_rl.rollout.groups import Group
from automodel_rl.rollout.protocol import Rollout
from automodel_rl.rollout.rewards.scorer import Score
from automodel_rl.trainers import policy_batches
from automodel_rl.trainers.grpo import _own_loss
from automodel_rl.trainers.policy_batches import with_advantages

ALONE: Any = SimpleNamespace(data_control=None, guests_control=None)
"""The layout of a single rank."""

PROMPT = 3
GROUP_SIZE, NUM_GROUPS, NUM_STEPS = 2, 5, 2


def config_of(**changes: Any) -> GRPOConfig:
    values: dict[str, Any] = {
        "output": "run",
        "model": {"path": "nowhere"},
        "data": {"train": [{"path": "nowhere.jsonl"}]},
        "rewards": [{"function": "math"}],
        "batch": {"microbatch_tokens": 512},
        "length": {"steps": 1},
        "rollout": {"prompts": 4, "group_size": GROUP_SIZE, "max_prompt_tokens": 16, "max_new_tokens": 16},
    }
    for section, given in changes.items():
        values[section] = {**values.get(section, {}), **given}
    return GRPOConfig.model_validate(values)


def rollout_of(generator: np.random.Generator, finish: Any = "stop") -> Rollout:
    """A conversation of two turns, with an answer between."""
    first, answer, last = generator.integers(1, 5, 3).tolist()
    sampled = [True] * first + [False] * answer + [True] * last
    conversation = Conversation(generator.integers(0, 9, PROMPT).tolist(), sampled)
    tokens = generator.integers(0, 9, len(sampled)).tolist()
    logprobs = [-float(x) * is_sampled for x, is_sampled in zip(generator.random(len(tokens)), sampled, strict=True)]
    completion = Completion(tokens, logprobs, finish, conversation=conversation)
    return Rollout(completion, "", Score(0.0, (0.0,), ("",)))


def groups_of(seed: int) -> list[Group]:
    generator = np.random.default_rng(seed)
    prompt: Any = SimpleNamespace(token_ids=[], media=())
    return [
        Group(
            prompt, [rollout_of(generator) for _ in range(GROUP_SIZE)], torch.from_numpy(generator.random(GROUP_SIZE))
        )
        for _ in range(NUM_GROUPS)
    ]


def packed(groups: list[Group], config: GRPOConfig) -> tuple[list[list[Microbatch]], list[list[TokenSequence]]]:
    """Microbatches of each optimizer step, with random values on every token, and the sequences in them."""
    generator = torch.Generator().manual_seed(5)
    steps, sequences = [], []
    for step in range(NUM_STEPS):
        chosen = policy_batches.rollouts_of_optimizer_step(groups, step, NUM_STEPS)
        own = [policy_batches._to_sequence(group, rollout, config) for group, rollout in chosen]
        for sequence in own:
            for name in ("old_logprobs", "ref_logprobs"):
                sequence.values[name] = -torch.rand(len(sequence), generator=generator, dtype=torch.float64)
        sequences.append(own)
        steps.append(pack(own, 30, min_microbatches=2))
    return steps, sequences


ESTIMATES = {"k1": lambda r: -r, "k2": lambda r: r**2 / 2, "k3": lambda r: r.exp() - 1 - r}
"""Of r = log-probability under the reference, less that under the policy."""


@pytest.mark.parametrize("estimator", [None, *ESTIMATES])
def test_advantages_are_those_of_rewards_less_the_divergence_that_was_asked_for(
    estimator: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "gather_objects", lambda value, group: [value])
    kl = {} if estimator is None else {"coefficient": 0.25, "estimator": estimator, "where": "reward"}
    config = config_of(loss={"kl": kl, "on_policy": False}, advantage={"kind": "dr_grpo"})
    groups = groups_of(2)
    steps, sequences = packed(groups, config)
    assert all(len(microbatches) > 1 for microbatches in steps)
    rewards = torch.stack([group.rewards for group in groups])
    if estimator is not None:
        for step, own in enumerate(sequences):
            for place, sequence in enumerate(own):
                r = (sequence.values["ref_logprobs"] - sequence.values["old_logprobs"])[sequence.loss_mask]
                group = step + NUM_STEPS * (place // GROUP_SIZE)
                rewards[group, place % GROUP_SIZE] -= 0.25 * ESTIMATES[estimator](r).sum()
    expected = rewards - rewards.mean(1, keepdim=True)
    found: dict[tuple[int, int], float] = {}
    for step, microbatches in enumerate(with_advantages(groups, steps, config, ALONE)):
        for microbatch in microbatches:
            for place, piece in zip(microbatch.order, unpack(microbatch.values["advantages"], microbatch), strict=True):
                (value,) = set(piece[1:].tolist())
                found[step + NUM_STEPS * (place // GROUP_SIZE), place % GROUP_SIZE] = value
    assert len(found) == NUM_GROUPS * GROUP_SIZE
    for (group, number), value in found.items():
        assert value == pytest.approx(expected[group, number].item(), abs=1e-12)


@pytest.mark.parametrize(
    ("masks", "finish", "counts"), [(False, "length", True), (True, "length", False), (True, "stop", True)]
)
def test_sampled_tokens_count_unless_their_completion_was_cut(masks: bool, finish: str, counts: bool) -> None:
    rollout = rollout_of(np.random.default_rng(3), finish)
    (group,) = [Group(SimpleNamespace(token_ids=[], media=()), [rollout], torch.zeros(1))]  # type: ignore[arg-type]
    sequence = policy_batches._to_sequence(group, rollout, config_of(filter={"mask_overlong": masks}))
    sampled = rollout.completion.sampled
    assert sequence.loss_mask.tolist() == [False] * PROMPT + (sampled if counts else [False] * len(sampled))
    assert sequence.input_ids[PROMPT:].tolist() == rollout.completion.token_ids
    assert sequence.values["rollout_logprobs"][PROMPT:].tolist() == rollout.completion.logprobs


TURNS = {"tools": ["my_tools:add"], "max_turns": 4}


@pytest.mark.parametrize(
    ("rollout", "loss", "longest"),
    [
        ({}, {}, 16),
        (TURNS, {}, 4 * 16),
        ({**TURNS, "max_tokens": 50}, {}, 50),
        ({**TURNS, "max_tokens": 99}, {}, 4 * 16),
        (TURNS, {"max_completion_tokens": 10}, 10),
    ],
    ids=["one turn", "several turns", "fewer tokens than turns", "more tokens than turns", "given"],
)
def test_a_constant_is_the_most_that_the_model_may_write(
    rollout: dict[str, Any], loss: dict[str, Any], longest: int
) -> None:
    config = config_of(rollout=rollout, loss={"normalise": "constant", **loss}, batch={"optimizer_steps": 2})
    (microbatch,) = pack(packed(groups_of(1), config)[1][0][:1], 30)
    microbatch.values["advantages"] = torch.ones(microbatch.num_tokens, dtype=torch.float64)
    output = TokenOutputs(microbatch.values["old_logprobs"].clone())
    total = _own_loss(config)(output, microbatch).sums["sequences"].item()
    assert total == pytest.approx(-int(microbatch.loss_mask.sum()) / longest)
