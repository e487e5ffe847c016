"""Runs on disk: adapters as standard PEFT files, and the optimizer moments beside them.

Tensors are whole and have the run's rank, so a run can resume on any layout and with any larger server rank.
"""

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from automodel_rl.engine import Engine
from automodel_rl.errors import InputError
from automodel_rl.files import atomic_folder
from automodel_rl.lora.peft import AdapterFolder, write_adapters
from automodel_rl.lora.rank import cut_to_rank, fill_up_to_rank
from automodel_rl.parallel.host_collectives import gather_objects
from automodel_rl.parallel.sharding import gather_whole, local_box, local_tensor
from automodel_rl.serve.messages import RunShape

MOMENTS, ABOUT = "moments.safetensors", "run.json"


@torch.no_grad()
def save_run(folder: Path, engine: Engine, shape: RunShape, for_training: bool, about: dict[str, Any]) -> None:
    """Writes the run that is loaded into the model. A collective.

    Args:
        folder: the new folder, on a file system that all ranks share.
        for_training: whether to include moments.
        about: further facts on the run, as JSON.

    Raises:
        InputError: on every rank, if the folder cannot be written.
    """
    handle, layout, origin = engine.handle, engine.handle.layout, engine.handle.adapter_origin
    assert origin is not None
    adapters: dict[str, Tensor] = {}
    moments: dict[str, Tensor] = {}
    for name, parameter in handle.named_parameters():
        if not parameter.requires_grad:
            continue
        adapters[name] = cut_to_rank(name, gather_whole(parameter, layout).cpu(), shape.rows)
        for key, value in engine.optimizer.state_of(parameter).items() if for_training else ():
            whole = gather_whole(value, layout).cpu()
            moments[f"{key}/{name}"] = whole if whole.ndim == 0 else cut_to_rank(name, whole, shape.rows)
    of_stages = gather_objects((adapters, moments), layout.pp_control)
    config = origin.config.model_copy(update={"rank": shape.rank})

    def write(unfinished: Path) -> None:
        every, theirs = ({k: v.contiguous() for one in of_stages for k, v in one[part].items()} for part in (0, 1))
        write_adapters(unfinished, every, type(origin)(config, origin.base, origin.family))
        if for_training:
            save_file(theirs, unfinished / MOMENTS)
        (unfinished / ABOUT).write_text(json.dumps({**about, "step": engine.step}))

    try:
        with atomic_folder(folder, layout.world_control) as unfinished:
            problem = ""
            if dist.get_rank() == 0:
                try:
                    write(unfinished)
                except (OSError, SafetensorError) as error:
                    problem = f"the weights cannot be saved ({error})"
            _raise_everywhere(problem, engine)
    except OSError as error:  # on every rank
        raise InputError(f"the weights cannot be saved ({error})") from None


@torch.no_grad()
def load_run(folder: Path, engine: Engine, first: int, with_optimizer: bool) -> None:
    """Loads adapters and optionally moments and step count into the model. A collective.

    Adapter rows of other runs are set to zero.

    Args:
        folder: a folder written by `save_run`.
        first: the run's first row in each `lora_A`.
        with_optimizer: whether to load moments and step count.

    Raises:
        InputError: on every rank, if the folder is damaged, in which case some adapters may have been loaded, or if
            it was trained on another kind of base.
    """
    problem = ""
    try:
        saved, origin = AdapterFolder(folder), engine.handle.adapter_origin
        assert origin is not None
        saved.check_base(origin.config.base)
        tensors = saved.tensors
        for name, parameter in _trained(engine):
            _fill(name, parameter, tensors[name], first)
        if with_optimizer:
            with safe_open(folder / MOMENTS, "pt") as moments:
                for name, parameter in _trained(engine):
                    state = engine.optimizer.empty_state(parameter)
                    for key, value in state.items():
                        stored = moments.get_tensor(f"{key}/{name}")
                        if value.ndim:
                            _fill(name, value, stored, first)
                        else:
                            value.copy_(stored)
                    engine.optimizer.set_state(parameter, state)
            engine.step = json.loads((folder / ABOUT).read_text())["step"]
    except InputError as error:
        problem = str(error)
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        problem = f"the saved weights are damaged ({error})"
    _raise_everywhere(problem, engine)


def _raise_everywhere(problem: str, engine: Engine) -> None:
    """Raises InputError on all ranks if one of them has a problem."""
    for found in gather_objects(problem, engine.handle.layout.world_control):
        if found:
            raise InputError(found)


def _trained(engine: Engine) -> list[tuple[str, torch.nn.Parameter]]:
    return [(name, parameter) for name, parameter in engine.handle.named_parameters() if parameter.requires_grad]


def _fill(name: str, tensor: Tensor, stored: Tensor, first: int) -> None:
    whole = fill_up_to_rank(name, stored, tuple(tensor.shape), first)
    local_tensor(tensor.detach()).copy_(whole[local_box(tensor)])
