"""Bugs of losses, advantages and rewards."""

from typing import Any
from unittest import mock

from tests.faults.fault import Fault, patch


def _pairs_turned() -> Any:
    from automodel_rl.losses.dpo import _by_pair

    return patch("losses.dpo._by_pair", lambda values, microbatch: _by_pair(values, microbatch).flip(1))


def _deviation_of_population() -> Any:
    return patch("losses.advantages.sample_deviation", lambda squares, count: (squares / count).sqrt())


def _temperature_ignored() -> Any:
    from automodel_rl.engine import Engine

    add = Engine.add_logprobs
    return mock.patch.object(
        Engine,
        "add_logprobs",
        lambda engine, microbatches, name, temperature=1.0, *more: add(engine, microbatches, name, 1.0, *more),
    )


def _rewards_of_neighbours() -> Any:
    from automodel_rl.rollout.rewards.scorer import Scorer

    take = Scorer.take

    def turned(scorer: Scorer, scorings: Any) -> Any:
        scores = take(scorer, scorings)
        return [*scores[-1:], *scores[:-1]]

    return mock.patch.object(Scorer, "take", turned)


LOSSES = "unit/losses/test_losses.py"
GRPO = "distributed/trainers/test_grpo.py"

FAULTS: dict[str, Fault] = {
    "k3 that cancels": Fault(
        lambda: mock.patch("torch.expm1", lambda r: r.exp() - 1),
        f"{LOSSES}::test_k3_is_exact_where_policy_and_reference_are_close",
    ),
    "pairs of any neighbours": Fault(
        lambda: patch("losses.dpo.check_pairs", return_value=None),
        f"{LOSSES}::test_rows_whose_neighbours_are_no_pairs_are_refused",
    ),
    "chosen and rejected turned": Fault(_pairs_turned, f"{LOSSES}::test_dpo_equals_the_padded_formula"),
    "standard deviation of the population": Fault(
        _deviation_of_population, f"{LOSSES}::test_advantages_equal_their_formulas"
    ),
    "rewards of the completions before": Fault(
        _rewards_of_neighbours,
        "unit/rollout/test_rollouts.py::test_completions_are_scored_while_others_are_written",
    ),
    "rewards that differ by rounding taken for different": Fault(
        lambda: patch("losses.advantages.ROUNDING", 0), f"{LOSSES}::test_rewards_that_differ_by_rounding_teach_nothing"
    ),
    "old log-probabilities at temperature 1": Fault(
        _temperature_ignored, f"{GRPO}::test_sequences_are_trained_with_the_advantages_of_their_rewards[temperature]"
    ),
}
