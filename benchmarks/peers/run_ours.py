"""This package on the peers' data: `run_ours.py FOLDER ROWS STEPS MICROBATCH [lora]`."""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from rows import ROW, make_rows, report, timed

from automodel_rl import Engine, ModelHandle, OptimizerConfig, TokenSequence, pack, sft_loss
from automodel_rl.config import LoraConfig, ModelConfig
from automodel_rl.launch.quiet import quiet_libraries

folder, num_rows, steps, capacity, *options = sys.argv[1:]
quiet_libraries()
lora = LoraConfig(rank=16) if "lora" in options else None
device: dict[str, Any] = {} if torch.cuda.is_available() else {"dtype": "float32"}
handle = ModelHandle.from_pretrained(ModelConfig(path=folder, lora=lora, **device))
engine = Engine(handle, OptimizerConfig(lr=1e-5, decay="constant", weight_decay=0.0))
length = ROW if torch.cuda.is_available() else 128
rows = make_rows(handle.config.vocab_size, int(num_rows), int(steps), length)
seconds, outputs = [], []
for step in range(int(steps)):
    sequences = [TokenSequence(ids, torch.ones(len(ids), dtype=torch.bool)) for ids in rows.documents(step)]
    microbatches = pack(sequences, int(capacity))
    seconds.append(timed(lambda: outputs.append(engine.train_step(microbatches, sft_loss))))  # noqa: B023
report("automodel_rl", Path(folder), rows, seconds, (outputs[0].loss, outputs[0].grad_norm), int(capacity))
sys.stdout.flush()
os._exit(0)
