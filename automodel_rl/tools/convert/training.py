"""Settings of other trainers that belong together: precision, layout, batch, length, optimizer, adapters, loss.

Each function sets the keys that a group amounts to. Settings that it reads count as used.
"""

import math
from typing import Any

from automodel_rl.tools.convert.conversion import Conversion

ENDLESS = 100_000
"""Limits of steps or epochs from here on mean none."""

DEFAULT_EPOCHS = 3
"""Epochs of transformers' Trainer, if a config sets no length."""

DECAYS = {"TRL": "linear", "LLaMA-Factory": "linear", "axolotl": "cosine", "verl": "constant", "NeMo RL": "constant"}
"""Schedule of a trainer whose config names none."""

MEGATRON = ("policy.megatron_cfg.", "actor_rollout_ref.actor.megatron.")


def precision(target: Conversion) -> None:
    """The compute dtype: bfloat16 unless another one is asked for."""
    said = {
        name: str(value).lower().removeprefix("torch.")
        for name in (
            *("torch_dtype", "dtype", "precision", "policy.precision", "bf16", "fp16", "tf32", "pure_bf16"),
            *("actor_rollout_ref.actor.fsdp_config.model_dtype", "actor_rollout_ref.rollout.dtype"),
            *("bfloat16", "float16"),
        )
        if (value := target.take(name)) is not None
    }
    if said.get("bf16") == "true":
        return
    half = [
        name for name, value in said.items() if value == "float16" or (name in ("fp16", "float16") and value == "true")
    ]
    if half:
        target.left_out[half[0]] = "float16 cannot be trained here: bfloat16 is used"
    elif {*said.values()} & {"float32", "fp32"} or (said.get("bf16") == "false" and "torch_dtype" not in said):
        target.put("model.dtype", "float32", next(iter(said)))


