"""Training state of runs on a model with adapters: one set of adapters per run, of any rank up to the model's."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from automodel_rl.config import LoraConfig
from automodel_rl.engine import Engine
from automodel_rl.engine.trained_state import Shards, TrainedState, on_host, trained_parameters, wait_for_host
from automodel_rl.lora.layers import initialise
from automodel_rl.lora.rank import is_attention, own_part, set_scale
from automodel_rl.parallel.sharding import local_tensor
from automodel_rl.serve.messages import RunShape
from automodel_rl.serve.run_files import load_run, save_run


class Adapters:
    """The adapters of the run that is loaded into the model. Methods are collectives.

    The model has adapters of the largest rank. A run of smaller rank uses some of their rows; the others are zero,
    get no gradient and stay zero, so the run computes and trains as if with adapters of its own rank. Runs without a
    common row can be in the model together, for one pass over all their data (batch/tensors.py).

    Args:
        lora: the config's `model.lora`.

    Attributes:
        scale: output factor of the adapters loaded now.
    """

    def __init__(self, engine: Engine, lora: LoraConfig):
        self.engine, self.lora = engine, lora
        self.whole = RunShape(lora.rank)
        self.scale = lora.scale

    def begin(self, shape: RunShape) -> None:
        """Resets the model to new adapters, without gradients and moments."""
        self.enter(shape)
        for name, parameter in self.engine.handle.named_parameters():
            if parameter.requires_grad:
                initialise(name, parameter, shape.seed, shape.rows)
        weights = self.engine.snapshot_state().weights
        self.engine.restore_state(TrainedState(weights, {}, {}))

    def enter(self, shape: RunShape) -> None:
        self.scale = self._scale(shape)
        set_scale(self.engine.handle.parts, self.scale)

    def is_trained(self, name: str, shape: RunShape) -> bool:
        return shape.attention if is_attention(name) else shape.mlp

    def save(self, folder: Path, shape: RunShape, for_training: bool, about: dict[str, Any]) -> None:
        """Writes the adapters as PEFT files and, for training, the moments beside them."""
        save_run(folder, self.engine, shape, for_training, about)

    def load(self, folder: Path, shape: RunShape, with_optimizer: bool) -> None:
        """Loads the adapters of a folder written by `save`. Raises InputError on every rank if it is damaged."""
        self.begin(shape)
        load_run(folder, self.engine, shape.first, with_optimizer)

    def join(self, states: list[TrainedState]) -> None:
        """Loads the adapters and gradients of several runs without a common row, for one pass."""
        first, *others = states
        self.engine.restore_state(TrainedState(first.weights, first.gradients, {}))
        for state in others:
            state.add(self.engine.handle)

    def gate(self, shapes: list[RunShape]) -> Tensor:
        """Returns the factors of the adapters' rows for tokens of each run, [runs, rank]."""
        gate = torch.zeros(len(shapes), self.lora.rank, dtype=torch.float64)
        for row, shape in zip(gate, shapes, strict=True):
            row[shape.rows] = self._scale(shape)
        return gate

    def split_gradients(self, shapes: list[RunShape]) -> list[Shards]:
        found: list[Shards] = [{} for _ in shapes]
        for name, parameter in trained_parameters(self.engine.handle):
            for gradients, shape in zip(found, shapes, strict=True):
                if parameter.grad is not None:
                    own = own_part(name, parameter, local_tensor(parameter.grad), shape.rows)
                    gradients[name] = on_host(own)
        wait_for_host()
        return found

    def _scale(self, shape: RunShape) -> float:
        return self.lora.model_copy(update={"rank": shape.rank}).scale
