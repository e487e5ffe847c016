"""A rank of benchmarks/weight_sync.py."""

import argparse
import json
import statistics
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from weight_sync import Case

from automodel_rl.config import ModelConfig, ParallelConfig, WeightSyncConfig
from automodel_rl.config.model import MemoryConfig
from automodel_rl.generators.generator_process import GeneratorProcess
from automodel_rl.generators.make_generator import start_transformers
from automodel_rl.generators.model_copy import ModelCopy
from automodel_rl.generators.transformers_generator import TransformersSettings
from automodel_rl.launch.process_group import join_process_group
from automodel_rl.launch.quiet import quiet_libraries
from automodel_rl.model.attention import choose_attention
from automodel_rl.model.build import build_empty_model
from automodel_rl.model.handle import ModelHandle
from automodel_rl.parallel.layout import Meshes, build_layout
from automodel_rl.parallel.sharding import allocate_storage, local_tensor
from automodel_rl.support.description import describe_model
from automodel_rl.support.rule import Combination
from automodel_rl.weight_sync.collective import CollectiveTransport
from automodel_rl.weight_sync.ipc import IpcTransport
from automodel_rl.weight_sync.sync import WeightSync
from automodel_rl.weight_sync.transport import Transport


def measure(name: str, case: Case, sizes: dict[str, Any], options: argparse.Namespace) -> None:
    """Measures all settings of a case, one after the other, with the same model and generator."""
    quiet_libraries()
    handle = random_model(sizes, case.layout)
    generator = start_generator(handle, case.first_generator + dist.get_rank())
    for transport, mib, num_buffers in case.settings:
        config = WeightSyncConfig(buffer_mib=0.1 if options.tiny else mib, num_buffers=num_buffers, timeout=60.0)
        sync = WeightSync(handle, make_transport(transport, generator, handle, config.timeout), config)
        seconds = []
        for _ in range(2 + options.syncs):
            dist.barrier()
            sync.send()
            slowest = torch.tensor(sync.seconds, dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX, group=handle.layout.world_control)
            seconds.append(slowest.item())
        check(handle, sync, generator, config, transport)
        sync.disconnect()
        if dist.get_rank() == 0:
            median = statistics.median(seconds[2:])
            result = {"seconds": round(median, 4), "gb_per_s": round(sync.num_bytes / median / 1e9, 1)}
            spread = {"fastest": round(min(seconds[2:]), 4), "slowest": round(max(seconds[2:]), 4)}
            setting = {"transport": transport, "buffer_mib": mib, "num_buffers": num_buffers}
            print(json.dumps({"case": name, **setting, "gb": round(sync.num_bytes / 1e9, 2), **result, **spread}))
    generator.close()


def check(
    handle: ModelHandle, sync: WeightSync, generator: GeneratorProcess, config: WeightSyncConfig, way: str
) -> None:
    """Makes one more sync, with other weights, and compares every tensor by its checksum."""
    with torch.no_grad():
        for _, parameter in handle.named_parameters():
            local_tensor(parameter).mul_(1.001)
    sync.disconnect()
    compared = config.model_copy(update={"checksum": True})
    again = WeightSync(handle, make_transport(way, generator, handle, config.timeout), compared)
    again.send()
    again.disconnect()


def make_transport(name: str, generator: GeneratorProcess, handle: ModelHandle, seconds: float) -> Transport:
    if name == "ipc":
        return IpcTransport(generator, handle.layout.device, seconds)
    return CollectiveTransport(generator, handle, seconds)


def random_model(sizes: dict[str, Any], parallel: ParallelConfig) -> ModelHandle:
    """A model without a checkpoint."""
    from transformers import AutoConfig

    device = join_process_group(parallel.world_size)
    config = AutoConfig.for_model(**sizes, bos_token_id=None, eos_token_id=None)
    model = ModelConfig(path="random", dtype="bfloat16")
    asked = Combination(describe_model(config), model, parallel, MemoryConfig())
    attention = choose_attention(asked, device, torch.bfloat16, compiled=False)
    empty = build_empty_model(config, "transformers", torch.float32, attention, untie=parallel.pp > 1)
    handle = ModelHandle(empty, Meshes(build_layout(parallel, device)), model, MemoryConfig())
    torch.manual_seed(dist.get_rank())
    for part in handle.parts:
        for parameter in part.parameters():
            allocate_storage(parameter, device)
        part.to(device)
        with torch.no_grad():
            for parameter in part.parameters():
                local_tensor(parameter).normal_(std=0.02)
    return handle


def start_generator(handle: ModelHandle, device: int) -> GeneratorProcess:
    is_cuda = handle.layout.device.type == "cuda"
    copy = ModelCopy(handle.config, handle.family, torch.bfloat16, torch.device("cpu"))
    tokenizer: Any = SimpleNamespace(eos_token_id=None)
    return start_transformers(copy, TransformersSettings(tokenizer, 1), str(device) if is_cuda else None)
