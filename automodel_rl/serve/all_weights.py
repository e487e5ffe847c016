"""Training state of runs on a model without adapters: all weights, saved as checkpoints."""

import json
from pathlib import Path
from typing import Any

from automodel_rl.checkpoint.folder import CONFIG, CheckpointError
from automodel_rl.checkpoint.load import check_intact, load_checkpoint
from automodel_rl.checkpoint.saver import CheckpointSaver
from automodel_rl.config import config_of_model, dump_config
from automodel_rl.engine import Engine
from automodel_rl.engine.trained_state import TrainedState
from automodel_rl.errors import InputError
from automodel_rl.serve.messages import RunShape
from automodel_rl.serve.run_files import ABOUT


class AllWeights:
    """The weights that are loaded into the model. Methods are collectives.

    A copy of the model's initial weights stays on the host, as the start of new runs.

    Attributes:
        scale: always 1; only adapters use it.
    """

    def __init__(self, engine: Engine):
        self.engine = engine
        self.whole, self.scale = RunShape(0), 1.0
        self._first = TrainedState(engine.snapshot_state().weights, {}, {})
        self._saver = CheckpointSaver(engine, {}, in_background=False)
        model, parallel = engine.handle.model, engine.handle.layout.parallel
        config = config_of_model(model.path, []).model_copy(update={"model": model, "parallel": parallel})
        self._config = dump_config(config)  # saved in checkpoints, for `export`

    def begin(self, shape: RunShape) -> None:
        """Resets the model to its initial weights, without gradients and moments."""
        self.engine.restore_state(self._first)

    def enter(self, shape: RunShape) -> None:
        """Does nothing."""

    def is_trained(self, name: str, shape: RunShape) -> bool:
        return True

    def save(self, folder: Path, shape: RunShape, for_training: bool, about: dict[str, Any]) -> None:
        """Writes a checkpoint, from which a run can resume on any layout."""
        self._saver.texts = {CONFIG: self._config, ABOUT: json.dumps({**about, "step": self.engine.step})}
        problem = self._saver.save(folder, {"step": self.engine.step}, {})
        if problem is not None:
            raise InputError(f"the weights cannot be saved ({problem})")

    def load(self, folder: Path, shape: RunShape, with_optimizer: bool) -> None:
        """Loads the weights of a checkpoint. Raises InputError on every rank if it is damaged."""
        self.begin(shape)  # a checkpoint has no gradients: drop the current ones
        try:
            check_intact(folder, self.engine.handle.layout.world_control)
            load_checkpoint(self.engine, folder)
        except CheckpointError as error:
            raise InputError(f"the saved weights are damaged ({error})") from None
        if not with_optimizer:
            self.engine.restore_state(TrainedState(self.engine.snapshot_state().weights, {}, {}))
