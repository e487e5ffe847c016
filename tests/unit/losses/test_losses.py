"""Losses on microbatches against the same on padded tensors, for random inputs over all options."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from automodel_rl.batch import Microbatch, TokenSequence, empty_microbatch, pack, unpack
from automodel_rl.batch.microbatch import EMPTY_LENGTH
from automodel_rl.config.losses import AdvantageConfig, CorrectionConfig, DPOLossConfig, PolicyLossConfig
from automodel_rl.losses import LossOutput, Readout, TokenOutputs, count, dpo_loss, grpo_loss, sft_loss, token_loss
from automodel_rl.losses.advantages import advantages, has_signal, overlong_penalty, whitened_over_tokens
from automodel_rl.losses.rollout_mismatch import effective_sample_size
from automodel_rl.losses.terms import correction_weights, kl_estimate
from tests.unit.losses import padded_losses

NAMES = ("old_logprobs", "rollout_logprobs", "ref_logprobs", "advantages")
SEEDS = st.integers(0, 10_000)


def random_sequences(seed: int, num_sequences: int) -> list[TokenSequence]:
    """Prompt, then a completion that counts; every per-token value is random."""
    generator = torch.Generator().manual_seed(seed)

    def sequence() -> TokenSequence:
        prompt, completion = (int(torch.randint(1, 7, (), generator=generator)) for _ in range(2))
        n = prompt + completion
        mask = torch.arange(n) >= prompt
        values = {
            name: torch.randn(n, generator=generator, dtype=torch.float64) * 0.5 - float(name != "advantages")
            for name in NAMES
        }
        return TokenSequence(torch.randint(0, 9, (n,), generator=generator), mask, values)

    return [sequence() for _ in range(num_sequences)]


def random_outputs(microbatches: list[Microbatch], seed: int) -> list[TokenOutputs]:
    generator = torch.Generator().manual_seed(seed + 1)

    def tensor(microbatch: Microbatch) -> Tensor:
        return torch.randn(microbatch.num_tokens, generator=generator, dtype=torch.float64)

    return [
        TokenOutputs((tensor(b) * 0.5 - 1).requires_grad_(), tensor(b).abs().requires_grad_()) for b in microbatches
    ]


def total_loss(
    microbatches: list[Microbatch], outputs: list[TokenOutputs], loss: Any
) -> tuple[Tensor, dict[str, float]]:
    """As the engine adds it up: sums over microbatches by global counts."""
    results: list[LossOutput] = [loss(o, b) for o, b in zip(outputs, microbatches, strict=True)]
    counts = count(microbatches)
    value = sum(total / max(counts[name], 1) for result in results for name, total in result.sums.items())
    names = results[0].metrics
    metrics = {n: sum(r.metrics[n][0] for r in results) / sum(r.metrics[n][1] for r in results) for n in names}
    return value, {name: float(metric) for name, metric in metrics.items()}


def padded(pieces: list[tuple[int, Tensor]]) -> Tensor:
    """[B, S] of (place, values aligned with tokens), in the order of the places."""
    tensors = [tensor for _, tensor in sorted(pieces, key=lambda piece: piece[0])]
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True)


def unpacked(microbatches: list[Microbatch], values: list[Tensor]) -> Tensor:
    pieces = [
        piece for b, v in zip(microbatches, values, strict=True) for piece in zip(b.order, unpack(v, b), strict=False)
    ]
    return padded(pieces)


def compare(microbatches: list[Microbatch], outputs: list[TokenOutputs], ours: Tensor, theirs: Tensor) -> None:
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-9, abs=1e-12)
    leaves = [leaf for o in outputs for leaf in (o.logprobs, o.entropy)]
    actual = torch.autograd.grad(ours, leaves, allow_unused=True, retain_graph=True)
    expected = torch.autograd.grad(theirs, leaves, allow_unused=True)
    for one, other, leaf in zip(actual, expected, leaves, strict=True):
        zero = torch.zeros_like(leaf)
        torch.testing.assert_close(
            zero if one is None else one, zero if other is None else other, rtol=1e-9, atol=1e-12
        )


dpo_options = st.fixed_dictionaries(
    {
        "variant": st.sampled_from(["dpo", "ipo", "simpo"]),
        "beta": st.sampled_from([0.05, 0.5, 2.0]),
        "label_smoothing": st.sampled_from([0.0, 0.2]),
        "length_normalised": st.booleans(),
        "gamma": st.sampled_from([0.0, 0.7]),
        "sft_weight": st.sampled_from([0.0, 0.3]),
    }
).map(lambda c: c | {"label_smoothing": c["label_smoothing"] if c["variant"] == "dpo" else 0.0})


@settings(max_examples=60, deadline=None)
@given(dpo_options, SEEDS, st.integers(1, 4))
def test_dpo_equals_the_padded_formula(options: dict, seed: int, num_pairs: int) -> None:
    microbatches = [*pack(random_sequences(seed, 2 * num_pairs), 40, sequences_per_example=2), empty_microbatch(None)]
    microbatches[-1].values["ref_logprobs"] = torch.zeros(EMPTY_LENGTH)
    outputs = random_outputs(microbatches, seed)
    config = DPOLossConfig(**options)
    ours, metrics = total_loss(microbatches, outputs, lambda o, b: dpo_loss(o, b, config))
    logprobs = unpacked(microbatches, [o.logprobs for o in outputs])
    ref = unpacked(microbatches, [b.values["ref_logprobs"] for b in microbatches])
    mask = unpacked(microbatches, [b.loss_mask for b in microbatches])
    theirs, expected = padded_losses.dpo(logprobs, ref, mask, options)
    compare(microbatches, outputs, ours, theirs)
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value)


policy_options = st.fixed_dictionaries(
    {
        "surrogate": st.sampled_from(["clip", "clip", "cispo"]),
        "ratio": st.sampled_from(["token", "sequence"]),
        "clip_low": st.sampled_from([0.1, 0.3]),
        "clip_high": st.sampled_from([0.1, 0.4]),
        "dual_clip": st.sampled_from([None, 1.5]),
        "normalise": st.sampled_from(["token", "sequence", "constant"]),
        "on_policy": st.booleans(),
        "entropy": st.sampled_from([0.0, 0.1]),
        "kl": st.sampled_from(["k1", "k2", "k3"]),
        "kl_coefficient": st.sampled_from([0.0, 0.2]),
        "correction": st.sampled_from(
            [("none", 0.0, 2.0), ("truncate", 0.5, 1.5), ("icepop", 0.6, 1.4), ("sequence_mask", 0.8, 1.2)]
        ),
        "longest": st.just(7),
    }
).map(lambda c: c | ({"ratio": "token", "dual_clip": None} if c["surrogate"] == "cispo" else {}))


def policy_config(c: dict) -> PolicyLossConfig:
    kind, low, high = c["correction"]
    own = ("surrogate", "ratio", "clip_low", "clip_high", "dual_clip", "normalise", "on_policy", "entropy")
    return PolicyLossConfig.model_validate(
        {name: c[name] for name in own}
        | {"kl": {"coefficient": c["kl_coefficient"], "estimator": c["kl"]}}
        | {"correction": {"kind": kind, "low": low, "high": high}, "max_completion_tokens": c["longest"]}
    )


@settings(max_examples=150, deadline=None)
@given(policy_options, SEEDS, st.integers(1, 5))
def test_policy_gradient_equals_the_padded_formula(options: dict, seed: int, num_sequences: int) -> None:
    microbatches = pack(random_sequences(seed, num_sequences), 25, min_microbatches=2)
    microbatches.append(empty_microbatch(microbatches[0]))
    outputs = random_outputs(microbatches, seed)
    config = policy_config(options)
    ours, metrics = total_loss(microbatches, outputs, lambda o, b: grpo_loss(o, b, config))
    logprobs = unpacked(microbatches, [o.logprobs for o in outputs])
    entropy = unpacked(microbatches, [o.entropy for o in outputs])
    values = [unpacked(microbatches, [b.values[name] for b in microbatches]) for name in NAMES]
    mask = unpacked(microbatches, [b.loss_mask for b in microbatches])
    expected, expected_metrics = padded_losses.policy_gradient(logprobs, entropy, *values, mask, options)
    compare(microbatches, outputs, ours, expected)
    assert metrics == pytest.approx(expected_metrics)


def test_sft_equals_the_padded_formula() -> None:
    microbatches = pack(random_sequences(3, 5), 25)
    outputs = random_outputs(microbatches, 3)
    ours, _ = total_loss(microbatches, outputs, sft_loss)
    logprobs = unpacked(microbatches, [o.logprobs for o in outputs])
    compare(
        microbatches,
        outputs,
        ours,
        padded_losses.nll(logprobs, unpacked(microbatches, [b.loss_mask for b in microbatches])),
    )


@pytest.mark.parametrize(
    ("changes", "missing", "message"),
    [
        ({"entropy": 0.1}, "entropy", "entropy=0.1 needs the policy's entropy: read it with Readout"),
        ({"kl": {"coefficient": 0.1}}, "ref_logprobs", "kl.coefficient=0.1 needs values.'ref_logprobs'"),
    ],
)
def test_terms_without_their_input_are_refused(changes: dict, missing: str, message: str) -> None:
    (microbatch,) = pack(random_sequences(5, 2), 50)
    (output,) = random_outputs([microbatch], 5)
    if missing == "entropy":
        output = TokenOutputs(output.logprobs)
    else:
        del microbatch.values[missing]
    with pytest.raises(ValueError, match=message):
        grpo_loss(output, microbatch, PolicyLossConfig.model_validate(changes))


def test_a_truncated_correction_that_overflows_is_the_largest_weight() -> None:
    (microbatch,) = pack(random_sequences(5, 2), 50)
    config = CorrectionConfig(kind="truncate", low=0.5, high=2.0)
    zeros = torch.zeros(microbatch.num_tokens, dtype=torch.float64)
    assert set(correction_weights(zeros + 1e4, zeros, microbatch, config)[microbatch.loss_mask].tolist()) == {2.0}
    assert set(correction_weights(zeros - 1e4, zeros, microbatch, config)[microbatch.loss_mask].tolist()) == {0.5}
    assert set(correction_weights(zeros, zeros + torch.nan, microbatch, config)[microbatch.loss_mask].tolist()) == {0.5}


def test_a_penalty_in_the_reward_needs_no_reference_in_the_loss() -> None:
    (microbatch,) = pack(random_sequences(5, 2), 50)
    (output,) = random_outputs([microbatch], 5)
    plain = grpo_loss(output, microbatch, PolicyLossConfig()).sums["tokens"]
    del microbatch.values["ref_logprobs"]
    config = PolicyLossConfig.model_validate({"kl": {"coefficient": 0.1, "where": "reward"}})
    assert torch.equal(grpo_loss(output, microbatch, config).sums["tokens"], plain)


def test_a_first_update_has_ratio_1_and_no_clipping() -> None:
    microbatches = pack(random_sequences(5, 4), 50)
    outputs = random_outputs(microbatches, 5)
    for microbatch, output in zip(microbatches, outputs, strict=True):
        microbatch.values["old_logprobs"] = output.logprobs.detach()
    _, metrics = total_loss(microbatches, outputs, lambda o, b: grpo_loss(o, b, PolicyLossConfig()))
    assert metrics["train/ratio_mean"] == 1
    assert metrics["train/clip_fraction"] == 0


def test_extremes_are_those_of_counted_tokens_and_of_whole_sequences() -> None:
    config = PolicyLossConfig()
    for seed in range(5):
        (microbatch,) = pack(random_sequences(seed, 4), 100)
        (output,) = random_outputs([microbatch], seed)
        found = grpo_loss(output, microbatch, config)
        old, rollout = (microbatch.values[name] for name in ("old_logprobs", "rollout_logprobs"))
        ratios = (output.logprobs.detach() - old).exp()[microbatch.loss_mask]
        assert found.largest["train/ratio_max"] == ratios.max()
        assert found.smallest["train/ratio_min"] == ratios.min()
        errors, counted = unpack((old - rollout).abs().exp(), microbatch), unpack(microbatch.loss_mask, microbatch)
        means = [error[counts].mean().item() for error, counts in zip(errors, counted, strict=True) if counts.any()]
        assert found.largest["train/max_seq_mult_prob_error"].item() == pytest.approx(max(means))
    nothing = empty_microbatch(microbatch)
    found = grpo_loss(TokenOutputs(torch.zeros(nothing.num_tokens, dtype=torch.float64)), nothing, config)
    assert found.largest["train/ratio_max"] == -torch.inf == -found.smallest["train/ratio_min"]


def test_equal_weights_count_as_all_tokens_and_one_heavy_one_as_few() -> None:
    means = {"train/correction_weight": 0.5, "train/correction_weight_square": 0.25}
    assert effective_sample_size(means) == {"train/effective_sample_size": 1.0}
    one_of_ten = {"train/correction_weight": 0.1, "train/correction_weight_square": 0.1}
    assert effective_sample_size(one_of_ten) == {"train/effective_sample_size": pytest.approx(0.1)}
    assert effective_sample_size({"train/loss": 1.0}) == {}


def test_overflowing_ratios_outside_of_the_mask_spoil_no_gradient() -> None:
    (microbatch,) = pack(random_sequences(5, 2), 50)
    (output,) = random_outputs([microbatch], 5)
    microbatch.values["old_logprobs"][~microbatch.loss_mask] = -1e6
    microbatch.values["ref_logprobs"][~microbatch.loss_mask] = 1e6
    config = PolicyLossConfig.model_validate({"kl": {"coefficient": 0.1}})
    (total,) = grpo_loss(output, microbatch, config).sums.values()
    (gradient,) = torch.autograd.grad(total, output.logprobs)
    assert gradient.isfinite().all()


def completion_of(ours: list[float], dtype: torch.dtype, **values: list[float]) -> tuple[Microbatch, TokenOutputs]:
    """A microbatch of one completion after one token of a prompt, and the policy's log-probabilities of it."""
    count = len(ours)
    tensors = {name: torch.tensor([0.0, *value], dtype=torch.float64) for name, value in values.items()}
    sequence = TokenSequence(torch.arange(count + 1), torch.tensor([False] + [True] * count), tensors)
    (microbatch,) = pack([sequence], 64)
    return microbatch, TokenOutputs(torch.tensor([*ours, 0.0], dtype=dtype).requires_grad_())


