"""Recomputation and offloading change memory, and no number."""

from pathlib import Path
from unittest import mock

import pytest
import torch

from automodel_rl.batch import pack_microbatch
from automodel_rl.compat.compilation import compiled_so_far
from automodel_rl.compat.versions import TORCH
from automodel_rl.config import ModelConfig, OptimizerConfig, ParallelConfig
from automodel_rl.config.model import LoraConfig, MemoryConfig
from automodel_rl.engine import Engine
from automodel_rl.losses import sft_loss
from automodel_rl.model.handle import ModelHandle
from automodel_rl.model.offload import Offload, _as_bytes
from automodel_rl.model.part_forward import layers_of
from automodel_rl.parallel.sharding import local_tensor
from tests.rank_pool import RankPool
from tests.tiny import make_sequences, save_tiny_model

Numbers = tuple[list[float], list[torch.Tensor]]
MODES = {
    "full": MemoryConfig(activation_checkpointing="full"),
    "selective": MemoryConfig(activation_checkpointing="selective"),
    "offload": MemoryConfig(activation_checkpointing="offload"),
    "moments": MemoryConfig(offload_optimizer=True),
}


def train(
    folder: Path, parallel: ParallelConfig, memory: MemoryConfig, lora: LoraConfig | None = None
) -> tuple[Numbers, int, bool]:
    """What three steps compute, how often a linear layer runs in the last, and whether moments wait on the host."""
    model = ModelConfig(path=str(folder), dtype="float64", lora=lora)
    handle = ModelHandle.from_pretrained(model, parallel, memory)
    engine = Engine(handle, OptimizerConfig(lr=1e-2, max_grad_norm=0.5, decay="constant"))
    microbatches = [pack_microbatch(make_sequences(2, 10 * handle.layout.data_rank + m)) for m in range(4)]
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    layers_of(handle.parts[0])[0].self_attn.o_proj.register_forward_hook(count)
    outputs = []
    for _ in range(3):
        calls = 0
        outputs.append(engine.train_step(microbatches, sft_loss))
    weights = [local_tensor(p.detach()).clone() for _, p in handle.named_parameters()]
    numbers = [number for output in outputs for number in (output.loss, output.grad_norm)]
    return (numbers, weights), calls, engine._moments.is_on_host


def compare_modes(folder: Path, parallel: ParallelConfig, modes: list[str]) -> None:
    (numbers, weights), plain_calls, _ = train(folder, parallel, MemoryConfig())
    for mode in modes:
        (other_numbers, other_weights), calls, is_offloaded = train(folder, parallel, MODES[mode])
        assert other_numbers == numbers, mode
        assert all(torch.equal(a, b) for a, b in zip(weights, other_weights, strict=True)), mode
        assert calls == plain_calls if mode == "moments" else calls >= 2 * plain_calls, mode
        assert is_offloaded == (mode == "moments"), mode


@pytest.mark.parametrize(
    ("family", "sizes", "modes"),
    [
        ("qwen3", {"pp": 2}, list(MODES)),
        ("qwen3_moe", {"cp": 2, "ep": 2}, list(MODES)),
        ("qwen3", {"cp": 2, "cp_exchange": "all_to_all"}, ["selective", "offload"]),
        pytest.param(
            "qwen3",
            {"pp": 2, "schedule": "ZBVZeroBubble", "virtual_stages": 2},
            ["full", "offload", "moments"],
            marks=pytest.mark.skipif(TORCH < (2, 13), reason="this torch cannot split the backward"),
        ),
    ],
)
def test_recomputation_and_offloading_take_place_and_change_no_number(
    ranks: RankPool, tmp_path: Path, family: str, sizes: dict, modes: list[str]
) -> None:
    save_tiny_model(tmp_path, family)
    ranks(2).run(compare_modes, tmp_path, ParallelConfig(**sizes), modes)


