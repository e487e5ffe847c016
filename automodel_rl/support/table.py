"""The table of supported combinations. All others are refused before weights are loaded.

Requirements on a config alone, independent of the model (a schedule's name, a batch's size), are checked with that
config.
"""

from automodel_rl.errors import InputError
from automodel_rl.support import layout_rules, model_rules, multimodal_rules, run_rules
from automodel_rl.support.capabilities import refuse_incompatible_pairs
from automodel_rl.support.combination import Combination

RULES = (
    model_rules.FAMILY,
    multimodal_rules.MULTIMODAL,
    model_rules.NEMO,
    model_rules.QUANTIZED,
    model_rules.NOISE,
    model_rules.BIDIRECTIONAL,
    model_rules.ROTARY,
    model_rules.ATTENTION_BACKENDS,
    model_rules.WINDOWS,
    model_rules.SOFTCAP,
    model_rules.SINKS,
    layout_rules.SCHEDULE,
    layout_rules.STAGES,
    layout_rules.SHARED_KEYS,
    layout_rules.CHOSEN_KEYS,
    layout_rules.OPTIMIZERS,
    layout_rules.FSDP,
    layout_rules.RESHARDING,
    layout_rules.HSDP,
    model_rules.TIED,
    model_rules.LINEAR_HEAD,
    layout_rules.TENSOR_PARALLEL,
    layout_rules.SEQUENCE_PARALLEL,
    layout_rules.CONTEXT_PARALLEL,
    layout_rules.EXCHANGED_HEADS,
    layout_rules.RECOMPUTATION,
    layout_rules.SELECTIVE,
    layout_rules.MLP_TILES,
    layout_rules.COMPILED,
    model_rules.LORA,
    model_rules.LORA_DROPOUT,
    model_rules.QUANTIZED_BASE,
    model_rules.FLOAT8,
    model_rules.NARROW_MASTERS,
    model_rules.ROUTERS,
    model_rules.MTP,
    model_rules.INDEXER,
    run_rules.ROUTER_REPLAY,
    layout_rules.EXPERT_PARALLEL,
    run_rules.VLLM,
    run_rules.SERVERS,
    run_rules.JOINED,
    run_rules.ROLLOUT_LENGTH,
    run_rules.ADAPTERS_ALONE,
    run_rules.ROLLOUT_OFFLOAD,
)
"""Rules in the order of the table."""

REFUSALS = (
    *(rule.refusal for rule in RULES[:2] if rule.refusal is not None),
    refuse_incompatible_pairs,
    *(rule.refusal for rule in RULES[2:] if rule.refusal is not None),
)
"""Checks in the order in which they run. The first two ensure that the family is known, which the others rely on."""


def check_supported(combination: Combination) -> None:
    """Checks a combination against all rules. Raises InputError with the message of the first violated one."""
    for refusal in REFUSALS:
        if (message := refusal(combination)) is not None:
            raise InputError(message)


def table() -> str:
    """Formats the rules as the Markdown table of README."""
    return "\n".join(["| feature | supported |", "|---|---|", *map(str, RULES)])
