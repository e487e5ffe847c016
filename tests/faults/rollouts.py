"""Bugs of prompts, conversations and rewards, and of what an optimizer step makes of completions."""

import dataclasses
import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Hashable
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from automodel_rl.batch import Batch
from tests.faults.fault import Fault, everywhere, patch


def _finish_by(is_whole: Callable[[Any, str], bool]) -> Any:
    """Conversations end with "stop" by another rule, given the episode and why it ended."""
    from automodel_rl.rollout.episodes.episode import Episode

    finish = Episode._finish

    def by_rule(episode: Any, end: str) -> None:
        finish(episode, end)
        word = "stop" if is_whole(episode, end) else "length"
        episode.completion = dataclasses.replace(episode.completion, finish=word)

    return mock.patch.object(Episode, "_finish", by_rule)


def _penalty_by(tokens: Callable[[Any], list[int]]) -> Any:
    """The overlong penalty is by other tokens of a completion."""
    from automodel_rl.generators.protocol import Completion

    return mock.patch.object(Completion, "last_turn", property(tokens))


def _penalty_scaled_too() -> Any:
    from automodel_rl.rollout.groups import shaped_rewards

    def scaled_last(rollouts: Any, config: Any, most: int) -> Tensor:
        plain = config.model_copy(update={"reward_scale": 1.0})
        return shaped_rewards(rollouts, plain, most) * config.reward_scale

    return everywhere(scaled_last, "rollout.groups.shaped_rewards", "trainers.step_rollouts.shaped_rewards")


def _divergence(estimate: Callable[[Tensor, Tensor, str], Tensor]) -> Any:
    """The divergence in the reward is another one, given log-probabilities, those of the reference, and its name."""
    return patch("trainers.rollout_batch.kl_estimate", estimate)


def _always_k3() -> Any:
    from automodel_rl.losses.terms import kl_estimate

    return _divergence(lambda ours, ref, _: kl_estimate(ours, ref, "k3"))


def _divergence_turned() -> Any:
    from automodel_rl.losses.terms import kl_estimate

    return _divergence(lambda ours, ref, name: kl_estimate(ref, ours, name))


def _divergence_of_every_token() -> Any:
    """Prompts and answers of tools have a part in the divergence, too."""
    from automodel_rl.trainers.rollout_batch import kl_sums

    def every(batch: Any, config: Any) -> Any:
        rows = [dataclasses.replace(one, loss_mask=torch.ones_like(one.loss_mask)) for one in batch.sequences]
        return kl_sums(Batch(rows), config)

    return patch("trainers.rollout_batch.kl_sums", every)


def _divergence_of_another_group() -> Any:
    from automodel_rl.trainers.rollout_batch import kl_sums

    return patch("trainers.rollout_batch.kl_sums", lambda *given: kl_sums(*given).flip(0))


def _most_sampled(most: Callable[[Any], int]) -> Any:
    """`normalise: constant` divides by something else, given the config's section `rollout`."""
    from automodel_rl.config import RolloutConfig

    return mock.patch.object(RolloutConfig, "sampled_tokens", property(most))


def _shuffled_by(*places: int) -> Any:
    """The order of a further pass depends only on some of seed, step and epoch."""

    def by_some(count: int, *place: int) -> list[int]:
        return random.Random(str([place[i] for i in places])).sample(range(count), count)

    return patch("trainers.rollout_batch.shuffled", by_some)


def _media_alike_by(identity: Callable[[int, Any], Hashable]) -> Any:
    return patch("batch.media._identity", identity)


def _stream_goes_on(place: Callable[[dict[str, int]], dict[str, int]]) -> Any:
    """A resumed stream of prompts begins with something else than its state."""
    from automodel_rl.data.prompts import PromptStream

    load = PromptStream.load_state_dict
    return mock.patch.object(PromptStream, "load_state_dict", lambda self, state: load(self, place(state)))


def _longest_prompts_taken() -> Any:
    """A prompt as long as the limit is left out."""
    from automodel_rl.data.prompts import PromptStream

    take = PromptStream.take

    def shorter(stream: Any, count: int) -> Any:
        stream.max_tokens -= 1
        try:
            return take(stream, count)
        finally:
            stream.max_tokens += 1

    return mock.patch.object(PromptStream, "take", shorter)


def _every_pass_alike() -> Any:
    """Every pass over the data has the order of the first."""
    from automodel_rl.data.sampler import BatchSampler

    records = BatchSampler._records
    return mock.patch.object(
        BatchSampler,
        "_records",
        lambda sampler, source: itertools.cycle([*itertools.islice(records(sampler, source), sampler.sizes[source])]),
    )


def _cut_completions_trained() -> Any:
    from automodel_rl.trainers.rollout_batch import _sequence

    def unmasked(row: Any, config: Any) -> Any:
        return _sequence(row, config.model_copy(update={"filter": type(config.filter)()}))

    return patch("trainers.rollout_batch._sequence", unmasked)


class _PositiveSums(defaultdict[str, float]):
    """Sums of which those above 0 are kept, as `Counter` does."""

    def __setitem__(self, name: str, value: float) -> None:
        if value > 0:
            super().__setitem__(name, value)
        else:
            self.pop(name, None)