def gradient_of(microbatch: Microbatch, outputs: TokenOutputs, config: dict) -> tuple[float, list[float]]:
    """The loss as a mean over tokens, and its gradient by the log-probability of each token of the completion."""
    (total,) = grpo_loss(outputs, microbatch, PolicyLossConfig.model_validate(config)).sums.values()
    (gradient,) = torch.autograd.grad(total, outputs.logprobs)
    return total.item(), gradient[:-1].tolist()


@pytest.mark.parametrize("kind", ["truncate", "icepop", "sequence_mask"])
def test_a_correction_weighs_tokens_of_a_sequence_ratio_one_by_one(kind: str) -> None:
    logprobs, rollout = [-1.0, -2.0, -1.0, -1.5], [-1.0, -2.0, -1.0, -9.0]
    values = {"old_logprobs": logprobs, "rollout_logprobs": rollout, "advantages": [1.0] * 4}
    microbatch, outputs = completion_of(logprobs, torch.float64, **values)
    correction = {"kind": kind, "low": 0.5, "high": 7.0}
    _, gradient = gradient_of(
        microbatch, outputs, {"ratio": "sequence", "normalise": "sequence", "correction": correction}
    )
    last = {"truncate": 7.0, "icepop": 0.0, "sequence_mask": math.exp(7.5)}[kind]
    assert gradient == pytest.approx([-0.25, -0.25, -0.25, -0.25 * last])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("r", [-99.0, 0.0, 2.0**-10, 20.0, 22.0, 99.0])
