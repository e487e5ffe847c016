"""How fast the weights of a 7B shape reach generators, against the link's own speed.

    python benchmarks/weight_sync.py same     trainer and generator on one GPU: ipc
    python benchmarks/weight_sync.py two      trainer on one GPU, generator on another: collective
    python benchmarks/weight_sync.py shards   FSDP2 over two GPUs, a generator on each: ipc
    python benchmarks/weight_sync.py stages   PP2 on two GPUs, generators on two others: collective
    ... --tiny                                check the script on a CPU

Random bf16 weights of Qwen2.5-7B's shape, fp32 masters on the trainer, so that casting is included. The generator is a
transformers model in a process of its own. Times are from the call of WeightSync.send to its return on the slowest
rank: the first message to the generator, casting, gathering, packing, sending, unpacking, and its report. The ceiling
is plain torch.distributed.broadcast over NCCL of as many bytes, between the same GPUs, just before. Prints a JSON line
for each setting, with medians over the syncs after two to warm up.
"""

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any

from automodel_rl.config import ParallelConfig
from automodel_rl.launch.local import run_local_ranks

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
        layout: the trainer's layout.
        first_generator: device of the first rank's generator; the others follow.
        receivers: devices that the ceiling's broadcast goes to from device 0.
        settings: tuples (transport, buffer_mib, num_buffers).
    """

    layout: ParallelConfig
    first_generator: int
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
        if options.ceiling:
            measure_ceiling(options.case)
        else:
            from weight_sync_rank import measure

            measure(options.case, CASES[options.case], SEVEN_B | (TINY if options.tiny else {}), options)
        return 0
    case = CASES[options.case]
    here = [sys.executable, __file__, *sys.argv[1:]]
    if case.receivers and not options.tiny:
        run_local_ranks([*here, "--ceiling"], 1 + max(case.receivers))
    return run_local_ranks(here, case.layout.world_size)


def measure_ceiling(name: str) -> None:
    """Measures the ceiling. Imports torch only, so it starts soon."""
    import torch
    import torch.distributed as dist

    case = CASES[name]
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
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
            print(json.dumps({"case": name, "ceiling": "broadcast", "mib": mib, "gb_per_s": round(rate, 1)}))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=list(CASES))
    parser.add_argument("--syncs", type=int, default=9)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--ceiling", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
