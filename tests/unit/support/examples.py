"""Examples of what the table refuses."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from automodel_rl.support.description import EncoderDescription

Keys = Mapping[str, Any]
"""Values by dotted key. A key is one of a config, as in a file, or one of a model's `description`."""


@dataclass(frozen=True)
class Breach:
    """An example of a refusal. Without `asks` it is supported, so nothing else has a part in the refusal.

    Attributes:
        says: the beginning of the refusal.
        asks: the keys that are refused.
        beside: further keys, which are supported without `asks`.
    """

    says: str
    asks: Keys
    beside: Keys = field(default_factory=dict)


MIXTURE = {"description.family": "qwen3_moe", "description.num_experts": 6}
NEMO_CLASSES = {"model.implementation": "nemo_automodel"}
_GRPO = {"algorithm": "grpo"}
_FP8 = {"model.fp8": "rowwise"}
_EXCHANGED = {"parallel.cp_exchange": "all_to_all"}
_DORA = {"model.lora": {"dora": True}}
_MASTERS = {"model.master_dtype": "bfloat16"}
_SPLIT_BACKWARD = {"parallel.pp": 2, "parallel.schedule": "ZBVZeroBubble", "parallel.virtual_stages": 2}
LLAVA = {
    "description.family": "llama",
    "description.multimodal": "llava",
    "description.encoders": {"vision": EncoderDescription("clip_vision_model", num_heads=3)},
}
_QWEN = {
    "description.family": "qwen2_5_vl_text",
    "description.multimodal": "qwen2_5_vl",
    "description.encoders": {"vision": EncoderDescription("qwen2_5_vl_vision")},
}
_AUDIO = {
    "description.family": "qwen2",
    "description.multimodal": "qwen2_audio",
    "description.encoders": {"audio": EncoderDescription("qwen2_audio_encoder", num_heads=4)},
}
_OMNI = {
    "description.family": "qwen2_5_omni_text",
    "description.multimodal": "qwen2_5_omni_thinker",
    "description.encoders": {
        "vision": EncoderDescription("qwen2_5_omni_vision_encoder"),
        "audio": EncoderDescription("qwen2_5_omni_audio_encoder"),
    },
}
_FOUR_HEADS = {"description.encoders": {"vision": EncoderDescription("clip_vision_model", num_heads=4)}}
_ON_TWO_RANKS = {"ranks": "0-1", "dp_shard": 2}
_SPLIT = {"ranks": "0-1", "tp": 2}
_DATA_RANKS = {"components": {"vision": _ON_TWO_RANKS, "language": _ON_TWO_RANKS}}
_SPLIT_ENCODER = {"components": {"vision": _SPLIT, "language": _ON_TWO_RANKS}}
_HEARING = {"components": {"audio": _ON_TWO_RANKS, "language": _ON_TWO_RANKS}}
_SPLIT_HEARING = {"components": {"audio": _SPLIT, "language": _ON_TWO_RANKS}}

