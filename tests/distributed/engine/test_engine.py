"""The engine and the handle beyond parity: export, forward-only work, bad numbers, bad weights."""

import math
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from automodel_rl import Engine, LossOutput, Microbatch, ModelHandle, OptimizerConfig, ParallelConfig, TokenOutputs
from automodel_rl import sft_loss as plain_sft_loss
from automodel_rl.batch import pack_microbatch
from automodel_rl.block_sizes import block_sizes
from automodel_rl.config import ModelConfig
from automodel_rl.engine.reference_weights import ReferenceWeights
from automodel_rl.errors import InputError, TrainingDivergedError
from automodel_rl.parallel.sharding import local_tensor
from automodel_rl.tools.verify.one_process import OneProcess, Training
from tests.rank_pool import RankPool
from tests.tiny import make_sequences, save_tiny_model

CPU = torch.device("cpu")


def make_engine(folder: Path, parallel: ParallelConfig, **optimizer: object) -> Engine:
    handle = ModelHandle.from_pretrained(ModelConfig(path=str(folder), dtype="float64"), parallel)
    return Engine(handle, OptimizerConfig(decay="constant", **optimizer))


def microbatches_of(engine: Engine) -> list[Microbatch]:
    rank = engine.handle.layout.data_rank
    return [pack_microbatch(make_sequences(2 + i, seed=10 * rank + i)) for i in range(3)]