def layout(target: Conversion, num_gpus: int) -> None:
    """GPUs that no other dimension uses shard weights (FSDP)."""
    counts = ("trainer.n_gpus_per_node", "trainer.nnodes", "cluster.gpus_per_node", "cluster.num_nodes")
    given = [whole(target.take(name)) for name in counts if name in target.run.settings]
    num_gpus = math.prod(given) if given else num_gpus
    uses_megatron = any(name.startswith(MEGATRON) for name in target.run.settings)
    prefixes = MEGATRON if uses_megatron else ("policy.dtensor_cfg.", "")
    ends = {
        "tp": ("tensor_model_parallel_size", "tensor_parallel_size"),
        "pp": ("pipeline_model_parallel_size", "pipeline_parallel_size"),
        "cp": ("context_parallel_size", "sequence_parallel_degree"),
    }
    inner = 1
    for key, names in ends.items():
        size = whole(target.take(*(f"{prefix}{name}" for prefix in prefixes for name in names)))
        if size > 1:
            target.put(f"parallel.{key}", size, names[0])
            inner *= size
    if num_gpus // inner > 1:
        target.put("parallel.dp_shard", num_gpus // inner, "")


def batch(target: Conversion, num_gpus: int) -> None:
    """The global batch of a supervised run."""
    micro = target.take("per_device_train_batch_size", "micro_batch_size")
    accumulate = whole(target.take("gradient_accumulation_steps"))
    total = target.take("policy.train_global_batch_size", "data.train_batch_size")
    if micro is not None and total is None:
        _note_gpus(target, whole(micro) * accumulate, num_gpus)
    key = "batch.pairs" if target.run.algorithm in ("dpo", "reward") else "batch.sequences"
    target.put(key, whole(total, whole(micro) * accumulate * num_gpus), "")


def rollout_batch(target: Conversion, num_gpus: int) -> None:
    """Prompts and completions of a step, and the optimizer steps made of them."""
    group = target.take("num_generations", "grpo.num_generations_per_prompt", "actor_rollout_ref.rollout.n")
    group_size = whole(group, 8 if target.run.algorithm == "grpo" else 1)
    micro, accumulate = (
        target.take("per_device_train_batch_size", "micro_batch_size"),
        target.take("gradient_accumulation_steps"),
    )
    per_generation = whole(target.take("steps_per_generation"), whole(accumulate))
    generated = target.take("generation_batch_size")
    prompts = target.take("grpo.num_prompts_per_step", "data.train_batch_size")
    of_optimizer = target.take("policy.train_global_batch_size")  # completions
    mini = target.take("actor_rollout_ref.actor.ppo_mini_batch_size")  # prompts
    if prompts is None:  # TRL and axolotl count completions
        _note_gpus(target, whole(micro) * per_generation, num_gpus)
        completions = whole(generated, whole(micro) * per_generation * num_gpus)
        prompts, steps = max(1, round(completions / group_size)), round(per_generation / whole(accumulate))
    elif mini is not None:
        steps = whole(prompts) // whole(mini)
    else:
        steps = whole(prompts) * group_size // whole(of_optimizer, whole(prompts) * group_size)
    target.put("rollout.prompts", whole(prompts), "")
    target.put("rollout.group_size", group_size, "")
    target.put("batch.optimizer_steps", max(1, steps), "")


def _note_gpus(target: Conversion, of_one: int, num_gpus: int) -> None:
    if num_gpus == 1:
        target.notes.append(f"batch: {of_one} on one GPU; if the run had N, give --gpus N, which multiplies it")


def length(target: Conversion) -> None:
    """Steps, or else epochs, and how often to validate."""
    sections = ("grpo.", "sft.", "dpo.")
    steps = target.take("max_steps", "trainer.total_training_steps", *(f"{one}max_num_steps" for one in sections))
    epochs = target.take(
        "num_train_epochs", "num_epochs", "trainer.total_epochs", *(f"{one}max_num_epochs" for one in sections)
    )
    if 0 < whole(steps, 0) < ENDLESS:
        target.put("length.steps", whole(steps), "")
    else:
        is_set = isinstance(epochs, int | float) and 0 < epochs < ENDLESS
        target.put("length.epochs", epochs if is_set else DEFAULT_EPOCHS, "")
    target.take("do_eval")
    strategy = str(target.take("eval_strategy", "evaluation_strategy")).lower()
    if strategy in ("no", "false"):
        target.take("eval_steps")
    elif strategy == "epoch":
        target.left_out["eval_strategy"] = "validation runs every length.validate_every steps, and at the end"
    for name in ("evals_per_epoch", "saves_per_epoch"):
        if target.take(name) is not None:
            target.left_out[name] = "give steps: length.validate_every and checkpoint.every_steps"


def optimizer(target: Conversion) -> None:
    """Betas, warm-up and schedule where they do not have a key each."""
    first, second = target.take("adam_beta1"), target.take("adam_beta2")
    if target.run.trainer in ("TRL", "axolotl", "LLaMA-Factory", "verl"):  # defaults of torch
        target.put("optimizer.betas", [0.9 if first is None else first, 0.999 if second is None else second], "")
    if isinstance(ratio := target.take("lr_scheduler_kwargs.min_lr_rate", "min_lr_rate"), float):
        target.put("optimizer.min_lr_ratio", ratio, "")
    if isinstance(target.run.settings.get("warmup_steps"), float):
        target.put("optimizer.warmup_ratio", target.take("warmup_steps"), "warmup_steps")
    if target.take("use_muon"):
        target.put("optimizer.name", "muon", "use_muon")
    schedulers = target.take("policy.scheduler")
    for one in schedulers if isinstance(schedulers, list) else []:
        name, options = str((one or {}).get("name", "")), (one or {}).get("kwargs") or {}
        if name.endswith("LinearLR"):
            target.put("optimizer.warmup_steps", whole(options.get("total_iters"), 0), "policy.scheduler")
        elif name.endswith("CosineAnnealingLR"):
            target.put("optimizer.decay", "cosine", "policy.scheduler")
    names = {"policy.megatron_cfg.optimizer.lr": "optimizer.lr", "critic.optim.lr": "critic.optimizer.lr"}
    of_verl = {"lr": "lr", "betas": "betas", "weight_decay": "weight_decay", "clip_grad": "max_grad_norm"}
    names |= {f"optim.{there}": f"optimizer.{here}" for there, here in of_verl.items()}
    names |= {"optim.lr_warmup_steps_ratio": "optimizer.warmup_ratio"}
    for name, key in names.items():
        if (value := target.take(name)) is not None:
            target.put(key, value, name)
    if any(name.startswith("policy.megatron_cfg.") for name in target.run.settings):
        target.take(*(name for name in target.run.settings if name.startswith("policy.megatron_cfg.")))
        target.left_out["policy.megatron_cfg"] = "Megatron's settings: layout and learning rate are taken over"
    target.take("policy.optimizer.kwargs.foreach", "policy.optimizer.kwargs.fused")


def adapters(target: Conversion) -> None:
    """LoRA, on a plain or a 4-bit base."""
    run = target.run
    kind = str(target.take("use_peft", "adapter", "finetuning_type", "policy.dtensor_cfg.lora_cfg.enabled")).lower()
    is_4_bit = (
        target.take("load_in_4bit") is True or target.run.settings.get("quantization_bit") == 4 or kind == "qlora"
    )
    if target.take("load_in_8bit") is True:
        target.left_out["load_in_8bit"] = "a base is plain, nf4 or as stored: it stays plain"
    if kind not in ("true", "false", "none", "lora", "qlora", "full"):
        target.left_out[kind] = "adapters are LoRA, rsLoRA or DoRA: all weights are trained"
    ranks = ("lora_r", "lora_rank", "policy.dtensor_cfg.lora_cfg.dim", "actor_rollout_ref.model.lora_rank")
    is_on = kind in ("true", "lora", "qlora") or whole(run.settings.get(ranks[-1]), 0) > 0
    rank = whole(target.take(*ranks), 8)
    dropout = target.take("lora_dropout", "policy.dtensor_cfg.lora_cfg.dropout")
    if not is_on:
        target.take(*(name for name in run.settings if "lora" in name.lower()))
        return
    target.put("model.lora.rank", rank, "")
    if run.trainer == "LLaMA-Factory" and "lora_alpha" not in run.settings:
        target.put("model.lora.alpha", 2 * rank, "")
    if is_4_bit:
        target.take("quantization_bit")
        target.put("model.lora.base", "nf4", "load_in_4bit")
    if dropout and run.algorithm == "sft":
        target.put("model.lora.dropout", dropout, "lora_dropout")
    elif dropout:
        target.left_out["lora_dropout"] = "for sft alone: other algorithms compare log-probabilities"


def loss(target: Conversion) -> None:
    """The kind of loss, the divergence from the reference, and what advantages are divided by."""
    algorithm = target.run.algorithm
    for name, kind in (("use_dft_loss", "dft"), ("use_eaft_loss", "eaft")):
        if target.take(name) and algorithm == "sft":
            target.put("loss.kind", kind, name)
    stated = target.take("rl")
    if algorithm == "dpo" and stated in ("ipo", "orpo", "simpo"):
        target.put("loss.variant", stated, "rl")
    if algorithm not in ("grpo", "ppo"):
        return
    mode = target.take("actor_rollout_ref.actor.policy_loss.loss_mode")
    if mode == "gspo":
        target.put("loss.ratio", "sequence", "policy_loss.loss_mode")
    elif mode in ("cispo", "sapo", "gmpo"):
        target.put("loss.surrogate", mode, "policy_loss.loss_mode")
    elif mode not in (None, "vanilla"):
        target.left_out["policy_loss.loss_mode"] = f"{mode}: see the table of losses in automodel_rl/losses/README.md"
    in_loss = target.take("actor_rollout_ref.actor.use_kl_loss")
    in_reward = target.take("algorithm.use_kl_in_reward")
    coefficients = target.take("actor_rollout_ref.actor.kl_loss_coef"), target.take("algorithm.kl_ctrl.kl_coef")
    target.take("algorithm.kl_penalty")
    coefficient = coefficients[0] if in_loss else coefficients[1] if in_reward else None
    if coefficient:
        target.put("loss.kl.coefficient", coefficient, "kl_coef")
        target.put("loss.kl.where", "loss" if in_loss else "reward", "kl_coef")
    for prefix in ("grpo.", "grpo.adv_estimator."):
        if target.take(f"{prefix}use_leave_one_out_baseline"):
            target.put("advantage.leave_one_out", True, "use_leave_one_out_baseline")
        if target.take(f"{prefix}normalize_rewards") is False:
            target.put("advantage.kind", "dr_grpo", "normalize_rewards")


def whole(value: Any, default: int = 1) -> int:
    """Returns a positive number as an integer, else `default`."""
    return int(value) if isinstance(value, int | float) and not isinstance(value, bool) and value >= 1 else default
