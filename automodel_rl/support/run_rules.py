"""Rules of runs. They do not judge a model that is loaded without a run."""

from automodel_rl.support.model_rules import MIXTURE, MOE_FAMILIES
from automodel_rl.support.rule import Breach, Combination, Rule

_GRPO = {"algorithm": "grpo"}


def _router_replay(asked: Combination) -> str | None:
    run = asked.generation
    if run is None or not run.router_replay.enabled or asked.description.num_experts:
        return None
    name = asked.description.family
    return f"router_replay.enabled=true: a {name!r} model has no routers: set it to false, or use a mixture"


ROUTER_REPLAY = Rule(
    "router replay",
    f"{', '.join(MOE_FAMILIES)}; every layout, schedule and recomputation; any generator",
    _router_replay,
    (
        Breach(
            "router_replay.enabled=true: a 'qwen3' model has no routers: set it to false, or use a mixture",
            {"description.family": "qwen3", "description.num_experts": 0},
            {**_GRPO, **MIXTURE, "router_replay.enabled": True},
        ),
    ),
)


def _quantized_rollout(asked: Combination) -> str | None:
    run, method = asked.generation, asked.description.quantization
    if run is None or run.rollout.generator.kind != "vllm" or not method:
        return None
    return (
        f"rollout.generator=vllm: it would keep the {method} weights of model.path, and a weight sync sends plain "
        "ones: make a plain copy with automodel-rl export and name it as model.path"
    )


QUANTIZED_ROLLOUT = Rule(
    "vLLM (grpo)",
    "every supported model with plain weights",
    _quantized_rollout,
    (
        Breach(
            "rollout.generator=vllm: it would keep the mxfp4 weights of model.path",
            {"description.quantization": "mxfp4"},
            {**_GRPO, "rollout.generator": "vllm"},
        ),
    ),
)


def _rollout_length(asked: Combination) -> str | None:
    run, context = asked.generation, asked.description.context
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
    (
        Breach(
            "rollout.max_prompt_tokens + rollout.max_new_tokens = 17 is more than the model's context of 16 tokens",
            {"rollout.max_prompt_tokens": 9},
            {**_GRPO, "rollout.max_prompt_tokens": 8, "rollout.max_new_tokens": 8, "description.context": 16},
        ),
    ),
)


def _rollout_offload(asked: Combination) -> str | None:
    run = asked.run
    if run is None or run.generation is not None or asked.memory.offload is None:
        return None
    return "memory.offload.during=rollout: only grpo has rollouts: leave memory.offload out"


ROLLOUT_OFFLOAD = Rule(
    "trainer on the host during rollouts",
    "grpo, every layout",
    _rollout_offload,
    (
        Breach(
            "memory.offload.during=rollout: only grpo has rollouts",
            {"memory.offload": {}},
            {"algorithm": "dpo"},
        ),
    ),
)
