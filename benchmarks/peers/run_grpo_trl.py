"""TRL 1.16's GRPOTrainer with vLLM in its own process: `run_grpo_trl.py SETTINGS.json`, as peers/grpo.py writes them.

fp32 master weights and bf16 autocast, Liger's layer kernels, no recomputation. Prints a JSON line a step and exports
the model.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from score import last_number
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

given = json.loads(Path(sys.argv[1]).read_text())
completions, of_device = given["prompts"] * given["group"], given["of_device"]
os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(given["port"])}
os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}


def is_right(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """1 if the completion's last number is the answer."""
    texts = [completion[0]["content"] for completion in completions]
    return [float(last_number(text) == float(right)) for right, text in zip(answer, texts, strict=True)]


class Clock(TrainerCallback):
    """Prints what a step took, from the end of the one before, and what TRL says of it."""

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.before = time.time()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        if "reward" not in logs:
            return
        now = time.time()
        record = {
            "step": state.global_step,
            "step_s": now - self.before,
            "reward": logs["reward"],
            "length": logs["completions/mean_length"],
            "mismatch": logs.get("sampling/sampling_logp_difference/mean"),
        }
        print(json.dumps(record), flush=True)
        self.before = now


with Path(given["train"]).open() as lines:
    data = Dataset.from_list([json.loads(line) for line in lines])
arguments = GRPOConfig(
    output_dir=given["output"],
    max_steps=given["steps"],
    seed=given["seed"],
    learning_rate=given["lr"],
    lr_scheduler_type="constant",
    adam_beta2=0.95,
    weight_decay=0.0,
    max_grad_norm=1.0,
    bf16=True,
    optim="adamw_torch_fused",
    gradient_checkpointing=False,
    use_liger_kernel=True,
    per_device_train_batch_size=of_device,
    gradient_accumulation_steps=completions // of_device,
    num_generations=given["group"],
    max_completion_length=given["tokens"],
    temperature=1.0,
    use_vllm=True,
    vllm_mode="colocate",
    vllm_gpu_memory_utilization=0.4,
    vllm_max_model_length=given["longest_prompt"] + given["tokens"],
    logging_steps=1,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
)
trainer = GRPOTrainer(
    model=AutoModelForCausalLM.from_pretrained(given["model"], dtype=torch.float32),
    args=arguments,
    reward_funcs=[is_right],
    train_dataset=data,
    processing_class=AutoTokenizer.from_pretrained(given["model"], padding_side="left"),
    callbacks=[Clock()],
)
trainer.train()
trainer.save_model(given["output"])
