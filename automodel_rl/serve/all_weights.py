"""What a run trains if the model has no adapters: all weights. They are saved as checkpoints."""

import json
from pathlib import Path
from typing import Any

from automodel_rl.checkpoint.folder import CONFIG, CheckpointError
from automodel_rl.checkpoint.load import check_whole, load_checkpoint
from automodel_rl.checkpoint.saver import CheckpointSaver
from automodel_rl.config import config_of_model, dump_config
from automodel_rl.engine import Engine
from automodel_rl.engine.trained_state import TrainedState
from automodel_rl.errors import InputError
from automodel_rl.serve.messages import RunShape
from automodel_rl.serve.run_files import ABOUT


class AllWeights:
    """The weights that the model has now. Methods are collectives.

    A copy of the model's first weights stays on the host, for a new run to begin with.

    Args:
        engine: trains the model.

    Attributes:
        scale: unused; adapters have one.
    """

    def __init__(self, engine: Engine):
        self.engine = engine
        self.whole, self.scale = RunShape(0), 1.0
        self._first = TrainedState(engine.take_state().weights, {}, {})
        self._saver = CheckpointSaver(engine, {}, in_background=False)
        model, parallel = engine.handle.model, engine.handle.layout.parallel
        config = config_of_model(model.path, []).model_copy(update={"model": model, "parallel": parallel})
        self._config = dump_config(config)  # with which `export` makes a Hugging Face checkpoint of what is saved

    def begin(self, shape: RunShape) -> None:
        """Gives the model its first weights, without gradients and moments."""
        self.engine.put_state(self._first)

    def enter(self, shape: RunShape) -> None:
        """Prepares the model for the state of a run: nothing is to be done."""

    def is_trained(self, name: str, shape: RunShape) -> bool:
        """Whether a run trains the weight of this name: each one."""
        return True

    def save(self, folder: Path, shape: RunShape, for_training: bool, about: dict[str, Any]) -> None:
        """Writes a checkpoint, from which a run goes on on any layout."""
        self._saver.texts = {CONFIG: self._config, ABOUT: json.dumps({**about, "step": self.engine.step})}
        problem = self._saver.save(folder, {"step": self.engine.step}, {})
        if problem is not None:
            raise InputError(f"the weights cannot be saved ({problem})")

    def load(self, folder: Path, shape: RunShape, with_optimizer: bool) -> None:
        """Gives the model the weights of a checkpoint.

        Raises:
            InputError: on every rank; the checkpoint is damaged.
        """
        self.begin(shape)  # a checkpoint has no gradients: those that are there must go
        try:
            check_whole(folder, self.engine.handle.layout.world_control)
            load_checkpoint(self.engine, folder)
        except CheckpointError as error:
            raise InputError(f"the saved weights are damaged ({error})") from None
        if not with_optimizer:
            self.engine.put_state(TrainedState(self.engine.take_state().weights, {}, {}))
