"""Microbatches of each optimizer step, made of rewarded completions: tokens, masks, log-probabilities, advantages."""

from collections.abc import Sequence

import torch
from torch.nn.utils.rnn import pad_sequence

from automodel_rl.batch import Microbatch, TokenSequence, add_values
from automodel_rl.config.algorithms import GRPOConfig
from automodel_rl.data.loader import PackedStep, pack_step, sums_of_sequences
from automodel_rl.losses.advantages import advantages
from automodel_rl.losses.terms import kl_estimate
from automodel_rl.model.handle import ModelHandle
from automodel_rl.parallel.layout import Layout
from automodel_rl.rollout.groups import Group
from automodel_rl.rollout.protocol import Rollout

Microbatches = list[Microbatch]
"""This data rank's microbatches of one optimizer step."""


def pack_optimizer_steps(groups: Sequence[Group], config: GRPOConfig, handle: ModelHandle) -> list[PackedStep]:
    """Packs the global batch of each optimizer step."""
    count = min(config.batch.optimizer_steps, len(groups))
    return [
        pack_step(
            [_to_sequence(group, rollout, config) for group, rollout in rollouts_of_optimizer_step(groups, i, count)],
            config.batch,
            handle.layout,
            handle.flops,
        )
        for i in range(count)
    ]


def rollouts_of_optimizer_step(
    groups: Sequence[Group], optimizer_step: int, num_optimizer_steps: int
) -> list[tuple[Group, Rollout]]:
    """The rollouts in an optimizer step's global batch, in order: those of every `num_optimizer_steps`-th group."""
    return [(group, rollout) for group in groups[optimizer_step::num_optimizer_steps] for rollout in group.rollouts]


def with_advantages(
    groups: Sequence[Group], optimizer_steps: Sequence[Microbatches], config: GRPOConfig, layout: Layout
) -> list[Microbatches]:
    """Adds `advantages`, computed over all groups together, to the microbatches of every optimizer step.

    A collective of the data ranks if the reward has a KL term.

    Args:
        groups: the groups that were packed.
        optimizer_steps: the groups' microbatches, with `old_logprobs` and `ref_logprobs` if the reward has a KL term.
        config: the run's config.
        layout: this rank's place.
    """
    count = len(optimizer_steps)
    rewards = [group.rewards for group in groups]
    if config.needs_reference and config.loss.kl.where == "reward":
        for i, microbatches in enumerate(optimizer_steps):
            kl = _kl_sums(microbatches, config, layout)
            by_group = kl.split([len(of_group) for of_group in rewards[i::count]])
            rewards[i::count] = [
                of_group - config.loss.kl.coefficient * sums
                for of_group, sums in zip(rewards[i::count], by_group, strict=True)
            ]
    counts = pad_sequence([torch.ones_like(of_group, dtype=torch.bool) for of_group in rewards], batch_first=True)
    values = advantages(pad_sequence(rewards, batch_first=True), config.advantage, counts)
    return [
        [_add_by_sequence(microbatch, values[i::count][counts[i::count]]) for microbatch in microbatches]
        for i, microbatches in enumerate(optimizer_steps)
    ]


def _to_sequence(group: Group, rollout: Rollout, config: GRPOConfig) -> TokenSequence:
    """The prompt and completion as a sequence. Only tokens that the generator sampled count in the loss, as far as it
    told their log-probabilities."""
    prompt, completion = rollout.prompt_of(group.prompt), rollout.completion
    counts = not (config.filter.mask_overlong and completion.finish == "length")
    return TokenSequence(
        torch.tensor([*prompt, *completion.token_ids]),
        torch.tensor([False] * len(prompt) + [counts and trained for trained in completion.trained]),
        {"rollout_logprobs": torch.tensor([0.0] * len(prompt) + completion.logprobs, dtype=torch.float64)},
        media=tuple(group.prompt.media),
    )


def _add_by_sequence(microbatch: Microbatch, values: torch.Tensor) -> Microbatch:
    """Adds `advantages` to a microbatch: each sequence's value for all of its tokens.

    Args:
        microbatch: the microbatch.
        values: the advantage of each of the N sequences of the global batch, [N].
    """
    pieces = [values[place].expand(length) for place, length in zip(microbatch.order, microbatch.lengths, strict=False)]
    return add_values(microbatch, "advantages", pieces)


def _kl_sums(microbatches: Microbatches, config: GRPOConfig, layout: Layout) -> torch.Tensor:
    """The divergence from the reference, summed over each completion of an optimizer step, float64 [N]."""

    def kl(microbatch: Microbatch) -> torch.Tensor:
        old, ref = (microbatch.values[name].double() for name in ("old_logprobs", "ref_logprobs"))
        return kl_estimate(old, ref, config.loss.kl.estimator)

    return sums_of_sequences(microbatches, kl, layout)
