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
"""What the records of rollouts say further, by the key of the rollout."""


@dataclass(frozen=True)
class RolloutRow:
    """A row of a step: a branch of a rollout.

    Attributes:
        group, rollout, branch: where it comes from.
        episode: the number of its rollout among those of all groups.
        is_first: whether it is its rollout's first row.
    """

    group: Group
    rollout: Rollout
    branch: Branch
    episode: int
    is_first: bool


def rows_of(groups: Sequence[Group]) -> list[RolloutRow]:
    """The rows of groups, in the order of their rollouts."""
    rollouts = [(group, rollout) for group in groups for rollout in group.rollouts]
    return [
        RolloutRow(group, rollout, branch, episode, place == 0)
        for episode, (group, rollout) in enumerate(rollouts)
        for place, branch in enumerate(rollout.branches(group.prompt))
    ]


def sources_of(groups: Sequence[Group]) -> list[int]:
    """The source of the prompt of each row, by its place in data.train."""
    return [row.group.prompt.source for row in rows_of(groups)]


def batch_of(groups: Sequence[Group], config: OnlineConfig) -> Batch:
    """The rollouts of groups as rows, in their order, with a part for each optimizer step."""
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
    """The share of the choices of experts that no generator reported.

    Args:
        groups: the groups whose rollouts are the rows.
        batch: the rows.
        shape: the shape of the model's routes.
    """
    missing = sum(row.branch.num_missing for row in rows_of(groups))
    return missing / max(sum(length - 1 for length in batch.lengths) * len(shape.layers), 1)


def parts_of(groups: Sequence[Group], order: Sequence[int], config: OnlineConfig) -> list[list[int]]:
    """The rows of each optimizer step: groups are dealt to the steps in turn.

    Args:
        groups: the groups whose rollouts are rows, in the order of the rows.
        order: the places of the groups, in the order in which they are dealt.
        config: the run's config.
    """
    count = min(config.batch.optimizer_steps, len(groups))
    counts = [sum(len(rollout.branches(group.prompt)) for rollout in group.rollouts) for group in groups]
    of_groups = [[*range(end - count, end)] for count, end in zip(counts, itertools.accumulate(counts), strict=True)]
    return [[row for place in order[number::count] for row in of_groups[place]] for number in range(count)]


def epochs_of(batch: Batch, groups: Sequence[Group], config: OnlineConfig, step: int) -> list[Batch]:
    """The batch of every pass over the rollouts. Each pass after the first deals groups anew, in an order that a
    resumed run has, too."""
    further = [shuffled(len(groups), config.seed, step, epoch) for epoch in range(1, config.batch.epochs)]
    return [batch, *(batch.dealt(parts_of(groups, order, config)) for order in further)]


def shuffled(count: int, seed: int, step: int, epoch: int) -> list[int]:
    """The places of groups in the order of a further pass."""
    return random.Random(f"{seed} {step} {epoch}").sample(range(count), count)


def advantages_of(groups: Sequence[Group], batch: Batch, config: GRPOConfig) -> Tensor:
    """The advantage of each row, float64 [N]. An episode has one reward and one advantage, whatever its number of rows.

    Args:
        groups: the groups whose rollouts are the rows.
        batch: the rows, with `old_logprobs` and `ref_logprobs` if the reward has a KL term.
        config: the run's config.
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
    """The divergence from the reference, summed over what the model wrote in each episode, float64 [E]."""
    pairs = zip(batch["old_logprobs"], batch["ref_logprobs"], strict=True)
    of_rows = batch.sums([kl_estimate(old.double(), ref.double(), config.loss.kl.estimator) for old, ref in pairs])
    return of_rows.new_zeros(batch.num_episodes).index_add(0, torch.tensor(batch.episodes, dtype=torch.long), of_rows)


def details_of(
    groups: Sequence[Group], values: Tensor, logprobs: dict[int, Tensor], tokenizer: PreTrainedTokenizerBase
) -> Details:
    """What is known of rollouts once they are rows.

    Args:
        groups: the groups whose rollouts are the rows.
        values: the advantage of each row, [N].
        logprobs: log-probabilities by the model of some rows, [n], by their number.
        tokenizer: the model's tokenizer.

    Returns:
        `advantage`, and for rows with log-probabilities `pieces`: for each token its text and its log-probabilities by
        the generator and the model.
    """
    details: Details = {}
    for number, row in enumerate(rows_of(groups)):
        if not row.is_first:
            continue
        details[row.rollout.key] = {"advantage": round(values[number].item(), 4)}
        if number in logprobs:
            ours = logprobs[number].tolist()[len(row.branch.prompt) :]
            details[row.rollout.key]["pieces"] = _pieces(row.branch, ours, tokenizer)
    return details


def _sequence(row: RolloutRow, config: OnlineConfig) -> TokenSequence:
    """The tokens of a row; of a completion that was cut nothing is trained, if the config says so."""
    is_masked = config.filter.mask_overlong and row.rollout.completion.finish == "length"
    return row.branch.row(row.group.prompt.media, trained=not is_masked)


def _pieces(branch: Branch, ours: list[float], tokenizer: PreTrainedTokenizerBase) -> list[list[Any]]:
    """Text and log-probabilities of each token; none of tokens that were not trained."""
    of_tokens = zip(branch.token_ids, branch.trained, branch.logprobs, ours, strict=True)
    return [
        [tokenizer.decode([token]), *((round(their, 4), round(our, 4)) if trained else (None, None))]
        for token, trained, their, our in of_tokens
    ]