def _only_what_is_above_0() -> Any:
    """Of the sums of conversations' metrics those above 0 are kept, after each conversation."""
    return patch("rollout.groups.defaultdict", _PositiveSums)


DRIVER, GROUPS = "unit/rollout/episodes/test_driver.py", "unit/rollout/test_shaped_rewards.py"
CUT = f"{DRIVER}::test_a_turn_that_was_cut_off_is_the_last_and_its_conversation_is_cut"
LAST_TURN = f"{GROUPS}::test_the_overlong_penalty_is_by_the_tokens_of_the_last_turn"
BATCHES = "unit/trainers/test_rollout_batch.py"
DIVERGENCE = f"{BATCHES}::test_advantages_are_those_of_rewards_less_the_divergence_that_was_asked_for"
CONSTANT = f"{BATCHES}::test_a_constant_is_the_most_that_the_model_may_write"
ORDERS = "unit/trainers/test_rollout_batch.py::test_every_pass_of_every_step_and_seed_has_an_order_of_its_own"
MEDIA = "unit/batch/test_media.py::test_media_with_the_same_content_are_encoded_once_and_no_others"
PROMPTS = "unit/data/test_prompts.py"
RESUMED = f"{PROMPTS}::test_a_resumed_stream_is_the_one_that_was_left"

FAULTS: dict[str, Fault] = {
    "a conversation whose last turn was cut counts as whole": Fault(
        lambda: _finish_by(lambda _, end: end in ("done", "template")), CUT
    ),
    "a conversation that nothing can follow counts as cut": Fault(
        lambda: _finish_by(lambda episode, end: end == "done" and not episode._turn.is_truncated),
        f"{DRIVER}::test_a_turn_that_the_template_lets_nothing_follow_ends_a_whole_conversation",
    ),
    "overlong penalty by all of a conversation": Fault(
        lambda: _penalty_by(lambda completion: completion.token_ids), LAST_TURN
    ),
    "overlong penalty by all sampled tokens": Fault(
        lambda: _penalty_by(lambda completion: [*itertools.compress(completion.token_ids, completion.sampled)]),
        LAST_TURN,
    ),
    "overlong penalty scaled like rewards": Fault(
        _penalty_scaled_too, f"{GROUPS}::test_rewards_are_scaled_and_the_penalty_is_not"
    ),
    "divergence in the reward by k3 always": Fault(_always_k3, DIVERGENCE),
    "divergence in the reward turned": Fault(_divergence_turned, DIVERGENCE),
    "divergence in the reward of every token": Fault(_divergence_of_every_token, DIVERGENCE),
    "divergence in the reward of another group": Fault(_divergence_of_another_group, DIVERGENCE),
    "a constant of one turn": Fault(lambda: _most_sampled(lambda rollout: rollout.max_new_tokens), CONSTANT),
    "a constant of all turns, however few tokens are left": Fault(
        lambda: _most_sampled(lambda rollout: rollout.max_new_tokens * (rollout.max_turns if rollout.has_turns else 1)),
        CONSTANT,
    ),
    "a constant with the answers of tools": Fault(
        lambda: _most_sampled(lambda rollout: rollout.completion_tokens), CONSTANT
    ),
    "further epochs shuffled alike in every step": Fault(lambda: _shuffled_by(0, 2), ORDERS),
    "further epochs of a step shuffled alike": Fault(lambda: _shuffled_by(0, 1), ORDERS),
    "further epochs shuffled alike with every seed": Fault(lambda: _shuffled_by(1, 2), ORDERS),
    "a file at two sizes encoded once": Fault(
        lambda: _media_alike_by(lambda number, item: (item.encoder, item.source or number)), MEDIA
    ),
    "media without a file taken for one": Fault(
        lambda: _media_alike_by(lambda _, item: (item.encoder, item.source, item.size)), MEDIA
    ),
    "a resumed stream forgets the prompts left out": Fault(
        lambda: _stream_goes_on(lambda state: {**state, "num_overlong": 0}), RESUMED
    ),
    "a resumed stream goes on after the prompts it took": Fault(
        lambda: _stream_goes_on(lambda state: {**state, "num_drawn": state["num_drawn"] - state["num_overlong"]}),
        RESUMED,
    ),
    "prompts of the most tokens left out": Fault(
        _longest_prompts_taken, f"{PROMPTS}::test_prompts_that_are_too_long_are_left_out_and_counted"
    ),
    "every pass over the data in the same order": Fault(
        _every_pass_alike, f"{PROMPTS}::test_seeds_and_passes_have_orders_of_their_own"
    ),
    "metrics of conversations that are not above 0 left out": Fault(
        _only_what_is_above_0,
        "unit/rollout/test_conversation_metrics.py::test_numbers_of_environments_may_be_negative_or_0",
    ),
    "completions that were cut are trained": Fault(
        _cut_completions_trained, f"{BATCHES}::test_sampled_tokens_count_unless_their_completion_was_cut"
    ),
}