def compare_tiles(folder: Path, parallel: ParallelConfig, adapters: bool) -> None:
    """Three steps with MLPs in tiles of 5 tokens, of which microbatches have several and a rest."""
    lora = LoraConfig(rank=2) if adapters else None
    (numbers, weights), *_ = train(folder, parallel, MemoryConfig(), lora)
    for mode in ("none", "full", "offload"):
        memory = MemoryConfig(activation_checkpointing=mode, mlp_tile=5)
        (other_numbers, other_weights), *_ = train(folder, parallel, memory, lora)
        torch.testing.assert_close(other_numbers, numbers, rtol=1e-11, atol=0)
        torch.testing.assert_close(other_weights, weights, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(
    ("sizes", "adapters"),
    [
        ({}, False),
        ({"pp": 2}, True),
        ({"dp_shard": 2, "fsdp": "reshard"}, False),
        ({"cp": 2}, True),
        ({"tp": 2}, True),
    ],
    ids=str,
)
def test_mlps_in_tiles_train_the_same(ranks: RankPool, tmp_path: Path, sizes: dict, adapters: bool) -> None:
    save_tiny_model(tmp_path, "qwen3")
    parallel = ParallelConfig(**sizes)
    ranks(parallel.world_size).run(compare_tiles, tmp_path, parallel, adapters)


def compare_compiled_tiles(folder: Path, parallel: ParallelConfig) -> None:
    """Likewise, with compiled layers, whose constants are in fp32."""
    (numbers, weights), *_ = train(folder, parallel, MemoryConfig())
    before = compiled_so_far().graphs
    memory = MemoryConfig(activation_checkpointing="full", mlp_tile=5, compile=True)
    (other_numbers, other_weights), *_ = train(folder, parallel, memory)
    assert compiled_so_far().graphs > before
    torch.testing.assert_close(other_numbers, numbers, rtol=1e-5, atol=0)
    torch.testing.assert_close(other_weights, weights, rtol=1e-3, atol=1e-4)


def test_mlps_in_tiles_train_the_same_in_compiled_layers(ranks: RankPool, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "qwen3")
    parallel = ParallelConfig(dp_shard=2, fsdp="reshard")
    ranks(2).run(compare_compiled_tiles, tmp_path, parallel)


class PlantedError(Exception):
    """What no code of the package catches."""


def fail_inside(folder: Path) -> None:
    """Failures within the block and on the way into it, between steps, against steps without any."""
    model = ModelConfig(path=str(folder), dtype="float64")
    steady, engine = (
        Engine(ModelHandle.from_pretrained(model, memory=MODES["moments"]), OptimizerConfig(lr=1e-2, decay="constant"))
        for _ in range(2)
    )
    microbatches = [pack_microbatch(make_sequences(2, seed=0))]
    for failure in (None, fail_in_the_block, fail_on_the_way_in):
        if failure is not None:
            failure(engine)
            assert not bytes_on_device(engine)
            assert engine._moments.is_on_host
        assert engine.train_step(microbatches, sft_loss) == steady.train_step(microbatches, sft_loss)
    pairs = zip(engine.handle.parts[0].parameters(), steady.handle.parts[0].parameters(), strict=True)
    assert all(torch.equal(local_tensor(a), local_tensor(b)) for a, b in pairs)


def bytes_on_device(engine: Engine) -> int:
    return sum(local_tensor(moment).untyped_storage().nbytes() for moment in engine.optimizer.moments())


def fail_in_the_block(engine: Engine) -> None:
    def block() -> None:
        with engine.moments_on_device():
            assert bytes_on_device(engine)
            raise PlantedError

    with pytest.raises(PlantedError):
        block()


def fail_on_the_way_in(engine: Engine) -> None:
    """The device has no memory for the third of the moments."""
    num_calls = 0

    def as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 3:
            raise PlantedError
        return _as_bytes(storage)

    entered = engine.moments_on_device()
    with mock.patch("automodel_rl.model.offload._as_bytes", as_bytes), pytest.raises(PlantedError):
        entered.__enter__()


def test_moments_are_on_the_host_after_a_failure_and_training_goes_on(ranks: RankPool, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, num_layers=1)
    ranks(1).run(fail_inside, tmp_path)


def test_offloaded_tensors_come_back_bit_for_bit() -> None:
    tensors = [torch.randn(100), torch.randn(7, 3, dtype=torch.float64), torch.empty(0)]
    alias = tensors[0][3:50]
    offload = Offload(lambda: [*tensors, alias])
    for _ in range(2):  # the memory on the host is used again
        expected = [tensor.clone() for tensor in tensors]
        assert offload.to_host() >= 100 * 4 + 21 * 8
        assert offload.to_host() == 0
        assert all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors)
        offload.to_device()
        offload.to_device()
        for tensor, before in zip(tensors, expected, strict=True):
            assert torch.equal(tensor, before)
        assert torch.equal(alias, expected[0][3:50])
        tensors[0] += 1


def test_tensors_may_have_other_values_before_their_own_come_back() -> None:
    whole, shared = torch.randn(100), torch.randn(10)
    part, frozen, expected = shared[:4], shared[4:], (whole.clone(), shared.clone())
    offload = Offload(lambda: [whole, part, frozen])
    offload.to_host()
    entered = offload.to_device_after([whole, part])
    entered.__enter__()
    assert not offload.is_on_host
    assert torch.equal(frozen, expected[1][4:])  # in a storage with one that waits
    whole.zero_()
    part.zero_()
    assert not entered.__exit__(PlantedError, PlantedError(), None)  # a failure in between loses nothing
    assert torch.equal(whole, expected[0])
    assert torch.equal(shared, expected[1])
