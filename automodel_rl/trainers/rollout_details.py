"""What the rollouts of a step tell only once they are packed: advantages, and the model's own log-probabilities."""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from automodel_rl.batch import unpack
from automodel_rl.parallel.host_collectives import gather_objects, share_with_guests
from automodel_rl.parallel.layout import Layout
from automodel_rl.rollout.groups import Group
from automodel_rl.rollout.protocol import Rollout
from automodel_rl.trainers.policy_batches import Microbatches, rollouts_of_optimizer_step

Details = dict[int, dict[str, Any]]
"""What the records of rollouts say further, by the identity of the rollout."""


def rollout_details(
    groups: Sequence[Group], optimizer_steps: Sequence[Microbatches], tokenizer: PreTrainedTokenizerBase, layout: Layout
) -> Details:
    """The advantage of every rollout, and for those in each data rank's first microbatch its tokens. A collective.

    Args:
        groups: the groups that were packed.
        optimizer_steps: their microbatches, with `advantages`; tokens need `old_logprobs` in the first microbatch.
        tokenizer: the model's tokenizer.
        layout: this rank's place.

    Returns:
        `advantage`, and `pieces`: for each token its text and its log-probabilities by the generator and the model.
    """
    count = len(optimizer_steps)
    own: dict[tuple[int, int], tuple[float, list[float] | None]] = {}
    for number, microbatches in enumerate(optimizer_steps):
        for index, microbatch in enumerate(microbatches):
            values = [piece[-1].item() for piece in unpack(microbatch.values["advantages"], microbatch)]
            has_logprobs = number == index == 0 and "old_logprobs" in microbatch.values
            logprobs: list[list[float] | None] = [None] * len(values)
            if has_logprobs:
                logprobs = [piece.tolist() for piece in unpack(microbatch.values["old_logprobs"], microbatch)]
            for place, value, ours in zip(microbatch.order, values, logprobs, strict=True):
                own[number, place] = value, ours
    of_ranks = {key: pair for share in gather_objects(own, layout.data_control) for key, pair in share.items()}
    everywhere = share_with_guests(of_ranks, layout)  # one of them may write the records
    details: Details = {}
    for number in range(count):
        for place, (group, rollout) in enumerate(rollouts_of_optimizer_step(groups, number, count)):
            advantage, ours = everywhere.get((number, place), (None, None))
            details[id(rollout)] = {} if advantage is None else {"advantage": round(advantage, 4)}
            if ours is not None:
                start = len(rollout.prompt_of(group.prompt))
                details[id(rollout)]["pieces"] = _pieces(rollout, ours[start:], tokenizer)
    return details


def _pieces(rollout: Rollout, ours: list[float], tokenizer: PreTrainedTokenizerBase) -> list[list[Any]]:
    """Text and log-probabilities of each token; none of tokens that were not trained."""
    completion = rollout.completion
    of_tokens = zip(completion.token_ids, completion.trained, completion.logprobs, ours, strict=True)
    return [
        [tokenizer.decode([token]), *((round(their, 4), round(our, 4)) if trained else (None, None))]
        for token, trained, their, our in of_tokens
    ]
