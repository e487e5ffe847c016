"""Losses against numbers of other packages' own functions.

`tests/golden/losses.json` was made by TRL 1.16.0, verl 0.9.1, OpenRLHF 0.11.2, NeMo RL 7ea279a, slime 624b824 and
axolotl 0.19.0 on float64 tensors; each case names the function, its settings and inputs. A case whose function computes
in float32 inside is compared to 1e-6.
"""

import dataclasses
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from automodel_rl.batch import TokenSequence, in_packed_order, pack, unpack
from automodel_rl.config.losses import AdvantageConfig, CorrectionConfig, DPOLossConfig, KTOLossConfig, PolicyLossConfig
from automodel_rl.losses import LossFn, TokenOutputs, dft_loss, dpo_loss, grpo_loss, kto_loss, sft_loss
from automodel_rl.losses.advantages import advantages, whitened_over_tokens
from automodel_rl.losses.kto import reference_point
from automodel_rl.losses.outputs import count
from automodel_rl.losses.policy_gradient import UNCERTAIN, uncertain_tokens
from automodel_rl.losses.sft import ENTROPY_WEIGHT, eaft_loss, entropy_weights
from automodel_rl.losses.terms import correction_weights

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "losses.json").read_text())
CASES = {case["name"]: case for case in GOLDEN["cases"]}
SHARED = GOLDEN["shared"]

PREFERENCES: dict[str, dict[str, Any]] = {
    "sigmoid": {},
    "hinge": {"variant": "hinge"},
    "ipo": {"variant": "ipo"},
    "exo_pair_ls0.001": {"variant": "exo", "label_smoothing": 0.001},
    "exo_pair_ls0.2": {"variant": "exo", "label_smoothing": 0.2},
    "nca_pair": {"variant": "nca"},
    "robust_ls0.1": {"variant": "robust", "label_smoothing": 0.1},
    "bco_pair": {"variant": "bco"},
    "sppo_hard": {"variant": "sppo"},
    "apo_zero": {"variant": "apo_zero"},
    "apo_down": {"variant": "apo_down"},
    "discopop": {"variant": "discopop"},
    "sigmoid_norm": {"length_normalised": True},
    "sigmoid_norm_beta2.0": {"length_normalised": True, "beta": 2.0},
    "hinge_beta2.0": {"variant": "hinge", "beta": 2.0},
    "ipo_beta0.5": {"variant": "ipo", "beta": 0.5},
    "sigmoid_f_forward_kl": {"divergence": "forward_kl"},
    "sigmoid_f_js_divergence": {"divergence": "js"},
    "rpo_sigmoid+sft": {"sft_weight": 0.3, "sft_mean": "token"},
    "mpo_sigmoid+bco+sft": {"mix": {"dpo": 0.8, "bco": 0.2}, "sft_weight": 1.0, "sft_mean": "token"},
    "ld_dpo_alpha0.5": {"excess_weight": 0.5},
    "openrlhf_cdpo_ls0.0": {},
    "openrlhf_cdpo_ls0.1": {"label_smoothing": 0.1},
    "nrl_dpo_sft_avg0": {"sft_weight": 0.3},
    "nrl_dpo_sft_avg1": {"sft_weight": 0.3, "length_normalised": True},
    "cpo_sigmoid": {"reference_free": True},
    "cpo_sigmoid_ls0.1": {"reference_free": True, "label_smoothing": 0.1},
    "cpo_hinge": {"variant": "hinge", "reference_free": True},
    "cpo_ipo": {"variant": "ipo", "reference_free": True},
    "cpo_simpo_beta2.0_gamma1.0": {"variant": "simpo", "beta": 2.0, "gamma": 1.0},
    "cpo_simpo_beta2.0_gamma1.0_alpha0.5": {"variant": "simpo", "beta": 2.0, "gamma": 1.0, "alpha": 0.5},
    "orpo_odds_ratio_term": {"variant": "orpo", "sft_weight": 0.0},
}
LOOSE = {"exo_pair_ls0.001", "exo_pair_ls0.2", "orpo_odds_ratio_term", "sapo"}
"""Cases whose functions have constants of float32 inside."""


