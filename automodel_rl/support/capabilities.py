"""Pairs of features that do not work together, from which error messages and the table are generated.

Limits of attention backends are in attention.py, those of encoders in their families (families/).
"""

from dataclasses import dataclass

from automodel_rl.support import features as f
from automodel_rl.support.combination import Combination
from automodel_rl.support.features import Feature


@dataclass(frozen=True)
class Lack:
    """Two features that do not work together.

    Attributes:
        of: the feature that lacks the other.
        lacks: the other feature.
        because: the reason.
        instead: the remedy.
    """

    of: Feature
    lacks: Feature
    because: str
    instead: str

    def refusal(self, asked: Combination) -> str | None:
        """Returns the error message for a combination that requests both features; otherwise None."""
        first, second = self.lacks.asked(asked), self.of.asked(asked)
        return f"{first} with {second}: {self.because}: {self.instead}" if first and second else None


_PLAIN_CLASSES = "use model.implementation=transformers"
_AS_TEXT = ", or train its language model alone with model.text_only=true"
_PLAIN_GENERATOR = "use rollout.generator=transformers"

LACKS = (
    Lack(
        f.NEMO, f.FLOAT64, "its classes keep rotary embeddings in float32", f"{_PLAIN_CLASSES} or model.dtype=float32"
    ),
    Lack(f.NEMO, f.TP, "tensor parallelism splits transformers' classes only", _PLAIN_CLASSES),
    Lack(f.NEMO, f.LORA, "adapters are added to transformers' classes only", f"{_PLAIN_CLASSES}, or remove lora"),
    Lack(f.NEMO, f.FP8, "fp8 layers replace those of transformers' classes only", _PLAIN_CLASSES),
    Lack(f.NEMO, f.MULTIMODAL, "multimodal models use transformers' classes only", _PLAIN_CLASSES),
    Lack(f.NEMO, f.AUX_LOSS, "routers of its mixtures do not return the scores that it needs", _PLAIN_CLASSES),
    Lack(f.NEMO, f.WINDOWED_MIXTURE, "its class has no sliding windows", _PLAIN_CLASSES),
    Lack(f.NEMO_MIXTURE, f.COMPILED, "layers of its mixtures do not compile", f"set it to auto, or {_PLAIN_CLASSES}"),
    Lack(f.NEMO, f.LINEAR_HEAD, "it replaces the head of transformers' classes only", _PLAIN_CLASSES),
    Lack(f.TP, f.LORA_DROPOUT, "ranks would drop different inputs", "set it to 0, or use parallel.dp_shard"),
    Lack(f.TP, f.DORA, "ranks would hold parts of rows", "use dp_shard, pp or cp"),
    Lack(f.TP, f.FP8, "split layers do not support fp8", "use tp=1"),
    Lack(f.ENCODER_TP, f.LORA, "adapters are not split", "use dp_shard"),
    Lack(f.WIDE, f.FP8, "fp8 layers take and return bfloat16", "use model.dtype=bfloat16"),
    Lack(
        f.NARROW_MASTERS,
        f.LORA,
        "adapters are small, and everything else is in model.dtype already",
        "remove one of them",
    ),
    Lack(f.NARROW_MASTERS, f.MUON, "its steps do not round weights", "use adamw or adamw_8bit"),
    Lack(f.BASE_IN_FEW_BITS, f.FP8, "it is multiplied in model.dtype", "use base=plain, or set fp8 to null"),
    Lack(f.MULTIMODAL, f.FP8, "it has no fp8 layers", f"set it to null{_AS_TEXT}"),
    Lack(
        f.SPLIT_BACKWARD,
        f.SELECTIVE,
        "it runs the backward twice, which selective does not support",
        "use full, or another parallel.schedule",
    ),
    Lack(
        f.SPLIT_BACKWARD,
        f.FSDP_EACH,
        "it runs the backward twice, the first time without weight gradients to reduce",
        "use keep, or Interleaved1F1B",
    ),
    Lack(
        f.SPLIT_BACKWARD,
        f.COMPILED,
        "compiled layers do not allow a split backward",
        "set it to auto, or use another parallel.schedule",
    ),
    Lack(
        f.SELECTIVE_MIXTURE,
        f.COMPILED,
        "compiled layers of a mixture do not expose what to keep",
        "set it to auto, or use full or none",
    ),
    Lack(f.NEMO, f.MLP_TILES, "tiles support transformers' classes only", _PLAIN_CLASSES),
    Lack(f.MIXTURE, f.MLP_TILES, "experts get their tokens from the whole microbatch", "set it to null"),
    Lack(
        f.SEQUENCE_PARALLEL,
        f.MLP_TILES,
        "ranks exchange the tokens of whole microbatches",
        "set it to null, or use cp instead of sequence_parallel",
    ),
    Lack(f.MLP_TILES, f.SELECTIVE, "products in tiles are recomputed", "use full, offload or none"),
    Lack(f.MLP_TILES, f.FP8, "fp8 layers scale the tokens of a microbatch", "set one of them to null"),
    Lack(f.MLP_TILES, f.LORA_DROPOUT, "a tile would drop different inputs in the backward", "set it to 0"),
    Lack(
        f.SPLIT_BACKWARD,
        f.MLP_TILES,
        "it runs the backward twice, tiles only once",
        "set it to null, or use another parallel.schedule",
    ),
    Lack(f.EXPERT_ADAPTERS, f.DORA, "PEFT does not support it for adapters of experts", "set it to false"),
    Lack(
        f.LORA_DROPOUT,
        f.DORA,
        "PEFT then also drops inputs of frozen weights, which is not supported",
        "set it to false",
    ),
    Lack(f.EXPERT_ADAPTERS, f.LORA_DROPOUT, "PEFT does not support it for adapters of experts", "set it to 0"),
    Lack(
        f.COMPARED_LOGPROBS,
        f.LORA_DROPOUT,
        "dropout would change them at random",
        "set it to 0",
    ),
    Lack(f.LORA, f.FROZEN, "everything but adapters and modules to save is frozen", "remove frozen"),
    Lack(
        f.UNNAMED_PARTS,
        f.LORA,
        "PEFT has no names for its parts",
        "train it whole, and freeze parts with model.frozen",
    ),
    Lack(
        f.MULTIMODAL,
        f.CONVERSATIONS,
        "prompts have media, which conversations do not support",
        f"remove tools, environment and agent{_AS_TEXT}",
    ),
    Lack(f.MULTIMODAL, f.AUTO_MICROBATCHES, "its memory depends on its images or audio", f"set a number{_AS_TEXT}"),
    Lack(
        f.MULTIMODAL, f.SERVERS, "media is not sent to servers", f"let the ranks start vLLM, with kind vllm{_AS_TEXT}"
    ),
    Lack(f.MULTIMODAL, f.JOINED, "media is not sent to generators that join", f"use another kind{_AS_TEXT}"),
    Lack(f.MULTIMODAL, f.ADAPTERS_ALONE, "its generators get merged weights", f"use merged{_AS_TEXT}"),
    Lack(
        f.EXCHANGED_HEADS,
        f.BIDIRECTIONAL_IMAGES,
        "it supports causal attention only",
        "use parallel.cp_exchange=all_gather",
    ),
    Lack(f.VLLM, f.BIDIRECTIONAL_IMAGES, "vLLM computes causal attention within images", _PLAIN_GENERATOR),
    Lack(f.VLLM, f.AUDIO, "audio is not sent to vLLM", _PLAIN_GENERATOR),
    Lack(
        f.VLLM,
        f.HIDDEN_INTERLEAVING,
        "vLLM would rotate queries and keys in another order than transformers",
        "set it to true in config.json, in text_config",
    ),
    Lack(
        f.VLLM,
        f.SENT_PLAIN,
        "vLLM would keep them, but a weight sync sends plain ones",
        "make a plain copy with automodel-rl export and set model.path to it; or, for a checkpoint in nf4, train "
        "adapters with weight_sync.adapters=alone",
    ),
    Lack(f.MULTIMODAL, f.BASE_IN_FEW_BITS, "its layers stay plain", f"use plain{_AS_TEXT}"),
    Lack(
        f.QUANTIZED,
        f.ALONE_IN_TRANSFORMERS,
        "transformers' copy has other kinds of quantized layers",
        "use weight_sync.adapters=merged",
    ),
    Lack(
        f.ADAPTERS_ALONE,
        f.OWN_NF4_BASE,
        "generators would use another base than the trainer",
        "use plain, or merged, or a checkpoint in nf4",
    ),
    Lack(f.ALONE_IN_VLLM, f.DORA, "vLLM computes adapters without row magnitudes", "use weight_sync.adapters=merged"),
    Lack(f.REPLAYED_ROUTES, f.JOINED, "routes stay with ranks that lead generators", "use another kind"),
    Lack(f.SERVERS, f.ADAPTERS_ALONE, "servers get whole weights", "use merged"),
    Lack(f.SAVED_MODULES, f.ADAPTERS_ALONE, "these are not adapters, but generators need them", "use merged"),
)
"""Pairs of features, in the order of checking."""


def refuse_pairs(asked: Combination) -> str | None:
    """Returns the error message for the first unsupported pair of features; None if all pairs are supported."""
    return next((said for lack in LACKS if (said := lack.refusal(asked)) is not None), None)


def goes_with_all(feature: Feature, asked: Combination) -> bool:
    """Whether an optional feature works with all features that a combination requests."""
    return not any(lack.lacks is feature and lack.of.asked(asked) for lack in LACKS)


def without(*features: Feature) -> str:
    """Returns the names of all features that do not work with the given ones, for the table."""
    lacks = [lack.lacks.name for lack in LACKS if lack.of in features]
    of = [lack.of.name for lack in LACKS if lack.lacks in features]
    return ", ".join(dict.fromkeys([*of, *lacks]))
