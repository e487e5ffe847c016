"""The whole model without storage, of transformers' or of nemo_automodel's classes."""

import torch
from nemo_automodel.components.utils.model_utils import init_empty_weights
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from automodel_rl.config.model import Implementation
from automodel_rl.model.attention import register_attention
from automodel_rl.model.experts import EXPERTS, register_experts
from automodel_rl.model.nemo import nemo_model


def build_empty_model(
    config: PretrainedConfig, implementation: Implementation, dtype: torch.dtype, attention: str, untie: bool
) -> PreTrainedModel:
    """The whole model without storage for its parameters.

    Buffers are real: nothing recomputes the rotary frequencies of a pipeline stage, and on the meta device they would
    stay uninitialised without any error.

    Args:
        config: of the checkpoint.
        implementation: whose class.
        dtype: of the parameters.
        attention: name of a registered attention function.
        untie: give a tied head a parameter of its own, which a pipeline needs. It is loaded with the same values.
    """
    register_attention()
    register_experts()
    with init_empty_weights():
        if implementation == "nemo_automodel":
            model = nemo_model(config, dtype, attention)
        else:
            model = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=attention, experts_implementation=EXPERTS
            )
    if config.tie_word_embeddings:  # building without storage has cut the tie
        weight = model.model.embed_tokens.weight
        model.lm_head.weight = nn.Parameter(torch.empty_like(weight)) if untie else weight
    return model
