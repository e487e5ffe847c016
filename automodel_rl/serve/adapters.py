"""What runs train if the model has adapters: a set of adapters for each run, of any rank up to that of the model."""

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
    """The adapters of the run that the model has now. Methods are collectives.

    The model has adapters of the largest rank. Those of a smaller rank have some of its rows. Others are filled with
    zeros, which get no gradient and stay 0. So they compute and train as adapters of their own rank. Runs that share no
    row can be in the model together, for one pass over the data of all (batch/tensors.py).

    Args:
        engine: trains the model.
        lora: the config's section `model.lora`.

    Attributes:
        scale: the factor of the output of the adapters that the model has now.
    """

    def __init__(self, engine: Engine, lora: LoraConfig):
        self.engine, self.lora = engine, lora
        self.whole = RunShape(lora.rank)
        self.scale = lora.scale

    def begin(self, shape: RunShape) -> None:
        """Gives the model new adapters, without gradients and moments."""
        self.enter(shape)
        for name, parameter in self.engine.handle.named_parameters():
            if parameter.requires_grad:
                initialise(name, parameter, shape.seed, shape.rows)
        weights = self.engine.take_state().weights
        self.engine.put_state(TrainedState(weights, {}, {}))

    def enter(self, shape: RunShape) -> None:
        """Prepares the model for the state of a run."""
        self.scale = self._scale(shape)
        set_scale(self.engine.handle.parts, self.scale)

    def is_trained(self, name: str, shape: RunShape) -> bool:
        """Whether a run trains the adapter of this name."""
        return shape.attention if is_attention(name) else shape.mlp

    def save(self, folder: Path, shape: RunShape, for_training: bool, about: dict[str, Any]) -> None:
        """Writes the adapters as PEFT's files and, for training, the moments beside them."""
        save_run(folder, self.engine, shape, for_training, about)

    def load(self, folder: Path, shape: RunShape, with_optimizer: bool) -> None:
        """Gives the model the adapters of a folder that `save` wrote.

        Raises:
            InputError: on every rank; the folder is damaged.
        """
        self.begin(shape)
        load_run(folder, self.engine, shape.first, with_optimizer)

    def join(self, states: list[TrainedState]) -> None:
        """Gives the model the adapters and gradients of several runs, which share no row, for one pass."""
        first, *others = states
        self.engine.put_state(TrainedState(first.weights, first.gradients, {}))
        for state in others:
            state.add(self.engine.handle)

    def gate(self, shapes: list[RunShape]) -> Tensor:
        """The factors of the adapters' rows for tokens of each run, [runs, rank]."""
        gate = torch.zeros(len(shapes), self.lora.rank, dtype=torch.float64)
        for row, shape in zip(gate, shapes, strict=True):
            row[shape.rows] = self._scale(shape)
        return gate

    def split_gradients(self, shapes: list[RunShape]) -> list[Shards]:
        """The gradients of each run after a pass of several."""
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