@pytest.mark.parametrize(("estimator", "constant"), [("k1", 1.0), ("k2", 0.0), ("k3", 0.0)])
def test_gradients_of_penalties_are_exact_at_any_distance(
    dtype: torch.dtype, r: float, estimator: str, constant: float
) -> None:
    values = {"old_logprobs": [-128.0], "ref_logprobs": [-128.0 + r], "advantages": [0.0]}
    microbatch, outputs = completion_of([-128.0], dtype, **values)
    kl = {"coefficient": 1.0, "estimator": estimator}
    value, gradient = gradient_of(microbatch, outputs, {"kl": kl, "entropy": 0.0})
    exact = {"k1": -r, "k2": r * r / 2, "k3": math.expm1(r) - r}[estimator]
    assert value == pytest.approx(exact, rel=1e-9, abs=1e-12)
    assert gradient == pytest.approx([constant - r], rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("ratio", ["token", "sequence"])
@pytest.mark.parametrize("log_ratio", [99.0, 9999.0])
def test_ratios_that_overflow_where_a_clip_protects_give_the_bound_and_no_gradient(
    dtype: torch.dtype, ratio: str, log_ratio: float
) -> None:
    for advantage, expected in ((2.0, -2.4), (-2.0, 6.0), (0.0, 0.0)):
        values = {"old_logprobs": [-1.0 - log_ratio], "advantages": [advantage]}
        microbatch, outputs = completion_of([-1.0], dtype, **values)
        value, gradient = gradient_of(microbatch, outputs, {"ratio": ratio, "dual_clip": 3.0})
        assert (value, gradient) == (pytest.approx(expected), [0.0])
    microbatch, outputs = completion_of([-1.0], dtype, old_logprobs=[-1.0 - log_ratio], advantages=[1.0])
    assert gradient_of(microbatch, outputs, {"surrogate": "cispo"}) == (pytest.approx(1.2), [pytest.approx(-1.2)])


def test_a_token_that_a_correction_drops_cannot_spoil_others_by_its_ratio() -> None:
    values = {"old_logprobs": [-999.0, -1.0], "rollout_logprobs": [-1.0, -1.0], "advantages": [-1.0, -1.0]}
    microbatch, outputs = completion_of([-1.0, -1.0], torch.float32, **values)
    assert gradient_of(microbatch, outputs, {"correction": {"kind": "icepop"}}) == (1.0, [0.0, 1.0])


def test_a_clipped_token_of_ppo_has_no_gradient_however_far_its_ratio_is() -> None:
    values = {"logprobs": [-999.0, -1.0], "advantages": [1.0, -2.0]}
    microbatch, outputs = completion_of([-1.0, -1.0], torch.float32, **values)
    (total,) = token_loss("ppo", {})(outputs, microbatch).sums.values()
    (gradient,) = torch.autograd.grad(total, outputs.logprobs)
    assert total.item() == pytest.approx(-1.2 + 2.0)
    assert gradient.tolist() == [0.0, 2.0, 0.0]


@pytest.mark.parametrize("bad", [math.nan, -math.inf, math.inf])
@pytest.mark.parametrize("ratio", ["token", "sequence"])
@pytest.mark.parametrize("kind", ["none", "truncate", "icepop", "sequence_mask"])
def test_a_token_whose_generator_gave_no_number_is_left_out_of_loss_and_metrics(
    bad: float, ratio: str, kind: str
) -> None:
    config = PolicyLossConfig.model_validate({"ratio": ratio, "correction": {"kind": kind}})
    values = {"old_logprobs": [-1.1, -2.0, -3.0], "rollout_logprobs": [-1.0, -2.2, bad], "advantages": [1.0] * 3}
    microbatch, outputs = completion_of([-1.0, -2.1, -9.0], torch.float64, **values)
    found = grpo_loss(outputs, microbatch, config)
    (gradient,) = torch.autograd.grad(found.sums["tokens"], outputs.logprobs)
    shorter, of_shorter = completion_of([-1.0, -2.1], torch.float64, **{n: v[:2] for n, v in values.items()})
    expected = grpo_loss(of_shorter, shorter, config)
    (expected_gradient,) = torch.autograd.grad(expected.sums["tokens"], of_shorter.logprobs)
    assert found.sums["tokens"].item() == pytest.approx(expected.sums["tokens"].item())
    assert gradient.tolist() == pytest.approx([*expected_gradient[:2].tolist(), 0.0, 0.0])
    for kind_of_metric in ("metrics", "largest", "smallest"):
        ours, theirs = getattr(found, kind_of_metric), getattr(expected, kind_of_metric)
        assert {n: torch.as_tensor(v).tolist() for n, v in ours.items()} == {
            n: pytest.approx(torch.as_tensor(v).tolist()) for n, v in theirs.items()
        }


REWARDS = torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.5, 0.5, 0.5, 0.5], [0.0, 0.0, 0.0, 2.0]], dtype=torch.float64)


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo", "reinforce"])
def test_advantages_equal_their_formulas(kind: str) -> None:
    result = advantages(REWARDS, AdvantageConfig.model_validate({"kind": kind}))
    every_centred = [r - sum(microbatch) / 4 for microbatch in REWARDS.tolist() for r in microbatch]
    for p, microbatch in enumerate(REWARDS.tolist()):
        mean = sum(microbatch) / 4
        std = (sum((r - mean) ** 2 for r in microbatch) / 3) ** 0.5
        for g, reward in enumerate(microbatch):
            expected = {
                "grpo": (reward - mean) / (std + 1e-6),
                "dr_grpo": reward - mean,
                "rloo": reward - (sum(microbatch) - reward) / 3,
                "reinforce": (reward - mean) / ((sum(x**2 for x in every_centred) / 11) ** 0.5 + 1e-6),
            }[kind]
            assert result[p, g].item() == pytest.approx(expected)


