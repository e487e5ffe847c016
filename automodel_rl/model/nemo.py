"""nemo_automodel: its model classes, and AutoPipeline, which splits a model. Its names live only here.

Checked with nemo_automodel 0.7.0 and transformers 5.18.0.
"""

import importlib
import logging
from collections.abc import Callable
from typing import Any

import torch
from nemo_automodel.components.distributed.pipelining import AutoPipeline
from nemo_automodel.components.models.common import BackendConfig
from nemo_automodel.components.utils.model_utils import init_empty_weights
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from automodel_rl.config.families import FAMILIES
from automodel_rl.model.attention import register_attention
from automodel_rl.model.experts import EXPERTS, register_experts
from automodel_rl.parallel.layout import Layout
from automodel_rl.parallel.schedules import SCHEDULES, fill_up_to
from automodel_rl.parallel.stages import layers_per_stage, modules_of_stages


def build_empty_model(
    config: PretrainedConfig, implementation: str, dtype: torch.dtype, attention: str, untie: bool
) -> PreTrainedModel:
    """The whole model without storage for its parameters.

    Buffers are real: nothing recomputes the rotary frequencies of a pipeline stage, and on the meta device they would
    stay uninitialised without any error.

    Args:
        config: of the checkpoint.
        implementation: "transformers" or "nemo_automodel".
        dtype: of the parameters.
        attention: name of a registered attention function.
        untie: give a tied head a parameter of its own, which a pipeline needs. It is loaded with the same values.
    """
    register_attention()
    register_experts()
    with init_empty_weights():
        if implementation == "transformers":
            model = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=attention, experts_implementation=EXPERTS
            )
        else:
            family = FAMILIES[config.model_type]
            assert family.nemo_class is not None  # the table has refused others
            module, name = family.nemo_class
            config.dtype, config._attn_implementation = dtype, attention
            backend = BackendConfig(attn="sdpa", linear="torch", rms_norm="torch")
            model = getattr(importlib.import_module(module), name)(config, backend=backend).to(dtype)
    if config.tie_word_embeddings:  # building without storage has cut the tie
        weight = model.model.embed_tokens.weight
        model.lm_head.weight = nn.Parameter(torch.empty_like(weight)) if untie else weight
    return model


def split_model(model: PreTrainedModel, layout: Layout, parallelise: Callable[[Any], None]) -> nn.Module | AutoPipeline:
    """Splits an empty model into this rank's parts and lays each out over its ranks."""
    parallel = layout.parallel
    if parallel.pp == 1:
        parallelise(model)
        return model
    layers = layers_per_stage(model.config.num_hidden_layers, parallel)
    pipeline = AutoPipeline(
        world_mesh=layout.mesh,
        # Its own schedule is built but never run: it decides where stages lie, V placement with ZBVZeroBubble only, and
        # wants a number of microbatches.
        pp_schedule="ZBVZeroBubble" if SCHEDULES[parallel.schedule].is_v else parallel.schedule,
        pp_batch_size=fill_up_to(len(layers), parallel),
        module_fqns_per_model_part=modules_of_stages(layers),
        patch_inner_model=False,
        patch_causal_lm_model=False,
        device=layout.device,
    )
    with OnlyErrorsLogged():
        return pipeline.build(model, loss_fn=_never_called, parallelize_fn=lambda part, **_: parallelise(part))


def parts_of(model: nn.Module | AutoPipeline) -> list[Any]:
    return model.parts if isinstance(model, AutoPipeline) else [model]


def _never_called(*_: object) -> None:
    raise AssertionError("AutoPipeline's own schedule must not run")


class OnlyErrorsLogged:
    """Silences remarks of libraries that read like problems."""

    def __enter__(self) -> None:
        self.level = logging.root.manager.disable
        logging.disable(logging.WARNING)

    def __exit__(self, *_: object) -> None:
        logging.disable(self.level)
