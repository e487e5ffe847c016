"""Pairs of features that do not work together, from which error messages and the table are generated.

Limits of attention backends are in attention.py, those of encoders in their families (families/).
"""

from dataclasses import dataclass

from automodel_rl.support import features as f
from automodel_rl.support.combination import Combination
from automodel_rl.support.features import Feature


@dataclass(frozen=True)
class Incompatibility:
    """Two features that do not work together.

    Attributes:
        feature: the feature that lacks the other.
        other: the other feature.
        reason: the reason.
        remedy: the remedy.
    """

    feature: Feature
    other: Feature
    reason: str
    remedy: str

    def refusal(self, combination: Combination) -> str | None:
        """Returns the error message for a combination that requests both features; otherwise None."""
        first, second = self.other.requested_as(combination), self.feature.requested_as(combination)
        return f"{first} with {second}: {self.reason}: {self.remedy}" if first and second else None


_PLAIN_CLASSES = "use model.implementation=transformers"
_AS_TEXT = ", or train its language model alone with model.text_only=true"
_PLAIN_GENERATOR = "use rollout.generator=transformers"

INCOMPATIBILITIES = (
    Incompatibility(
        f.NEMO, f.FLOAT64, "its classes keep rotary embeddings in float32", f"{_PLAIN_CLASSES} or model.dtype=float32"
    ),
    Incompatibility(f.NEMO, f.TP, "tensor parallelism splits transformers' classes only", _PLAIN_CLASSES),
    Incompatibility(
        f.NEMO, f.LORA, "adapters are added to transformers' classes only", f"{_PLAIN_CLASSES}, or remove lora"
    ),
    Incompatibility(f.NEMO, f.FP8, "fp8 layers replace those of transformers' classes only", _PLAIN_CLASSES),
    Incompatibility(f.NEMO, f.MULTIMODAL, "multimodal models use transformers' classes only", _PLAIN_CLASSES),
    Incompatibility(
        f.NEMO, f.AUX_LOSS, "routers of its mixtures do not return the scores that it needs", _PLAIN_CLASSES
    ),
    Incompatibility(f.NEMO, f.WINDOWED_MIXTURE, "its class has no sliding windows", _PLAIN_CLASSES),
    Incompatibility(
        f.NEMO_MIXTURE, f.COMPILED, "layers of its mixtures do not compile", f"set it to auto, or {_PLAIN_CLASSES}"
    ),
    Incompatibility(f.NEMO, f.LINEAR_HEAD, "it replaces the head of transformers' classes only", _PLAIN_CLASSES),
    Incompatibility(f.TP, f.LORA_DROPOUT, "ranks would drop different inputs", "set it to 0, or use parallel.dp_shard"),
    Incompatibility(f.TP, f.DORA, "ranks would hold parts of rows", "use dp_shard, pp or cp"),
    Incompatibility(f.TP, f.FP8, "split layers do not support fp8", "use tp=1"),
    Incompatibility(f.ENCODER_TP, f.LORA, "adapters are not split", "use dp_shard"),
    Incompatibility(f.WIDE, f.FP8, "fp8 layers take and return bfloat16", "use model.dtype=bfloat16"),
    Incompatibility(
        f.NARROW_MASTERS,
        f.LORA,
        "adapters are small, and everything else is in model.dtype already",
        "remove one of them",
    ),
    Incompatibility(f.NARROW_MASTERS, f.MUON, "its steps do not round weights", "use adamw or adamw_8bit"),
    Incompatibility(f.QUANTIZED_BASE, f.FP8, "it is multiplied in model.dtype", "use base=plain, or set fp8 to null"),
    Incompatibility(f.MULTIMODAL, f.FP8, "it has no fp8 layers", f"set it to null{_AS_TEXT}"),
    Incompatibility(
        f.SPLIT_BACKWARD,
        f.SELECTIVE,
        "it runs the backward twice, which selective does not support",
        "use full, or another parallel.schedule",
    ),
    Incompatibility(
        f.SPLIT_BACKWARD,
        f.FSDP_EACH,
        "it runs the backward twice, the first time without weight gradients to reduce",
        "use keep, or Interleaved1F1B",
    ),
    Incompatibility(
        f.SPLIT_BACKWARD,
        f.COMPILED,
        "compiled layers do not allow a split backward",
        "set it to auto, or use another parallel.schedule",
    ),
    Incompatibility(
        f.SELECTIVE_MIXTURE,
        f.COMPILED,
        "compiled layers of a mixture do not expose what to keep",
        "set it to auto, or use full or none",
    ),
    Incompatibility(f.NEMO, f.MLP_TILES, "tiles support transformers' classes only", _PLAIN_CLASSES),
    Incompatibility(f.MIXTURE, f.MLP_TILES, "experts get their tokens from the whole microbatch", "set it to null"),
    Incompatibility(
        f.SEQUENCE_PARALLEL,
        f.MLP_TILES,
        "ranks exchange the tokens of whole microbatches",
        "set it to null, or use cp instead of sequence_parallel",
    ),
    Incompatibility(f.MLP_TILES, f.SELECTIVE, "products in tiles are recomputed", "use full, offload or none"),
    Incompatibility(f.MLP_TILES, f.FP8, "fp8 layers scale the tokens of a microbatch", "set one of them to null"),
    Incompatibility(f.MLP_TILES, f.LORA_DROPOUT, "a tile would drop different inputs in the backward", "set it to 0"),
    Incompatibility(
        f.SPLIT_BACKWARD,
        f.MLP_TILES,
        "it runs the backward twice, tiles only once",
        "set it to null, or use another parallel.schedule",
    ),
    Incompatibility(f.EXPERT_ADAPTERS, f.DORA, "PEFT does not support it for adapters of experts", "set it to false"),
    Incompatibility(
        f.LORA_DROPOUT,
        f.DORA,
        "PEFT then also drops inputs of frozen weights, which is not supported",
        "set it to false",
    ),
    Incompatibility(
        f.EXPERT_ADAPTERS, f.LORA_DROPOUT, "PEFT does not support it for adapters of experts", "set it to 0"
    ),
    Incompatibility(
        f.COMPARED_LOGPROBS,
        f.LORA_DROPOUT,
        "dropout would change them at random",
        "set it to 0",
    ),
    Incompatibility(f.LORA, f.FROZEN, "everything but adapters and modules to save is frozen", "remove frozen"),
    Incompatibility(
        f.UNNAMED_PARTS,
        f.LORA,
        "PEFT has no names for its parts",
        "train it whole, and freeze parts with model.frozen",
    ),
    Incompatibility(
        f.MULTIMODAL,
        f.CONVERSATIONS,
        "prompts have media, which conversations do not support",
        f"remove tools, environment and agent{_AS_TEXT}",
    ),
    Incompatibility(
        f.MULTIMODAL, f.AUTO_MICROBATCHES, "its memory depends on its images or audio", f"set a number{_AS_TEXT}"
    ),
    Incompatibility(
        f.MULTIMODAL, f.SERVERS, "media is not sent to servers", f"let the ranks start vLLM, with kind vllm{_AS_TEXT}"
    ),
    Incompatibility(f.MULTIMODAL, f.JOINED, "media is not sent to generators that join", f"use another kind{_AS_TEXT}"),
    Incompatibility(f.MULTIMODAL, f.ADAPTERS_ALONE, "its generators get merged weights", f"use merged{_AS_TEXT}"),
    Incompatibility(
        f.EXCHANGED_HEADS,
        f.BIDIRECTIONAL_IMAGES,
        "it supports causal attention only",
        "use parallel.cp_exchange=all_gather",
    ),
    Incompatibility(f.VLLM, f.BIDIRECTIONAL_IMAGES, "vLLM computes causal attention within images", _PLAIN_GENERATOR),
    Incompatibility(f.VLLM, f.AUDIO, "audio is not sent to vLLM", _PLAIN_GENERATOR),
    Incompatibility(
        f.VLLM,
        f.HIDDEN_INTERLEAVING,
        "vLLM would rotate queries and keys in another order than transformers",
        "set it to true in config.json, in text_config",
    ),
    Incompatibility(
        f.VLLM,
        f.SENT_PLAIN,
        "vLLM would keep them, but a weight sync sends plain ones",
        "make a plain copy with automodel-rl export and set model.path to it; or, for a checkpoint in nf4, train "
        "adapters with weight_sync.adapters=alone",
    ),
    Incompatibility(f.MULTIMODAL, f.QUANTIZED_BASE, "its layers stay plain", f"use plain{_AS_TEXT}"),
    Incompatibility(
        f.QUANTIZED,
        f.ALONE_IN_TRANSFORMERS,
        "transformers' copy has other kinds of quantized layers",
        "use weight_sync.adapters=merged",
    ),
    Incompatibility(
        f.ADAPTERS_ALONE,
        f.OWN_NF4_BASE,
        "generators would use another base than the trainer",
        "use plain, or merged, or a checkpoint in nf4",
    ),
    Incompatibility(
        f.ALONE_IN_VLLM, f.DORA, "vLLM computes adapters without row magnitudes", "use weight_sync.adapters=merged"
    ),
    Incompatibility(f.REPLAYED_ROUTES, f.JOINED, "routes stay with ranks that lead generators", "use another kind"),
    Incompatibility(f.SERVERS, f.ADAPTERS_ALONE, "servers get whole weights", "use merged"),
    Incompatibility(
        f.SAVED_MODULES, f.ADAPTERS_ALONE, "these are not adapters, but generators need them", "use merged"
    ),
)
"""Pairs of features, in the order of checking."""


def refuse_incompatible_pairs(combination: Combination) -> str | None:
    """Returns the error message for the first unsupported pair of features; None if all pairs are supported."""
    return next((said for lack in INCOMPATIBILITIES if (said := lack.refusal(combination)) is not None), None)


def is_compatible(feature: Feature, combination: Combination) -> bool:
    """Whether an optional feature works with all features that a combination requests."""
    return not any(lack.other is feature and lack.feature.requested_as(combination) for lack in INCOMPATIBILITIES)


def incompatible_with(*features: Feature) -> str:
    """Returns the names of all features that do not work with the given ones, for the table."""
    lacks = [lack.other.name for lack in INCOMPATIBILITIES if lack.feature in features]
    of = [lack.feature.name for lack in INCOMPATIBILITIES if lack.other in features]
    return ", ".join(dict.fromkeys([*of, *lacks]))
