"""Rules for layouts and memory-saving settings."""

import itertools

from automodel_rl.parallel.pipeline.schedules import SCHEDULES, refuse_schedule
from automodel_rl.parallel.pipeline.split import layers_per_stage, refuse_split
from automodel_rl.support import features as f
from automodel_rl.support.combination import Combination
from automodel_rl.support.model_rules import MOE_FAMILIES
from automodel_rl.support.rule import Rule


def _schedule(combination: Combination) -> str | None:
    if combination.parallel.pp > 1:
        return refuse_schedule(combination.parallel)
    virtual_stages = combination.parallel.virtual_stages
    if virtual_stages == 1:
        return None
    return f"parallel.virtual_stages={virtual_stages} needs parallel.pp of at least 2: use virtual_stages=1"


SCHEDULE = Rule(
    "pipeline schedules",
    ", ".join(f"{name} (torch 2.13)" if rule.splits_backward else name for name, rule in SCHEDULES.items()),
    _schedule,
)


def _stages(combination: Combination) -> str | None:
    return refuse_split(combination.description.num_layers, combination.parallel)


STAGES = Rule(
    "layers of a stage",
    "any split, also uneven",
    _stages,
)


def _shared_keys(combination: Combination) -> str | None:
    if combination.parallel.pp == 1 or not combination.description.shares_keys:
        return None
    return (
        f"parallel.pp={combination.parallel.pp}: layers of this {combination.description.family!r} model take keys and "
        "values of earlier layers, or embeddings of their own, which are not sent between stages: use pp=1 and dp_shard"
    )


SHARED_KEYS = Rule(
    "keys and values of earlier layers, per-layer embeddings (Gemma 4 E2B, E4B)",
    "every axis but pp",
    _shared_keys,
)


def _chosen_keys(combination: Combination) -> str | None:
    parallel, taking = combination.parallel, combination.description.shared_index_layers
    if parallel.pp == 1 or not taking:
        return None
    starts = [0, *itertools.accumulate(layers_per_stage(combination.description.num_layers, parallel))][:-1]
    cut = [start for start in starts if start in taking]
    if not cut:
        return None
    number = next(start for start in range(cut[0], -1, -1) if start not in taking)
    return (
        f"parallel.pp={parallel.pp}: a stage begins with layer {cut[0]}, which uses the keys that layer {number} chose "
        f"(indexer_types): begin it with layer {number}, with parallel.layers_per_stage"
    )


CHOSEN_KEYS = Rule(
    "sparse attention with an indexer (DeepSeek-V3.2, GLM-5)",
    "every layout; pipeline stages begin with layers that choose keys themselves",
    _chosen_keys,
)
OPTIMIZERS = Rule(
    "optimizers",
    "adamw, adamw_8bit, muon: with every axis, with LoRA and with encoders; adamw_8bit with tp where a rank has whole "
    "blocks of 128 values of a row",
)

FSDP = Rule("FSDP2 (dp_shard)", "with every other axis")


RESHARDING = Rule(
    "gradients reduced after each microbatch (fsdp=reduce, reshard)",
    "with every other axis",
    features=(f.FSDP_EACH,),
)


def _replicas(combination: Combination) -> str | None:
    replicas = combination.parallel.dp_replicate
    if replicas == 1 or combination.parallel.fsdp_size > 1:
        return None
    return (
        f"parallel.dp_replicate={replicas} needs parallel.dp_shard x parallel.cp of at least 2: "
        f"use dp_shard={replicas} and dp_replicate=1"
    )


HSDP = Rule(
    "HSDP (dp_replicate)",
    "with dp_shard x cp of at least 2",
    _replicas,
)


def _tensor(combination: Combination) -> str | None:
    tp, description = combination.parallel.tp, combination.description
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
    features=(f.TP,),
)


def _sequence_parallel(combination: Combination) -> str | None:
    if not combination.parallel.sequence_parallel or combination.parallel.tp > 1:
        return None
    return "parallel.sequence_parallel=true needs parallel.tp of at least 2: set it to false, or raise tp"


SEQUENCE_PARALLEL = Rule(
    "sequence parallel",
    "with tp",
    _sequence_parallel,
)


def _token_mixers(combination: Combination) -> str | None:
    heads, ranks = combination.description.num_mixer_heads, combination.parallel.cp * combination.parallel.tp
    if heads == 0 or heads % ranks == 0:
        return None
    return (
        f"parallel.cp x parallel.tp = {ranks} must divide the {heads} heads (or channels) of layers without attention, "
        "which these ranks share: lower one of them"
    )


CONTEXT_PARALLEL = Rule(
    "context parallel (cp)",
    "every model and schedule; every attention backend, except windows with te; cp x tp divides heads and channels of "
    "linear attention, state spaces and convolutions",
    _token_mixers,
)


def _exchanged_heads(combination: Combination) -> str | None:
    parallel, description = combination.parallel, combination.description
    if parallel.cp_exchange == "all_gather":
        return None
    what = f"parallel.cp_exchange={parallel.cp_exchange}"
    if parallel.cp == 1:
        return f"{what} needs parallel.cp of at least 2: remove it, or raise cp"
    if combination.family.index_rotary:
        return f"{what}: indexers choose keys among all heads' tokens: use all_gather"
    ranks = parallel.cp * parallel.tp
    for name, heads in (("attention heads", description.num_heads), ("key-value heads", description.num_kv_heads)):
        if heads % ranks:
            return f"{what}: parallel.cp x parallel.tp = {ranks} must divide the {heads} {name}: use all_gather"
    return None


EXCHANGED_HEADS = Rule(
    "exchange of heads over cp (cp_exchange=all_to_all)",
    "every model without indexers; cp x tp divides heads and KV heads",
    _exchanged_heads,
    features=(f.EXCHANGED_HEADS,),
)


RECOMPUTATION = Rule("full recomputation (activation_checkpointing)", "everywhere, also with inputs on the host")
SELECTIVE = Rule(
    "selective recomputation (activation_checkpointing)",
    "every layout",
    features=(f.SELECTIVE,),
)


MLP_TILES = Rule(
    "MLPs in tiles (mlp_tile)",
    "dense models, every layout",
    features=(f.MLP_TILES,),
)


COMPILED = Rule(
    "compiled layers",
    "every model and layout",
    features=(f.COMPILED,),
)


def _experts(combination: Combination) -> str | None:
    ep, description = combination.parallel.ep, combination.description
    if ep == 1:
        return None
    if not description.num_experts:
        return f"parallel.ep={ep}: a {description.family!r} model has no experts: use ep=1"
    ranks = combination.parallel.expert_ranks
    if ranks % ep:
        return (
            f"parallel.ep={ep} must divide parallel.dp_shard x parallel.cp x parallel.tp = {ranks}, the ranks "
            "that share the experts: change one of them"
        )
    if combination.parallel.tp > 1 and not combination.parallel.sequence_parallel:
        return (
            f"parallel.ep={ep} with parallel.tp={combination.parallel.tp} needs parallel.sequence_parallel=true, so "
            "that each rank sends its own tokens: set it, or use ep=1"
        )
    if description.num_experts % ep:
        return f"parallel.ep={ep} must divide the model's {description.num_experts} experts: use another ep"
    return None


EXPERT_PARALLEL = Rule(
    "expert parallel (ep)",
    f"{', '.join(MOE_FAMILIES)}; ep divides experts and dp_shard x cp x tp",
    _experts,
)
