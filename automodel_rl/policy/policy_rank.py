"""A rank of a policy: the methods that a program calls on all ranks together."""

import contextlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from automodel_rl.batch import Microbatch, RoutesRef, unpack
from automodel_rl.checkpoint.load import check_intact, load_checkpoint, newest_intact
from automodel_rl.checkpoint.saver import CheckpointSaver
from automodel_rl.data.padding import padding_of
from automodel_rl.data.stop_tokens import new_stop_tokens
from automodel_rl.engine import Engine, TrainOutput
from automodel_rl.engine.parameter_groups import Settings
from automodel_rl.engine.reference_weights import ReferenceWeights
from automodel_rl.errors import JobEndedError
from automodel_rl.files import is_io_error
from automodel_rl.launch.flight import flight, flight_file
from automodel_rl.losses import Denominator, LossFn, Readout
from automodel_rl.model.handle import ModelHandle
from automodel_rl.model.perturbed_weights import perturbed_weights
from automodel_rl.model.rounding_noise import rounding_noise
from automodel_rl.optimizers import AdamWSettings
from automodel_rl.policy.routes import RouteStore
from automodel_rl.policy.shares import RowValues, Share
from automodel_rl.step.agreement import GlobalBatch


@dataclass(frozen=True)
class CheckpointStatus:
    """State of the last checkpoint.

    Attributes:
        is_done: whether no checkpoint is being written.
        error: why it could not be written; reported once.
        seconds: time it took.
    """

    is_done: bool
    error: str | None
    seconds: float


