"""Rules of low-rank adapters."""

from automodel_rl.support.model_rules import NEMO_CLASSES
from automodel_rl.support.multimodal_rules import LLAVA
from automodel_rl.support.rule import Breach, Combination, Rule

GROUPED_MULTIPLE = 8
"""Sizes of bfloat16 matrices that torch's grouped products take: 16 bytes."""

VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks for which vLLM makes places; adapters of another rank get a larger place."""


def _lora(asked: Combination) -> str | None:
    lora, run = asked.model.lora, asked.run
    if lora is None:
        return None
    if asked.parallel.tp > 1 or asked.model.implementation != "transformers":
        return (
            "model.lora: adapters need parallel.tp=1 and model.implementation=transformers: set them, or leave lora out"
        )
    if "lm_head" in lora.targets:
        return (
            "model.lora.targets: lm_head cannot have adapters, for log-probabilities read its weight: remove it, or "
            "train it whole with modules_to_save"
        )
    if lora.has_experts and asked.model.dtype == "bfloat16" and lora.rank % GROUPED_MULTIPLE:
        return (
            f"model.lora.rank={lora.rank}: adapters of experts in bfloat16 need a multiple of {GROUPED_MULTIPLE}, or "
            "experts would be computed one by one: use one, or model.dtype=float32"
        )
    if lora.dropout and lora.has_experts:
        return f"model.lora.dropout={lora.dropout}: adapters of experts have none, and PEFT knows none: set it to 0"
    if lora.dropout and run is not None and run.compares_logprobs:
        return (
            f"model.lora.dropout={lora.dropout}: dpo and grpo compare log-probabilities, which dropout would change at "
            "random: set it to 0"
        )
    return None


LORA = Rule(
    "LoRA",
    "linear layers and experts of transformers models, experts in bfloat16 with ranks that are multiples of "
    f"{GROUPED_MULTIPLE}; with pp, cp, ep, dp; dropout with sft, but not on experts",
    _lora,
    (
        Breach("model.lora: adapters need parallel.tp=1 and", {"parallel.tp": 2}, {"model.lora": {}}),
        Breach("model.lora: adapters need parallel.tp=1 and", NEMO_CLASSES, {"model.lora": {}}),
        Breach(
            "model.lora.targets: lm_head cannot have adapters",
            {"model.lora": {"targets": ["q_proj", "lm_head"]}},
            {"model.lora": {"targets": ["q_proj"]}},
        ),
        Breach(
            "model.lora.rank=4: adapters of experts in bfloat16 need a multiple of 8",
            {"model.lora": {"rank": 4, "targets": ["experts"]}},
            {"model.lora": {"targets": ["experts"]}, "model.dtype": "bfloat16"},
        ),
        Breach(
            "model.lora.dropout=0.1: adapters of experts have none",
            {"model.lora": {"dropout": 0.1, "targets": ["experts"]}},
            {"model.lora": {"targets": ["experts"]}},
        ),
        Breach(
            "model.lora.dropout=0.1: dpo and grpo compare log-probabilities",
            {"model.lora": {"dropout": 0.1}},
            {"algorithm": "dpo"},
        ),
    ),
)


def _adapters_alone(asked: Combination) -> str | None:
    run, lora = asked.generation, asked.model.lora
    if run is None or run.weight_sync.adapters != "alone":
        return None
    if lora is None:
        return "weight_sync.adapters=alone needs model.lora: set it, or use merged"
    if asked.description.multimodal is not None:
        name = asked.description.multimodal
        return f"weight_sync.adapters=alone: generators of a {name!r} model get merged ones: use merged"
    if run.rollout.generator.kind == "servers":
        return "weight_sync.adapters=alone with rollout.generator=servers: servers get whole weights: use merged"
    if run.rollout.generator.kind == "vllm" and lora.rank > VLLM_RANKS[-1]:
        return f"weight_sync.adapters=alone: vLLM takes ranks up to {VLLM_RANKS[-1]}, not {lora.rank}: use merged"
    if lora.modules_to_save:
        return (
            f"weight_sync.adapters=alone: model.lora.modules_to_save={[*lora.modules_to_save]} are no adapters, and "
            "generators need them: use merged"
        )
    return None


ADAPTERS_ALONE = Rule(
    "adapters alone in weight syncs (grpo)",
    f"transformers generators, and vLLM but servers up to rank {VLLM_RANKS[-1]}; without modules to save; text models",
    _adapters_alone,
    (
        Breach(
            "weight_sync.adapters=alone needs model.lora: set it",
            {"weight_sync.adapters": "alone"},
            {"algorithm": "grpo"},
        ),
        Breach(
            "weight_sync.adapters=alone: generators of a 'llava' model get merged ones",
            {"weight_sync.adapters": "alone"},
            {"algorithm": "grpo", "model.lora": {}, **LLAVA},
        ),
        Breach(
            "weight_sync.adapters=alone with rollout.generator=servers",
            {"rollout.generator": {"kind": "servers", "urls": ["http://localhost:1"]}},
            {"algorithm": "grpo", "weight_sync.adapters": "alone", "model.lora": {}},
        ),
        Breach(
            "weight_sync.adapters=alone: vLLM takes ranks up to 512, not 1024",
            {"model.lora": {"rank": 1024}},
            {"algorithm": "grpo", "weight_sync.adapters": "alone", "model.lora": {}, "rollout.generator": "vllm"},
        ),
        Breach(
            "weight_sync.adapters=alone: model.lora.modules_to_save=['lm_head'] are no adapters",
            {"model.lora": {"modules_to_save": ["lm_head"]}},
            {"algorithm": "grpo", "weight_sync.adapters": "alone", "model.lora": {}},
        ),
    ),
)
