"""What a value of another trainer is here, by the key that it is converted to."""

from collections.abc import Callable
from typing import Any


class NotConvertibleError(ValueError):
    """A value without a counterpart. The message is the reason."""


class AsIsError(ValueError):
    """A value that means what happens here anyway."""


def _chosen(choices: dict[Any, Any], reason: str) -> Callable[[Any], Any]:
    """Returns a function that looks a value up, in lower case; `reason` is why others have no counterpart."""

    def choose(value: Any) -> Any:
        key = value.lower() if isinstance(value, str) else value
        if isinstance(key, str | bool | int | float) and key in choices:
            if choices[key] is None:
                raise AsIsError
            return choices[key]
        raise NotConvertibleError(reason)

    return choose


def _automatic(value: Any) -> Any:
    raise AsIsError


def _positive(value: Any) -> Any:
    if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
        return value
    raise AsIsError


def _switch(value: Any) -> bool:
    if isinstance(value, str) and value.lower() in ("true", "false", "yes", "no"):
        return value.lower() in ("true", "yes")
    if isinstance(value, bool):
        return value
    raise NotConvertibleError("is neither true nor false")


def _folder(value: Any) -> str:
    if isinstance(value, str):
        return value
    raise AsIsError  # such as overwrite_output_dir


def _optimizer(value: Any) -> str:
    name = str(value).lower()
    if "muon" in name:
        return "muon"
    if "adam" in name and ("8bit" in name or "8_bit" in name):
        return "adamw_8bit"
    if "adam" in name and not any(other in name for other in ("mini", "apollo", "ademamix")):
        raise AsIsError
    raise NotConvertibleError("optimizers are adamw, adamw_8bit and muon: adamw is used")


def _targets(value: Any) -> list[str]:
    if isinstance(value, bool) or value in ("all", "all-linear", "all_linear"):
        raise AsIsError
    names = value.split(",") if isinstance(value, str) else value
    if isinstance(names, list) and all(isinstance(name, str) for name in names):
        return [name.strip() for name in names]
    raise NotConvertibleError("is no list of layers")


def _trackers(value: Any) -> list[str]:
    names = [str(name).lower() for name in (value if isinstance(value, list) else [value])]
    known: list[str] = [name for name in ("tensorboard", "wandb", "trackio") if name in names]
    if known:
        return known
    if {*names} & {"none", "console", "all", "true", "false"}:
        raise AsIsError
    raise NotConvertibleError("trackers are tensorboard, wandb and trackio")


def _template(value: Any) -> str:
    if isinstance(value, str) and value.endswith((".jinja", ".jinja2")):
        return value
    raise NotConvertibleError("the model's own template is used; data.chat_template names a file with another")


def _every_steps(value: Any) -> int | None:
    if isinstance(value, str | bool):
        if str(value).lower() in ("no", "false"):
            return None
        if str(value).lower() in ("steps", "true"):
            raise AsIsError
        raise NotConvertibleError("checkpoints are written every so many steps or minutes")
    if isinstance(value, float) and 0 < value < 1:
        raise NotConvertibleError("is a share of all steps: give a number of steps")
    return int(value) if isinstance(value, int | float) and value > 0 else None


