"""What of an engine a checkpoint holds: weights, moments and update counts, by module and name.

torch's distributed checkpoint (DCP) stores every tensor with its place in the whole, so a checkpoint does not know the
layout that wrote it, nor on which ranks a module was.
"""

import re
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from automodel_rl.checkpoint.folder import CheckpointError
from automodel_rl.checkpoint.storage import SafetensorsReader
from automodel_rl.engine.engine import Engine
from automodel_rl.engine.optimizer import MOMENTS
from automodel_rl.hf.read import EMBEDDING, stored_buffers
from automodel_rl.model.handle import ModelHandle
from automodel_rl.parallel.host_collectives import gather_objects

WEIGHT = re.compile(r"(\w+)\.model\.(.+)")
"""A key of a trained weight: its module and its name."""

BUFFER = re.compile(r"(\w+)\.buffers\.(.+)")

ByModule = dict[str, dict[str, nn.Parameter]]


def engine_tensors(engine: Engine) -> dict[str, dict[str, dict[str, Tensor]]]:
    """By module and kind this rank's weights, moments and update counts by name; moments must be on the device."""
    return _tensors(engine, _trained(engine.handle))


def restore_tensors(engine: Engine, folder: Path) -> None:
    """Fills weights, moments, update counts and stored buffers in place. A collective.

    Args:
        engine: of any layout.
        folder: of the tensors.

    Raises:
        CheckpointError: the checkpoint holds other weights than those that are trained.
    """
    handle = engine.handle
    parameters = _trained(handle)
    reader = SafetensorsReader(folder)
    _check_names(handle, parameters, reader)
    handle.has_changed = True
    copy = None if handle.tied is None else handle.tied.trained_copy
    if copy is not None:  # restored from the weight it copies, which with V placement is on the same rank
        parameters["language"].setdefault(EMBEDDING, copy)
    with engine.moments_on_device():
        state = _tensors(engine, parameters)
        dcp.load(state, storage_reader=reader, process_group=handle.layout.world_control)
        for module in handle.modules:
            _restore_moments(engine, parameters[module.name], state[module.name])
        if copy is not None and copy is not parameters["language"][EMBEDDING]:
            _copy_trained(engine, parameters["language"][EMBEDDING], copy)


def _trained(handle: ModelHandle) -> ByModule:
    """What is trained of this rank's modules. Frozen weights are those of the model's own checkpoint."""
    return {
        module.name: {name: p for name, p in handle.named_parameters(module) if p.requires_grad}
        for module in handle.modules
    }


def _check_names(handle: ModelHandle, parameters: ByModule, reader: SafetensorsReader) -> None:
    """Raises CheckpointError where the checkpoint holds other weights than those that are trained, on any rank."""
    own = {f"{module}.model.{name}": p.shape for module, named in parameters.items() for name, p in named.items()}
    trained = {key: size for shapes in gather_objects(own, handle.layout.world_control) for key, size in shapes.items()}
    stored = {key: size for key, size in reader.shapes.items() if WEIGHT.fullmatch(key)}
    remedy = "resume with the model and the model.frozen and model.lora that wrote it"
    for module in sorted({key.partition(".")[0] for key in trained.keys() ^ stored.keys()}):
        lacks = sorted(key for key in trained.keys() - stored.keys() if key.startswith(f"{module}."))
        rest = sorted(key for key in stored.keys() - trained.keys() if key.startswith(f"{module}."))
        what = f"has no {lacks[0]}, which is trained" if lacks else f"has {rest[0]}, which is not trained"
        raise CheckpointError(f"{reader.folder.parent}: for the {module} module the checkpoint {what}: {remedy}")
    for key, size in sorted(trained.items()):
        if stored[key] != size:
            raise CheckpointError(
                f"{reader.folder.parent}: {key} has shape {[*stored[key]]} in the checkpoint but {[*size]} in the "
                f"model: {remedy}"
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
