"""Losses of distillation and of reward models against numbers of other packages' own functions (test_golden.py)."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from automodel_rl.batch import TokenSequence, pack
from automodel_rl.config.distillation import DistillLossConfig
from automodel_rl.config.losses import RewardLossConfig
from automodel_rl.losses import LossOutput, TokenOutputs, distill_loss, reward_loss
from automodel_rl.losses.distill import IDS, TEACHER, teacher_advantages
from automodel_rl.trainers.teachers import union
from tests.unit.losses.test_golden import CASES, SHARED

VOCAB = 11
TOP = {"top_k": 3}
DISTILLATION: dict[str, dict[str, Any]] = {
    f"gkd_jsd_beta{beta}_T{temperature}": {"temperature": temperature, "top_k": VOCAB, "outside": "drop"} | settings
    for temperature in (1.0, 2.0)
    for beta, settings in {
        "0": {"divergence": "forward_kl"},
        "0.1": {"divergence": "jsd", "beta": 0.1},
        "0.5": {"divergence": "jsd"},
        "0.9": {"divergence": "jsd", "beta": 0.9},
        "1": {"divergence": "reverse_kl"},
    }.items()
}
for tail, outside in (("tail0", "renormalise"), ("tail1", "tail")):
    how = TOP | {"outside": outside}
    DISTILLATION |= {
        f"topk3_beta0_{tail}": how,
        f"topk3_beta0.5_{tail}": how | {"divergence": "jsd", "tokens_of": "both"},
        f"topk3_beta1_{tail}": how | {"divergence": "reverse_kl", "tokens_of": "student"},
        f"sdft_student_topk3_alpha0.0_{tail}": how | {"tokens_of": "student"},
        f"sdft_student_topk3_alpha0.5_{tail}": how | {"divergence": "jsd", "tokens_of": "student"},
        f"sdft_student_topk3_alpha1.0_{tail}": how | {"divergence": "reverse_kl", "tokens_of": "student"},
    }
RENORMALISED = TOP | {"outside": "renormalise"}
DISTILLATION |= {
    "verl_forward_kl_topk4_clampNone": {"top_k": 4, "outside": "drop"},
    "nrl_forward_zero0": RENORMALISED,
    "nrl_reverse_zero0": RENORMALISED | {"divergence": "reverse_kl"},
    "nrl_mixed_zero0": RENORMALISED | {"divergence": "mixed", "beta": 0.3},
    "tinker_reverse_kl_top3": RENORMALISED | {"divergence": "reverse_kl"},
}
IN_FLOAT32 = ("verl", "nrl")


def of_sequences() -> list[tuple[TokenSequence, Tensor, Tensor]]:
    """Rows of a prompt's token and completion tokens, with the logits of student and teacher for these."""
    given = SHARED["distill"]
    names = ("tokens", "loss_mask", "student_logits", "teacher_logits")
    found = []
    for tokens, mask, student, teacher in zip(*(given[name] for name in names), strict=True):
        row = TokenSequence(torch.tensor([0, *map(int, tokens)]), torch.tensor([False, *map(bool, mask)]))
        logits = [torch.tensor(one, dtype=torch.float64) for one in (student, teacher)]
        found.append((row, logits[0].requires_grad_(), logits[1]))
    return found


def compared(student: Tensor, teacher: Tensor, config: DistillLossConfig) -> Tensor:
    """The compared tokens of each place."""
    own, theirs = (logits.detach().topk(config.top_k).indices for logits in (student, teacher))
    return {"student": own, "teacher": theirs, "both": union(own, theirs)}[config.tokens_of]