CLIPPED = {"clip_high": 0.28}
POLICY: dict[str, dict[str, Any]] = {
    "sapo": {"surrogate": "sapo", "normalise": "sequence"},
    "verl_sapo": {"surrogate": "sapo", "normalise": "sequence"},
    "vespo": {"surrogate": "vespo"},
    "vespo_with_token_tis": {"surrogate": "vespo", "correction": {"kind": "truncate", "high": 3.0}},
    "cispo_hi1.3": {"surrogate": "cispo", "clip_low": 1.0, "clip_high": 0.3},
    "dapo_hi0.28": CLIPPED,
    "dr_grpo": {"normalise": "constant", "max_completion_tokens": 8},
    "luspo_levelsequence": {"ratio": "sequence", "normalise": "constant", "max_completion_tokens": 1},
    "grpo_levelsequence": {"ratio": "sequence", "normalise": "sequence"},
    "verl_gspo": {"ratio": "sequence", "normalise": "sequence", "clip_low": 0.02, "clip_high": 0.02},
    "grpo_opsm0.05": {"normalise": "sequence", "off_policy_bound": 0.05},
    "dapo_q0.4": {"uncertain": 0.4},
    "gmpo": {"surrogate": "gmpo", "normalise": "sequence", "clip_low": 0.4, "clip_high": 0.4},
    "verl_geo_mean": {"surrogate": "gmpo", "normalise": "sequence", "clip_low": 0.4, "clip_high": 0.4},
    "verl_dppo_tv": {"surrogate": "dppo_tv", "clip_low": 0.1, "clip_high": 0.1},
    "verl_dppo_kl": {"surrogate": "dppo_kl", "clip_low": 0.02, "clip_high": 0.02},
    "nrl_clipped_pg_nll0.0": CLIPPED | {"dual_clip": 10.0},
    "openrlhf_ppo_token_ratio": CLIPPED | {"correction": {"kind": "icepop", "low": 0.8, "high": 1.25}},
    "openrlhf_ppo_seq_ratio": CLIPPED | {"correction": {"kind": "sequence_mask", "low": 0.9, "high": 1.1}},
}
for level, of in {"token": "token", "mean": "seq"}.items():
    for statistic, bound in {"binary_kl": 0.01, "tv": 0.05}.items():
        rule = {"statistic": statistic, "level": level, "high": bound}
        # Bounds so far apart that what is kept has its own weight.
        POLICY[f"openrlhf_ppo_{of}_{statistic}"] = CLIPPED | {
            "correction": {"kind": "truncate", "high": 1e9, "reject": [rule]}
        }

CORRECTIONS: dict[str, dict[str, Any]] = {
    "verl_rs_token_k1": {"reject": [{"low": 0.8, "high": 1.25}]},
    "verl_rs_token_k2": {"reject": [{"statistic": "k2", "high": 0.02}]},
    "verl_rs_token_k3": {"reject": [{"statistic": "k3", "high": 0.02}]},
    "verl_rs_seq_sum_k1": {"reject": [{"level": "sum", "low": 0.8, "high": 1.25}]},
    "verl_rs_seq_mean_k1": {"reject": [{"level": "mean", "low": 0.9, "high": 1.1}]},
    "verl_rs_seq_mean_k2": {"reject": [{"statistic": "k2", "level": "mean", "high": 0.01}]},
    "verl_rs_seq_mean_k3": {"reject": [{"statistic": "k3", "level": "mean", "high": 0.01}]},
    "verl_rs_seq_max_k2": {"reject": [{"statistic": "k2", "level": "max", "high": 0.05}]},
    "verl_rs_seq_max_k3": {"reject": [{"statistic": "k3", "level": "max", "high": 0.05}]},
    "verl_is_token_norm0": {"kind": "truncate", "high": 1.5},
    "verl_is_sequence_norm0": {"kind": "product_truncate", "high": 1.5},
}