LEFT_OUT = {
    "an outlier": ([0.3, 0.3, 0.3, -1000.0], [250.075 * 4 / 3 / (1000.3 / 3**0.5)] * 3 + [-1000.3]),
    "many equal ones": ([1000.1] * 15 + [0.0], [1000.1 / 15 / (1000.1 / 15**0.5)] * 15 + [-1000.1]),
    "equal but for rounding": ([0.1 + 0.2, 0.3, 0.3, 0.0], [0.1 / (0.3 / 3**0.5)] * 3 + [-0.3]),
    "far from 0": ([1e6, 1e6 + 1, 1e6, 1e6 + 1], [-2 / 3 * 3**0.5, 2 / 3 * 3**0.5] * 2),
    "two": ([1.0, 0.0], [1.0, -1.0]),
}


@pytest.mark.parametrize("name", LEFT_OUT)
@pytest.mark.parametrize("kind", ["grpo", "gdpo"])
def test_a_deviation_of_the_others_that_is_rounding_divides_nothing(name: str, kind: str) -> None:
    given, expected = LEFT_OUT[name]
    rewards = torch.tensor([given], dtype=torch.float64)
    config = AdvantageConfig.model_validate({"kind": kind, "leave_one_out": True, "whiten": "tokens"})
    weights = torch.tensor([1.0, 0.0])
    found = advantages(rewards if kind == "grpo" else torch.stack([rewards, rewards], 2), config, weights=weights)
    assert found[0].tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("leave_one_out", [False, True])
