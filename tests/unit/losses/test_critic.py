"""Generalised advantages and the loss of critics, against other packages' numbers and by the definition."""

from typing import Any

import pytest
import torch
from torch import Tensor

from automodel_rl.batch import TokenSequence, in_packed_order, pack, unpack
from automodel_rl.config.critic import GAEConfig
from automodel_rl.losses import TokenOutputs
from automodel_rl.losses.gae import gae, whitened
from automodel_rl.losses.terms import kl_estimate
from automodel_rl.losses.value import MOMENTS, OLD_VALUES, RETURNS, explained_variance, value_loss
from tests.unit.losses.test_golden import CASES, SHARED, rows_of

GIVEN = SHARED["critic"]
ESTIMATES: dict[str, dict[str, Any]] = {
    "nrl_gae": {"discount": 0.99},
    "nrl_gae_lambda1": {"gae_lambda": 1.0},
    "nrl_gae_whitened": {"discount": 0.99},
    "nrl_gae_kl_k1": {"discount": 0.99},
    "nrl_gae_kl_k3": {"discount": 0.99},
    "nrl_vapo_decoupled": {"critic_lambda": 1.0},
    "nrl_vapo_length_adaptive": {"critic_lambda": 1.0, "length_adaptive": 0.5},
    "verl_gae": {"discount": 0.99},
}
LOOSE = {"nrl_vapo_length_adaptive": 1e-6, "verl_gae": 1e-6, "nrl_gae_whitened": 1e-6}
"""Cases with constants of float32, or with another small number in a denominator."""


def of_case(name: str) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Rewards, values and masks of the rows of a case."""
    coefficient = CASES[name]["settings"].get("kl_coefficient") or 0.0
    rows = []
    given = (GIVEN[key] for key in ("values", "action_mask", "sequence_rewards", "logprobs", "ref_logprobs"))
    for values, mask, reward, logprobs, reference in zip(*given, strict=True):
        counted = torch.tensor(mask) > 0
        rewards = torch.zeros(len(values), dtype=torch.float64)
        if coefficient:
            pair = (torch.tensor(one, dtype=torch.float64) for one in (logprobs, reference))
            kind = CASES[name]["settings"]["kl_in_reward"]
            rewards -= coefficient * torch.where(counted, kl_estimate(*pair, kind), 0.0)
        rewards[counted.nonzero()[-1, 0]] += reward
        rows.append((rewards, torch.tensor(values, dtype=torch.float64), counted))
    return rows


@pytest.mark.parametrize("name", ESTIMATES)
def test_advantages_and_returns_have_the_numbers_of_other_packages(name: str) -> None:
    rows, tolerance = of_case(name), LOOSE.get(name, 1e-9)
    found = [gae(*row, GAEConfig(**ESTIMATES[name])) for row in rows]
    advantages, masks = [advantage for advantage, _ in found], [mask for *_, mask in rows]
    if name in ("verl_gae", "nrl_gae_whitened"):
        advantages = whitened(advantages, masks)
    outputs = CASES[name]["outputs"]
    for ours, (_, returns), mask, advantage, expected in zip(
        advantages, found, masks, outputs["advantages"], outputs["returns"], strict=True
    ):
        for own, theirs in ((ours, advantage), (returns, expected)):
            other = torch.tensor(theirs, dtype=torch.float64)[mask]
            torch.testing.assert_close(own[mask], other, rtol=tolerance, atol=tolerance)
        assert not ours[~mask].any()


def test_a_turn_is_one_step_whatever_stands_between() -> None:
    mask = torch.tensor([False, True, True, False, False, True, True, True, False])
    rewards, values = torch.zeros(9), torch.arange(9.0)
    rewards[2], rewards[7] = 0.5, 2.0
    advantages, returns = gae(rewards, values, mask, GAEConfig(discount=0.5, gae_lambda=0.5, level="turn"))
    last = 2.0 - 5.0
    first = 0.5 + 0.5 * 5.0 - 1.0 + 0.25 * last
    assert advantages.tolist() == pytest.approx([0, first, first, 0, 0, last, last, last, 0])
    assert returns.tolist() == pytest.approx([0, first + 1, first + 1, 0, 0, last + 5, last + 5, last + 5, 0])


def test_a_row_without_counted_tokens_has_no_advantage() -> None:
    advantages, returns = gae(torch.ones(3), torch.ones(3), torch.zeros(3) > 0, GAEConfig())
    assert not advantages.any()
    assert not returns.any()
    assert not whitened([advantages], [torch.zeros(3) > 0])[0].any()


VALUES: dict[str, float | None] = {
    "value_loss_clipNone": None,
    "openrlhf_value_loss_clipNone": None,
    "value_loss_clip0.2": 0.2,
    "openrlhf_value_loss_clip0.2": 0.2,
    "verl_value_loss_clip0.2": 0.2,
}


@pytest.mark.parametrize("capacity", [64, 9], ids=["one microbatch", "several"])
@pytest.mark.parametrize("name", VALUES)
def test_losses_of_values_have_the_numbers_of_other_packages(name: str, capacity: int) -> None:
    named = {RETURNS: "returns_given", OLD_VALUES: "values", "predicted": "value_predictions"}
    rows: list[TokenSequence] = rows_of({key: GIVEN[given] for key, given in named.items()}, GIVEN["action_mask"])
    total, clipped, gradients, microbatches = 0.0, 0.0, [], pack(rows, capacity)
    for microbatch in microbatches:
        scores = microbatch.values["predicted"][:, None].clone().requires_grad_()
        output = value_loss(TokenOutputs(torch.zeros(0), scores=scores), microbatch, VALUES[name])
        (gradient,) = torch.autograd.grad(output.sums["tokens"], scores)
        total += output.sums["tokens"].item()
        clipped += output.metrics["critic/clip_fraction"][0].item()
        gradients += unpack(gradient[:, 0], microbatch)
    outputs, count = CASES[name]["outputs"], sum(int(row.loss_mask.sum()) for row in rows)
    is_mean, tolerance = "loss_mean" in outputs, 1e-6 if name.startswith("verl") else 1e-9
    assert total / (count if is_mean else 1) == pytest.approx(
        outputs.get("loss_sum", outputs.get("loss_mean")), rel=tolerance
    )
    if is_mean:
        assert clipped / count == pytest.approx(outputs["clip_fraction"], rel=tolerance)
    for ours, theirs in zip(in_packed_order(gradients, microbatches), outputs["grad_value_predictions"], strict=True):
        expected = [count * one if is_mean else one for one in theirs]
        assert ours[1:].tolist() == pytest.approx(expected, rel=tolerance, abs=tolerance)


def test_explained_variance_is_that_of_all_tokens() -> None:
    returns, values = torch.tensor([1.0, 2.0, 4.0, 0.0]), torch.tensor([1.5, 1.0, 3.0, 0.5])
    error = returns - values
    moments = (returns, returns.square(), error, error.square())
    expected = 1 - error.var(correction=0) / returns.var(correction=0)
    found = explained_variance({name: one.mean().item() for name, one in zip(MOMENTS, moments, strict=True)})
    assert found == pytest.approx(expected.item(), rel=1e-5)
