"""Rules of layouts and of settings that save memory."""

from automodel_rl.parallel.pipeline.schedules import SCHEDULES, refuse_schedule
from automodel_rl.parallel.pipeline.split import refuse_split
from automodel_rl.support.model_rules import MIXTURE, MOE_FAMILIES
from automodel_rl.support.rule import Breach, Combination, Rule

_SPLIT_BACKWARD = {"parallel.pp": 2, "parallel.schedule": "ZBVZeroBubble", "parallel.virtual_stages": 2}


def _schedule(asked: Combination) -> str | None:
    if asked.parallel.pp > 1:
        return refuse_schedule(asked.parallel)
    virtual_stages = asked.parallel.virtual_stages
    if virtual_stages == 1:
        return None
    return f"parallel.virtual_stages={virtual_stages} needs parallel.pp of at least 2: use virtual_stages=1"


SCHEDULE = Rule(
    "pipeline schedules",
    ", ".join(f"{name} (torch 2.13)" if rule.splits_backward else name for name, rule in SCHEDULES.items()),
    _schedule,
    (
        Breach("parallel.virtual_stages=2 needs parallel.pp of at least 2", {"parallel.virtual_stages": 2}),
        Breach(
            "parallel.virtual_stages=2: 1F1B has 1 on each rank: use virtual_stages=1",
            {"parallel.virtual_stages": 2},
            {"parallel.pp": 2},
        ),
        Breach(
            "parallel.virtual_stages=1: Interleaved1F1B has at least 2 on each rank: use virtual_stages=2",
            {"parallel.schedule": "Interleaved1F1B"},
            {"parallel.pp": 2},
        ),
        Breach(
            "parallel.virtual_stages=3: DualPipeV has 2 on each rank: use virtual_stages=2",
            {"parallel.virtual_stages": 3},
            {**_SPLIT_BACKWARD, "parallel.schedule": "DualPipeV"},
        ),
    ),
)


def _stages(asked: Combination) -> str | None:
    return refuse_split(asked.description.num_layers, asked.parallel)


STAGES = Rule(
    "layers of a stage",
    "any split, also uneven",
    _stages,
    (
        Breach(
            "parallel.pp=4: the model has 3 layers and a stage needs at least one; use no more than 3 stages",
            {"parallel.pp": 4},
            {"description.num_layers": 3},
        ),
        Breach(
            "parallel.layers_per_stage=[4, 4] lists 2 stages but parallel.pp=1 makes 1: list one number for each",
            {"parallel.layers_per_stage": [4, 4]},
        ),
        Breach(
            "parallel.layers_per_stage=[4, 3] adds up to 7 but the model has 8 layers: make the sum equal",
            {"parallel.layers_per_stage": [4, 3]},
            {"parallel.pp": 2, "description.num_layers": 8},
        ),
    ),
)
OPTIMIZERS = Rule("optimizers", "adamw, muon: with every axis, with LoRA and with encoders")

FSDP = Rule("FSDP2 (dp_shard)", "with every other axis")


def _resharding(asked: Combination) -> str | None:
    if not asked.parallel.reduces_each or not asked.splits_backward:
        return None
    return (
        f"parallel.fsdp={asked.parallel.fsdp}: {asked.parallel.schedule} goes through the backward twice, the first "
        "time without gradients of weights to reduce: use keep, or Interleaved1F1B"
    )


RESHARDING = Rule(
    "gradients reduced after each microbatch (fsdp=reduce, reshard)",
    "with every other axis; schedules that split the backward reduce once a step",
    _resharding,
    (Breach("parallel.fsdp=reshard: ZBVZeroBubble goes through", {"parallel.fsdp": "reshard"}, _SPLIT_BACKWARD),),
)


def _replicas(asked: Combination) -> str | None:
    replicas = asked.parallel.dp_replicate
    if replicas == 1 or asked.parallel.fsdp_size > 1:
        return None
    return (
        f"parallel.dp_replicate={replicas} needs parallel.dp_shard x parallel.cp of at least 2: "
        f"use dp_shard={replicas} and dp_replicate=1"
    )


HSDP = Rule(
    "HSDP (dp_replicate)",
    "with dp_shard x cp of at least 2",
    _replicas,
    (Breach("parallel.dp_replicate=2 needs parallel.dp_shard x parallel.cp of", {"parallel.dp_replicate": 2}),),
)


def _tensor(asked: Combination) -> str | None:
    tp, description = asked.parallel.tp, asked.description
    if tp == 1:
        return None
    sizes = {
        "attention heads": description.num_heads,
        "key-value heads": description.num_kv_heads,
        "tokens in the vocabulary": description.vocab_size,
        "columns in the MLP": description.mlp_size,
        "columns in the shared experts": description.shared_expert_size,
    }
    for what, size in sizes.items():
        if size % tp:
            return f"parallel.tp={tp} must divide the {size} {what}: use a smaller tp"
    return None


TENSOR_PARALLEL = Rule(
    "tensor parallel (tp)",
    "every family; tp divides heads, KV heads, MLP, shared experts and vocabulary",
    _tensor,
    (
        *(
            Breach(f"parallel.tp=2 must divide the 7 {what}", {key: 7}, {"parallel.tp": 2})
            for key, what in (
                ("description.num_heads", "attention heads"),
                ("description.num_kv_heads", "key-value heads"),
                ("description.vocab_size", "tokens in the vocabulary"),
                ("description.mlp_size", "columns in the MLP"),
                ("description.shared_expert_size", "columns in the shared experts"),
            )
        ),
    ),
)


