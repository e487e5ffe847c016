"""What completions become in an optimizer step: masks, advantages of their groups, and a penalty in the reward."""

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from automodel_rl.batch import Batch, pack
from automodel_rl.batch.microbatch import to_predictor
from automodel_rl.config.algorithms import GRPOConfig
from automodel_rl.generators.protocol import Branch, Completion, Conversation
from automodel_rl.losses import TokenOutputs
from automodel_rl.rollout.groups import Group
from automodel_rl.rollout.protocol import Rollout
from automodel_rl.rollout.rewards.scorer import Score
from automodel_rl.trainers import rollout_batch
from automodel_rl.trainers.online import policy_loss
from tests.unit.rollout.test_groups import group_of, rollout

PROMPT = 3
SCORE = Score(0.0, (0.0,), ("",))
GROUP_SIZE, NUM_GROUPS = 2, 5


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
    return Rollout(completion, "", SCORE)


def groups_of(seed: int) -> list[Group]:
    generator = np.random.default_rng(seed)
    prompt: Any = SimpleNamespace(token_ids=[], media=())
    return [
        Group(
            prompt, [rollout_of(generator) for _ in range(GROUP_SIZE)], torch.from_numpy(generator.random(GROUP_SIZE))
        )
        for _ in range(NUM_GROUPS)
    ]


def batch_with_values(groups: list[Group], config: GRPOConfig) -> Batch:
    """The rows of groups, with random values on every token."""
    generator = torch.Generator().manual_seed(5)
    batch = rollout_batch.batch_of(groups, config)
    for name in ("old_logprobs", "ref_logprobs"):
        batch[name] = [-torch.rand(length, generator=generator, dtype=torch.float64) for length in batch.lengths]
    return batch


ESTIMATES = {"k1": lambda r: -r, "k2": lambda r: r**2 / 2, "k3": lambda r: r.exp() - 1 - r}
"""Of r = log-probability under the reference, less that under the policy."""


@pytest.mark.parametrize("estimator", [None, *ESTIMATES])
def test_advantages_are_those_of_rewards_less_the_divergence_that_was_asked_for(estimator: str | None) -> None:
    kl = {} if estimator is None else {"coefficient": 0.25, "estimator": estimator, "where": "reward"}
    config = config_of(loss={"kl": kl, "on_policy": False}, advantage={"kind": "dr_grpo"})
    groups = groups_of(2)
    batch = batch_with_values(groups, config)
    rewards = torch.stack([group.rewards for group in groups])
    if estimator is not None:
        for row, sequence in enumerate(batch.sequences):
            r = (sequence.values["ref_logprobs"] - sequence.values["old_logprobs"])[sequence.loss_mask]
            rewards.view(-1)[row] -= 0.25 * ESTIMATES[estimator](r).sum()
    expected = (rewards - rewards.mean(1, keepdim=True)).flatten()
    assert rollout_batch.advantages_of(groups, batch, config).tolist() == pytest.approx(expected.tolist(), abs=1e-12)


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo", "reinforce"])
def test_mean_and_deviation_are_over_the_completions_that_are_left(kind: str) -> None:
    of_groups = [[1.0, math.nan, 0.0], [0.0, 1.0, 1.0], [1.0, 0.0, math.nan]]
    groups = [group_of([rollout(reward) for reward in rewards]).scored for rewards in of_groups]
    kept = [[reward for reward in rewards if not math.isnan(reward)] for rewards in of_groups]
    centred = [[r - sum(rewards) / len(rewards) for r in rewards] for rewards in kept]
    flat = [c for of_group in centred for c in of_group]
    batch_deviation = (sum(c * c for c in flat) / (len(flat) - 1)) ** 0.5

    def expected(rewards: list[float], c: float) -> float:
        n = len(rewards)
        mean = sum(rewards) / n
        deviation = (sum((r - mean) ** 2 for r in rewards) / (n - 1)) ** 0.5
        return {
            "grpo": c / (deviation + 1e-6),
            "dr_grpo": c,
            "rloo": c * n / (n - 1),
            "reinforce": c / (batch_deviation + 1e-6),
        }[kind]

    config = config_of(advantage={"kind": kind}, batch={"optimizer_steps": 2})
    batch = rollout_batch.batch_of(groups, config)
    assert batch.parts == [[0, 1, 5, 6], [2, 3, 4]]
    found = rollout_batch.advantages_of(groups, batch, config).tolist()
    assert found == pytest.approx([expected(r, c) for r, cs in zip(kept, centred, strict=True) for c in cs])


def test_only_tokens_with_a_log_probability_are_in_the_loss_mask() -> None:
    group = group_of([rollout(1.0, logprobs=[-1.0, math.nan, -2.0]), rollout(0.0)])
    sequence = rollout_batch.batch_of([group], config_of()).sequences[0]
    assert sequence.loss_mask.tolist() == [False, False, True, False, True]


