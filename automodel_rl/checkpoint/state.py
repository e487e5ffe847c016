"""The tensors of a checkpoint: weights, their optimizer state, and buffers, by component and name.

Every shard is stored with its box in the whole tensor. So a checkpoint depends neither on the layout that wrote it,
nor on the ranks that held a component.
"""

import re
from pathlib import Path

from torch import Tensor, nn

from automodel_rl.checkpoint.folder import CheckpointError
from automodel_rl.checkpoint.storage import SafetensorsReader
from automodel_rl.engine.engine import Engine
from automodel_rl.errors import describe_root_cause
from automodel_rl.hf.read import EMBEDDING, stored_buffers
from automodel_rl.model.handle import ModelHandle
from automodel_rl.optimizers import COUNT, OPTIMIZERS
from automodel_rl.parallel.host_collectives import gather_objects

WEIGHT = re.compile(r"(\w+)\.model\.(.+)")
"""Pattern of a trained weight's key, with groups for component and name."""

BUFFER = re.compile(r"(\w+)\.buffers\.(.+)")
"""Pattern of a stored buffer's key, with groups for component and name."""

KINDS = {COUNT: "step_counts"}
"""Names of optimizer state in checkpoints, where they differ from the optimizer's own."""

ByComponent = dict[str, dict[str, nn.Parameter]]


def engine_tensors(engine: Engine) -> dict[str, dict[str, dict[str, Tensor]]]:
    """Returns this rank's weights, optimizer state and buffers, by component, kind and name. Moments must be on the
    device."""
    return _tensors(engine, _trained(engine.handle))


def restore_tensors(engine: Engine, folder: Path) -> None:
    """Restores weights, optimizer state and stored buffers in place, on any layout. A collective.

    Raises:
        CheckpointError: the checkpoint holds other weights than the engine trains, or another optimizer wrote it.
    """
    handle = engine.handle
    handle.check_on_device()
    parameters = _trained(handle)
    reader = SafetensorsReader(folder)
    _check_names(handle, parameters, reader)
    _check_optimizer(engine, parameters, reader)
    handle.has_changed = True
    copy = None if handle.tied is None else handle.tied.trained_copy
    if copy is not None:  # restored as the weight it copies, which with V placement is on the same rank
        parameters["language"].setdefault(EMBEDDING, copy)
    with engine.moments_on_device():
        state = _tensors(engine, parameters)
        problem = ""
        try:
            reader.read_into(state)
        except CheckpointError as error:
            problem = str(error)
        except Exception as error:  # the other ranks wait for this one
            problem = f"{folder}: cannot be read here: {describe_root_cause(error)}"
        for text in gather_objects(problem, handle.layout.world_control):
            if text:
                raise CheckpointError(text)
        for component in handle.components:
            _restore_state(engine, parameters[component.name], state[component.name])
        if copy is not None and copy is not parameters["language"][EMBEDDING]:
            _copy_trained(engine, parameters["language"][EMBEDDING], copy)


def _trained(handle: ModelHandle) -> ByComponent:
    """Returns this rank's trained parameters, by component and name. Frozen weights are in the model's own
    checkpoint."""
    return {
        component.name: {name: p for name, p in handle.named_parameters(component) if p.requires_grad}
        for component in handle.components
    }


def _check_names(handle: ModelHandle, parameters: ByComponent, reader: SafetensorsReader) -> None:
    """Raises CheckpointError on all ranks if the checkpoint's weights are not those that the ranks train."""
    own = {f"{component}.model.{name}": p.shape for component, named in parameters.items() for name, p in named.items()}
    trained = {key: size for shapes in gather_objects(own, handle.layout.world_control) for key, size in shapes.items()}
    stored = {key: size for key, size in reader.shapes.items() if WEIGHT.fullmatch(key)}
    remedy = "resume with the model and the model.frozen and model.lora that wrote it"
    for component in sorted({key.partition(".")[0] for key in trained.keys() ^ stored.keys()}):
        lacks = sorted(key for key in trained.keys() - stored.keys() if key.startswith(f"{component}."))
        rest = sorted(key for key in stored.keys() - trained.keys() if key.startswith(f"{component}."))
        what = f"has no {lacks[0]}, which is trained" if lacks else f"has {rest[0]}, which is not trained"
        raise CheckpointError(f"{reader.folder.parent}: for the {component} component the checkpoint {what}: {remedy}")
    for key, size in sorted(trained.items()):
        if stored[key] != size:
            raise CheckpointError(
                f"{reader.folder.parent}: {key} has shape {[*stored[key]]} in the checkpoint but {[*size]} in the "
                f"model: {remedy}"
            )


def _check_optimizer(engine: Engine, parameters: ByComponent, reader: SafetensorsReader) -> None:
    """Raises CheckpointError on all ranks if the checkpoint lacks some of the optimizer's state."""
    own = {
        f"{component}.{KINDS.get(kind, kind)}.{name}"
        for component, named in parameters.items()
        for name, parameter in named.items()
        for kind in engine.optimizer.state_names[parameter].all
    }
    lacks = sorted(own - reader.shapes.keys())
    for key in gather_objects(next(iter(lacks), None), engine.handle.layout.world_control):
        if key is not None:
            raise CheckpointError(
                f"{reader.folder.parent}: has no {key}, which optimizer.name={engine.config.name} keeps, so another "
                f"optimizer wrote it: resume with its optimizer.name, one of {', '.join(OPTIMIZERS)}"
            )


def _tensors(engine: Engine, parameters: ByComponent) -> dict[str, dict[str, dict[str, Tensor]]]:
    """Returns weights, buffers and optimizer state (0 before the first step), by component, kind and name."""
    state = {}
    for component in engine.handle.components:
        of_component: dict[str, dict[str, Tensor]] = {"model": {}}
        # Buffers are router biases, trained without an optimizer.
        of_component["buffers"] = {name: buffer for part in component.parts for name, buffer in stored_buffers(part)}
        for name, parameter in parameters[component.name].items():
            of_component["model"][name] = parameter.detach()
            for kind, tensor in engine.optimizer.state_of(parameter).items():
                of_component.setdefault(KINDS.get(kind, kind), {})[name] = tensor
        state[component.name] = of_component
    return state


def _restore_state(engine: Engine, parameters: dict[str, nn.Parameter], state: dict[str, dict[str, Tensor]]) -> None:
    for name, parameter in parameters.items():
        kinds = engine.optimizer.state_names[parameter].all
        engine.optimizer.set_state(parameter, {kind: state[KINDS.get(kind, kind)][name] for kind in kinds})


def _copy_trained(engine: Engine, source: nn.Parameter, copy: nn.Parameter) -> None:
    """Copies a parameter's weight and optimizer state to another parameter."""
    copy.detach().copy_(source.detach())
    state = engine.optimizer.state_of(source)
    engine.optimizer.set_state(copy, {kind: tensor.clone() for kind, tensor in state.items()})
