"""Configs and scripts of other trainers become configs that are accepted, with what has no counterpart named."""

import json
from pathlib import Path
from typing import Any

import pytest

from automodel_rl.cli import main
from automodel_rl.config import load_config

TRL_DPO = """
model_name_or_path: some/model
torch_dtype: bfloat16
dataset_mixer: {some/pairs: 1.0}
dataset_splits: [train_prefs, test_prefs]
use_peft: true
load_in_4bit: true
lora_r: 8
lora_alpha: 16
lora_dropout: 0.05
beta: 0.01
loss_type: ipo
per_device_train_batch_size: 4
gradient_accumulation_steps: 2
learning_rate: 5.0e-6
lr_scheduler_type: cosine
warmup_ratio: 0.1
num_train_epochs: 2
eval_strategy: steps
eval_steps: 100
save_steps: 50
report_to: [wandb]
output_dir: data/out
overwrite_output_dir: true
push_to_hub: true
"""
TRL_GRPO = """
model_name_or_path: some/model
dataset_name: some/problems
dataset_prompt_column: problem
reward_funcs: [accuracy, tag_count]
num_generations: 8
per_device_train_batch_size: 16
gradient_accumulation_steps: 4
max_completion_length: 512
use_vllm: true
vllm_gpu_memory_utilization: 0.7
fp16: true
learning_rate: 1e-6
max_steps: -1
"""
AXOLOTL = """
base_model: some/model
load_in_8bit: true
datasets: [{path: some/chats, type: chat_template, field_messages: conversations}]
val_set_size: 0.05
adapter: lora
lora_r: 32
lora_alpha: 16
lora_target_linear: true
sequence_len: 2048
sample_packing: true
gradient_accumulation_steps: 2
micro_batch_size: 2
num_epochs: 4
optimizer: adamw_bnb_8bit
learning_rate: 0.0002
warmup_steps: 0.1
bf16: auto
tf32: false
saves_per_epoch: 1
wandb_project:
"""
LLAMA_FACTORY = """
llamafactory-cli train \\
    --model_name_or_path some/model \\
    --stage dpo --pref_beta 0.2 --pref_loss orpo \\
    --finetuning_type lora --lora_target all --lora_rank 4 \\
    --dataset pairs_en --template qwen3 --cutoff_len 2048 \\
    --per_device_train_batch_size 1 --gradient_accumulation_steps 8 \\
    --learning_rate 1e-4 --num_train_epochs 3.0 --bf16 true  # a comment
"""
VERL = """
set -x
MODEL=some/model
tokens=$((512 * 2))
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    data.train_files=data/train.parquet \\
    data.val_files="['data/test.parquet']" \\
    data.train_batch_size=64 \\
    data.max_prompt_length=512 \\
    data.max_response_length=$tokens \\
    actor_rollout_ref.model.path=$MODEL \\
    actor_rollout_ref.actor.optim.lr=1e-6 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=16 \\
    actor_rollout_ref.actor.use_kl_loss=True \\
    actor_rollout_ref.actor.kl_loss_coef=0.001 \\
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \\
    actor_rollout_ref.actor.policy_loss.loss_mode=gspo \\
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean \\
    actor_rollout_ref.rollout.name=vllm \\
    actor_rollout_ref.rollout.n=5 \\
    trainer.n_gpus_per_node=4 \\
    trainer.logger=['console','wandb'] \\
    trainer.total_epochs=3 $@
"""
NEMO_RL = """
defaults: base.yaml
policy:
  model_name: some/model
  max_total_sequence_length: 512
  generation: {max_new_tokens: "${policy.max_total_sequence_length}"}
"""
NEMO_RL_BASE = """
grpo:
  num_prompts_per_step: 32
  num_generations_per_prompt: 16
  max_num_epochs: 1
  max_num_steps: 1000000
  normalize_rewards: true
  use_leave_one_out_baseline: true
  async_grpo: {enabled: false, max_trajectory_age_steps: 1}
policy:
  model_name: another/model
  train_global_batch_size: 256
  precision: bfloat16
  optimizer: {name: torch.optim.AdamW, kwargs: {lr: 5.0e-6, betas: [0.9, 0.999]}}
  scheduler:
    - {name: torch.optim.lr_scheduler.LinearLR, kwargs: {total_iters: 20}}
    - {name: torch.optim.lr_scheduler.ConstantLR}
  generation: {backend: vllm, max_new_tokens: 8}
  dtensor_cfg: {enabled: true, tensor_parallel_size: 2}
data: {train_data_path: problems.jsonl}
cluster: {gpus_per_node: 8, num_nodes: 1}
"""
FILES = {
    "trl_dpo.yaml": TRL_DPO,
    "grpo/trl.yaml": TRL_GRPO,
    "axolotl.yml": AXOLOTL,
    "factory.sh": LLAMA_FACTORY,
    "verl.sh": VERL,
    "nemo.yaml": NEMO_RL,
    "base.yaml": NEMO_RL_BASE,
}

