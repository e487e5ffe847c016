"""Rules for layouts and memory-saving settings."""

import itertools

from automodel_rl.parallel.pipeline.schedules import SCHEDULES, refuse_schedule
from automodel_rl.parallel.pipeline.split import layers_per_stage, refuse_split
from automodel_rl.support import features as f
from automodel_rl.support.combination import Combination
from automodel_rl.support.model_rules import MOE_FAMILIES
from automodel_rl.support.rule import Rule


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
)


def _stages(asked: Combination) -> str | None:
    return refuse_split(asked.description.num_layers, asked.parallel)


STAGES = Rule(
    "layers of a stage",
    "any split, also uneven",
    _stages,
)


def _shared_keys(asked: Combination) -> str | None:
    if asked.parallel.pp == 1 or not asked.description.shares_keys:
        return None
    return (
        f"parallel.pp={asked.parallel.pp}: layers of this {asked.description.family!r} model take keys and values of "
        "earlier layers, or embeddings of their own, which are not sent between stages: use pp=1 and dp_shard"
    )


SHARED_KEYS = Rule(
    "keys and values of earlier layers, per-layer embeddings (Gemma 4 E2B, E4B)",
    "every axis but pp",
    _shared_keys,
)


def _chosen_keys(asked: Combination) -> str | None:
    parallel, taking = asked.parallel, asked.description.taking_layers
    if parallel.pp == 1 or not taking:
        return None
    starts = [0, *itertools.accumulate(layers_per_stage(asked.description.num_layers, parallel))][:-1]
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
    features=(f.TP,),
)


def _sequence_parallel(asked: Combination) -> str | None:
    if not asked.parallel.sequence_parallel or asked.parallel.tp > 1:
        return None
    return "parallel.sequence_parallel=true needs parallel.tp of at least 2: set it to false, or raise tp"


SEQUENCE_PARALLEL = Rule(
    "sequence parallel",
    "with tp",
    _sequence_parallel,
)


def _token_mixers(asked: Combination) -> str | None:
    heads, ranks = asked.description.num_mixer_heads, asked.parallel.cp * asked.parallel.tp
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


def _exchanged_heads(asked: Combination) -> str | None:
    parallel, description = asked.parallel, asked.description
    if parallel.cp_exchange == "all_gather":
        return None
    what = f"parallel.cp_exchange={parallel.cp_exchange}"
    if parallel.cp == 1:
        return f"{what} needs parallel.cp of at least 2: remove it, or raise cp"
    if asked.family.index_rotary:
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


def _experts(asked: Combination) -> str | None:
    ep, description = asked.parallel.ep, asked.description
    if ep == 1:
        return None
    if not description.num_experts:
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
)
