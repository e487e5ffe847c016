"""Each shard is written once, and a rank reads what it holds, once, from the files that have it."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultSavePlanner

from automodel_rl.batch import pack_microbatch
from automodel_rl.checkpoint.folder import CheckpointError
from automodel_rl.checkpoint.load import load_checkpoint
from automodel_rl.checkpoint.state import engine_tensors
from automodel_rl.checkpoint.storage import SafetensorsReader, keys_of, plan_writes
from automodel_rl.config import ModelConfig, OptimizerConfig, ParallelConfig
from automodel_rl.engine import Engine
from automodel_rl.launch.process_group import join_process_group
from automodel_rl.losses import sft_loss
from automodel_rl.model.handle import ModelHandle
from automodel_rl.parallel.host_collectives import gather_objects
from automodel_rl.parallel.layout import build_layout
from automodel_rl.parallel.sharding import local_tensor
from tests.checkpoints import save_checkpoint
from tests.rank_pool import RankPool
from tests.tiny import make_sequences, save_tiny_model


def engine_of(model: Path, parallel: ParallelConfig) -> Engine:
    handle = ModelHandle.from_pretrained(ModelConfig(path=str(model), dtype="float32"), parallel)
    return Engine(handle, OptimizerConfig(lr=1e-2, decay="constant"))


def save(model: Path, folder: Path, parallel: ParallelConfig) -> None:
    engine = engine_of(model, parallel)
    engine.train_step([pack_microbatch(make_sequences(2, engine.handle.layout.data_rank))], sft_loss)
    save_checkpoint(engine, folder, {}, {})


class Noted:
    """A file of tensors, which notes how many numbers are read."""

    def __init__(self, stored: Any, noted: list[int]):
        self.stored, self.noted = stored, noted

    def get_tensor(self, key: str) -> Any:
        whole = self.stored.get_tensor(key)
        self.noted.append(whole.numel())
        return whole

    def get_slice(self, key: str) -> Any:
        stored, noted = self.stored.get_slice(key), self.noted

        class Slice:
            def __getitem__(self, box: Any) -> Any:
                part = stored[box]
                noted.append(part.numel())
                return part

        return Slice()


def reads(model: Path, folder: Path, parallel: ParallelConfig) -> tuple[list[str], int, int]:
    """The files that this rank opens, the numbers that it reads, and those that it holds."""
    opened: list[str] = []
    numbers: list[int] = []
    open_file = SafetensorsReader._open

    @contextmanager
    def noting(reader: SafetensorsReader, file: str) -> Iterator[Noted]:
        opened.append(file)
        with open_file(reader, file) as stored:
            yield Noted(stored, numbers)

    engine = engine_of(model, parallel)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SafetensorsReader, "_open", noting)
        load_checkpoint(engine, folder)
    held = sum(local_tensor(tensor).numel() for _, tensor in keys_of(engine_tensors(engine)))
    return opened, sum(numbers), held


@pytest.mark.parametrize(
    ("sizes", "most_files"),
    [
        ({"pp": 2, "dp_shard": 2}, 2),
        ({"dp_shard": 4}, 4),
        ({"pp": 2, "tp": 2}, 3),
        ({"dp_replicate": 2, "dp_shard": 2}, 4),
    ],
    ids=str,
)
def test_a_rank_reads_what_it_holds_from_the_files_that_have_it(
    ranks: RankPool, tmp_path: Path, sizes: dict, most_files: int
) -> None:
    save_tiny_model(tmp_path / "model", "qwen3", num_layers=4)
    ranks(4).run(save, tmp_path / "model", tmp_path / "step_1", ParallelConfig(pp=2, dp_shard=2))
    for opened, read, held in ranks(4).run(reads, tmp_path / "model", tmp_path / "step_1", ParallelConfig(**sizes)):
        assert len(opened) == len({*opened}) <= most_files
        assert read == held


def chunks_of(model: Path, parallel: ParallelConfig) -> tuple[list[str], set, set]:
    """The keys that this rank is to write, and on rank 0 the chunks of all tensors: as planned here and by DCP."""
    engine = engine_of(model, parallel)
    group = engine.handle.layout.world_control
    tensors = engine_tensors(engine)
    plan = plan_writes(tensors, group)
    planner = DefaultSavePlanner()
    planner.set_up_planner(tensors, is_coordinator=group.rank() == 0)
    _, metadata = planner.create_global_plan(gather_objects(planner.create_local_plan(), group))
    ours = {
        (key, *map(tuple, (chunk["offsets"], chunk["shape"])))
        for key, of_key in json.loads(plan.index or "{}").items()
        for chunk in of_key["chunks"]
    }
    theirs = {
        (key, tuple(chunk.offsets), tuple(chunk.sizes))
        for key, tensor in metadata.state_dict_metadata.items()
        for chunk in tensor.chunks  # type: ignore[union-attr]
        if 0 not in chunk.sizes
    }
    return plan.keys, ours, theirs


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("qwen3", {"dp_replicate": 2, "dp_shard": 2}),
        ("qwen3", {"tp": 2, "dp_shard": 2}),
        ("qwen3", {"pp": 2, "tp": 2}),
        ("deepseek_v3", {"dp_shard": 4, "ep": 2}),
    ],
    ids=str,
)
def test_shards_are_those_of_dcp_and_each_is_written_by_one_rank(
    ranks: RankPool, tmp_path: Path, family: str, sizes: dict
) -> None:
    save_tiny_model(tmp_path, family, num_layers=4)
    found = ranks(4).run(chunks_of, tmp_path, ParallelConfig(**sizes))
    ours, theirs = found[0][1:]
    assert ours == theirs
    written = [key for keys, *_ in found for key in keys]
    assert sorted(written) == sorted(key for key, *_ in ours)
    assert all(len({*keys}) == len(keys) for keys, *_ in found)
    assert min(len(keys) for keys, *_ in found) > 0


def plan_with_a_dtype_that_is_none_of_safetensors() -> str:
    layout = build_layout(ParallelConfig(dp_shard=3), join_process_group(3))
    dtype = torch.complex64 if dist.get_rank() == 1 else torch.float32
    with pytest.raises(CheckpointError) as caught:
        plan_writes({"language": {"model": {"weight": torch.zeros(2, dtype=dtype)}}}, layout.world_control)
    return str(caught.value)


def test_what_one_rank_cannot_plan_is_told_on_all(ranks: RankPool) -> None:
    said = ranks(3).run(plan_with_a_dtype_that_is_none_of_safetensors)
    assert len({*said}) == 1
    assert said[0].startswith("rank 1 cannot report what it holds: KeyError")