def at(logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
    return (logits / temperature).log_softmax(1).gather(1, ids.clamp_min(0))


@pytest.mark.parametrize("name", DISTILLATION)
def test_divergences_have_the_numbers_of_other_packages(name: str) -> None:
    config = DistillLossConfig.model_construct(**{**DistillLossConfig().model_dump(), **DISTILLATION[name]})
    total, logits_of = torch.zeros((), dtype=torch.float64), []
    for row, student, teacher in of_sequences():
        ids = compared(student, teacher, config)
        first = [torch.full_like(ids[:1], -1), torch.zeros(1, ids.shape[1], dtype=torch.float64)]
        values = {IDS: torch.cat([first[0], ids]), TEACHER: torch.cat([first[1], at(teacher, ids, config.temperature)])}
        (microbatch,) = pack([TokenSequence(row.input_ids, row.loss_mask, values)], 16)
        columns = torch.cat([at(student, ids, config.temperature), student.new_zeros(1, ids.shape[1])])
        total = (
            total + distill_loss(TokenOutputs(columns[:, 0], ids_logprobs=columns), microbatch, config).sums["tokens"]
        )
        logits_of.append(student)
    outputs, tolerance = CASES[name]["outputs"], 1e-5 if name.startswith(IN_FLOAT32) else 1e-9
    assert total.item() == pytest.approx(outputs["loss_sum"], rel=tolerance)
    for ours, theirs in zip(torch.autograd.grad(total, logits_of), outputs["grad_student_logits"], strict=True):
        torch.testing.assert_close(ours, torch.tensor(theirs, dtype=torch.float64), rtol=tolerance, atol=tolerance)


REWARDS: dict[str, tuple[dict[str, Any], bool]] = {
    "bt_margin0_centerNone": ({}, False),
    "bt_margin0_center0.01": ({"centring": 0.01}, False),
    "bt_margin1_centerNone": ({}, True),
    "bt_margin1_center0.01": ({"centring": 0.01}, True),
    "openrlhf_pairwise": ({}, True),
    "openrlhf_logexp": ({}, False),
}


@pytest.mark.parametrize("name", REWARDS)
def test_losses_of_reward_models_have_the_numbers_of_other_packages(name: str) -> None:
    settings, has_margin = REWARDS[name]
    given, outputs = SHARED["reward_pairs"], CASES[name]["outputs"]
    sides = [torch.tensor(given[side], dtype=torch.float64, requires_grad=True) for side in ("chosen", "rejected")]
    rows = []
    for number, margin in enumerate(given["margin"]):
        for length in (2 + number, 3):
            values = {"margin": torch.full((length,), margin, dtype=torch.float64)} if has_margin else {}
            rows.append(TokenSequence(torch.ones(length, dtype=torch.int64), torch.ones(length) > 0, values))
    loss: Callable[..., LossOutput] = functools.partial(reward_loss, config=RewardLossConfig(**settings))
    total = torch.zeros((), dtype=torch.float64)
    for microbatch in pack(rows, 12, sequences_per_example=2):
        scores = torch.full((microbatch.num_tokens, 1), 7.0, dtype=torch.float64)  # of tokens that are not the last
        for place, end in zip(microbatch.order, microbatch.cu_seqlens[1:].tolist(), strict=True):
            scores[end - 1, 0] = sides[place % 2][place // 2]
        total = total + loss(TokenOutputs(torch.zeros(0), scores=scores), microbatch).sums["pairs"] / 4
    assert total.item() == pytest.approx(outputs["loss_mean"], rel=1e-9)
    for ours, side in zip(torch.autograd.grad(total, sides), ("chosen", "rejected"), strict=True):
        assert ours.tolist() == pytest.approx(outputs[f"grad_{side}"], rel=1e-9)


ON_POLICY = {
    "tinker_opd_advantage_discount0.0": (0.7, 0.0),
    "tinker_opd_advantage_discount0.9": (0.7, 0.9),
    "nrl_opd_advantage": (1.0, 0.0),
}


@pytest.mark.parametrize("name", ON_POLICY)
def test_advantages_by_a_teacher_have_the_numbers_of_other_packages(name: str) -> None:
    found = zip(of_sequences(), CASES[name]["outputs"]["advantages"], strict=True)
    for (row, student, teacher), expected in found:
        tokens, mask = row.input_ids[1:, None], row.loss_mask[1:]
        old, judged = (at(logits.detach(), tokens, 1.0)[:, 0] for logits in (student, teacher))
        ours = teacher_advantages(old, judged, mask, *ON_POLICY[name])
        theirs = torch.tensor(expected, dtype=torch.float64)
        torch.testing.assert_close(ours[mask], theirs[mask], rtol=1e-6, atol=1e-6)
