"""Rules for runs, which do not apply to models loaded without a run."""

from automodel_rl.support import features as f
from automodel_rl.support.combination import Combination
from automodel_rl.support.model_rules import MOE_FAMILIES
from automodel_rl.support.rule import Rule


def _router_replay(combination: Combination) -> str | None:
    run = combination.generation
    if run is None or not run.router_replay.enabled or combination.description.num_experts:
        return None
    name = combination.description.family
    return f"router_replay.enabled=true: a {name!r} model has no routers: set it to false, or use a mixture"


ROUTER_REPLAY = Rule(
    "router replay",
    f"{', '.join(MOE_FAMILIES)}; every layout, schedule and recomputation; any generator",
    _router_replay,
)


VLLM = Rule("vLLM (grpo)", "every supported model", features=(f.VLLM,))
JOINED = Rule("generators that join (grpo)", "every supported model", features=(f.JOINED,))
SERVERS = Rule("vLLM servers (grpo)", "every supported model", features=(f.SERVERS,))


def _rollout_length(combination: Combination) -> str | None:
    run, context = combination.generation, combination.description.context
    if run is None or context is None:
        return None
    longest = run.longest_sequence
    if longest <= context:
        return None
    return f"{run.longest_keys} = {longest} is more than the model's context of {context} tokens: lower one of them"


ROLLOUT_LENGTH = Rule(
    "prompt and completion (grpo)",
    "together within the model's context",
    _rollout_length,
)


def _rollout_offload(combination: Combination) -> str | None:
    run = combination.run
    if run is None or run.generation is not None or combination.memory.offload is None:
        return None
    return "memory.offload.during=rollout: only grpo and ppo have rollouts: remove memory.offload"


ROLLOUT_OFFLOAD = Rule(
    "trainer on the host during rollouts",
    "grpo, every layout",
    _rollout_offload,
)

VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Adapter ranks for which vLLM allocates slots; other ranks take the next larger one."""


def _adapters_alone(combination: Combination) -> str | None:
    run, lora = combination.generation, combination.model.lora
    if run is None or run.weight_sync.adapters != "alone":
        return None
    if lora is None:
        return "weight_sync.adapters=alone needs model.lora: set it, or use merged"
    if run.rollout.generator.kind == "vllm" and lora.rank > VLLM_RANKS[-1]:
        return f"weight_sync.adapters=alone: vLLM supports ranks up to {VLLM_RANKS[-1]}, not {lora.rank}: use merged"
    return None


ADAPTERS_ALONE = Rule(
    "adapters alone in weight syncs (grpo)",
    f"transformers generators, and vLLM up to rank {VLLM_RANKS[-1]}",
    _adapters_alone,
    features=(f.ADAPTERS_ALONE,),
)
