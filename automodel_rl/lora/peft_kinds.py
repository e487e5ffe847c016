"""Treatment of the keys of PEFT's adapter_config.json: honoured, ignored, or rejected.

PEFT has many kinds of LoRA in one format. An unknown key may request another kind, so it is rejected unless its value
is empty. `init_lora_weights` stays in the file, and PEFT applies it when it loads adapters: PiSSA, OLoRA, CorDA,
LoftQ and LoRA-GA change the base model's weights.
"""

from typing import Any

FOLLOWED = frozenset(
    (
        "auto_mapping",
        "base_model_name_or_path",
        "exclude_modules",
        "layers_to_transform",
        "lora_alpha",
        "modules_to_save",
        "peft_type",
        "r",
        "revision",
        "target_modules",
        "target_parameters",
        "use_dora",
        "use_rslora",
    )
)
"""Keys that are honoured."""

HARMLESS = frozenset(
    (
        "corda_config",
        "eva_config",
        "inference_mode",
        "layers_pattern",
        "loftq_config",
        "lora_dropout",
        "lora_ga_config",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "runtime_config",
        "task_type",
    )
)
"""Keys that do not change what adapters compute: notes, initialisation, and settings of features enabled by other
keys."""

REFUSED = frozenset(
    (
        "alora_invocation_tokens",
        "alpha_pattern",
        "arrow_config",
        "bias",
        "ensure_weight_tying",
        "fan_in_fan_out",
        "kasa_config",
        "layer_replication",
        "lora_bias",
        "megatron_config",
        "monteclora_config",
        "rank_pattern",
        "trainable_token_indices",
        "use_bdlora",
        "use_qalora",
        "velora_config",
    )
)
"""Keys that request unsupported kinds of adapters, unless empty."""

BEGINNING = "init_lora_weights"

PLAIN_BEGINNINGS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of `BEGINNING` that leave the base model's weights unchanged."""


def problem_of(values: dict[str, Any]) -> str:
    """Returns why an adapter_config.json requests unsupported adapters, with the remedy; "" if it does not."""
    if values["peft_type"] != "LORA":
        return _unlike("peft_type", values["peft_type"])
    beginning = values.get(BEGINNING, True)
    if beginning not in PLAIN_BEGINNINGS:
        return (
            f"adapters with {BEGINNING}={beginning} cannot be trained or merged here, because PEFT changes the base "
            "model's weights when it loads them: merge them with PEFT, or save them with its "
            "path_initial_model_for_weight_conversion"
        )
    for key in sorted(values.keys() - FOLLOWED - HARMLESS - {BEGINNING}):
        if values[key] and values[key] != "none":
            return _unlike(key, values[key], "" if key in REFUSED else ", an unknown key,")
    return ""


def _unlike(key: str, value: Any, why: str = "") -> str:
    return f"adapters with {key}={value}{why} cannot be trained or merged here: merge them with PEFT"