@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo", "reinforce", "gdpo"])
@pytest.mark.parametrize("given", [[0.3] * 7, [1e12 / 3] * 7, [-0.7e13] * 3, [1e9 * (0.1 + 0.2), 1e9 * 0.3]])
def test_rewards_that_differ_by_rounding_teach_nothing(given: list[float], kind: str, leave_one_out: bool) -> None:
    if leave_one_out and kind not in ("grpo", "gdpo"):
        return
    rewards = torch.tensor([given], dtype=torch.float64)
    of_kind = torch.stack([rewards, rewards], 2) if kind == "gdpo" else rewards
    config = AdvantageConfig.model_validate({"kind": kind, "leave_one_out": leave_one_out})
    assert not advantages(of_kind, config, weights=torch.ones(2)).any()
    assert not has_signal(rewards).any()
    assert not whitened_over_tokens(rewards[0], torch.full((len(given),), 7.0)).any()


def test_advantages_have_the_precision_of_rewards() -> None:
    rewards = torch.tensor([[0.1, 0.7, 0.2, 0.4, 0.9, 0.3, 0.8]], dtype=torch.float64)
    (found,) = advantages(rewards, AdvantageConfig(kind="rloo")).tolist()
    given = rewards[0].tolist()
    assert found == pytest.approx([r - (sum(given) - r) / 6 for r in given], rel=1e-14)


