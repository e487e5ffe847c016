"""The batch of a step's rewarded completions: tokens, masks, log-probabilities, advantages."""

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from automodel_rl.batch import EPISODE_TOKENS, Batch, RouterShape, TokenSequence
from automodel_rl.config.algorithms import GRPOConfig, OnlineConfig
from automodel_rl.generators.protocol import Branch
from automodel_rl.losses.advantages import advantages, whitened_over_tokens
from automodel_rl.losses.terms import kl_estimate
from automodel_rl.rollout.groups import Group
from automodel_rl.rollout.protocol import Rollout

Details = dict[tuple[int, int], dict[str, Any]]
"""Further entries of rollout records, by rollout key."""


NEXT_ROW = "\n--- next row ---\n"
"""Separates the rows of an episode in its details."""


@dataclass(frozen=True)
class RolloutRow:
    """A row of a step: a branch of a rollout.

    Attributes:
        episode: index of its rollout among those of all groups.
        is_first: whether it is its rollout's first row.
    """

    group: Group
    rollout: Rollout
    branch: Branch
    episode: int
    is_first: bool


def rows_of(groups: Sequence[Group]) -> list[RolloutRow]:
    rollouts = [(group, rollout) for group in groups for rollout in group.rollouts]
    return [
        RolloutRow(group, rollout, branch, episode, place == 0)
        for episode, (group, rollout) in enumerate(rollouts)
        for place, branch in enumerate(rollout.branches(group.prompt))
    ]


def sources_of(groups: Sequence[Group]) -> list[int]:
    """Returns, for each row, the index in data.train of its prompt's source."""
    return [row.group.prompt.source for row in rows_of(groups)]


def batch_of(groups: Sequence[Group], config: OnlineConfig) -> Batch:
    """Returns the groups' rollouts as rows, with one part per optimizer step."""
    rows = rows_of(groups)
    replayed = [row.branch.routes for row in rows if row.branch.routes] if config.router_replay.enabled else []
    batch = Batch(
        [_sequence(row, config) for row in rows],
        routes=[[piece.at for piece in pieces] for pieces in replayed],
        parts=parts_of(groups, range(len(groups)), config),
        episodes=[row.episode for row in rows],
    )
    if batch.num_episodes < len(batch):
        batch[EPISODE_TOKENS] = batch.episode_tokens
    return batch


def counted(row: TokenSequence) -> Tensor:
    """The tokens of a row that count in the loss, bool [n]; never the first, which nothing predicts."""
    return row.loss_mask & (torch.arange(len(row)) > 0)


def missing_routes(groups: Sequence[Group], batch: Batch, shape: RouterShape) -> float:
    """Returns the share of the rows' expert choices that no generator reported."""
    missing = sum(row.branch.num_missing for row in rows_of(groups))
    return missing / max(sum(length - 1 for length in batch.lengths) * len(shape.layers), 1)


def parts_of(groups: Sequence[Group], order: Sequence[int], config: OnlineConfig) -> list[list[int]]:
    """Returns the rows of each optimizer step: groups are dealt to the steps in turn.

    Args:
        order: indices of the groups, in dealing order.
    """
    count = min(config.batch.optimizer_steps, len(groups))
    counts = [sum(len(rollout.branches(group.prompt)) for rollout in group.rollouts) for group in groups]
    of_groups = [[*range(end - count, end)] for count, end in zip(counts, itertools.accumulate(counts), strict=True)]
    return [[row for place in order[number::count] for row in of_groups[place]] for number in range(count)]


def epochs_of(batch: Batch, groups: Sequence[Group], config: OnlineConfig, step: int) -> list[Batch]:
    """Returns the batch of each pass over the rollouts. Later passes deal the groups in new orders, reproducible
    after a resume."""
    further = [shuffled(len(groups), config.seed, step, epoch) for epoch in range(1, config.batch.epochs)]
    return [batch, *(batch.dealt(parts_of(groups, order, config)) for order in further)]


def shuffled(count: int, seed: int, step: int, epoch: int) -> list[int]:
    return random.Random(f"{seed} {step} {epoch}").sample(range(count), count)


def advantages_of(groups: Sequence[Group], batch: Batch, config: GRPOConfig) -> Tensor:
    """Returns the advantage of each row, float64 [N]. An episode has one reward and one advantage, however many rows
    it has.

    Args:
        batch: the groups' rows, with `old_logprobs` and `ref_logprobs` if the reward has a KL term.
    """
    rewards = [group.rewards for group in groups]
    if config.has_kl_in_reward:
        sums = kl_sums(batch, config).split([len(of_group) for of_group in rewards])
        pairs = zip(rewards, sums, strict=True)
        rewards = [of_group - config.loss.kl.coefficient * of_rows for of_group, of_rows in pairs]
    counts = pad_sequence([torch.ones_like(of_group, dtype=torch.bool) for of_group in rewards], batch_first=True)
    weights = torch.tensor([reward.weight for reward in config.rewards], dtype=torch.float64)
    compared = rewards if config.advantage.kind != "gdpo" else [group.parts for group in groups]
    of_episodes = advantages(pad_sequence(compared, batch_first=True), config.advantage, counts, weights)[counts]
    of_rows = of_episodes[batch.episodes]
    if config.advantage.whiten == "tokens":
        of_rows = whitened_over_tokens(of_rows, batch.sums([torch.ones(length) for length in batch.lengths]))
    return of_rows


def kl_sums(batch: Batch, config: OnlineConfig) -> Tensor:
    """KL divergence from the reference, summed over each episode's generated tokens, float64 [E]."""
    pairs = zip(batch["old_logprobs"], batch["ref_logprobs"], strict=True)
    of_rows = batch.sums([kl_estimate(old.double(), ref.double(), config.loss.kl.estimator) for old, ref in pairs])
    return of_rows.new_zeros(batch.num_episodes).index_add(0, torch.tensor(batch.episodes, dtype=torch.long), of_rows)


def details_of(
    groups: Sequence[Group], values: Tensor, logprobs: dict[int, Tensor], tokenizer: PreTrainedTokenizerBase
) -> Details:
    """Returns report details of rollouts: `advantage`, and for rows with log-probabilities `pieces`: each token's
    text and its log-probabilities under the generator and the model, of one row of an episode after the other.

    Args:
        values: advantage of each row, [N].
        logprobs: the model's log-probabilities of some rows, [n], by row.
    """
    details: Details = {}
    for number, row in enumerate(rows_of(groups)):
        if row.is_first:
            details[row.rollout.key] = {"advantage": round(values[number].item(), 4)}
        if number in logprobs:
            ours = logprobs[number].tolist()[len(row.branch.prompt) :]
            earlier = details[row.rollout.key].setdefault("pieces", [])
            earlier += [[NEXT_ROW, None, None]] if earlier else []
            earlier += _pieces(row.branch, ours, tokenizer)
    return details


def _sequence(row: RolloutRow, config: OnlineConfig) -> TokenSequence:
    """The tokens of a row. Truncated completions are not trained on if the config says so."""
    is_masked = config.filter.mask_overlong and row.rollout.completion.finish == "length"
    return row.branch.row(row.group.prompt.media, trained=not is_masked)


def _pieces(branch: Branch, ours: list[float], tokenizer: PreTrainedTokenizerBase) -> list[list[Any]]:
    """Text and log-probabilities of each token; None for those of untrained tokens."""
    of_tokens = zip(branch.token_ids, branch.trained, branch.logprobs, ours, strict=True)
    return [
        [tokenizer.decode([token]), *((round(their, 4), round(our, 4)) if trained else (None, None))]
        for token, trained, their, our in of_tokens
    ]
