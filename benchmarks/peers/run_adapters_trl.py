"""Adapters by TRL's SFTTrainer, peft and bitsandbytes, alone or with Unsloth, on rows of one length:
`run_adapters_trl.py FOLDER TOKENS ROWS STEPS BASE [unsloth]`.

TRL has Liger's layer kernels and its fused head, FlashAttention-3 where it is installed, and recomputation of layers.
Unsloth has its own fused kernels, and recomputation with the layers' inputs on the host ("unsloth").
"""

import os
import sys
from pathlib import Path
from typing import Any

if "unsloth" in sys.argv:
    import unsloth  # patches the others, so it comes first

import torch
import transformers
import trl
from clock import Clock
from datasets import Dataset
from peft import LoraConfig
from rows import WARMUP_OF_ADAPTERS, full_rows, report_adapters
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from transformers.utils import is_flash_attn_3_available

folder, length, num_rows, steps, base = Path(sys.argv[1]), *map(int, sys.argv[2:5]), sys.argv[5]
with_unsloth, on_cuda = "unsloth" in sys.argv, torch.cuda.is_available()
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
options: dict[str, Any] = {}
if with_unsloth:
    model, tokenizer = unsloth.FastLanguageModel.from_pretrained(
        str(folder),
        max_seq_length=length,
        dtype=torch.bfloat16,
        load_in_4bit=base == "qlora",
        use_exact_model_name=True,
        local_files_only=True,
    )
    model = unsloth.FastLanguageModel.get_peft_model(
        model,
        r=16,
        lora_alpha=16,
        lora_dropout=0,
        bias="none",
        target_modules=TARGETS,
        use_gradient_checkpointing="unsloth",
        random_state=0,
    )
else:
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.bfloat16,
        attn_implementation="flash_attention_3" if on_cuda and is_flash_attn_3_available() else "sdpa",
        device_map={"": 0} if on_cuda else None,
        quantization_config=quantization if base == "qlora" else None,
    )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    options["peft_config"] = LoraConfig(r=16, lora_alpha=16, target_modules=TARGETS)

rows = full_rows(model.config.vocab_size, num_rows, steps, length)
ids = [row for step in rows.ids.tolist() for row in step]
arguments = trl.SFTConfig(
    output_dir="/tmp/trl",
    max_steps=steps,
    per_device_train_batch_size=num_rows,
    gradient_accumulation_steps=1,
    learning_rate=1e-5,
    lr_scheduler_type="constant",
    adam_beta1=0.9,
    adam_beta2=0.95,
    weight_decay=0.0,
    max_grad_norm=1.0,
    optim="adamw_torch_fused" if on_cuda else "adamw_torch",
    bf16=on_cuda,
    use_cpu=not on_cuda,
    packing=False,
    max_length=None,
    dataset_kwargs={"skip_prepare_dataset": True},
    train_sampling_strategy="sequential",
    gradient_checkpointing=True,
    gradient_checkpointing_kwargs=None if with_unsloth else {"use_reentrant": False},
    use_liger_kernel=on_cuda and not with_unsloth,
    logging_steps=10**6,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
    seed=0,
)


class ClockAfterWarmup(Clock):
    """Peaks of memory are those of the steps that count, too."""

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        super().on_step_end(args, state, control, **others)
        if state.global_step == WARMUP_OF_ADAPTERS and on_cuda:
            torch.cuda.reset_peak_memory_stats()


clock = ClockAfterWarmup()
trainer = trl.SFTTrainer(
    model=model,
    args=arguments,
    train_dataset=Dataset.from_dict({"input_ids": ids, "labels": ids, "attention_mask": [[1] * length] * len(ids)}),
    processing_class=tokenizer,
    callbacks=[clock],
    **options,
)
trainer.train()
name = f"TRL {trl.__version__}, transformers {transformers.__version__}"
report_adapters(
    f"Unsloth {unsloth.__version__}" if with_unsloth else name, base, rows, clock.seconds, clock.first["loss"]
)
sys.stdout.flush()
os._exit(0)