def test_every_pass_of_every_step_and_seed_has_an_order_of_its_own() -> None:
    places = [(seed, step, epoch) for seed in (0, 1) for step in (1, 2, 11) for epoch in (1, 2)]
    orders = [tuple(rollout_batch.shuffled(30, *place)) for place in places]
    assert len({*orders, tuple(range(30))}) == len(orders) + 1
    assert all(sorted(order) == [*range(30)] for order in orders)
    assert [tuple(rollout_batch.shuffled(30, *place)) for place in places] == orders


def test_a_further_pass_trains_every_row_once_with_its_values() -> None:
    config = config_of(batch={"optimizer_steps": 2, "epochs": 3})
    groups = groups_of(4)
    batch = batch_with_values(groups, config)
    first, *further = rollout_batch.epochs_of(batch, groups, config, step=1)
    assert first is batch
    assert len(further) == 2
    for epoch in further:
        assert epoch.parts != batch.parts
        assert sorted(row for part in epoch.parts for row in part) == [*range(len(batch))]
        for part, rows in zip(epoch.split(), epoch.parts, strict=True):
            assert [value.tolist() for value in part["old_logprobs"]] == [
                batch["old_logprobs"][r].tolist() for r in rows
            ]


@pytest.mark.parametrize(
    ("masks", "finish", "counts"), [(False, "length", True), (True, "length", False), (True, "stop", True)]
)
def test_sampled_tokens_count_unless_their_completion_was_cut(masks: bool, finish: str, counts: bool) -> None:
    rollout = rollout_of(np.random.default_rng(3), finish)
    (group,) = [Group(SimpleNamespace(token_ids=[], media=()), [rollout], torch.zeros(1))]  # type: ignore[arg-type]
    sequence = rollout_batch.batch_of([group], config_of(filter={"mask_overlong": masks})).sequences[0]
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
    (microbatch,) = pack(batch_with_values(groups_of(1), config).sequences[:1], 30)
    microbatch.values["advantages"] = torch.ones(microbatch.num_tokens, dtype=torch.float64)
    output = TokenOutputs(microbatch.values["old_logprobs"].clone())
    total = policy_loss(config)(output, microbatch).sums["sequences"].item()
    assert total == pytest.approx(-int(microbatch.loss_mask.sum()) / longest)


BRANCHES = [
    [([True] * 3, [])],
    [([True] * 2 + [False] * 2 + [True] * 2, [[False, False, False, True], [False, True]])],
    [([True], []), ([True, True, False, True], [[False, True, True]])],
]
"""For each group the episodes: what was sampled in the last call's row, and in each further one."""


def forked_groups(seed: int) -> list[Group]:
    """Groups whose episodes have one row or several."""
    generator = np.random.default_rng(seed)

    def branch(sampled: list[bool]) -> Branch:
        tokens = generator.integers(0, 9, len(sampled)).tolist()
        logprobs = [-float(x) * one for x, one in zip(generator.random(len(sampled)), sampled, strict=True)]
        return Branch(generator.integers(0, 9, PROMPT).tolist(), tokens, logprobs, sampled)

    def episode(own: list[bool], others: list[list[bool]]) -> Rollout:
        last = branch(own)
        conversation = Conversation(last.prompt, own, branches=[branch(other) for other in others])
        return Rollout(Completion(last.token_ids, last.logprobs, "stop", conversation=conversation), "", SCORE)

    prompt: Any = SimpleNamespace(token_ids=[], media=())
    groups = []
    for of_group in BRANCHES:
        rollouts = [episode(*one) for one in of_group] + [rollout_of(generator)]
        groups.append(Group(prompt, rollouts, torch.from_numpy(generator.random(len(rollouts)))))
    return groups


def test_rows_of_an_episode_stay_together_and_share_one_advantage() -> None:
    groups, config = forked_groups(1), config_of(batch={"optimizer_steps": 2}, advantage={"kind": "dr_grpo"})
    batch = rollout_batch.batch_of(groups, config)
    assert batch.episodes == [0, 1, 2, 2, 2, 3, 4, 5, 5, 6]
    assert batch.parts == [[0, 1, 6, 7, 8, 9], [2, 3, 4, 5]]
    assert [part.episodes for part in batch.split()] == [[0, 1, 4, 5, 5, 6], [2, 2, 2, 3]]
    assert [part.episodes for part in batch.split(3)] == [[0, 3, 6], [1, 4], [2, 2, 2, 5, 5]]
    of_episodes = torch.cat([group.rewards - group.rewards.mean() for group in groups])
    found = rollout_batch.advantages_of(groups, batch, config)
    assert found.tolist() == pytest.approx([of_episodes[episode].item() for episode in batch.episodes])