def rows_of(values: dict[str, list[list[float]]], masks: list[list[int]] | None = None) -> list[TokenSequence]:
    """Rows of a prompt's token and completion tokens, each with values by name."""
    lengths = [*map(len, next(iter(values.values())))]
    rows = []
    for place, length in enumerate(lengths):
        mask = [False, *([True] * length if masks is None else map(bool, masks[place]))]
        of_row = {name: torch.tensor([0.0, *of[place]], dtype=torch.float64) for name, of in values.items()}
        rows.append(TokenSequence(torch.zeros(length + 1, dtype=torch.int64), torch.tensor(mask), of_row))
    return rows


@dataclasses.dataclass(frozen=True)
class Golden:
    """A case as rows and a loss of ours.

    Attributes:
        rows: the rows, with the policy's log-probabilities as values of the name `logprobs`.
        loss: the loss.
        sequences_per_example: number of neighbours that stay in one microbatch.
        total: the loss that the other package computes.
        gradients: its gradient by the log-probabilities of each completion.
        tolerance: the relative and absolute tolerance.
    """

    rows: list[TokenSequence]
    loss: LossFn
    sequences_per_example: int
    total: float
    gradients: list[list[float]]
    tolerance: float = 1e-9

    def check(self, total: float, gradients: Sequence[Sequence[float]]) -> None:
        """Compares a loss and gradients with those of the other package."""
        assert total == pytest.approx(self.total, rel=self.tolerance, abs=self.tolerance)
        for ours, theirs in zip(gradients, self.gradients, strict=True):
            assert ours == pytest.approx(theirs, rel=self.tolerance, abs=self.tolerance)


def computed(
    loss: LossFn, rows: list[TokenSequence], capacity: int, sequences_per_example: int
) -> tuple[float, list[Tensor]]:
    """The loss of rows and its gradient by their log-probabilities, [n] each; the rows have these as `logprobs`."""
    microbatches = pack(rows, capacity, sequences_per_example=sequences_per_example)
    counts, total, gradients = count(microbatches), 0.0, []
    for microbatch in microbatches:
        outputs = TokenOutputs(microbatch.values["logprobs"].requires_grad_())
        parts = [value / max(counts[name], 1) for name, value in loss(outputs, microbatch).sums.items()]
        part = torch.stack(parts).sum()
        (gradient,) = torch.autograd.grad(part, outputs.logprobs)
        total += part.item()
        gradients += unpack(gradient, microbatch)
    return total, in_packed_order(gradients, microbatches)


def preference(name: str) -> Golden:
    outputs, pairs = CASES[name]["outputs"], SHARED["pairs"]
    values = {
        "logprobs": _in_turn(pairs["chosen_logprobs"], pairs["rejected_logprobs"]),
        "ref_logprobs": _in_turn(pairs["ref_chosen_logprobs"], pairs["ref_rejected_logprobs"]),
    }
    loss = functools.partial(dpo_loss, config=DPOLossConfig.model_validate(PREFERENCES[name]))
    gradients = _in_turn(outputs["grad_chosen_logprobs"], outputs["grad_rejected_logprobs"])
    return Golden(rows_of(values), loss, 2, outputs["loss_mean"], gradients, 1e-6 if name in LOOSE else 1e-9)


@pytest.mark.parametrize("capacity", [64, 10], ids=["one microbatch", "several"])
@pytest.mark.parametrize("name", PREFERENCES)
def test_preference_losses_have_the_numbers_of_other_packages(name: str, capacity: int) -> None:
    _check(preference(name), capacity)


def _check(golden: Golden, capacity: int) -> None:
    total, gradients = computed(golden.loss, golden.rows, capacity, golden.sequences_per_example)
    golden.check(total, [gradient[1:].tolist() for gradient in gradients])


def _in_turn(chosen: list[Any], rejected: list[Any]) -> list[Any]:
    return [one for pair in zip(chosen, rejected, strict=True) for one in pair]


