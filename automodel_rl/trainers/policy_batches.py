"""Microbatches of each optimizer step, made of rewarded completions: tokens, masks, log-probabilities, advantages."""

from collections.abc import Sequence

import torch

from automodel_rl.batch import Microbatch, TokenSequence, add_values
from automodel_rl.config import GRPOConfig
from automodel_rl.data.loader import PackedStep, pack_step
from automodel_rl.losses.advantages import advantages
from automodel_rl.losses.terms import kl_estimate
from automodel_rl.model.handle import ModelHandle
from automodel_rl.parallel.host_collectives import gather_objects, share_with_guests
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
    rewards = torch.stack([group.rewards for group in groups])
    if config.needs_reference and config.loss.kl.where == "reward":
        penalties = [_kl_sums(microbatches, config, layout) for microbatches in optimizer_steps]
        by_group = [penalties[i % count][i // count] for i in range(len(groups))]
        rewards = rewards - config.loss.kl.coefficient * torch.tensor(by_group, dtype=torch.float64)
    values = advantages(rewards, config.advantage)
    return [
        [_add_by_sequence(microbatch, values[i::count].flatten()) for microbatch in microbatches]
        for i, microbatches in enumerate(optimizer_steps)
    ]


def _to_sequence(group: Group, rollout: Rollout, config: GRPOConfig) -> TokenSequence:
    """The prompt and completion as a sequence. Only tokens that the generator sampled count in the loss."""
    prompt, completion = rollout.prompt_of(group.prompt), rollout.completion
    counts = not (config.filter.mask_overlong and completion.finish == "length")
    return TokenSequence(
        torch.tensor([*prompt, *completion.token_ids]),
        torch.tensor([False] * len(prompt) + [counts and sampled for sampled in completion.sampled]),
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


def _kl_sums(microbatches: Microbatches, config: GRPOConfig, layout: Layout) -> list[list[float]]:
    """The divergence from the reference, summed over each completion of each group of an optimizer step."""
    own: dict[int, float] = {}
    for microbatch in microbatches:
        old, ref = microbatch.values["old_logprobs"], microbatch.values["ref_logprobs"]
        kl = torch.where(microbatch.loss_mask, kl_estimate(old, ref, config.loss.kl.estimator), 0.0)
        own |= zip(microbatch.order, (piece.sum().item() for piece in kl.split(microbatch.lengths)), strict=False)
    shares = gather_objects(own, layout.data_control)
    flat = share_with_guests({place: total for share in shares for place, total in share.items()}, layout)
    size = config.rollout.group_size
    return [[flat[start + i] for i in range(size)] for start in range(0, len(flat), size)]
