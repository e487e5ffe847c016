"""Checkpoints to resume from: weights, optimizer state and the trainer's place, written by all ranks together.

torch's distributed checkpoint stores every tensor under its module and name with its place in the whole, so a
checkpoint does not know the layout that wrote it, nor on which ranks a module was. A folder gets its name only when it
is complete.
"""

import json
import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from automodel_rl.engine.engine import Engine
from automodel_rl.engine.optimizer import MOMENTS
from automodel_rl.errors import InputError
from automodel_rl.files import complete_folder
from automodel_rl.model.handle import ModelHandle
from automodel_rl.model.hf_read import EMBEDDING, stored_buffers
from automodel_rl.parallel.host_collectives import gather_objects


def save_checkpoint(engine: Engine, folder: Path, progress: dict[str, Any], rank_state: dict[str, Any]) -> None:
    """Writes a checkpoint. A collective; the folder must be on a file system that all ranks share.

    Args:
        engine: whose weights, moments and step are stored.
        folder: named when everything is in it.
        progress: the trainer's place, the same on every rank; JSON.
        rank_state: what each rank needs for itself, such as its data loader's state.
    """
    layout = engine.handle.layout
    with engine.moments_on_device(), complete_folder(folder, layout.world_control) as unfinished:
        tensors = _tensors(engine, _trained(engine.handle))
        dcp.save(tensors, checkpoint_id=unfinished / "tensors", process_group=layout.world_control)
        torch.save({"random": _random_state(layout.device), **rank_state}, _rank_file(unfinished))
        if dist.get_rank() == 0:
            engine_state = {"step": engine.step, "skipped_in_a_row": engine.skipped_in_a_row}
            (unfinished / "progress.json").write_text(json.dumps({"engine": engine_state, **progress}, indent=2))


def load_checkpoint(engine: Engine, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Restores weights, moments, step and random state in place, on the layout that wrote them or on another. A
    collective.

    Returns:
        The `progress` that was saved, and the `rank_state` of this rank, or of the first where fewer have written it.

    Raises:
        InputError: the checkpoint holds other weights than those that are trained.
    """
    handle = engine.handle
    parameters = _trained(handle)
    _check_names(handle, parameters, folder)
    copy = None if handle.tied is None else handle.tied.trained_copy
    if copy is not None:  # restored from the weight it copies, which with V placement is on the same rank
        parameters["language"].setdefault(EMBEDDING, copy)
    with engine.moments_on_device():
        state = _tensors(engine, parameters)
        dcp.load(state, checkpoint_id=folder / "tensors", process_group=handle.layout.world_control)
        for module in handle.modules:
            _restore_moments(engine, parameters[module.name], state[module.name])
        if copy is not None and copy is not parameters["language"][EMBEDDING]:
            _copy_trained(engine, parameters["language"][EMBEDDING], copy)
    own = _rank_file(folder)
    rank_state = torch.load(own if own.is_file() else _rank_file(folder, rank=0), weights_only=False)
    _set_random_state(rank_state.pop("random"), handle.layout.device)
    progress = json.loads((folder / "progress.json").read_text())
    engine.step = progress["engine"]["step"]
    engine.skipped_in_a_row = progress["engine"]["skipped_in_a_row"]
    return progress, rank_state


ByModule = dict[str, dict[str, nn.Parameter]]


def _trained(handle: ModelHandle) -> ByModule:
    """What is trained of this rank's modules. Frozen weights are those of the model's own checkpoint."""
    return {
        module.name: {name: p for name, p in handle.named_parameters(module) if p.requires_grad}
        for module in handle.modules
    }


def _check_names(handle: ModelHandle, parameters: ByModule, folder: Path) -> None:
    """Raises InputError where the checkpoint holds other weights than those that are trained, on whatever ranks."""
    own = {f"{module}.model.{name}" for module, named in parameters.items() for name in named}
    trained = {name for names in gather_objects(own, handle.layout.world_control) for name in names}
    keys = dcp.FileSystemReader(folder / "tensors").read_metadata().state_dict_metadata
    stored = {key for key in keys if re.match(r"\w+\.model\.", key)}
    for module in sorted({name.partition(".")[0] for name in trained ^ stored}):
        lacks = sorted(name for name in trained - stored if name.startswith(f"{module}."))
        rest = sorted(name for name in stored - trained if name.startswith(f"{module}."))
        what = f"has no {lacks[0]}, which is trained" if lacks else f"has {rest[0]}, which is not trained"
        raise InputError(
            f"{folder}: for the {module} module the checkpoint {what}: resume with the model and the model.frozen and "
            "model.lora that wrote it"
        )


def _tensors(engine: Engine, parameters: ByModule) -> dict[str, dict[str, dict[str, Tensor]]]:
    """By module and kind the weights, moments and update counts by name. Parameters that were never updated have zero
    moments."""
    optimizer_of = _optimizer_of(engine)
    state = {}
    for module in engine.handle.modules:
        of_module: dict[str, dict[str, Tensor]] = {"model": {}, "updates": {}, **{moment: {} for moment in MOMENTS}}
        # Routers' biases, which are trained without an optimizer.
        of_module["buffers"] = {name: buffer for part in module.parts for name, buffer in stored_buffers(part)}
        for name, parameter in parameters[module.name].items():
            moments = optimizer_of[parameter].state.get(parameter, {})
            of_module["model"][name] = parameter.detach()
            of_module["updates"][name] = moments.get("step", torch.zeros(())).detach().clone()
            for moment in MOMENTS:
                of_module[moment][name] = moments[moment] if moments else torch.zeros_like(parameter.detach())
        state[module.name] = of_module
    return state


def _restore_moments(engine: Engine, parameters: dict[str, nn.Parameter], state: dict[str, dict[str, Tensor]]) -> None:
    optimizer_of = _optimizer_of(engine)
    for name, parameter in parameters.items():
        optimizer, step = optimizer_of[parameter], state["updates"][name]
        optimizer.state[parameter] = {
            # A fused optimizer counts on the device.
            "step": step.to(parameter.device) if optimizer.defaults["fused"] else step.cpu(),
            **{moment: state[moment][name] for moment in MOMENTS},
        }


def _copy_trained(engine: Engine, source: nn.Parameter, copy: nn.Parameter) -> None:
    """Gives a parameter the weight of another one, and its moments and count, in tensors of its own."""
    optimizer_of = _optimizer_of(engine)
    copy.detach().copy_(source.detach())
    optimizer_of[copy].state[copy] = {
        name: tensor.clone() for name, tensor in optimizer_of[source].state[source].items()
    }


def _optimizer_of(engine: Engine) -> dict[nn.Parameter, torch.optim.Optimizer]:
    groups = [(optimizer, group) for optimizer in engine.optimizers for group in optimizer.param_groups]
    return {parameter: optimizer for optimizer, group in groups for parameter in group["params"]}


def _rank_file(folder: Path, rank: int | None = None) -> Path:
    return folder / f"rank_{dist.get_rank() if rank is None else rank}.pt"


def _random_state(device: torch.device) -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def _set_random_state(state: dict[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
