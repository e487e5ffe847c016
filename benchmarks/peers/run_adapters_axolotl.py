"""Adapters by axolotl 0.19 on rows of one length: `run_adapters_axolotl.py FOLDER TOKENS ROWS STEPS BASE`.

Its kernels for adapters, fused attention and Liger's norms, cut cross entropy, FlashAttention-3 where it is installed,
and recomputation of layers, whose inputs go to the host for long rows.
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ |= {"AXOLOTL_DO_NOT_TRACK": "1", "HF_DATASETS_OFFLINE": "1", "WANDB_DISABLED": "true"}

import torch
import yaml
from axolotl.cli.args import TrainerCliArgs
from axolotl.cli.config import load_cfg
from axolotl.cli.train import do_train
from axolotl.integrations.base import BasePlugin
from clock import Clock
from datasets import Dataset
from rows import full_rows, report_adapters
from transformers import AutoConfig, TrainerCallback
from transformers.utils import import_utils, is_flash_attn_3_available

folder, length, num_rows, steps, base = Path(sys.argv[1]), *map(int, sys.argv[2:5]), sys.argv[5]
LONG = 16384
"""Tokens of a row from which layers' inputs go to the host."""

rows = full_rows(AutoConfig.from_pretrained(folder).vocab_size, num_rows, steps, length)
on_cuda = torch.cuda.is_available()


class ClockToTheEnd(Clock):
    """What axolotl does after the last step is not waited for. Its logs begin the peaks of memory anew."""

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        report_adapters("axolotl 0.19.0", base, rows, self.seconds, float(self.first["loss"]))
        sys.stdout.flush()
        os._exit(0)


class Measure(BasePlugin):
    def add_callbacks_post_trainer(self, cfg: Any, trainer: Any) -> list[TrainerCallback]:
        return [ClockToTheEnd()]


def settings(work: Path) -> dict[str, Any]:
    ids = [row for step in rows.ids.tolist() for row in step]
    data = Dataset.from_dict({"input_ids": ids, "labels": ids, "attention_mask": [[1] * length] * len(ids)})
    data.to_parquet(work / "rows.parquet")
    of_cuda = {
        "bf16": True,
        "tf32": True,
        "fused_attn_kernel": True,
        "liger_rms_norm": True,
        "cut_cross_entropy": True,
        "attn_implementation": "flash_attention_3" if is_flash_attn_3_available() else "sdpa",
    }
    plugins = ["axolotl.integrations.liger.LigerPlugin", "axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"]
    return {
        "base_model": str(folder),
        "plugins": ["measure.Measure", *(plugins if on_cuda else [])],
        "datasets": [{"path": str(work / "rows.parquet"), "ds_type": "parquet", "type": None}],
        "dataset_prepared_path": str(work / "prepared"),
        "dataset_num_proc": 1,
        "shuffle_merged_datasets": False,
        "curriculum_sampling": True,  # rows in the file's order
        "val_set_size": 0,
        "output_dir": str(work / "out"),
        "sequence_len": length,
        "adapter": base,
        "load_in_4bit": base == "qlora",
        "lora_r": 16,
        "lora_alpha": 16,
        "lora_dropout": 0.0,
        "lora_target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        "lora_mlp_kernel": on_cuda,
        "lora_qkv_kernel": on_cuda,
        "lora_o_kernel": on_cuda,
        "micro_batch_size": num_rows,
        "gradient_accumulation_steps": 1,
        "max_steps": steps,
        "num_epochs": 1,
        "optimizer": "adamw_torch_fused" if on_cuda else "adamw_torch",
        "adam_beta2": 0.95,
        "max_grad_norm": 1.0,
        "learning_rate": 1e-5,
        "lr_scheduler": "constant",
        "weight_decay": 0.0,
        "gradient_checkpointing": "offload" if length >= LONG else True,
        # reentrant recomputation, its default, would send all that is computed again to the host as well
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "logging_steps": 10**6,
        "save_strategy": "no",
        "save_first_step": False,
        "include_tkps": False,
        "strict": False,
        **(of_cuda if on_cuda else {"float32": True}),
    }


if __name__ == "__main__":  # datasets starts processes that import this file
    sys.modules["measure"] = sys.modules["__main__"]  # where the config finds the plugin
    names = (
        import_utils.PACKAGE_DISTRIBUTION_MAPPING
    )  # transformers knows FlashAttention-3 by another distribution's name
    names["flash_attn_interface"] = [*names.get("flash_attn_interface", []), "flash-attn-3"]
    work = Path(tempfile.mkdtemp(prefix="axolotl_"))
    (work / "config.yml").write_text(yaml.safe_dump(settings(work)))
    do_train(load_cfg(str(work / "config.yml")), TrainerCliArgs())