def test_advantages_are_clipped() -> None:
    result = advantages(REWARDS, AdvantageConfig(kind="dr_grpo", clip=0.4))
    assert result.abs().max() == 0.4


def test_groups_without_signal_are_known() -> None:
    assert has_signal(REWARDS).tolist() == [True, False, True]


def test_the_overlong_penalty_rises_over_the_buffer() -> None:
    assert overlong_penalty(torch.tensor([10, 80, 90, 100]), max_tokens=100, buffer=20).tolist() == [0, 0, 0.5, 1]


def test_k3_is_exact_where_policy_and_reference_are_close() -> None:
    ours = torch.full((200_000,), -1.5)
    ref = ours + torch.linspace(-2e-3, 2e-3, len(ours))
    estimate = kl_estimate(ours, ref, "k3")
    r = (ref - ours).double()
    exact = torch.expm1(r) - r
    assert (estimate >= -1e-13).all()
    assert (estimate - exact).abs().max() < 1e-9
    clearly = r.abs() > 1e-4
    assert ((estimate - exact).abs() / exact)[clearly].max() < 0.01  # exp(r) - 1 - r is off by a half


@pytest.mark.parametrize("capacity", [64, 7], ids=["in another order", "split"])
def test_rows_whose_neighbours_are_no_pairs_are_refused(capacity: int) -> None:
    def sequence(length: int) -> TokenSequence:
        mask = torch.arange(length) > 1
        return TokenSequence(torch.arange(length), mask, {"ref_logprobs": torch.zeros(length)})

    sequences = [sequence(n) for n in (5, 3, 4, 6)]

    def losses(microbatches: list[Microbatch]) -> list[LossOutput]:
        return [
            dpo_loss(TokenOutputs(torch.zeros(microbatch.num_tokens)), microbatch, DPOLossConfig())
            for microbatch in microbatches
        ]

    assert len(losses(pack(sequences, 64, sequences_per_example=2))) == 1
    with pytest.raises(ValueError, match=r"not whole pairs: use pack\(..., sequences_per_example=2\)"):
        losses(pack(sequences, capacity))