class PolicyRank:
    """This rank's part of a model. Its methods are collectives, which `Policy` calls on all ranks.

    A `share` is the rows of this rank's data rank; None on an outsider.

    Args:
        tokenizer: saved with the model.
        variables: further variables of the chat template.

    Attributes:
        engine: set by `begin`.
        routes: the routes on this rank.
    """

    def __init__(
        self, handle: ModelHandle, tokenizer: PreTrainedTokenizerBase, variables: Mapping[str, Any] | None = None
    ):
        self.handle, self.tokenizer, self.variables = handle, tokenizer, variables
        self.engine: Engine
        self.routes = RouteStore(handle)
        self._kept: dict[str, ReferenceWeights] = {}
        self._in_use: list[contextlib.ExitStack] = []
        self._saver: CheckpointSaver

    def ping(self) -> None:
        """Does nothing; shows that this rank is alive."""

    def begin(self, optimizer: Settings | None, total_steps: int | None, microbatch_dump_folder: Path | None) -> None:
        self.engine = Engine(self.handle, optimizer, total_steps)
        self.engine.microbatch_dump_folder = microbatch_dump_folder

    def to_host(self) -> None:
        self.engine.moments_to_host()
        self.handle.to_host()

    def to_device(self) -> None:
        self.handle.to_device()

    def _microbatches(self, share: Share | None, replay: bool = False) -> list[Microbatch]:
        if share is None:
            return []
        return share.pack(self.routes.arrived if replay else None)

    def train_step(
        self,
        share: Share | None,
        loss: LossFn,
        readout: Readout,
        global_batch: GlobalBatch,
        replay: bool = False,
        step_index: float | None = None,
    ) -> TrainOutput:
        return self.engine.train_step(self._microbatches(share, replay), loss, readout, global_batch, step_index)

    def forward_backward(
        self,
        share: Share | None,
        loss: LossFn,
        readout: Readout,
        global_batch: GlobalBatch,
        counts: dict[Denominator, int] | None,
        replay: bool = False,
    ) -> tuple[float, dict[str, float]]:
        return self.engine.forward_backward(self._microbatches(share, replay), loss, readout, counts, global_batch)

    def optimizer_step(self, settings: AdamWSettings | None = None) -> TrainOutput:
        return self.engine.optimizer_step(settings)

    def zero_grad(self) -> None:
        self.engine.zero_grad()

    def evaluate(
        self,
        share: Share | None,
        loss: LossFn,
        readout: Readout,
        global_batch: GlobalBatch,
        counts: dict[Denominator, int] | None,
    ) -> tuple[float, dict[str, float]]:
        return self.engine.evaluate(self._microbatches(share), loss, readout, counts, global_batch)

    def logprobs(
        self,
        share: Share | None,
        temperature: float,
        global_batch: GlobalBatch,
        replay: bool = False,
        ids: str | None = None,
    ) -> RowValues | None:
        """Log-probability of each token of each row, [n]; or of the tokens in the rows' values `ids`, [n, K]."""
        microbatches = self._microbatches(share, replay)
        scored = self.engine.add_logprobs(microbatches, "logprobs", temperature, global_batch, ids)
        # Unpacked separately, as the rows may bring a value of this name.
        return self._of_rows(scored, [piece for one in scored for piece in unpack(one.values["logprobs"], one)])

    def entropies(
        self, share: Share | None, temperature: float, global_batch: GlobalBatch, replay: bool = False
    ) -> RowValues | None:
        """Entropy of the distribution over each token of each row, [n]."""
        microbatches = self._microbatches(share, replay)
        found = self.engine.entropies(microbatches, temperature, global_batch)
        return self._of_rows(microbatches, [piece.cpu() for piece in found])

    def scores(self, share: Share | None, global_batch: GlobalBatch) -> RowValues | None:
        """Outputs of a linear head for each token of each row, [n, L]."""
        microbatches = self._microbatches(share)
        return self._of_rows(microbatches, [piece.cpu() for piece in self.engine.scores(microbatches, global_batch)])

    def top_logits(
        self, share: Share | None, k: int, global_batch: GlobalBatch, normalised: bool = False, temperature: float = 1.0
    ) -> tuple[RowValues, RowValues] | None:
        """The k largest logits for each token of each row, [n, k], and their ids; if `normalised`, log-probabilities
        instead."""
        microbatches = self._microbatches(share)
        if normalised:
            found = self.engine.top_logprobs(microbatches, k, temperature, global_batch)
        else:
            found = self.engine.top_logits(microbatches, k, global_batch)
        logits = self._of_rows(microbatches, [of_row[0].cpu() for of_row in found])
        ids = self._of_rows(microbatches, [of_row[1].cpu() for of_row in found])
        return None if logits is None or ids is None else (logits, ids)

    def next_tokens(self, share: Share | None, global_batch: GlobalBatch) -> dict[int, int] | None:
        """Most likely token after each row, by row."""
        microbatches = self._microbatches(share)
        tokens = self.engine.next_tokens(microbatches, global_batch).tolist()
        if not self.handle.layout.is_first_of_data_rank:
            return None
        return dict(zip(_rows(microbatches), tokens, strict=True))

    def _of_rows(self, microbatches: list[Microbatch], pieces: list[Tensor]) -> RowValues | None:
        if not self.handle.layout.is_first_of_data_rank:
            return None
        return RowValues.of(_rows(microbatches), pieces)

    def keep_weights(self, name: str, lends_memory: bool) -> None:
        self._kept[name] = ReferenceWeights(self.handle, lends_memory=lends_memory)

    def use_weights(self, name: str) -> None:
        """Computes with kept weights until `restore_weights`."""
        self._use(self._kept[name].in_place())

    def use_changed_weights(self) -> None:
        """Computes with altered weights until `restore_weights`."""
        self._use(perturbed_weights(self.handle))

    def use_rounding_noise(self, dtype: torch.dtype) -> None:
        """Computes with noise of the size of rounding to a dtype until `restore_weights`."""
        self._use(rounding_noise(self.handle, dtype))

    def restore_weights(self) -> None:
        """Undoes the last call of `use_weights`, `use_changed_weights` or `use_rounding_noise`."""
        self._in_use.pop().close()

    def _use(self, others: AbstractContextManager[None]) -> None:
        stack = contextlib.ExitStack()
        stack.enter_context(others)
        self._in_use.append(stack)

    def move_routes(self, pieces: list[tuple[RoutesRef, int]]) -> None:
        """Sends routes from the ranks that have them to those that train on their rows. `pieces` are pieces of rows,
        each with the row's data rank."""
        self.routes.move(pieces)

    def forget_routes(self, rollouts: set[int]) -> None:
        self.routes.forget(rollouts)

    def open_saver(self, texts: dict[str, str], in_background: bool) -> None:
        """Prepares to write checkpoints that include these texts, by file name."""
        self._saver = CheckpointSaver(self.engine, texts, in_background=in_background)

    def save_checkpoint(self, folder: Path, progress: dict[str, Any], state: dict[str, Any]) -> str | None:
        """Writes a checkpoint, possibly in the background. No other may be in progress. Returns an error, or None.

        Args:
            progress: the program's progress, with the key `step`; JSON values.
            state: the program's state; JSON values.
        """
        return self._saver.save(folder, progress, state if dist.get_rank() == 0 else {})

    def checkpoint_status(self, waits: bool) -> CheckpointStatus:
        """Returns the state of the last checkpoint. With `waits`, waits until it is done."""
        if not (waits or self._saver.is_done):
            return CheckpointStatus(False, None, self._saver.seconds)
        return CheckpointStatus(True, self._saver.wait(), self._saver.seconds)

    def newest_checkpoint(self, folders: list[Path]) -> tuple[Path | None, list[str]]:
        """Returns the newest of these folders with a complete checkpoint, and a warning about each newer one."""
        warnings: list[str] = []
        return newest_intact(folders, self.handle.layout.world_control, warnings.append), warnings

    def check_checkpoint(self, folder: Path) -> None:
        check_intact(folder, self.handle.layout.world_control)

    def load_checkpoint(self, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
        """Restores a checkpoint. Returns the stored progress and program state."""
        return load_checkpoint(self.engine, folder)

    def record_flight_in(self, folder: Path) -> None:
        flight.record_in(flight_file(folder, dist.get_rank()))

    def save_model(self, folder: Path) -> str:
        """Writes a Hugging Face checkpoint. Returns a line about the model's end tokens; "" if there is nothing to
        report."""
        handle, is_adapters = self.handle, self.handle.adapter_origin is not None
        try:
            if handle.has_linear_head:
                padding = padding_of(handle.whole_config, self.tokenizer, self.variables)
                handle.save_pretrained(folder, padding.tokenizer, pads_with=padding.token)
                return padding.note
            ends = new_stop_tokens(
                handle.source, handle.whole_config, self.tokenizer, self.variables, adapters=is_adapters
            )
            handle.save_pretrained(folder, self.tokenizer, ends.ids)
        except Exception as error:
            if not is_io_error(error):
                raise
            # Other ranks may be waiting for this rank's part of the folder, so the job must end.
            raise JobEndedError(
                f"error: {folder} could not be written ({error}): free disk space or fix its permissions; "
                "--resume auto then writes it"
            ) from error
        return ends.note


def _rows(microbatches: list[Microbatch]) -> list[int]:
    return [row for microbatch in microbatches for row in microbatch.order]
