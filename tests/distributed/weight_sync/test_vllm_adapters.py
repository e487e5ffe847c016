"""Adapters alone for vLLM, on any layout: its folder holds what a saved folder of the same adapters holds."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from automodel_rl.config import ModelConfig, ParallelConfig, WeightSyncConfig
from automodel_rl.config.model import LoraConfig
from automodel_rl.generator_messages import Answer, Call, Committed, Message
from automodel_rl.hf.adapter_pieces import one_by_one
from automodel_rl.lora.peft import CONFIG, PEFT_PREFIX, WEIGHTS, AdapterFolder
from automodel_rl.model.handle import ModelHandle
from automodel_rl.parallel.sharding import local_tensor
from automodel_rl.weight_sync.sync import WeightSync
from automodel_rl.weight_sync.vllm_adapters import VllmAdapters
from tests.rank_pool import RankPool
from tests.tiny import save_tiny_model


class Reader:
    """Stands for vLLM: reads the folder while it is there."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.config: dict[str, Any] = {}
        self.folders: list[Path] = []
        self.answers: list[Message] = []

    def send(self, message: Message) -> None:
        assert isinstance(message, Call)
        assert message.verb == "load_adapter"
        version, folder = message.arguments
        self.folders.append(Path(folder))
        self.tensors = load_file(Path(folder, WEIGHTS))
        self.config = json.loads(Path(folder, CONFIG).read_text())
        self.answers.append(Answer("load_adapter", Committed(version)))

    def ready(self) -> bool:
        return bool(self.answers)

    def receive(self) -> Message:
        return self.answers.pop()


def sync_and_save(folder: Path, family: str, sizes: dict, saved: Path) -> None:
    lora = LoraConfig(rank=2, alpha=8.0, targets=("q_proj", "down_proj", *(["experts"] if "moe" in family else [])))
    handle = ModelHandle.from_pretrained(
        ModelConfig(path=str(folder), dtype="float32", lora=lora), ParallelConfig(**sizes)
    )
    reader = Reader()
    assert handle.adapter_origin is not None
    transport = VllmAdapters(reader, handle.adapter_origin, handle.layout.device, 5.0)
    sync = WeightSync(handle, transport, WeightSyncConfig(adapters="alone", buffer_mib=0.001))
    for version in (1, 2):
        for name, parameter in handle.named_parameters():
            if parameter.requires_grad:
                local_tensor(parameter.detach()).add_(version + len(name))
        sync.send()
        handle.save_pretrained(saved)
        written = AdapterFolder(saved)
        expected = one_by_one(written.tensors, handle.family)
        assert {*reader.tensors} == {f"{PEFT_PREFIX}{name}" for name in expected}
        assert all(torch.equal(reader.tensors[f"{PEFT_PREFIX}{name}"], tensor) for name, tensor in expected.items())
        assert (reader.config["r"], reader.config["lora_alpha"]) == (2, 8.0)
    assert len({*reader.folders}) == 2
    assert not any(path.exists() for path in reader.folders)


@pytest.mark.parametrize(
    ("family", "sizes"),
    [("qwen3", {"pp": 2}), ("qwen3_moe", {"dp_shard": 2, "ep": 2})],
)
def test_vllm_reads_the_adapters_that_a_saved_folder_has(
    ranks: RankPool, tmp_path: Path, family: str, sizes: dict
) -> None:
    save_tiny_model(tmp_path / "model", family)
    ranks(2).run(sync_and_save, tmp_path / "model", family, sizes, tmp_path / "saved")
