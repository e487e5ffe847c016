"""Building a model with nemo_automodel: split into parts, sharded, weights loaded. Its private names live only here.

Checked with nemo_automodel 0.7.0 and transformers 5.18.0.
"""

import importlib
import logging
from pathlib import Path
from typing import Any

import torch
from nemo_automodel._transformers.infrastructure import apply_model_infrastructure, instantiate_infrastructure
from nemo_automodel.components.distributed import FSDP2Config, PipelineConfig
from nemo_automodel.components.distributed.pipelining import AutoPipeline
from nemo_automodel.components.models.common import BackendConfig
from nemo_automodel.components.utils.model_utils import init_empty_weights
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from automodel_rl.config import ParallelConfig
from automodel_rl.parallel.gradients import sum_fsdp_gradients
from automodel_rl.parallel.layout import Layout
from automodel_rl.parallel.schedules import SCHEDULES, fill_up_to
from automodel_rl.parallel.stages import layers_per_stage, modules_of_stages

NEMO_CLASSES = {
    "llama": ("nemo_automodel.components.models.llama.model", "LlamaForCausalLM"),
    "qwen3": ("nemo_automodel.components.models.qwen3.model", "Qwen3ForCausalLM"),
}


def fsdp_strategy(compute: torch.dtype, master: torch.dtype) -> FSDP2Config:
    """Parameters gathered in the compute dtype, gradients reduced in the master dtype.

    Weights stay gathered over the microbatches of a step: one all-gather a step instead of one for each microbatch.
    """
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=master, cast_forward_inputs=False)
    return FSDP2Config(mp_policy=policy, reshard_after_forward=False)


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
    with init_empty_weights():
        if implementation == "transformers":
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
        else:
            module, name = NEMO_CLASSES[config.model_type]
            config.dtype, config._attn_implementation = dtype, attention
            backend = BackendConfig(attn="sdpa", linear="torch", rms_norm="torch")
            model = getattr(importlib.import_module(module), name)(config, backend=backend).to(dtype)
    if untie and config.tie_word_embeddings:
        model.lm_head.weight = nn.Parameter(torch.empty_like(model.lm_head.weight))
    return model


def parallelise_and_load(model: PreTrainedModel, folder: Path, layout: Layout) -> nn.Module | AutoPipeline:
    """Splits and shards an empty model as the layout says and loads this rank's weights. A collective."""
    strategy = layout.mesh.strategy_config
    mesh, pipeline, parallelise, _ = instantiate_infrastructure(
        distributed_config=strategy,
        pipeline_config=_pipeline_config(model.config.num_hidden_layers, layout.parallel),
        mesh=layout.mesh,
        device=layout.device,
    )
    # Every parameter comes from the checkpoint. Random initialisation first would only cost time.
    model._skip_init_weights_on_load = True
    with OnlyErrorsLogged():
        built = apply_model_infrastructure(
            model,
            is_meta_device=True,
            device=layout.device,
            model_wrapper=mesh,
            mesh=mesh,
            autopipeline=pipeline,
            parallelize_fn=parallelise,
            loss_fn=_never_called,
            pretrained_model_name_or_path=str(folder),
            load_base_model=True,
            cache_dir="",
        )
    for part in parts_of(built):
        if not isinstance(part, FSDPModule):  # nemo_automodel leaves a job of one rank unwrapped
            _wrap(part, strategy.mp_policy, layout)
        sum_fsdp_gradients(part)
    return built


def parts_of(model: nn.Module | AutoPipeline) -> list[nn.Module]:
    return model.parts if isinstance(model, AutoPipeline) else [model]


def _pipeline_config(num_layers: int, parallel: ParallelConfig) -> PipelineConfig | None:
    layers = layers_per_stage(num_layers, parallel)
    if parallel.pp == 1:
        return None
    return PipelineConfig(
        # Its own schedule is built but never run: it decides where stages lie, V placement with ZBVZeroBubble only, and
        # wants a number of microbatches.
        pp_schedule="ZBVZeroBubble" if SCHEDULES[parallel.schedule].is_v else parallel.schedule,
        pp_batch_size=fill_up_to(len(layers), parallel),
        module_fqns_per_model_part=modules_of_stages(layers),
        patch_inner_model=False,
        patch_causal_lm_model=False,
    )


def _wrap(model: Any, policy: MixedPrecisionPolicy, layout: Layout) -> None:
    """FSDP on a mesh of one: nothing to shard, but the same mixed precision as on many ranks."""
    mesh = layout.device_mesh["dp_shard"]
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)


def _never_called(*_: object) -> None:
    raise AssertionError("AutoPipeline's own schedule must not run")


class OnlyErrorsLogged:
    """Silences the loader's remarks (a tied head is missing from the file, say), which read like problems."""

    def __enter__(self) -> None:
        self.level = logging.root.manager.disable
        logging.disable(logging.WARNING)

    def __exit__(self, *_: object) -> None:
        logging.disable(self.level)