EXPECTED: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "trl_dpo.yaml": (
        "dpo",
        {
            "output": "data/out",
            "model.lora.rank": 8,
            "model.lora.base": "nf4",
            "model.lora.dropout": 0.0,
            "loss.beta": 0.01,
            "loss.variant": "ipo",
            "batch.pairs": 16,  # 4 x 2 on two GPUs
            "parallel.dp_shard": 2,
            "optimizer.lr": 5e-6,
            "optimizer.decay": "cosine",
            "optimizer.betas": (0.9, 0.999),
            "length.validate_every": 100,
            "checkpoint.every_steps": 50,
            "observe.trackers": ("wandb",),
        },
        ["lora_dropout: for sft alone", "push_to_hub: nothing is uploaded"],
    ),
    "grpo/trl.yaml": (
        "grpo",
        {
            "rollout.prompts": 16,  # 16 x 4 on two GPUs, by 8
            "rollout.group_size": 8,
            "rollout.max_new_tokens": 512,
            "rollout.generator.kind": "vllm",
            "rollout.generator.memory_fraction": 0.7,
            "model.dtype": "bfloat16",
            "optimizer.decay": "linear",  # the default there
            "length.epochs": 3,  # likewise
        },
        ["fp16: float16 cannot be trained here", "reward_funcs: tag_count: a function of the script"],
    ),
    "axolotl.yml": (
        "sft",
        {
            "batch.sequences": 8,
            "length.epochs": 4,
            "data.max_tokens": 2048,
            "optimizer.name": "adamw_8bit",
            "optimizer.warmup_ratio": 0.1,
            "model.dtype": "bfloat16",
            "model.lora.rank": 32,
            "model.lora.base": "plain",
        },
        ["load_in_8bit: ", "val_set_size: nothing is split off", "saves_per_epoch: give steps"],
    ),
    "factory.sh": (
        "dpo",
        {
            "loss.variant": "orpo",
            "loss.beta": 0.2,
            "model.lora.rank": 4,
            "model.lora.alpha": 8,
            "batch.pairs": 16,
            "optimizer.decay": "linear",
        },
        ["template: the model's own template is used"],
    ),
    "verl.sh": (
        "grpo",
        {
            "model.path": "some/model",
            "rollout.prompts": 64,
            "rollout.group_size": 5,
            "batch.optimizer_steps": 4,
            "rollout.max_new_tokens": 1024,
            "loss.kl.coefficient": 0.001,
            "loss.kl.estimator": "k3",
            "loss.ratio": "sequence",
            "loss.normalise": "sequence",
            "parallel.dp_shard": 4,
            "optimizer.decay": "constant",
        },
        [],
    ),
    "nemo.yaml": (
        "grpo",
        {
            "model.path": "some/model",
            "rollout.prompts": 32,
            "batch.optimizer_steps": 2,
            "rollout.max_new_tokens": 512,
            "rollout.max_staleness": 0,
            "advantage.leave_one_out": True,
            "parallel.tp": 2,
            "parallel.dp_shard": 4,
            "optimizer.warmup_steps": 20,
            "optimizer.decay": "constant",
            "length.epochs": 1,
        },
        [],
    ),
}
"""By file: the algorithm, values of the converted config, and lines that say what was left out."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize("name", EXPECTED)
def test_a_foreign_config_becomes_one_that_is_accepted(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    algorithm, values, left_out = EXPECTED[name]
    assert main(["convert", str(folder / name), "--out", str(folder / "out.yaml"), "--gpus", "2"]) == 0
    config = load_config(folder / "out.yaml")
    assert config.algorithm == algorithm
    found = {}
    for key in values:
        value = config
        for part in key.split("."):
            value = getattr(value, part)
        found[key] = value
    assert found == values
    said = capsys.readouterr().out
    assert all(line in said and line in (folder / "out.yaml").read_text() for line in left_out)


def test_columns_and_sources_are_taken_over(folder: Path) -> None:
    for name, expected in {
        "trl_dpo.yaml": [("some/pairs", "train_prefs", {})],
        "axolotl.yml": [("some/chats", "train", {"messages": "conversations"})],
        "grpo/trl.yaml": [("some/problems", "train", {"prompt": "problem"})],
        "verl.sh": [("data/train.parquet", "train", {"answer": "reward_model.ground_truth"})],
    }.items():
        out = folder / f"{Path(name).stem}.out.yaml"
        assert main(["convert", str(folder / name), "--out", str(out)]) == 0
        assert [(one.path, one.split, one.columns) for one in load_config(out).data.train] == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 1", "is no config of TRL, axolotl, LLaMA-Factory, verl or NeMo RL"),
        ("- a", "is not a mapping"),
        ("a: [", "cannot be read"),
        ("policy: {model_name: m}\ndistillation: {}", "is not converted: here it is grpo with teachers"),
        ("base_model: m\nrl: grpo_fancy", "say what to train with --algorithm"),
        ("model_name_or_path: m\nper_device_train_batch_size: 0.5", None),
    ],
)
def test_what_cannot_be_read_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, said: str | None
) -> None:
    (tmp_path / "their.yaml").write_text(text)
    code = main(["convert", str(tmp_path / "their.yaml"), "--out", str(tmp_path / "out.yaml")])
    if said is None:
        assert code == 0
        return
    (line,) = capsys.readouterr().err.splitlines()
    assert (code, said in line, (tmp_path / "out.yaml").exists()) == (2, True, False)


def test_configs_that_build_on_each_other_in_a_circle_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("defaults: b.yaml")
    (tmp_path / "b.yaml").write_text("defaults: a.yaml")
    assert main(["convert", str(tmp_path / "a.yaml"), "--out", str(tmp_path / "out.yaml")]) == 2


def test_json_is_read_too(tmp_path: Path) -> None:
    (tmp_path / "their.json").write_text(json.dumps({"base_model": "m", "micro_batch_size": 3}))
    assert main(["convert", str(tmp_path / "their.json"), "--out", str(tmp_path / "out.yaml")]) == 0
    assert load_config(tmp_path / "out.yaml").batch.sequences == 3
