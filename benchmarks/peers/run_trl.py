"""TRL 1.16's SFTTrainer on the peers' data: `run_trl.py FOLDER ROWS STEPS ROWS_OF_A_MICROBATCH [lora]`.

Rows are packed beforehand and `padding_free`; Liger's layer kernels and its fused head; torch's varlen_attn through
transformers' attention interface; FSDP2 of accelerate on one rank with fp32 master weights and reduction. With `lora`:
peft's adapters over weights in bf16, without FSDP, which does not take them here.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from clock import Clock
from datasets import Dataset
from rows import ROW, make_rows, report
from tokenizers import Tokenizer, models
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.attention.varlen import varlen_attn
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.masking_utils import AttentionMaskInterface
from trl import SFTConfig, SFTTrainer

folder, num_rows, steps, of_microbatch = Path(sys.argv[1]), *map(int, sys.argv[2:5])
with_lora = "lora" in sys.argv
os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29512", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}


def attention(
    module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, cu_seq_lens_q: Any, **rest: Any
) -> Any:
    flat = (tensor.transpose(1, 2).flatten(0, 1).to(torch.bfloat16) for tensor in (query, key, value))
    longest = rest.get("max_length_q", query.shape[2])
    output = varlen_attn(*flat, cu_seq_lens_q, cu_seq_lens_q, longest, longest, scale=scaling, window_size=(-1, 0))
    return output.view(query.shape[0], query.shape[2], query.shape[1], -1), None


AttentionInterface.register("varlen", attention)
AttentionMaskInterface.register("varlen", lambda *_, **__: None)
dtype = torch.bfloat16 if with_lora else torch.float32
model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="varlen")
vocab = model.config.vocab_size
names = {**{f"t{i}": i for i in range(vocab - 2)}, "<pad>": vocab - 2, "<eos>": vocab - 1}
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(models.WordLevel(names, unk_token="<pad>")), pad_token="<pad>", eos_token="<eos>"
)
rows = make_rows(vocab, num_rows, steps)
data = Dataset.from_dict(
    {
        "input_ids": [row for step in rows.ids.tolist() for row in step],
        "labels": [
            [-100, *row[:-1]] for step in range(steps) for row in rows.labels(step).tolist()
        ],  # TRL shifts them again
        "seq_lengths": [row for step in rows.lengths for row in step],
    }
)
sharding: dict[str, Any] = {}
if not with_lora:
    config = {
        "version": 2,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_layer_cls_to_wrap": model._no_split_modules,
        "reshard_after_forward": False,
    }
    sharding = {"fsdp": True, "fsdp_config": config}
arguments = SFTConfig(
    output_dir="/tmp/trl",
    max_steps=steps,
    per_device_train_batch_size=of_microbatch,
    gradient_accumulation_steps=num_rows // of_microbatch,
    learning_rate=1e-5,
    lr_scheduler_type="constant",
    adam_beta1=0.9,
    adam_beta2=0.95,
    weight_decay=0.0,
    max_grad_norm=1.0,
    optim="adamw_torch_fused",
    bf16=True,
    padding_free=True,
    packing=False,
    max_length=None,
    dataset_kwargs={"skip_prepare_dataset": True},
    train_sampling_strategy="sequential",
    gradient_checkpointing=False,
    use_liger_kernel=True,
    logging_steps=10**6,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
    dataloader_num_workers=2,
    seed=0,
    **sharding,
)
options: dict[str, Any] = {}
if with_lora:
    from peft import LoraConfig

    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    options["peft_config"] = LoraConfig(r=16, lora_alpha=32, target_modules=targets)
clock = Clock()
trainer = SFTTrainer(
    model=model, args=arguments, train_dataset=data, processing_class=tokenizer, callbacks=[clock], **options
)
if not with_lora:
    plugin = trainer.accelerator.state.fsdp_plugin
    plugin.mixed_precision_policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
trainer.train()
report(
    "TRL 1.16 + Liger",
    folder,
    rows,
    clock.seconds,
    (clock.first["loss"], clock.first["grad_norm"]),
    of_microbatch * ROW,
)
sys.stdout.flush()
os._exit(0)