def _sequence_parallel(asked: Combination) -> str | None:
    if not asked.parallel.sequence_parallel or asked.parallel.tp > 1:
        return None
    return "parallel.sequence_parallel=true needs parallel.tp of at least 2: set it to false, or raise tp"


SEQUENCE_PARALLEL = Rule(
    "sequence parallel",
    "with tp",
    _sequence_parallel,
    (Breach("parallel.sequence_parallel=true needs parallel.tp of at least 2", {"parallel.sequence_parallel": True}),),
)


def _linear_attention(asked: Combination) -> str | None:
    heads, ranks = asked.description.num_linear_heads, asked.parallel.cp * asked.parallel.tp
    if heads == 0 or heads % ranks == 0:
        return None
    return (
        f"parallel.cp x parallel.tp = {ranks} must divide the {heads} key heads of linear attention, which these ranks "
        "share: lower one of them"
    )


CONTEXT_PARALLEL = Rule(
    "context parallel (cp)",
    "every model and schedule; every attention backend, but windows with te; cp x tp divides the key heads of linear "
    "attention",
    _linear_attention,
    (
        Breach(
            "parallel.cp x parallel.tp = 4 must divide the 6 key heads of linear attention",
            {"description.num_linear_heads": 6},
            {"parallel.cp": 4, "description.family": "qwen3_5_text"},
        ),
    ),
)


def _recomputation(asked: Combination) -> str | None:
    if asked.memory.recomputed != "selective" or not asked.splits_backward:
        return None
    return (
        f"memory.activation_checkpointing=selective: {asked.parallel.schedule} goes through the backward twice, which "
        "it cannot: use full, or another parallel.schedule"
    )


RECOMPUTATION = Rule(
    "activation checkpointing",
    "full: everywhere; selective: with schedules that do not split the backward",
    _recomputation,
    (
        Breach(
            "memory.activation_checkpointing=selective: ZBVZeroBubble goes through the backward twice, which it",
            {"memory.activation_checkpointing": "selective"},
            _SPLIT_BACKWARD,
        ),
    ),
)


def why_not_compiled(asked: Combination) -> str | None:
    """Why layers cannot be compiled, with the remedy; None if they can."""
    reason = None
    if asked.splits_backward:
        reason = (
            f"{asked.parallel.schedule} splits the backward, which compiled layers do not allow: set it to auto, or "
            "use another parallel.schedule"
        )
    elif asked.family.is_moe and asked.model.implementation != "transformers":
        reason = (
            f"layers of {asked.model.implementation}'s mixtures do not compile: set it to auto, or use "
            "model.implementation=transformers"
        )
    elif asked.family.is_moe and asked.memory.recomputed == "selective":
        reason = (
            "compiled layers of a mixture do not show memory.activation_checkpointing=selective what to keep: set it "
            "to auto, or use full or none"
        )
    return reason


def _compiled(asked: Combination) -> str | None:
    reason = why_not_compiled(asked) if asked.memory.compile is True else None
    return None if reason is None else f"memory.compile=true: {reason}"


COMPILED = Rule(
    "compiled layers",
    "with schedules that do not split the backward; mixtures of transformers, not with selective",
    _compiled,
    (
        Breach("memory.compile=true: ZBVZeroBubble splits the backward", {"memory.compile": True}, _SPLIT_BACKWARD),
        Breach(
            "memory.compile=true: layers of nemo_automodel's mixtures do not compile",
            {"memory.compile": True},
            {**MIXTURE, "model.implementation": "nemo_automodel"},
        ),
        Breach(
            "memory.compile=true: compiled layers of a mixture do not show memory.activation_checkpointing=selective",
            {"memory.compile": True},
            {**MIXTURE, "memory.activation_checkpointing": "selective"},
        ),
    ),
)


def _experts(asked: Combination) -> str | None:
    ep, description = asked.parallel.ep, asked.description
    if ep == 1:
        return None
    if not asked.family.is_moe:
        return f"parallel.ep={ep}: a {description.family!r} model has no experts: use ep=1"
    ranks = asked.parallel.expert_ranks
    if ranks % ep:
        return (
            f"parallel.ep={ep} must divide parallel.dp_shard x parallel.cp x parallel.tp = {ranks}, the ranks "
            "that share the experts: change one of them"
        )
    if asked.parallel.tp > 1 and not asked.parallel.sequence_parallel:
        return (
            f"parallel.ep={ep} with parallel.tp={asked.parallel.tp} needs parallel.sequence_parallel=true, so that "
            "each rank sends its own tokens: set it, or use ep=1"
        )
    if description.num_experts % ep:
        return f"parallel.ep={ep} must divide the model's {description.num_experts} experts: use another ep"
    return None


EXPERT_PARALLEL = Rule(
    "expert parallel (ep)",
    f"{', '.join(MOE_FAMILIES)}; ep divides experts and dp_shard x cp x tp",
    _experts,
    (
        Breach("parallel.ep=2: a 'qwen3' model has no experts", {"parallel.ep": 2}, {"parallel.dp_shard": 2}),
        Breach("parallel.ep=2 must divide parallel.dp_shard x parallel.cp x", {"parallel.ep": 2}, MIXTURE),
        Breach(
            "parallel.ep=2 with parallel.tp=2 needs parallel.sequence_parallel=true",
            {"parallel.ep": 2},
            {**MIXTURE, "parallel.tp": 2},
        ),
        Breach("parallel.ep=4 must divide the model's 6 experts", {"parallel.ep": 4}, {**MIXTURE, "parallel.cp": 4}),
    ),
)
