"""How fast the weights of a 7B shape reach rollout engines, against the link's own speed.

    python benchmarks/weight_sync.py same     trainer and engine on one GPU: ipc
    python benchmarks/weight_sync.py two      trainer on one GPU, engine on another: collective
    python benchmarks/weight_sync.py shards   FSDP2 over two GPUs, an engine on each: ipc
    python benchmarks/weight_sync.py stages   PP2 on two GPUs, engines on two others: collective
    ... --tiny                                check the script on a CPU

Random bf16 weights of Qwen2.5-7B's shape, fp32 masters on the trainer, so that casting is included. The engine is a
transformers model in a process of its own. Times are from the call of WeightSync.update to its return on the slowest
rank: telling the engine, casting, gathering, packing, sending, unpacking, and the engine's report. The ceiling is plain
torch.distributed.broadcast over NCCL of as many bytes, between the same GPUs, just before. Prints a JSON line for each
setting, with medians over the updates after two to warm up.
"""

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from automodel_rl.config import ModelConfig, ParallelConfig, WeightSyncConfig
from automodel_rl.config.memory import MemoryConfig
from automodel_rl.launch.local import run_local_ranks
from automodel_rl.launch.process_group import join_process_group
from automodel_rl.launch.quiet import quiet_libraries
from automodel_rl.model.attention import choose_attention
from automodel_rl.model.build import build_empty_model
from automodel_rl.model.flops import StepFlops
from automodel_rl.model.handle import ModelHandle
from automodel_rl.model.nemo import split_model
from automodel_rl.parallel.layout import build_layout
from automodel_rl.parallel.sharding import give_storage, local_tensor
from automodel_rl.rollout.engine_process import EngineProcess
from automodel_rl.rollout.make_engine import TRANSFORMERS_WORKER
from automodel_rl.weight_sync.collective import Collective
from automodel_rl.weight_sync.ipc import Ipc
from automodel_rl.weight_sync.sync import WeightSync
from automodel_rl.weight_sync.transport import Transport

SEVEN_B: dict[str, Any] = {
    "model_type": "qwen2",
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
TINY: dict[str, Any] = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}


@dataclass(frozen=True)
class Case:
    """A placement.

    Attributes:
        layout: of the trainer.
        first_engine: device of the first rank's engine; the others follow.
        receivers: devices that the ceiling's broadcast goes to from device 0.
        settings: (transport, buffer_mib, num_buffers).
    """

    layout: ParallelConfig
    first_engine: int
    receivers: tuple[int, ...]
    settings: tuple[tuple[str, float, int], ...]


BUFFERS = tuple(("collective", mib, count) for mib, count in ((256.0, 1), (256.0, 2), (256.0, 4), (1024.0, 2)))
CASES = {
    "same": Case(ParallelConfig(), 0, (), (("ipc", 256.0, 1), ("ipc", 256.0, 2), ("ipc", 1024.0, 2))),
    "two": Case(ParallelConfig(), 1, (1,), BUFFERS),
    "shards": Case(ParallelConfig(dp_shard=2), 0, (), (("ipc", 256.0, 1), ("ipc", 256.0, 2), ("ipc", 256.0, 4))),
    "stages": Case(ParallelConfig(pp=2), 2, (2, 3), BUFFERS),
}


def main() -> int:
    options = parse_arguments()
    if "RANK" in os.environ:
        quiet_libraries()
        (measure_ceiling if options.ceiling else measure)(options)
        return 0
    case = CASES[options.case]
    here = [sys.executable, __file__, *sys.argv[1:]]
    if case.receivers and not options.tiny:
        run_local_ranks([*here, "--ceiling"], 1 + max(case.receivers))
    return run_local_ranks(here, case.layout.world_size)


def measure_ceiling(options: argparse.Namespace) -> None:
    case = CASES[options.case]
    device = join_process_group(1 + max(case.receivers))
    members = (0, *case.receivers)
    group = dist.new_group(list(members))
    if dist.get_rank() not in members:
        return
    for mib in (256, 1024):
        buffer = torch.empty(mib * 2**20, dtype=torch.uint8, device=device)
        count = 14336 // mib
        seconds = []
        for _ in range(6):
            torch.cuda.synchronize()
            dist.barrier(group)
            started = time.perf_counter()
            for _ in range(count):
                dist.broadcast(buffer, src=0, group=group)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
        if dist.get_rank() == 0:
            rate = count * buffer.numel() / statistics.median(seconds[2:]) / 1e9
            print(json.dumps({"case": options.case, "ceiling": "broadcast", "mib": mib, "gb_per_s": round(rate, 1)}))


