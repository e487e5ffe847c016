"""nemo_automodel: its model classes, and AutoPipeline, which splits a model. All that leans on its insides is here.

Checked with nemo_automodel 0.7.0 and transformers 5.18.0.
"""

import contextlib
import importlib
import logging
from collections.abc import Iterator
from typing import Any

import torch
from nemo_automodel.components.distributed.pipelining import AutoPipeline
from nemo_automodel.components.models.common import BackendConfig
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from automodel_rl.config.families import FAMILIES
from automodel_rl.parallel.layout import Layout
from automodel_rl.parallel.pipeline.schedules import SCHEDULES, fill_up_to
from automodel_rl.parallel.pipeline.split import layers_per_stage, modules_of_stages


def nemo_model(config: PretrainedConfig, dtype: torch.dtype, attention: str) -> Any:
    """A model of nemo_automodel's own class for a family, with transformers' attention interface.

    Args:
        config: of the checkpoint; its dtype and attention are set.
        dtype: of the parameters.
        attention: name of a registered attention function.
    """
    family = FAMILIES[config.model_type]
    assert family.nemo_class is not None  # the table has refused others
    module, name = family.nemo_class
    config.dtype, config._attn_implementation = dtype, attention
    backend = BackendConfig(attn="sdpa", linear="torch", rms_norm="torch")
    return getattr(importlib.import_module(module), name)(config, backend=backend).to(dtype)


def split_model(model: PreTrainedModel, layout: Layout) -> nn.Module | AutoPipeline:
    """Splits an empty model into this rank's parts; without a pipeline it is the only one."""
    parallel = layout.parallel
    if parallel.pp == 1:
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
    with _only_errors_logged():
        return pipeline.build(model, loss_fn=_never_called)


def parts_of(model: nn.Module | AutoPipeline) -> list[Any]:
    """This rank's model chunks, first stage first."""
    return model.parts if isinstance(model, AutoPipeline) else [model]


def _never_called(*_: object) -> None:
    raise AssertionError("AutoPipeline's own schedule must not run")


@contextlib.contextmanager
def _only_errors_logged() -> Iterator[None]:
    """Silences remarks of libraries that read like problems."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(level)
