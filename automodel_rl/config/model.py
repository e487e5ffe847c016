"""Which model is trained, and how it computes."""

from typing import Literal

from automodel_rl.config.base import Section

Implementation = Literal["transformers", "nemo_automodel"]
Dtype = Literal["bfloat16", "float32", "float64"]


class ModelConfig(Section):
    """Which checkpoint is trained, by whose classes, and in which precision."""

    path: str
    """Folder of a Hugging Face checkpoint (config.json, safetensors, tokenizer), or a hub id."""

    implementation: Implementation = "transformers"
    """Whose model class runs: transformers' own, or nemo_automodel's of the same architecture."""

    dtype: Dtype = "bfloat16"
    """What the model computes in. Master weights are float32 (float64 for float64)."""

    attention: Literal["auto", "varlen", "te", "sdpa", "eager"] = "auto"
    """Attention over packed rows. auto: varlen_attn on CUDA in bfloat16, else SDPA over each sequence."""