@pytest.mark.parametrize(
    ("settings_", "values", "message"),
    [
        ({"on_policy": True}, (), r"every policy loss needs values\['advantages'\]"),
        ({}, ("advantages",), r"on_policy=auto needs values\['old_logprobs'\]"),
        ({"on_policy": True, "correction": {"kind": "truncate"}}, ("advantages",), "correction.kind=truncate needs"),
        ({"on_policy": True, "kl": {"coefficient": 0.1}}, ("advantages",), "kl.coefficient=0.1 needs"),
    ],
)
def test_a_policy_loss_names_what_its_batch_lacks(settings_: dict, values: tuple[str, ...], message: str) -> None:
    mask = torch.tensor([False, True, True])
    (microbatch,) = pack([TokenSequence(torch.arange(3), mask, {name: torch.ones(3) for name in values})], 8)
    with pytest.raises(ValueError, match=message):
        grpo_loss(TokenOutputs(torch.zeros(3)), microbatch, PolicyLossConfig.model_validate(settings_))


def test_a_policy_loss_without_a_correction_needs_nothing_of_the_engine() -> None:
    mask = torch.tensor([False, True, True])
    (microbatch,) = pack([TokenSequence(torch.arange(3), mask, {"advantages": torch.ones(3)})], 8)
    output = grpo_loss(TokenOutputs(torch.zeros(3)), microbatch, PolicyLossConfig(on_policy=True))
    assert output.sums["tokens"] == -2.0
    assert "train/logprob_error" not in output.metrics


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan"), float("inf")])
def test_a_temperature_that_logits_cannot_be_divided_by_is_refused(temperature: float) -> None:
    with pytest.raises(ValueError, match="it must be above 0"):
        Readout(temperature=temperature)