@pytest.mark.parametrize(
    "settings",
    [
        {"divergence": "forward_kl"},
        {"variant": "hinge", "divergence": "forward_kl"},
        {"variant": "simpo", "alpha": 8.0},
    ],
    ids=str,
)
def test_completions_that_have_become_most_unlikely_have_finite_gradients(settings: dict[str, Any]) -> None:
    logprobs, reference = [[-0.5], [-130.0], [-120.0], [-150.0]], [[-0.5], [-0.5], [-0.5], [-0.5]]
    rows = rows_of({"logprobs": logprobs, "ref_logprobs": reference})
    rows = [
        TokenSequence(row.input_ids, row.loss_mask, {name: value.float() for name, value in row.values.items()})
        for row in rows
    ]
    loss = functools.partial(dpo_loss, config=DPOLossConfig.model_validate(settings))
    total, gradients = computed(loss, rows, 64, sequences_per_example=2)
    assert torch.tensor(total).isfinite()
    assert all(gradient.isfinite().all() for gradient in gradients)


def policy_rows() -> list[TokenSequence]:
    given = SHARED["policy"]
    values = {name: given[name] for name in ("logprobs", "old_logprobs", "rollout_logprobs")}
    of_sequences = zip(given["sequence_advantages"], given["lengths"], strict=True)
    values["advantages"] = [[advantage] * length for advantage, length in of_sequences]
    rows = rows_of(values, given["loss_mask"])
    entropies = [torch.tensor([0.0, *of_row]) for of_row in given["entropy"]]
    uncertain = uncertain_tokens(entropies, [row.loss_mask for row in rows], 0.4)
    return [
        TokenSequence(row.input_ids, row.loss_mask, row.values | {UNCERTAIN: one})
        for row, one in zip(rows, uncertain, strict=True)
    ]


def of_policy(name: str) -> Golden:
    config = PolicyLossConfig.model_validate(POLICY[name] | {"on_policy": False})
    outputs, tolerance = CASES[name]["outputs"], 1e-6 if name.startswith("verl") or name in LOOSE else 1e-9
    loss = functools.partial(grpo_loss, config=config)
    return Golden(policy_rows(), loss, 1, outputs["loss"], outputs["grad_logprobs"], tolerance)


@pytest.mark.parametrize("capacity", [64, 7], ids=["one microbatch", "several"])
@pytest.mark.parametrize("name", POLICY)
def test_policy_losses_have_the_numbers_of_other_packages(name: str, capacity: int) -> None:
    _check(of_policy(name), capacity)


@pytest.mark.parametrize("capacity", [64, 7], ids=["one microbatch", "several"])
@pytest.mark.parametrize("name", CORRECTIONS)
def test_corrections_have_the_numbers_of_other_packages(name: str, capacity: int) -> None:
    config, microbatches = CorrectionConfig.model_validate(CORRECTIONS[name]), pack(policy_rows(), capacity)
    found = []
    for one in microbatches:
        weights = correction_weights(one.values["old_logprobs"], one.values["rollout_logprobs"], one, config)
        found += unpack(weights * one.loss_mask, one)
    (expected,) = CASES[name]["outputs"].values()
    for ours, theirs in zip(in_packed_order(found, microbatches), expected, strict=True):
        assert ours[1:].tolist() == pytest.approx(theirs, rel=1e-9)


SUPERVISED: dict[str, tuple[float, int]] = {
    "sft_nll": (0.0, 0),
    "sft_dft": (0.0, 0),
    "sft_eaft_alpha1.0_k3": (1.0, 3),
    "sft_eaft_alpha1.0_k20": (1.0, 11),
    "sft_eaft_alpha2.0_k3": (2.0, 3),
    "sft_eaft_alpha2.0_k20": (2.0, 11),
}
"""Supervised losses, with the power and the number of tokens of an entropy."""