EXAMPLES = (
    # model_rules FAMILY
    Breach(
        "model.path: a 'gpt2' model with implementation transformers is not supported: use one of llama, mistral,",
        {"description.family": "gpt2"},
    ),
    Breach(
        "model.path: a 'qwen2' model with implementation nemo_automodel is not supported: use one of llama, qwen3",
        NEMO_CLASSES,
        {"description.family": "qwen2"},
    ),
    # model_rules NEMO
    Breach(
        "model.moe.aux_loss=0.1 with model.implementation=nemo_automodel: routers of its mixtures do",
        {"model.moe.aux_loss": 0.1},
        {**NEMO_CLASSES, **MIXTURE},
    ),
    Breach(
        "the sliding windows of a 'qwen3_moe' model with model.implementation=nemo_automodel: its class",
        NEMO_CLASSES,
        {**MIXTURE, "description.has_windows": True},
    ),
    Breach(
        "model.num_labels=1 with model.implementation=nemo_automodel: it replaces the head",
        NEMO_CLASSES,
        {"algorithm": "reward"},
    ),
    Breach(
        "model.dtype=float64 with model.implementation=nemo_automodel: its classes keep rotary embeddings in float32",
        {"model.dtype": "float64"},
        NEMO_CLASSES,
    ),
    Breach(
        "parallel.tp=2 with model.implementation=nemo_automodel: tensor parallelism splits",
        NEMO_CLASSES,
        {"parallel.tp": 2},
    ),
    # model_rules QUANTIZED
    Breach(
        "rollout.generator=transformers with nf4 weights: transformers' copy has other kinds of quantized layers",
        {"description.quantization": "nf4"},
        {**_GRPO, "model.lora": {}, "weight_sync.adapters": "alone"},
    ),
    Breach("model.path: the weights are quantized by 'awq', but only", {"description.quantization": "awq"}),
    # layout_rules SHARED_KEYS
    Breach(
        "parallel.pp=2: layers of this 'qwen3' model take keys and values of earlier layers",
        {"description.shares_keys": True},
        {"parallel.pp": 2},
    ),
    # layout_rules CHOSEN_KEYS
    Breach(
        "parallel.pp=2: a stage begins with layer 2, which uses the keys that layer 1 chose",
        {"description.shared_index_layers": (2, 3)},
        {"parallel.pp": 2},
    ),
    # model_rules NOISE
    Breach("model.path: config.json has resid_pdrop=0.1", {"description.noise": {"resid_pdrop": 0.1}}),
    # model_rules BIDIRECTIONAL
    Breach("model.path: config.json has use_bidirectional_attention", {"description.is_bidirectional": True}),
    # model_rules ROTARY
    Breach("model.path: config.json has rope_type=dynamic", {"description.rope_types": ("dynamic",)}),
    Breach("model.path: config.json has rope_type=longrope", {"description.rope_types": ("default", "longrope")}),
    # model_rules ATTENTION_BACKENDS
    Breach(
        "model.attention=sdpa: this model has a soft cap in its attention: use eager",
        {"model.attention": "sdpa"},
        {"description.family": "gemma2", "description.has_softcap": True},
    ),
    Breach(
        "model.attention=sdpa: this model has sinks in its attention: use eager or varlen or fa3",
        {"model.attention": "sdpa"},
        {"description.family": "gpt_oss"},
    ),
    Breach(
        "model.attention=te computes in bfloat16, not float32",
        {"model.dtype": "float32"},
        {"model.attention": "te"},
    ),
    Breach(
        "model.attention=varlen computes in bfloat16, not float64",
        {"model.attention": "varlen"},
        {"model.dtype": "float64"},
    ),
    Breach(
        "model.attention=te with parallel.cp=2: it does not support sliding windows with cp: use varlen",
        {"parallel.cp": 2},
        {"model.attention": "te", "description.has_windows": True},
    ),
    # model_rules FLOAT8
    Breach("model.fp8=rowwise with model.dtype=float32: fp8 layers take", {"model.dtype": "float32"}, _FP8),
    Breach(
        "model.lora.base=stored: the checkpoint has no quantized weights",
        {"model.lora": {"base": "stored"}},
        {"model.lora": {"base": "plain"}},
    ),
    Breach("model.lora with model.master_dtype=bfloat16: adapters are small", {"model.lora": {"rank": 4}}, _MASTERS),
    Breach("optimizer.name=muon with model.master_dtype=bfloat16", {"optimizer.name": "muon"}, _MASTERS),
    Breach(
        "model.fp8=rowwise with model.lora.base=nf4: it is multiplied in model.dtype",
        {"model.lora": {"base": "nf4"}},
        _FP8,
    ),
    Breach("model.fp8=rowwise with parallel.tp=2: split layers", {"parallel.tp": 2}, _FP8),
    Breach("model.fp8=rowwise with model.implementation=nemo_automodel", NEMO_CLASSES, _FP8),
    Breach(
        "model.fp8=rowwise with a 'llava' model: it has no fp8 layers",
        _FP8,
        LLAVA,
    ),
    # model_rules MTP
    Breach("model.mtp: layers for multi-token prediction of 'qwen3' cannot be trained", {"model.mtp": {}}),
    Breach(
        "model.mtp: its layer is trained in full, but model.lora freezes it",
        {"model.mtp": {}, "model.lora": {}},
        {"description.family": "deepseek_v3", "description.num_experts": 8},
    ),
    Breach(
        "model.mtp: only transformers' classes have its layer",
        {"model.mtp": {}, "model.implementation": "nemo_automodel"},
        {"description.family": "deepseek_v3", "description.num_experts": 8},
    ),
    Breach(
        "model.mtp: it needs the vocabulary head",
        {"model.mtp": {}},
        {
            "algorithm": "reward",
            "model.num_labels": 1,
            "description.family": "deepseek_v3",
            "description.num_experts": 8,
        },
    ),
    Breach(
        "model.mtp: it does not work with encoders",
        {"model.mtp": {}},
        {"description.family": "qwen3_5_text", "description.multimodal": "qwen3_5"},
    ),
    # model_rules INDEXER
    Breach("model.indexer: a 'qwen3' model has no indexers", {"model.indexer": {}}),
    Breach(
        "model.indexer: indexers are trained in full, but model.lora freezes them",
        {"model.indexer": {}, "model.lora": {}},
        {"description.family": "deepseek_v32", "description.num_experts": 8},
    ),
    # model_rules ROUTERS
    Breach("model.moe.aux_loss=0.1: a 'qwen3' model has no softmax router", {"model.moe": {"aux_loss": 0.1}}),
    Breach(
        "model.moe.aux_loss=0.1: a 'deepseek_v3' model has no softmax router",
        {"model.moe": {"aux_loss": 0.1}},
        {"description.family": "deepseek_v3", "description.num_experts": 8},
    ),
    Breach(
        "model.moe.bias_update_rate=0.1: the routers of a 'qwen3_moe' model have no bias: set it to 0",
        {"model.moe": {"bias_update_rate": 0.1}},
        MIXTURE,
    ),
    # layout_rules SCHEDULE
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
    # layout_rules STAGES
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
    # layout_rules RESHARDING
    Breach(
        "parallel.fsdp=reshard with parallel.schedule=ZBVZeroBubble: it runs the backward",
        {"parallel.fsdp": "reshard"},
        _SPLIT_BACKWARD,
    ),
    # layout_rules HSDP
    Breach("parallel.dp_replicate=2 needs parallel.dp_shard x parallel.cp of", {"parallel.dp_replicate": 2}),
    # layout_rules TENSOR_PARALLEL
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
    # layout_rules SEQUENCE_PARALLEL
    Breach("parallel.sequence_parallel=true needs parallel.tp of at least 2", {"parallel.sequence_parallel": True}),
    # layout_rules EXCHANGED_HEADS
    Breach("parallel.cp_exchange=all_to_all needs parallel.cp of at least 2", _EXCHANGED),
    Breach(
        "parallel.cp_exchange=all_to_all: parallel.cp x parallel.tp = 4 must divide the 6 key-value heads",
        {"parallel.cp": 4, **_EXCHANGED},
        {"description.num_heads": 12, "description.num_kv_heads": 6},
    ),
    Breach(
        "parallel.cp_exchange=all_to_all: indexers choose keys among all heads' tokens",
        {"parallel.cp": 2, **_EXCHANGED},
        {"description.family": "deepseek_v32"},
    ),
    Breach(
        "images of a 'gemma3' model with parallel.cp_exchange=all_to_all: it supports causal attention",
        {"parallel.cp": 2, **_EXCHANGED},
        {
            "description.family": "gemma3_text",
            "description.multimodal": "gemma3",
            "description.is_bidirectional_in_images": True,
        },
    ),
    # layout_rules CONTEXT_PARALLEL
    Breach(
        "parallel.cp x parallel.tp = 4 must divide the 6 heads (or channels) of layers without attention",
        {"description.num_mixer_heads": 6},
        {"parallel.cp": 4, "description.family": "qwen3_5_text"},
    ),
    # layout_rules RECOMPUTATION
    Breach(
        "memory.activation_checkpointing=selective with parallel.schedule=ZBVZeroBubble: it runs",
        {"memory.activation_checkpointing": "selective"},
        _SPLIT_BACKWARD,
    ),
    # layout_rules COMPILED
    Breach(
        "memory.compile=true with parallel.schedule=ZBVZeroBubble: compiled layers do not allow a split backward",
        {"memory.compile": True},
        _SPLIT_BACKWARD,
    ),
    Breach(
        "memory.compile=true with model.implementation=nemo_automodel: layers of its mixtures do not compile",
        {"memory.compile": True},
        {**MIXTURE, "model.implementation": "nemo_automodel"},
    ),
    Breach(
        "memory.compile=true with memory.activation_checkpointing=selective: compiled layers of a",
        {"memory.compile": True},
        {**MIXTURE, "memory.activation_checkpointing": "selective"},
    ),
    # layout_rules MLP_TILES
    Breach(
        "memory.mlp_tile=64 with model.implementation=nemo_automodel: tiles support",
        {"memory.mlp_tile": 64},
        NEMO_CLASSES,
    ),
    Breach("memory.mlp_tile=64 with a 'qwen3_moe' model: experts get their tokens", {"memory.mlp_tile": 64}, MIXTURE),
    Breach(
        "memory.activation_checkpointing=selective with memory.mlp_tile=64: products in tiles are recomputed",
        {"memory.activation_checkpointing": "selective"},
        {"memory.mlp_tile": 64},
    ),
    Breach("model.fp8=rowwise with memory.mlp_tile=64: fp8 layers scale", _FP8, {"memory.mlp_tile": 64}),
    Breach(
        "model.lora.dropout=0.1 with memory.mlp_tile=64: a tile would drop different inputs",
        {"model.lora": {"dropout": 0.1}},
        {"memory.mlp_tile": 64},
    ),
    Breach(
        "memory.mlp_tile=64 with parallel.schedule=ZBVZeroBubble: it runs the backward twice",
        {"memory.mlp_tile": 64},
        _SPLIT_BACKWARD,
    ),
    Breach(
        "memory.mlp_tile=64 with parallel.sequence_parallel=true: ranks exchange the tokens of whole microbatches",
        {"memory.mlp_tile": 64},
        {"parallel.tp": 2, "parallel.sequence_parallel": True},
    ),
    # layout_rules EXPERT_PARALLEL
    Breach("parallel.ep=2: a 'qwen3' model has no experts", {"parallel.ep": 2}, {"parallel.dp_shard": 2}),
    Breach("parallel.ep=2 must divide parallel.dp_shard x parallel.cp x", {"parallel.ep": 2}, MIXTURE),
    Breach(
        "parallel.ep=2 with parallel.tp=2 needs parallel.sequence_parallel=true",
        {"parallel.ep": 2},
        {**MIXTURE, "parallel.tp": 2},
    ),
    Breach("parallel.ep=4 must divide the model's 6 experts", {"parallel.ep": 4}, {**MIXTURE, "parallel.cp": 4}),
    Breach(
        "model.lora.dropout=0.1 with parallel.tp=2: ranks would drop different inputs",
        {"parallel.tp": 2},
        {"model.lora": {"dropout": 0.1}},
    ),
    Breach(
        "model.lora with model.implementation=nemo_automodel: adapters are added to transformers' classes only",
        NEMO_CLASSES,
        {"model.lora": {}},
    ),
    Breach(
        "model.lora.targets: lm_head cannot have adapters",
        {"model.lora": {"targets": ["q_proj", "lm_head"]}},
        {"model.lora": {"targets": ["q_proj"]}},
    ),
    Breach(
        "model.lora.dropout=0.1 with model.lora.targets=['experts']: PEFT does not support it for adapters of experts",
        {"model.lora": {"dropout": 0.1, "targets": ["experts"]}},
        {"model.lora": {"targets": ["experts"]}},
    ),
    Breach(
        "model.lora.base=nf4 with a 'llava' model: its layers stay plain: use plain, or train its language model alone",
        {"model.lora": {"base": "nf4"}},
        {**LLAVA, "model.lora": {}},
    ),
    Breach(
        "model.lora.base=nf4 with weight_sync.adapters=alone: generators would use another base than the trainer: use "
        "plain, or merged, or a checkpoint in nf4",
        {"model.lora": {"base": "nf4"}},
        {**_GRPO, "model.lora": {}, "weight_sync.adapters": "alone"},
    ),
    Breach(
        "model.lora.dropout=0.1 with an algorithm that compares log-probabilities: dropout would change",
        {"model.lora": {"dropout": 0.1}},
        {"algorithm": "dpo"},
    ),
    Breach(
        "weight_sync.adapters=alone needs model.lora: set it",
        {"weight_sync.adapters": "alone"},
        {"algorithm": "grpo"},
    ),
    Breach(
        "weight_sync.adapters=alone with a 'llava' model: its generators get merged weights",
        {"weight_sync.adapters": "alone"},
        {"algorithm": "grpo", "model.lora": {}, **LLAVA},
    ),
    Breach(
        "weight_sync.adapters=alone with rollout.generator=servers",
        {"rollout.generator": {"kind": "servers", "urls": ["http://localhost:1"]}},
        {"algorithm": "grpo", "weight_sync.adapters": "alone", "model.lora": {}},
    ),
    Breach("model.lora.dora=true with parallel.tp=2: ranks would hold parts of rows", {"parallel.tp": 2}, _DORA),
    Breach(
        "model.lora.dora=true with model.lora.targets=['experts']: PEFT does not support it",
        {"model.lora": {"dora": True, "targets": ["experts"]}},
        _DORA,
    ),
    Breach(
        "model.lora.dora=true with model.lora.dropout=0.1: PEFT then also drops inputs of frozen weights",
        {"model.lora": {"dora": True, "dropout": 0.1}},
        _DORA,
    ),
    Breach(
        "model.lora.dora=true with weight_sync.adapters=alone for vLLM: vLLM computes adapters without row magnitudes",
        {"rollout.generator": "vllm"},
        {"algorithm": "grpo", "weight_sync.adapters": "alone", **_DORA},
    ),
    Breach(
        "weight_sync.adapters=alone: vLLM supports ranks up to 512, not 1024",
        {"model.lora": {"rank": 1024}},
        {"algorithm": "grpo", "weight_sync.adapters": "alone", "model.lora": {}, "rollout.generator": "vllm"},
    ),
    Breach(
        "weight_sync.adapters=alone with model.lora.modules_to_save=['lm_head']: these are not adapters,",
        {"model.lora": {"modules_to_save": ["lm_head"]}},
        {"algorithm": "grpo", "weight_sync.adapters": "alone", "model.lora": {}},
    ),
    # multimodal_rules MULTIMODAL
    Breach("components: a 'qwen3' model has one component: set its layout in parallel", _DATA_RANKS),
    Breach("model.frozen: a 'qwen3' model has no encoder: remove it", {"model.frozen": ["vision"]}),
    Breach(
        "data.min_pixels and data.max_pixels: a 'qwen3' model reads no images: remove them",
        {"data.max_pixels": 1000},
    ),
    Breach(
        "data.min_pixels and data.max_pixels: a 'llava' model has no image processor with limits",
        {"data.min_pixels": 1000},
        LLAVA,
    ),
    Breach(
        "model.lora.targets: a 'qwen3' model has no encoder: remove vision, audio and projector",
        {"model.lora": {"targets": ["q_proj", "projector"]}},
        {"model.lora": {}},
    ),
    Breach(
        "rollout.tools, rollout.environment or rollout.agent with a 'llava' model: prompts have media, which "
        "conversations do not support",
        {"rollout.tools": ["math:sqrt"], "rollout.max_turns": 2},
        {**LLAVA, "algorithm": "grpo"},
    ),
    Breach(
        "rollout.generator=servers with a 'qwen2_5_vl' model: media is not sent to servers",
        {"rollout.generator": {"kind": "servers", "urls": ["http://127.0.0.1:1"]}},
        {**_QWEN, "algorithm": "grpo"},
    ),
    Breach(
        "rollout.generator=joined with a 'qwen2_5_vl' model: media is not sent to generators that join",
        {"rollout.generator": {"kind": "joined"}},
        {**_QWEN, "algorithm": "grpo", "weight_sync.publish": "weights"},
    ),
    Breach(
        "rollout.generator=joined with router_replay.enabled=true: routes stay with ranks that lead generators",
        {"rollout.generator": {"kind": "joined"}},
        {**_GRPO, **MIXTURE, "router_replay.enabled": True, "weight_sync.publish": "weights"},
    ),
    Breach(
        "images of a 'gemma3' model with rollout.generator=vllm: vLLM computes causal attention within images",
        {"rollout.generator": "vllm"},
        {
            "description.family": "gemma3_text",
            "description.multimodal": "gemma3",
            "description.is_bidirectional_in_images": True,
            "description.encoders": {"vision": EncoderDescription("siglip_vision_model")},
            "algorithm": "grpo",
        },
    ),
    Breach(
        "a config without rope_parameters.mrope_interleaved with rollout.generator=vllm: vLLM would",
        {"description.hides_interleaving": True},
        {**_QWEN, "rollout.generator": "vllm", "algorithm": "grpo"},
    ),
    Breach(
        "batch.microbatch_tokens=auto with a 'llava' model: its memory depends on its images or audio",
        {"batch.microbatch_tokens": "auto"},
        LLAVA,
    ),
    Breach(
        "model.path: a 'llava' model with a 'gemma2' language model is not supported: use one with llama,",
        {"description.family": "gemma2"},
        LLAVA,
    ),
    Breach(
        "model.path: a 'llava' model with a 'dinov2' encoder is not supported: use clip_vision_model",
        {"description.encoders": {"vision": EncoderDescription("dinov2")}},
        LLAVA,
    ),
    Breach(
        "a 'llava' model with model.implementation=nemo_automodel: multimodal models use transformers' classes only",
        {"model.implementation": "nemo_automodel"},
        LLAVA,
    ),
    Breach(
        "model.frozen with model.lora: everything but adapters and modules to save is frozen",
        {"model.frozen": ["vision"]},
        {**LLAVA, "model.lora": {}},
    ),
    Breach(
        "model.lora with components.vision.tp=2: adapters are not split",
        _SPLIT_ENCODER,
        {
            **LLAVA,
            **_FOUR_HEADS,
            "model.lora": {},
            **_DATA_RANKS,
        },
    ),
    Breach(
        "model.frozen: all parts are frozen and nothing is left to train: remove one",
        {"model.frozen": ["vision", "projector", "language"]},
        {**LLAVA, "model.frozen": ["vision", "projector"]},
    ),
    Breach(
        "components.vision.tp=2: Pixtral's encoder is not split over tp: use dp_shard",
        _SPLIT_ENCODER,
        {**LLAVA, "description.encoders": {"vision": EncoderDescription("pixtral")}, **_DATA_RANKS},
    ),
    Breach(
        "components.vision.tp=2 must divide the encoder's 3 attention heads",
        _SPLIT_ENCODER,
        {**LLAVA, **_DATA_RANKS},
    ),
    Breach(
        "model.lora with a 'qwen2_5_omni_thinker' model: PEFT has no names for its parts",
        {"model.lora": {}},
        _OMNI,
    ),
    Breach(
        "model.frozen: a 'qwen2_audio' model has no encoder vision: name audio, projector, language",
        {"model.frozen": ["vision"]},
        _AUDIO,
    ),
    Breach(
        "model.lora.targets: a 'llava' model has no encoder audio: remove it",
        {"model.lora": {"targets": ["q_proj", "audio"]}},
        {**LLAVA, "model.lora": {}},
    ),
    Breach(
        "components: a 'qwen2_audio' model has audio, language, but layouts are set for vision, language",
        _DATA_RANKS,
        _AUDIO,
    ),
    Breach(
        "components.audio.tp=2: Qwen2-Audio's encoder is not split over tp: use dp_shard",
        _SPLIT_HEARING,
        {**_AUDIO, **_HEARING},
    ),
    Breach(
        "audio of a 'qwen2_audio' model with rollout.generator=vllm: audio is not sent to vLLM",
        {"rollout.generator": "vllm"},
        {**_AUDIO, "algorithm": "grpo"},
    ),
    # run_rules ROUTER_REPLAY
    Breach(
        "router_replay.enabled=true: a 'qwen3' model has no routers: set it to false, or use a mixture",
        {"description.family": "qwen3", "description.num_experts": 0},
        {**_GRPO, **MIXTURE, "router_replay.enabled": True},
    ),
    # run_rules QUANTIZED_ROLLOUT
    Breach(
        "mxfp4 weights with rollout.generator=vllm: vLLM would keep them, but a weight sync sends plain ones",
        {"description.quantization": "mxfp4"},
        {**_GRPO, "rollout.generator": "vllm"},
    ),
    # run_rules ROLLOUT_LENGTH
    Breach(
        "rollout.max_prompt_tokens + rollout.max_new_tokens = 17 is more than the model's context of 16 tokens",
        {"rollout.max_prompt_tokens": 9},
        {**_GRPO, "rollout.max_prompt_tokens": 8, "rollout.max_new_tokens": 8, "description.context": 16},
    ),
    # run_rules ROLLOUT_OFFLOAD
    Breach(
        "memory.offload.during=rollout: only grpo and ppo have rollouts",
        {"memory.offload": {}},
        {"algorithm": "dpo"},
    ),
)
