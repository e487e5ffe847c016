"""A vLLM that is split over devices of several ranks: every worker gets every byte, and failures reach all ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from automodel_rl.config.generator_spec import GeneratorSpec
from automodel_rl.config.generators import VllmGeneratorConfig
from automodel_rl.errors import WeightSyncError
from automodel_rl.generator_messages import Answer, Call, Committed, Failure, Message
from automodel_rl.generators.generator_ranks import GeneratorRanks, NoGenerator
from automodel_rl.weight_sync.sync import WeightSync
from automodel_rl.weight_sync.vllm import VllmSameDevice
from tests.distributed.weight_sync.generators import own_tensors, sync_config, train, trained_model
from tests.rank_pool import RankPool
from tests.tiny import save_tiny_model


class Workers:
    """Stands for vLLM: its workers read the buffers of their ranks at the moment of the message."""

    num_workers = 2

    def __init__(self) -> None:
        self.answers: list[Message] = []
        self.buffers: list[list[Tensor]] = []
        self.loaded: dict[str, Tensor] = {}
        self.version, self.fails_at = 0, ""

    def send(self, message: Message) -> None:
        if isinstance(message, Call) and message.verb == self.fails_at:
            raise WeightSyncError(f"gone at {self.fails_at}")
        match message:
            case Call("init_transfer", (info,)):
                self.buffers = [
                    [
                        torch.from_file(file, shared=True, size=Path(file).stat().st_size, dtype=torch.uint8)
                        for (file,) in own
                    ]
                    for own in info["buffers"]
                ]
                self.answers.append(Answer("init_transfer"))
            case Call("begin", (version, _)):
                self.version, self.loaded = version, {}
            case Call("load_weights", (info,)):
                self.answers.append(self._load(info))
            case Call("commit"):
                self.answers.append(Answer("commit", Committed(self.version)))

    def _load(self, info: dict[str, Any]) -> Message:
        first, second = (buffers[info["buffer"]] for buffers in self.buffers)
        start = 0
        for name, shape, dtype in zip(info["names"], info["shapes"], info["dtype_names"], strict=True):
            like = torch.empty(shape, dtype=getattr(torch, dtype))
            part = slice(start, start + like.nbytes)
            if not torch.equal(first[part], second[part]):
                return Failure(f"{name} differs between the workers")
            self.loaded[name] = first[part].clone().view(like.dtype).view(shape)
            start += like.nbytes
        return Answer("load_weights")

    def ready(self) -> bool:
        return bool(self.answers)

    def receive(self) -> Message:
        return self.answers.pop(0)


def sync_over_two_ranks(folder: Path, sizes: dict[str, Any]) -> list[str]:
    """What went wrong in weight syncs, in which the channel fails at each message in turn."""
    handle, engine = trained_model(folder, sizes)
    spec = GeneratorSpec(VllmGeneratorConfig(tensor_parallel=2), 8, sync_config())
    ranks = GeneratorRanks.join(spec)
    workers = Workers()
    channel: Any = workers if ranks.is_leader else NoGenerator()
    config = sync_config(num_buffers=2, timeout=5.0)
    sync = WeightSync(handle, VllmSameDevice(channel, handle.layout.device, 5.0, ranks.group), config)
    problems = []
    for seed, fails_at in enumerate(("", "init_transfer", "begin", "load_weights", "commit", "")):
        workers.fails_at = fails_at
        if fails_at == "init_transfer":
            sync.disconnect()
        try:
            sync.send()
            problems.append("")
        except WeightSyncError as error:
            problems.append(str(error))
        workers.answers.clear()
        expected = own_tensors(handle, torch.float32)
        if not fails_at and ranks.is_leader:
            assert workers.version == seed + 1
            assert len(workers.loaded) == sum(len(plan.tensors) for plan in sync.producer.plans)
            for name, tensor in expected.items():
                torch.testing.assert_close(workers.loaded[name], tensor, rtol=0, atol=0)
        train(handle, engine, seed)
    return problems


@pytest.mark.parametrize("sizes", [{"dp_shard": 2}, {"pp": 2}], ids=str)
def test_every_worker_gets_every_byte_and_failures_reach_all_ranks(
    ranks: RankPool, tmp_path: Path, sizes: dict[str, Any]
) -> None:
    save_tiny_model(tmp_path)
    expected = ["", *(f"gone at {name}" for name in ("init_transfer", "begin", "load_weights", "commit")), ""]
    assert ranks(2).run(sync_over_two_ranks, tmp_path, sizes) == [expected, expected]
