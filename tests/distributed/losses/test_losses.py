"""Preference and policy-gradient losses compute the same on every layout, with unequal microbatches on every rank."""

import functools
from pathlib import Path

import pytest
import torch

from automodel_rl.batch import TokenSequence, add_values, pack
from automodel_rl.config import DPOLossConfig, ModelConfig, OptimizerConfig, ParallelConfig, PolicyLossConfig
from automodel_rl.engine import Engine, TrainOutput
from automodel_rl.losses import LossFn, Readout, dpo_loss, grpo_loss
from automodel_rl.model.handle import ModelHandle
from tests.rank_pool import RankPool
from tests.tiny import make_sequences, save_tiny_model

Expected = tuple[str, Path, list[TrainOutput]]
LOSSES: dict[str, LossFn] = {
    "dpo": functools.partial(dpo_loss, config=DPOLossConfig(label_smoothing=0.1, sft_weight=0.2)),
    "preferences": functools.partial(
        dpo_loss,
        config=DPOLossConfig(
            mix={"apo_down": 0.5, "orpo": 2.0, "hinge": 1.0}, sft_mean="token", sft_weight=0.3, excess_weight=0.4
        ),
    ),
    "gspo": functools.partial(
        grpo_loss,
        config=PolicyLossConfig.model_validate(
            {
                "ratio": "sequence",
                "normalise": "sequence",
                "entropy": 0.05,
                "kl": {"coefficient": 0.1},
                "correction": {"kind": "truncate", "high": 1.1},
            }
        ),
    ),
}
BY_SEQUENCE = {"statistic": "k3", "level": "mean", "high": 0.05}
for name, settings in {
    "vespo": {"surrogate": "vespo", "correction": {"kind": "truncate", "high": 3.0}},
    "gmpo": {"surrogate": "gmpo", "normalise": "sequence", "correction": {"reject": [BY_SEQUENCE]}},
}.items():
    LOSSES[name] = functools.partial(grpo_loss, config=PolicyLossConfig.model_validate(settings))
READOUTS = {name: Readout() for name in LOSSES} | {"gspo": Readout(temperature=0.7, entropy=True)}


def with_values(sequences: list[TokenSequence]) -> list[TokenSequence]:
    generator = torch.Generator().manual_seed(7)
    names = ("old_logprobs", "rollout_logprobs", "ref_logprobs", "advantages")
    return [
        TokenSequence(
            s.input_ids,
            s.loss_mask,
            {name: torch.randn(len(s), generator=generator, dtype=torch.float64) * 0.2 - 4 for name in names},
        )
        for s in sequences
    ]


def train(folder: Path, parallel: ParallelConfig, loss: str) -> list[TrainOutput]:
    handle = ModelHandle.from_pretrained(ModelConfig(path=str(folder), dtype="float64"), parallel)
    engine = Engine(handle, OptimizerConfig(lr=1e-2, decay="constant"))
    microbatches = pack(
        with_values(make_sequences(10, seed=3)),
        40,
        share=handle.layout.data_share,
        sequences_per_example=2,
    )
    return [engine.train_step(microbatches, LOSSES[loss], READOUTS[loss]) for _ in range(2)]


@pytest.fixture(scope="module", params=list(LOSSES))
def one_process(request: pytest.FixtureRequest, ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Expected:
    """A loss, a model, and what one process makes of them."""
    folder = tmp_path_factory.mktemp("model")
    save_tiny_model(folder)
    (outputs,) = ranks(1).run(train, folder, ParallelConfig(), request.param)
    return request.param, folder, outputs


@pytest.mark.parametrize("sizes", [{"tp": 2, "sequence_parallel": True}, {"dp_shard": 2}, {"pp": 2, "cp": 2}], ids=str)
def test_layouts_compute_the_loss_of_one_process(ranks: RankPool, one_process: Expected, sizes: dict) -> None:
    loss, folder, expected = one_process
    parallel = ParallelConfig(**sizes)
    for actual in ranks(parallel.world_size).run(train, folder, parallel, loss):
        for ours, theirs in zip(actual, expected, strict=True):
            assert ours.loss == pytest.approx(theirs.loss, rel=1e-9)
            assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-9)
            assert ours.metrics.keys() == theirs.metrics.keys()
            assert ours.metrics == pytest.approx(theirs.metrics, rel=1e-9)


def recompute(folder: Path, parallel: ParallelConfig) -> tuple[dict[str, float], float]:
    """The metrics of a first update whose old log-probabilities were computed before it."""
    handle = ModelHandle.from_pretrained(ModelConfig(path=str(folder), dtype="float32"), parallel)
    engine = Engine(handle, OptimizerConfig(lr=1e-2, decay="constant"))
    microbatches = pack(with_values(make_sequences(6, seed=3)), 40)
    logprobs = iter(engine.logprobs(microbatches, temperature=0.7))
    microbatches = [
        add_values(microbatch, "old_logprobs", [next(logprobs) for _ in microbatch.lengths])
        for microbatch in microbatches
    ]
    values = []

    def loss(outputs, microbatch):  # type: ignore[no-untyped-def]
        values.append((outputs.logprobs - microbatch.values["old_logprobs"]).abs().max().item())
        return grpo_loss(outputs, microbatch, PolicyLossConfig())

    output = engine.train_step(microbatches, loss, Readout(temperature=0.7, entropy=True))
    return output.metrics, max(values, default=0.0)


@pytest.mark.parametrize("sizes", [{}, {"pp": 2}, {"cp": 2}], ids=str)
def test_recomputed_logprobs_are_exactly_those_of_the_first_update(
    ranks: RankPool, tmp_path: Path, sizes: dict
) -> None:
    save_tiny_model(tmp_path, dtype=torch.float32)
    parallel = ParallelConfig(**sizes)
    for metrics, difference in ranks(parallel.world_size).run(recompute, tmp_path, parallel):
        assert difference == 0
        assert metrics["train/ratio_mean"] == 1


def read(folder: Path, parallel: ParallelConfig) -> tuple[list[tuple], torch.Tensor, list[torch.Tensor]]:
    handle = ModelHandle.from_pretrained(ModelConfig(path=str(folder), dtype="float64"), parallel)
    engine = Engine(handle)
    microbatches = pack(make_sequences(5, seed=3), 40)
    return engine.top_logits(microbatches, 3), engine.sequence_scores(microbatches), engine.logprobs(microbatches)


def test_top_logits_and_scores_belong_to_their_tokens(ranks: RankPool, tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    (expected,) = ranks(1).run(read, tmp_path, ParallelConfig())
    tops, scores, logprobs = ranks(2).run(read, tmp_path, ParallelConfig(pp=2))[1]
    sequences = [
        make_sequences(5, seed=3)[i] for microbatch in pack(make_sequences(5, seed=3), 40) for i in microbatch.order
    ]
    for (values, ids), (other_values, other_ids), sequence, logprob in zip(
        tops, expected[0], sequences, logprobs, strict=True
    ):
        assert values.shape == ids.shape == (len(sequence), 3)
        assert torch.equal(ids, other_ids)
        torch.testing.assert_close(values, other_values, rtol=1e-10, atol=1e-10)
        # Where the likeliest token is the one that came, no other log-probability is higher.
        assert (values[1:, 0] >= values[1:, 1]).all()
        assert logprob.shape == (len(sequence),)
    counted = [(p * s.loss_mask)[1:].sum() for p, s in zip(logprobs, sequences, strict=True)]
    torch.testing.assert_close(scores, torch.stack(counted), rtol=1e-12, atol=1e-12)