def _validate_every(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    if isinstance(value, float):
        raise NotConvertibleError("is a share of all steps; give a number of steps")
    raise AsIsError


def _hang_minutes(value: Any) -> float | None:
    minutes = float(value) / 60
    return minutes if minutes < 7 * 24 * 60 else None


def _size(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value > 1:
        return value
    raise AsIsError


def _staleness(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise AsIsError


PREFERENCES = {
    **{name: name for name in ("dpo", "ipo", "simpo", "orpo", "hinge", "robust", "apo_zero", "apo_down", "discopop")},
    "sigmoid": None,
    "exo_pair": "exo",
    "nca_pair": "nca",
    "bco_pair": "bco",
    "sppo_hard": "sppo",
}
"""Names of preference losses in TRL, axolotl and LLaMA-Factory. None is the default here."""

AVERAGES = {
    "grpo": "sequence",
    "bnpo": None,
    "dapo": None,
    "dr_grpo": "constant",
    "token-mean": None,
    "seq-mean-token-mean": "sequence",
    "seq-mean-token-sum-norm": "constant",
    True: None,
    False: "sequence",
}
"""How losses of tokens are averaged, in TRL, verl and NeMo RL."""

SUPERVISED = {"nll": None, "dft": "dft", "likelihood": None}
ADVANTAGES = {
    "grpo": None,
    "group": None,
    True: None,
    "rloo": "rloo",
    "reinforce_plus_plus": "reinforce",
    "gdpo": "gdpo",
    False: "dr_grpo",
    "none": "dr_grpo",
    "grpo_passk": "grpo",
}

CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "output": _folder,
    "model.attention": _automatic,
    "memory.activation_checkpointing": _automatic,
    "memory.compile": _automatic,
    "memory.offload_optimizer": _automatic,
    "memory.reference": _automatic,
    "parallel.fsdp": _automatic,
    "model.trust_remote_code": _switch,
    "batch.microbatch_tokens": _automatic,
    "data.num_workers": _automatic,
    "data.overlong": _chosen(
        {
            "truncate": None,
            "keep_start": None,
            "right": None,
            False: None,
            "drop": "drop",
            "error": "drop",
            True: "drop",
        },
        "sequences that are too long are cut at their end or dropped",
    ),
    "data.chat_template": _template,
    "data.shuffle": _switch,
    "data.train_on": _chosen({True: None, False: None, "assistant": None}, "all turns of the assistant are trained"),
    "optimizer.decay": _chosen(
        {
            "cosine": "cosine",
            "linear": "linear",
            "constant": "constant",
            "constant_with_warmup": "constant",
            "cosine_with_min_lr": "cosine",
        },
        "schedules are constant, linear and cosine: cosine is used",
    ),
    "optimizer.name": _optimizer,
    "optimizer.warmup_steps": _positive,
    "optimizer.groups": _chosen({}, "set optimizer.groups, by names of parameters"),
    "model.lora.targets": _targets,
    "model.lora.base": _chosen({True: "nf4", False: None}, "is neither true nor false"),
    "checkpoint.every_steps": _every_steps,
    "checkpoint.keep_best": _automatic,
    "checkpoint.format": _automatic,
    "checkpoint.load_best": _switch,
    "observe.trackers": _trackers,
    "observe.samples": _automatic,
    "length.steps": _positive,
    "length.epochs": _positive,
    "length.validate_every": _validate_every,
    "failures.hang_minutes": _hang_minutes,
    "loss.variant": _chosen(PREFERENCES, "see the table of losses in automodel_rl/losses/README.md"),
    "loss.normalise": _chosen(AVERAGES, "see the table of losses in automodel_rl/losses/README.md"),
    "loss.kind": _chosen(SUPERVISED, "the losses of sft are likelihood, dft and eaft"),
    "loss.kl.estimator": _chosen(
        {"low_var_kl": None, "k3": None, "kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2"},
        "estimators are k1, k2 and k3",
    ),
    "loss.ratio": _chosen({"token": None, "sequence": "sequence", True: "sequence", False: None}, "token or sequence"),
    "advantage.kind": _chosen(ADVANTAGES, "see the table of losses in automodel_rl/losses/README.md"),
    "data.validation": _chosen({0: None}, "nothing is split off: give held-out data in data.validation"),
    "filter.dynamic": _switch,
    "filter.mask_overlong": _switch,
    "rollout.max_staleness": _staleness,
    "rollout.max_turns": _size,
    "loss.on_policy": _chosen({False: None, True: True}, "true or false"),
    "rollout.generator": _automatic,
    "rollout.generator.place": _automatic,
    "loss.kl.where": _chosen({False: None, True: "reward"}, "loss or reward"),
    "loss.correction.kind": _chosen({False: None, True: "truncate"}, "set loss.correction"),
    **dict.fromkeys(("parallel.dp_shard", "parallel.dp_replicate", "parallel.ep"), _size),
    "precompute_reference": _switch,
    "parallel.sequence_parallel": _switch,
    "rollout.generator.sleep": _automatic,
    "rollout.generator.options": _chosen({False: None}, "arguments of vllm.LLM: set rollout.generator.options"),
    "rollout.validation_top_k": _chosen({-1: None, 0: None}, "training samples are drawn without top-k"),
    "rollout.validation_top_p": _chosen({1: None}, "training samples are drawn without top-p"),
    "weight_sync.buffer_mib": _automatic,
}
"""Conversions of values, by key. Values of other keys are taken over unchanged."""


def converted(key: str, value: Any) -> Any:
    """Returns the value for `key`.

    Raises:
        NotConvertibleError: there is no counterpart.
        AsIsError: it is what happens here without the key.
    """
    conversion = CONVERSIONS.get(key)
    return value if conversion is None else conversion(value)