def test_details_have_the_tokens_of_every_row_of_an_episode() -> None:
    numbers = itertools.count()
    groups = [
        Group(one.prompt, [replace(rollout, key=(0, next(numbers))) for rollout in one.rollouts], one.rewards)
        for one in forked_groups(1)
    ]
    rows = rollout_batch.rows_of(groups)
    logprobs = {number: torch.zeros(PROMPT + len(row.branch.token_ids)) for number, row in enumerate(rows)}
    tokenizer: Any = SimpleNamespace(decode=lambda ids: str(ids[0]))
    details = rollout_batch.details_of(groups, torch.zeros(len(rows)), logprobs, tokenizer)
    for key, found in details.items():
        of_rows = [row.branch.token_ids for row in rows if row.rollout.key == key]
        shown = "|".join(piece[0] for piece in found["pieces"]).split(f"|{rollout_batch.NEXT_ROW}|")
        assert shown == ["|".join(map(str, tokens)) for tokens in of_rows]


def test_a_divergence_in_the_reward_is_summed_over_all_rows_of_an_episode() -> None:
    groups = forked_groups(2)
    config = config_of(
        loss={"kl": {"coefficient": 0.5, "where": "reward", "estimator": "k1"}, "on_policy": False},
        advantage={"kind": "dr_grpo"},
    )
    batch = batch_with_values(groups, config)
    sums = [0.0] * 7
    for episode, row in zip(batch.episodes, batch.sequences, strict=True):
        sums[episode] += (row.values["old_logprobs"] - row.values["ref_logprobs"])[row.loss_mask].sum().item()
    rewards = torch.cat([group.rewards for group in groups]) - 0.5 * torch.tensor(sums, dtype=torch.float64)
    centred = torch.cat([of - of.mean() for of in rewards.split([len(group.rollouts) for group in groups])])
    found = rollout_batch.advantages_of(groups, batch, config)
    assert found.tolist() == pytest.approx([centred[episode].item() for episode in batch.episodes])


@pytest.mark.parametrize("normalise", ["token", "sequence", "constant"])
def test_an_episode_counts_once_however_many_rows_it_has(normalise: str) -> None:
    groups = forked_groups(3)
    config = config_of(loss={"normalise": normalise, "on_policy": False, "max_completion_tokens": 7})
    batch = batch_with_values(groups, config)
    batch["advantages"] = rollout_batch.advantages_of(groups, batch, config)
    ratios = [torch.linspace(0.9, 1.1, length, dtype=torch.float64) for length in batch.lengths]
    of_episodes: dict[int, list[float]] = {}
    for episode, row, ratio in zip(batch.episodes, batch.sequences, ratios, strict=True):
        losses = -row.values["advantages"].double() * ratio
        of_episodes.setdefault(episode, []).extend(losses[row.loss_mask].tolist())
    expected = {
        "token": sum(map(sum, of_episodes.values())) / sum(map(len, of_episodes.values())),
        "sequence": sum(sum(losses) / len(losses) for losses in of_episodes.values()) / len(of_episodes),
        "constant": sum(map(sum, of_episodes.values())) / 7 / len(of_episodes),
    }[normalise]
    found, loss = 0.0, policy_loss(config)
    for row, ratio in zip(batch.sequences, ratios, strict=True):  # a microbatch for each row, as on other ranks
        (microbatch,) = pack([row], 30)
        logprobs = to_predictor(row.values["old_logprobs"] + ratio.log())
        ((_, total),) = loss(TokenOutputs(logprobs), microbatch).sums.items()
        found += total.item()
    num_tokens = sum(int(row.loss_mask.sum()) for row in batch.sequences)
    assert found / (num_tokens if normalise == "token" else batch.num_episodes) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("kind", "expected"), [("gdpo", (1.0, 0.5)), ("grpo", ())])
def test_only_gdpo_compares_rewards_alone(kind: str, expected: tuple[float, ...]) -> None:
    rewards = [{"function": "math"}, {"function": "exact_match", "weight": 0.5}]
    config = GRPOConfig.model_validate({**config_of().model_dump(), "rewards": rewards, "advantage": {"kind": kind}})
    assert config.weights_alone == expected


@pytest.mark.parametrize("given", [{}, {"temperature": 0.7}])
def test_a_divergence_from_teachers_has_the_temperature_of_rollouts(given: dict[str, float]) -> None:
    values = config_of(rollout={"temperature": 0.7}).model_dump(exclude_unset=True)
    teaching = {"teachers": {"large": {"path": "elsewhere"}}, "distillation": {"loss": given}}
    found = GRPOConfig.model_validate({**values, **teaching}).distillation.loss
    assert found is not None
    assert found.temperature == 0.7
    with pytest.raises(ValueError, match="one pass computes both at one temperature"):
        GRPOConfig.model_validate({**values, **teaching, "distillation": {"loss": {"temperature": 0.9}}})