def measure(options: argparse.Namespace) -> None:
    case = CASES[options.case]
    handle = random_model(SEVEN_B | (TINY if options.tiny else {}), case.layout)
    engine = start_engine(handle, case.first_engine + dist.get_rank())
    for transport, mib, num_buffers in case.settings:
        config = WeightSyncConfig(buffer_mib=0.1 if options.tiny else mib, num_buffers=num_buffers, timeout=60.0)
        sync = WeightSync(handle, make_transport(transport, engine, handle, config.timeout), config)
        seconds = []
        for _ in range(2 + options.updates):
            dist.barrier()
            sync.update()
            slowest = torch.tensor(sync.seconds, dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX, group=handle.layout.world_control)
            seconds.append(slowest.item())
        check(handle, sync, engine, config, transport)
        sync.disconnect()
        if dist.get_rank() == 0:
            median = statistics.median(seconds[2:])
            result = {"seconds": round(median, 4), "gb_per_s": round(sync.num_bytes / median / 1e9, 1)}
            spread = {"fastest": round(min(seconds[2:]), 4), "slowest": round(max(seconds[2:]), 4)}
            setting = {"transport": transport, "buffer_mib": mib, "num_buffers": num_buffers}
            print(
                json.dumps({"case": options.case, **setting, "gb": round(sync.num_bytes / 1e9, 2), **result, **spread})
            )
    engine.close()


def check(handle: ModelHandle, sync: WeightSync, engine: EngineProcess, config: WeightSyncConfig, way: str) -> None:
    """One more update with other weights, of which every tensor is compared by its checksum."""
    with torch.no_grad():
        for _, parameter in handle.named_parameters():
            local_tensor(parameter).mul_(1.001)
    sync.disconnect()
    compared = config.model_copy(update={"checksum": True})
    again = WeightSync(handle, make_transport(way, engine, handle, config.timeout), compared)
    again.update()
    again.disconnect()


def make_transport(name: str, engine: EngineProcess, handle: ModelHandle, seconds: float) -> Transport:
    if name == "ipc":
        return Ipc(engine, handle.layout.device, seconds)
    return Collective(engine, handle.layout, seconds)


def random_model(sizes: dict[str, Any], parallel: ParallelConfig) -> ModelHandle:
    """A model without a checkpoint."""
    from transformers import AutoConfig

    device = join_process_group(parallel.world_size)
    layout = build_layout(parallel, device)
    config = AutoConfig.for_model(**sizes, bos_token_id=None, eos_token_id=None)
    attention = choose_attention("auto", False, device, torch.bfloat16)
    empty = build_empty_model(config, "transformers", torch.float32, attention, untie=parallel.pp > 1)
    flops = StepFlops(empty)
    model = ModelConfig(path="random", dtype="bfloat16")
    handle = ModelHandle(split_model(empty, layout), config, model, MemoryConfig(), layout, flops)
    torch.manual_seed(dist.get_rank())
    for part in handle.parts:
        for parameter in part.parameters():
            give_storage(parameter, device)
        part.to(device)
        with torch.no_grad():
            for parameter in part.parameters():
                local_tensor(parameter).normal_(std=0.02)
    return handle


def start_engine(handle: ModelHandle, device: int) -> EngineProcess:
    is_cuda = handle.layout.device.type == "cuda"
    arguments = {
        "config": handle.config,
        "dtype": torch.bfloat16,
        "device": torch.device("cuda", 0) if is_cuda else torch.device("cpu"),
        "tokenizer": SimpleNamespace(eos_token_id=None),
        "max_new_tokens": 1,
        "stop": (),
        "batch_size": 1,
    }
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": str(device)}
    return EngineProcess([sys.executable, *TRANSFORMERS_WORKER], environment, ("start", arguments))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=list(CASES))
    parser.add_argument("--updates", type=int, default=9)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--ceiling", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
