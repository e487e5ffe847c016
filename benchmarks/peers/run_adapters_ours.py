"""Adapters by this package on rows of one length: `run_adapters_ours.py FOLDER TOKENS ROWS STEPS BASE [offload]`."""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from rows import full_rows, report_adapters, timed

from automodel_rl import Engine, ModelHandle, OptimizerConfig, TokenSequence, pack, sft_loss
from automodel_rl.config import LoraConfig, ModelConfig
from automodel_rl.config.model import MemoryConfig
from automodel_rl.launch.quiet import quiet_libraries

folder, length, num_rows, steps, base = Path(sys.argv[1]), *map(int, sys.argv[2:5]), sys.argv[5]
how: Any = "offload" if "offload" in sys.argv else "full"
quiet_libraries()
lora = LoraConfig(rank=16, alpha=16, targets="all-linear", base="nf4" if base == "qlora" else "plain")
device: dict[str, Any] = {} if torch.cuda.is_available() else {"dtype": "float32"}
model = ModelConfig(path=str(folder), lora=lora, **device)
handle = ModelHandle.from_pretrained(model, memory=MemoryConfig(activation_checkpointing=how))
engine = Engine(handle, OptimizerConfig(lr=1e-5, decay="constant", weight_decay=0.0))
rows = full_rows(handle.config.vocab_size, num_rows, steps, length)
if torch.cuda.is_available():
    torch.cuda.reset_peak_memory_stats()
seconds, outputs = [], []
for step in range(steps):
    sequences = [TokenSequence(ids, torch.ones(len(ids), dtype=torch.bool)) for ids in rows.documents(step)]
    microbatches = pack(sequences, length * num_rows)
    seconds.append(timed(lambda: outputs.append(engine.train_step(microbatches, sft_loss))))  # noqa: B023
report_adapters(f"automodel_rl, {how}", base, rows, seconds, outputs[0].loss)
sys.stdout.flush()
os._exit(0)
