"""nemo_automodel's model classes, and its AutoPipeline, which splits a model into stages.

Imported where needed, as importing takes seconds. Checked with nemo_automodel 0.7.0 and transformers 5.18.0.
"""

import contextlib
import importlib
import importlib.util
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PretrainedConfig

from automodel_rl.compat.modules import set_attention
from automodel_rl.errors import InputError
from automodel_rl.launch.quiet import quiet_imports


def check_installed() -> None:
    """Raises InputError without nemo_automodel, an extra of this package."""
    if importlib.util.find_spec("nemo_automodel") is None:
        raise InputError(
            "model.implementation=nemo_automodel: nemo_automodel is not installed: pip install 'automodel-rl[nemo]', "
            "or use transformers"
        )


def nemo_model(class_path: tuple[str, str], config: PretrainedConfig, dtype: torch.dtype, attention: str) -> Any:
    """Builds a model of nemo_automodel's own class with transformers' attention interface.

    Args:
        class_path: module and name of the class.
        config: the checkpoint's config; its dtype and attention are set.
    """
    with quiet_imports():
        from nemo_automodel.components.models.common import BackendConfig

    module, name = class_path
    config.dtype = dtype
    set_attention(config, attention)
    backend = BackendConfig(attn="sdpa", linear="torch", rms_norm="torch")
    return getattr(importlib.import_module(module), name)(config, backend=backend).to(dtype)


def split_by_auto_pipeline(
    model: nn.Module,
    mesh: DeviceMesh,
    device: torch.device,
    schedule: str,
    modules_of_stages: list[list[str]],
    num_microbatches: int,
) -> list[tuple[int, Any]]:
    """Splits an empty model, and returns index and part of each of this rank's stages.

    AutoPipeline's own schedule is built, because it decides which rank gets which stage, but never run.

    Args:
        mesh: a mesh with the axis `pp`.
        num_microbatches: any number that the schedule can run.
    """
    with quiet_imports():
        from nemo_automodel.components.distributed.pipelining import AutoPipeline

    pipeline = AutoPipeline(
        world_mesh=mesh,
        pp_schedule=schedule,
        pp_batch_size=num_microbatches,
        module_fqns_per_model_part=modules_of_stages,
        patch_inner_model=False,
        patch_causal_lm_model=False,
        device=device,
    )
    with only_errors_logged():
        built = pipeline.build(model, loss_fn=_never_called)
    return [(stage.stage_index, stage.submod) for stage in built.info.stages]


def _never_called(*_: object) -> None:
    raise AssertionError("AutoPipeline's own schedule must not run")


@contextlib.contextmanager
def only_errors_logged() -> Iterator[None]:
    """Silences libraries' warnings inside the block."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(level)
