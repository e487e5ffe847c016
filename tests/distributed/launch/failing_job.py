"""A job of two stages in which one rank fails in the middle of a step; started as a process of its own.

python -m tests.distributed.launch.failing_job MODEL_FOLDER WAY
    WAY: loss | memory | abort | killed | hang | sleep
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch

from automodel_rl import Engine, ModelHandle, OptimizerConfig, ParallelConfig, sft_loss
from automodel_rl.batch import Microbatch, pack_microbatch
from automodel_rl.config import ModelConfig
from automodel_rl.launch.failure import guard
from automodel_rl.launch.flight import flight, flight_file
from automodel_rl.launch.local import is_rank, run_local_ranks
from automodel_rl.launch.quiet import quiet_libraries
from automodel_rl.launch.watchdog import set_hang_limit
from automodel_rl.losses import LossOutput, TokenOutputs
from tests.tiny import make_sequences

HANG_SECONDS = 8.0

SLEEP_SECONDS = 1200.0
"""Of a rank that hangs. A job that ends in a tenth of this did not wait for it."""


def work() -> None:
    quiet_libraries()
    folder, way = sys.argv[1:]
    if way == "hang":
        set_hang_limit(HANG_SECONDS / 60)
    flight.record_in(flight_file(Path(folder, "flight"), int(os.environ["RANK"])))
    handle = ModelHandle.from_pretrained(ModelConfig(path=folder, dtype="float32"), ParallelConfig(pp=2))
    engine = Engine(handle, OptimizerConfig(decay="constant"))
    microbatches = [pack_microbatch(make_sequences(2, seed=i)) for i in range(4)]
    engine.train_step(microbatches, sft_loss)
    calls = 0

    def failing_loss(outputs: TokenOutputs, batch: Microbatch) -> LossOutput:
        nonlocal calls
        calls += 1
        if calls == 3:
            Path(folder, "failed_at").write_text(str(time.time()))
        if way == "killed" and calls == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        if way == "hang" and calls == 3:
            time.sleep(SLEEP_SECONDS)
        if way == "memory" and calls == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        if way == "loss" and calls == 3:
            raise ValueError("planted in the loss")
        return sft_loss(outputs, batch)

    if way == "sleep":
        with Path(folder, "pids").open("a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(SLEEP_SECONDS)
    if way == "abort":  # the peer of a failed rank may crash without a word
        Path(folder, "failed_at").write_text(str(time.time()))
        if handle.layout.pp_rank == 0:
            raise ValueError("the real cause")
        time.sleep(0.8)
        os.abort()
    engine.train_step(microbatches, failing_loss)


if __name__ == "__main__":
    if is_rank():
        sys.exit(guard(work))
    command = [sys.executable, "-m", "tests.distributed.launch.failing_job", *sys.argv[1:]]
    sys.exit(run_local_ranks(command, 2, Path(sys.argv[1], "flight")))