@pytest.mark.parametrize("name", SUPERVISED)
def test_supervised_losses_have_the_numbers_of_other_packages(name: str) -> None:
    given, case, (power, top_k) = SHARED["distill"], CASES[name]["outputs"], SUPERVISED[name]
    rows, logits = [], []
    for tokens, mask, of_row in zip(given["tokens"], given["loss_mask"], given["student_logits"], strict=True):
        ids = torch.tensor([0, *map(int, tokens)])
        logits.append(torch.tensor(of_row, dtype=torch.float64, requires_grad=True))
        weights = entropy_weights(logits[-1].detach().topk(top_k).values, power) if top_k else torch.ones(len(tokens))
        values = {ENTROPY_WEIGHT: torch.cat([weights.new_zeros(1), weights])}
        rows.append(TokenSequence(ids, torch.tensor([False, *map(bool, mask)]), values))
    (microbatch,) = pack(rows, 64)
    logprobs = [
        torch.cat([one.log_softmax(1).gather(1, rows[place].input_ids[1:, None])[:, 0], one.new_zeros(1)])
        for place, one in ((place, logits[place]) for place in microbatch.order)
    ]
    loss_fn: LossFn = eaft_loss if top_k else {"sft_nll": sft_loss, "sft_dft": dft_loss}[name]
    loss = loss_fn(TokenOutputs(torch.cat(logprobs)), microbatch).sums["tokens"]
    assert loss.item() == pytest.approx(case["loss_sum"], rel=1e-5)
    gradients = torch.autograd.grad(loss, logits)
    for ours, theirs in zip(gradients, case["grad_student_logits"], strict=True):
        torch.testing.assert_close(ours, torch.tensor(theirs, dtype=torch.float64), rtol=1e-5, atol=1e-5)


KTO: dict[str, dict[str, Any]] = {
    "kto_kl_positive": {},
    "kto_kl_clamped_to_0": {},
    "kto_kl_positive_weights": {"desirable_weight": 1.33, "undesirable_weight": 0.8},
    "apo_zero_unpaired_no_kl": {"reference_point": "zero"},
}


def judged(name: str) -> Golden:
    config, given, outputs = KTOLossConfig(**KTO[name]), SHARED["kto"], CASES[name]["outputs"]
    kind = CASES[name]["settings"]["mismatched_ref"]
    of_batch = (given["mismatched_logprobs"], given[f"mismatched_ref_logprobs_{kind}"])
    policy, reference = (torch.tensor([sum(row) for row in rows], dtype=torch.float64) for rows in of_batch)
    point = reference_point(policy, reference) if config.reference_point == "batch" else 0.0
    values = {name: given[name] for name in ("logprobs", "ref_logprobs")}
    of_rows = zip(given["desirable"], given["lengths"], strict=True)
    values["label"] = [[float(is_good)] * length for is_good, length in of_rows]
    loss = functools.partial(kto_loss, config=config, reference_point=point)
    if config.reference_point == "batch":
        assert point == pytest.approx(outputs["kl"], abs=1e-9)
    return Golden(rows_of(values), loss, 1, outputs["loss_mean"], outputs["grad_logprobs"])


@pytest.mark.parametrize("capacity", [64, 7], ids=["one microbatch", "several"])
@pytest.mark.parametrize("name", KTO)
def test_losses_of_judged_completions_have_the_numbers_of_another_package(name: str, capacity: int) -> None:
    _check(judged(name), capacity)


GDPO: dict[str, tuple[dict[str, Any], tuple[float, float]]] = {
    "nrl_gdpo_loo0_wNone": ({}, (1.0, 1.0)),
    "nrl_gdpo_loo0_w[1.0, 0.5]": ({}, (1.0, 0.5)),
    "nrl_gdpo_loo1_wNone": ({"leave_one_out": True}, (1.0, 1.0)),
    "nrl_gdpo_loo1_w[1.0, 0.5]": ({"leave_one_out": True}, (1.0, 0.5)),
    "verl_gdpo_wNone": ({"whiten": "tokens"}, (1.0, 1.0)),
    "verl_gdpo_w[1.0, 0.5]": ({"whiten": "tokens"}, (1.0, 0.5)),
}


@pytest.mark.parametrize("name", GDPO)
def test_advantages_of_several_rewards_have_the_numbers_of_other_packages(name: str) -> None:
    settings, weights = GDPO[name]
    given, config = SHARED["gdpo"], AdvantageConfig(kind="gdpo", **settings)
    rewards = torch.tensor([given["reward_a"], given["reward_b"]], dtype=torch.float64).T.view(2, 4, 2)
    found = advantages(rewards, config, weights=torch.tensor(weights)).flatten()
    if config.whiten == "tokens":
        found = whitened_over_tokens(found, torch.tensor(given["lengths"]))
    assert found.tolist() == pytest.approx(CASES[name]["outputs"]["advantages"], rel=1e-5, abs=1e-5)