def train_and_save(folder: Path, parallel: ParallelConfig) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Log-probabilities of every sequence and logits of every microbatch, after training."""
    engine = make_engine(folder, parallel, lr=1e-2)
    for _ in range(3):
        engine.train_step(microbatches_of(engine), plain_sft_loss)
    engine.handle.save_pretrained(folder / "final")
    microbatches = microbatches_of(engine)
    return engine.logprobs(microbatches), engine.runner.forward(
        microbatches, lambda hidden, head, _: hidden @ head.weight.t()
    )


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("parallel", [ParallelConfig(pp=2), ParallelConfig(pp=2, dp_shard=2)], ids=["pp2", "pp2 dp2"])
def test_what_is_saved_gives_the_logits_of_the_trained_handle(
    ranks: RankPool, tmp_path: Path, parallel: ParallelConfig, tied: bool
) -> None:
    save_tiny_model(tmp_path, tied=tied)
    trained, logits = ranks(parallel.world_size).run(train_and_save, tmp_path, parallel)[0]
    saved = OneProcess(tmp_path / "final", torch.float64, Training(), CPU)
    sequences = [s for i in range(3) for s in make_sequences(2 + i, seed=i)]
    for actual, sequence in zip(trained, sequences, strict=True):
        assert (actual - saved.logprobs(sequence)).abs().max() < 1e-10
    expected = torch.cat([saved.model(sequence.input_ids[None]).logits[0] for sequence in sequences])
    assert (torch.cat(logits) - expected).abs().max() < 1e-10
    original = dict(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64).named_parameters())
    assert all(not torch.equal(p, original[name]) for name, p in saved.model.named_parameters())


def forward_only(folder: Path, parallel: ParallelConfig) -> tuple[list[float], list[float], list[list[torch.Tensor]]]:
    """Losses read before each of three steps, those of the steps, and log-probabilities read whole and in blocks."""
    engine = make_engine(folder, parallel, lr=1e-2)
    microbatches = microbatches_of(engine)
    read, trained = [], []
    for _ in range(3):
        read.append(engine.evaluate(microbatches, plain_sft_loss)[0])
        trained.append(engine.train_step(microbatches, plain_sft_loss).loss)
    whole = engine.logprobs(microbatches)
    with mock.patch.object(block_sizes, "forward_microbatches", 2):
        return read, trained, [whole, engine.logprobs(microbatches)]


@pytest.mark.parametrize("parallel", [ParallelConfig(pp=2), ParallelConfig(dp_shard=2)], ids=["pp2", "dp2"])
def test_forward_only_work_sees_the_weights_of_its_time(
    ranks: RankPool, tmp_path: Path, parallel: ParallelConfig
) -> None:
    save_tiny_model(tmp_path)
    results = ranks(2).run(forward_only, tmp_path, parallel)
    for read, trained, (whole, in_blocks) in results:
        assert read == pytest.approx(trained, rel=1e-12)
        assert trained[2] < trained[0]
        assert len(whole) == len(in_blocks) == 9
        assert all(torch.equal(a, b) for a, b in zip(whole, in_blocks, strict=True))
    if parallel.pp == 2:
        assert all(torch.equal(a, b) for a, b in zip(results[0][2][0], results[1][2][0], strict=True))


def likeliest(folder: Path) -> list[int]:
    engine = make_engine(folder, ParallelConfig(pp=2))
    return engine.next_tokens(microbatches_of(engine)).tolist()


def test_next_tokens_are_the_likeliest(ranks: RankPool, tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    expected = [
        int(model(s.input_ids[None]).logits[0, -1].argmax()) for i in range(3) for s in make_sequences(2 + i, seed=i)
    ]
    assert ranks(2).run(likeliest, tmp_path) == [expected, expected]


def bad_loss_on_one_rank(folder: Path, parallel: ParallelConfig) -> tuple[list[bool], bool, str]:
    engine = make_engine(folder, parallel, max_skipped_steps=2)
    rank = engine.handle.layout.data_rank

    def loss(outputs: TokenOutputs, microbatch: Microbatch) -> LossOutput:
        factor = math.nan if rank == 1 else 1.0
        return LossOutput({"tokens": plain_sft_loss(outputs, microbatch).sums["tokens"] * factor})

    def weights() -> list[torch.Tensor]:
        return [(p.to_local() if isinstance(p, DTensor) else p).clone() for _, p in engine.handle.named_parameters()]

    def gradient(outputs: TokenOutputs, microbatch: Microbatch) -> LossOutput:
        """A finite loss whose gradient is not, on one rank."""
        total = plain_sft_loss(outputs, microbatch).sums["tokens"]
        return LossOutput({"tokens": total + (0 * outputs.logprobs.sum()).abs().sqrt() if rank == 1 else total})

    skipped = [engine.train_step(microbatches_of(engine), f).skipped for f in (loss, plain_sft_loss, gradient)]
    engine = make_engine(folder, parallel, max_skipped_steps=2)
    before = weights()
    engine.train_step(microbatches_of(engine), loss)
    unchanged = all(torch.equal(a, b) for a, b in zip(weights(), before, strict=True))
    try:
        engine.train_step(microbatches_of(engine), loss)
    except TrainingDivergedError as error:
        return skipped, unchanged, str(error)
    return skipped, unchanged, "went on"


@pytest.mark.parametrize("parallel", [ParallelConfig(dp_shard=2), ParallelConfig(pp=2, dp_shard=2)], ids=["dp2", "pp2"])
def test_a_loss_that_is_not_finite_skips_the_step_on_every_rank(
    ranks: RankPool, tmp_path: Path, parallel: ParallelConfig
) -> None:
    save_tiny_model(tmp_path)
    for skipped, unchanged, message in ranks(parallel.world_size).run(bad_loss_on_one_rank, tmp_path, parallel):
        assert skipped == [True, False, True]
        assert unchanged
        assert message.startswith("2 steps in a row were skipped, the last with loss nan")


def infinite_gradient_on_one_stage(folder: Path, kept: Path) -> tuple[list[bool], bool, str]:
    engine = make_engine(folder, ParallelConfig(pp=2), max_skipped_steps=2)
    engine.microbatch_dump_folder = kept
    before = [local_tensor(p.detach()).clone() for _, p in engine.handle.named_parameters()]
    if engine.handle.layout.pp_rank == 1:
        _, parameter = next(iter(engine.handle.named_parameters()))
        parameter.register_post_accumulate_grad_hook(lambda p: local_tensor(p.grad).view(-1)[:1].fill_(math.inf))
    skipped = [engine.train_step(microbatches_of(engine), plain_sft_loss).skipped]
    unchanged = all(
        torch.equal(local_tensor(p.detach()), old)
        for (_, p), old in zip(engine.handle.named_parameters(), before, strict=True)
    )
    try:
        engine.train_step(microbatches_of(engine), plain_sft_loss)
    except TrainingDivergedError as error:
        return skipped, unchanged, str(error)
    return skipped, unchanged, "went on"


def test_a_gradient_that_is_not_finite_on_one_stage_skips_the_step_on_every_rank_and_keeps_its_rows(
    ranks: RankPool, tmp_path: Path
) -> None:
    save_tiny_model(tmp_path)
    kept = tmp_path / "not_finite"
    for skipped, unchanged, message in ranks(2).run(infinite_gradient_on_one_stage, tmp_path, kept):
        assert skipped == [True]
        assert unchanged
        assert message.startswith(
            f"2 steps in a row were skipped, the last (its microbatches are in {kept}) with loss "
        )
        assert "gradient norm inf" in message
    microbatches = load_file(kept / "data_rank_0.safetensors")
    assert microbatches["microbatch_0.input_ids"].shape == microbatches["microbatch_0.loss_mask"].shape


def with_metrics(folder: Path, parallel: ParallelConfig) -> tuple[float, dict[str, float]]:
    engine = make_engine(folder, parallel)

    def loss(outputs: TokenOutputs, microbatch: Microbatch) -> LossOutput:
        ones = torch.ones((), dtype=torch.float64)
        metrics = {
            "length": (ones * microbatch.num_tokens * (not microbatch.is_empty), ones * microbatch.num_sequences)
        }
        total = plain_sft_loss(outputs, microbatch).sums["tokens"]
        longest = ones * (0 if microbatch.is_empty else max(microbatch.lengths))
        extremes = {"largest": {"longest": longest}, "smallest": {"shortest": -longest, "of nothing": ones * math.inf}}
        return LossOutput({"tokens": total, "sequences": 0 * total + microbatch.num_sequences}, metrics, **extremes)

    output = engine.train_step(microbatches_of(engine)[:1], loss)
    return output.loss, output.metrics


def test_sums_and_metrics_are_divided_by_global_counts(ranks: RankPool, tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    sequences = [make_sequences(2, seed=0), make_sequences(2, seed=10)]
    lengths = [len(s) for rank in sequences for s in rank]
    results = ranks(4).run(with_metrics, tmp_path, ParallelConfig(pp=2, dp_shard=2))
    reference = OneProcess(tmp_path, torch.float64, Training(), CPU).backward(sequences)
    for loss, metrics in results:
        assert loss == pytest.approx(reference + 1.0, rel=1e-12)
        assert metrics == {
            "length": pytest.approx(sum(lengths) / 4),
            "longest": max(lengths),
            "shortest": -max(lengths),
        }


def load_error(folder: Path) -> str:
    try:
        make_engine(folder, ParallelConfig(pp=2))
    except InputError as error:
        return str(error)
    return "loaded"


def test_weights_with_nan_are_named_on_every_rank(ranks: RankPool, tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.3.mlp.up_proj.weight"][1, 2] = math.nan
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    for message in ranks(2).run(load_error, tmp_path):
        assert message.endswith(
            "tensor model.layers.3.mlp.up_proj.weight holds NaN or infinite weights: use an intact checkpoint"
        )


def late_reference(folder: Path) -> str:
    engine = make_engine(folder, ParallelConfig())
    ReferenceWeights(engine.handle)
    engine.train_step(microbatches_of(engine), plain_sft_loss)
    with pytest.raises(RuntimeError) as raised:
        ReferenceWeights(engine.handle)
    return str(raised.value)


def test_reference_weights_cannot_be_taken_from_a_model_that_was_trained(ranks: RankPool, tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    assert ranks(1).run(late_reference, tmp_path)[0].startswith("ReferenceWeights are the first weights")
