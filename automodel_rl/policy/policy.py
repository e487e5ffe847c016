"""Policy: the model in training, as a program uses it."""

import contextlib
import dataclasses
import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from automodel_rl.batch import Batch, Packing, RoutesRef, StepSize, TokenSequence
from automodel_rl.engine import TrainOutput
from automodel_rl.engine.engine import LOGPROBS
from automodel_rl.engine.parameter_groups import Settings
from automodel_rl.errors import InputError
from automodel_rl.losses import Denominator, LossFn, Readout
from automodel_rl.optimizers import AdamWSettings
from automodel_rl.policy.crew import POLICY, Crew
from automodel_rl.policy.shares import RowValues, Share
from automodel_rl.step.agreement import GlobalBatch

Dealt = list[list[list[int]]]
"""Rows of each microbatch of each data rank."""


class Policy:
    """The model in training. Its methods take rows, pack and distribute them to the data ranks, and return results
    in row order. None of them is a collective: a single program calls them.

    Args:
        crew: the ranks that train the model.
        packing: how rows become microbatches.
        vocab_size: number of token ids of the model.
        name: the model's name on the ranks.

    Attributes:
        total_steps: number of optimizer steps of the run; None if it has no end.
        is_on_host: whether the weights are in host memory, in which case the model computes only inside `on_device`.

    Example:
        >>> import torch
        >>> def program(policy, fleet, run):
        ...     policy.begin(OptimizerConfig(lr=1e-4, decay="constant"))
        ...     batch = Batch([TokenSequence(torch.tensor([5, 6, 7]), torch.tensor([False, False, True]))])
        ...     return policy.train_step(batch, sft_loss).num_tokens, policy.logprobs(batch)[0].shape
        >>> run_program(program, load_config("my_sft.yaml"))  # doctest: +ELLIPSIS
        loading ...
        (1, torch.Size([3]))
    """

    def __init__(self, crew: Crew, packing: Packing, vocab_size: int, name: str = POLICY):
        self.crew, self.packing, self.vocab_size, self.name = crew, packing, vocab_size, name
        self._dealt: weakref.WeakKeyDictionary[Batch, list[Dealt]] = weakref.WeakKeyDictionary()
        self._routes_at: dict[RoutesRef, int] = {}
        self.total_steps: int | None = None
        self.is_on_host = False

    def begin(
        self, optimizer: Settings | None = None, total_steps: int | None = None, diverged_folder: Path | None = None
    ) -> None:
        """Creates the optimizer. Must be called first.

        Args:
            optimizer: its settings, or one per component, {"vision": ..., ...}; None for a constant rate.
            total_steps: number of optimizer steps of the run; required if the learning rate decays.
            diverged_folder: folder for the microbatches of the step at which training diverged; None keeps none.

        Raises:
            InputError: the learning rate decays and `total_steps` is missing.
        """
        self.total_steps = total_steps
        self._ask("begin", optimizer, total_steps, diverged_folder)

    def train_step(
        self,
        batch: Batch,
        loss: LossFn,
        readout: Readout = LOGPROBS,
        *,
        replay: bool = False,
        step_index: float | None = None,
    ) -> TrainOutput:
        """Takes one optimizer step.

        Args:
            batch: the global batch, of one part.
            loss: returns sums over a microbatch. It is sent to all ranks.
            readout: per-token outputs that the loss reads.
            replay: follow the routes of the rows.
            step_index: position in the learning-rate schedule, as in `Engine.train_step`.

        Raises:
            InputError: the rows do not fit the model or a microbatch. Nothing was trained.
            MicrobatchError, TrainingDivergedError: as `Engine.train_step`.
        """
        self._check_ids(batch, readout.ids)
        global_batch, shares = self.shares(batch, replay, single_part=True)
        output: TrainOutput = self._ask("train_step", loss, readout, global_batch, replay, step_index, shares=shares)
        return output

    def forward_backward(
        self,
        batch: Batch,
        loss: LossFn,
        readout: Readout = LOGPROBS,
        counts: dict[Denominator, int] | None = None,
        *,
        replay: bool = False,
    ) -> tuple[float, dict[str, float]]:
        """Accumulates the gradients of a batch until `optimizer_step` or `zero_grad`. Returns the loss and its
        metrics.

        Args:
            batch, loss, readout, replay: as in `train_step`.
            counts: divisors of the loss's sums; None for the counts of this batch, `UNDIVIDED` for none.
        """
        self._check_ids(batch, readout.ids)
        global_batch, shares = self.shares(batch, replay, single_part=True)
        result: tuple[float, dict[str, float]] = self._ask(
            "forward_backward", loss, readout, global_batch, counts, replay, shares=shares
        )
        return result

    def optimizer_step(self, settings: AdamWSettings | None = None) -> TrainOutput:
        """Takes one optimizer step with the accumulated gradients, and clears them. `settings` are those of AdamW
        for this step; None for those of `begin` and their schedule."""
        output: TrainOutput = self._ask("optimizer_step", settings)
        return output

    def zero_grad(self) -> None:
        """Clears the accumulated gradients."""
        self._ask("zero_grad")

    def evaluate(
        self,
        batch: Batch,
        loss: LossFn,
        readout: Readout = LOGPROBS,
        counts: dict[Denominator, int] | None = None,
    ) -> tuple[float, dict[str, float]]:
        """Returns loss and metrics of a batch, without gradients.

        Args:
            batch: rows; several parts are packed separately and evaluated as one.
            loss, readout, counts: as in `forward_backward`.
        """
        self._check_ids(batch, readout.ids)
        global_batch, shares = self.shares(batch)
        result: tuple[float, dict[str, float]] = self._ask(
            "evaluate", loss, readout, global_batch, counts, shares=shares
        )
        return result

    def logprobs(
        self, batch: Batch, temperature: float = 1.0, *, replay: bool = False, ids: str | None = None
    ) -> list[Tensor]:
        """Returns the log-probability of each token of each row of n tokens, [n], fp32 or float64; the first entry
        is 0.

        Args:
            batch: rows; several parts are packed separately, like the optimizer steps over them.
            temperature: divisor of the logits.
            replay: follow the routes of the rows.
            ids: name of values with alternative token ids at each position, int64 [n, K], -1 for none. Their
                log-probabilities are returned instead, [n, K].
        """
        self._check_ids(batch, ids)
        global_batch, shares = self.shares(batch, replay)
        return self._of_rows(batch, "logprobs", temperature, global_batch, replay, ids, shares=shares)

    def entropies(self, batch: Batch, temperature: float = 1.0, *, replay: bool = False) -> list[Tensor]:
        """Returns the entropy of the distribution over each token of each row, in nats, [n], fp32 or float64; the
        first entry is 0.

        Args:
            batch, temperature, replay: as in `logprobs`.
        """
        global_batch, shares = self.shares(batch, replay)
        return self._of_rows(batch, "entropies", temperature, global_batch, replay, shares=shares)

    def scores(self, batch: Batch) -> list[Tensor]:
        """Returns the outputs of a linear head for each token of each row, [n, L], fp32 or float64.

        Entry i is the output after token i: the last entry is the score of the whole row, and entry i - 1 the value
        of the state in which token i is chosen. Several parts of `batch` are packed separately. Raises InputError if
        the model has a vocabulary head.
        """
        global_batch, shares = self.shares(batch)
        return self._of_rows(batch, "scores", global_batch, shares=shares)

    def top_logits(self, batch: Batch, k: int) -> list[tuple[Tensor, Tensor]]:
        """Returns the `k` largest logits for each token of each row of `batch`, [n, k], fp32 or float64, largest
        first, and their ids."""
        return self._top(batch, k, normalised=False)

    def top_logprobs(self, batch: Batch, k: int, temperature: float = 1.0) -> list[tuple[Tensor, Tensor]]:
        """Returns the `k` largest log-probabilities for each token of each row of `batch`, [n, k], fp32 or float64,
        largest first, and their ids. Logits are divided by `temperature`. The first entry is 0, as nothing predicts
        the first token."""
        return self._top(batch, k, normalised=True, temperature=temperature)

    def _top(self, batch: Batch, k: int, *, normalised: bool, temperature: float = 1.0) -> list[tuple[Tensor, Tensor]]:
        global_batch, shares = self.shares(batch)
        answers = self.crew.gather(self.name, "top_logits", k, global_batch, normalised, temperature, shares=shares)
        logits, ids = ([answer[place] for answer in answers] for place in (0, 1))
        return [*zip(_in_order(logits, len(batch)), _in_order(ids, len(batch)), strict=True)]

    def _ask(self, method: str, *arguments: Any, shares: Sequence[Share] | None = None) -> Any:
        return self.crew.ask(self.name, method, *arguments, shares=shares)

    def _of_rows(self, batch: Batch, method: str, *arguments: Any, shares: Sequence[Share]) -> list[Tensor]:
        """Gathers a method's `RowValues` from the data ranks, in row order."""
        return _in_order(self.crew.gather(self.name, method, *arguments, shares=shares), len(batch))

    def next_tokens(self, sequences: Sequence[TokenSequence]) -> list[int]:
        """Returns the most likely token after each of `sequences`, which may have any length."""
        longest = max(map(len, sequences), default=0)
        roomy = dataclasses.replace(self.packing, capacity=max(self.packing.capacity, longest))
        global_batch, shares = self.shares(Batch(sequences), packing=roomy)
        found: dict[int, int] = {}
        for of_rank in self.crew.gather(self.name, "next_tokens", global_batch, shares=shares):
            found |= of_rank
        return [found[row] for row in range(len(sequences))]

    def keep_weights(self, name: str, *, lends_memory: bool = False) -> None:
        """Keeps a copy of the loaded weights. Must be called before they change.

        Args:
            name: the name of the copy, for `with_weights`.
            lends_memory: whether generators and the model take turns using device memory.
        """
        self._ask("keep_weights", name, lends_memory)

    def with_weights(self, name: str) -> AbstractContextManager[None]:
        """Computes with the weights kept as `name` in the block, then restores the model's own, bit for bit."""
        return self._with_other_weights("use_weights", name)

    def with_changed_weights(self) -> AbstractContextManager[None]:
        """Computes with altered weights of the same size, which belong to no checkpoint, in the block, then restores
        the model's own, bit for bit."""
        return self._with_other_weights("use_changed_weights")

    def with_rounding_noise(self, dtype: torch.dtype) -> AbstractContextManager[None]:
        """Computes in the block with noise in every layer's input, of the size of rounding to `dtype`."""
        return self._with_other_weights("use_rounding_noise", dtype)

    @contextlib.contextmanager
    def _with_other_weights(self, method: str, *arguments: Any) -> Iterator[None]:
        self._ask(method, *arguments)
        try:
            yield
        finally:
            if self.crew.is_intact:
                self._ask("restore_weights")

    @contextlib.contextmanager
    def on_device(self) -> Iterator[None]:
        """Moves the weights to the device inside the block, if they are in host memory, and back afterwards."""
        if not self.is_on_host:
            yield
            return
        self._ask("to_device")
        self.is_on_host = False
        try:
            yield
        finally:
            if self.crew.is_intact:
                self.to_host()

    @contextlib.contextmanager
    def off_device(self) -> Iterator[None]:
        """Moves weights and optimizer moments to host memory inside the block, to free the GPU for another model."""
        if self.is_on_host:
            yield
            return
        self.to_host()
        try:
            yield
        finally:
            if self.crew.is_intact:
                self._ask("to_device")
                self.is_on_host = False

    def to_host(self) -> None:
        """Moves weights and optimizer moments to host memory, to free the device. Afterwards the model can compute
        or be saved only inside `on_device`."""
        self._ask("to_host")
        self.is_on_host = True

    def forget_routes(self, rollouts: Collection[int]) -> None:
        """Drops the routes of rows that have been trained on, by the numbers of their `rollouts`."""
        self._routes_at = {at: rank for at, rank in self._routes_at.items() if at.key[0] not in rollouts}
        self._ask("forget_routes", {*rollouts})

    def save(self, folder: str | Path) -> str:
        """Writes a Hugging Face checkpoint with its tokenizer, or PEFT files for adapters.

        Args:
            folder: the folder to write, on a file system that all ranks share; replaced if it exists.

        Returns:
            A line about the model's end tokens; "" if there is nothing to report.

        Raises:
            JobEndedError: it could not be written. The ranks accept no more calls.
        """
        note: str = self._ask("save_model", Path(folder).absolute())
        return note

    def record_flight_in(self, folder: Path) -> None:
        """Writes each rank's flight recorder to a file in `folder`, which survives however the rank ends."""
        self._ask("record_flight_in", folder)

    def size(self, batch: Batch) -> StepSize:
        """Returns the size of a `batch` in tokens, microbatches and floating-point operations.

        Raises:
            InputError: rows do not fit the model or a microbatch.
        """
        sizes = [
            self.packing.size([len(batch.sequences[row]) for row in part], dealt)
            for part, dealt in zip(batch.parts, self._deal(batch), strict=True)
        ]
        return sum(sizes[1:], sizes[0])

    def shares(
        self, batch: Batch, replay: bool = False, single_part: bool = False, packing: Packing | None = None
    ) -> tuple[GlobalBatch, list[Share]]:
        """Returns the size of a batch, and the share of each data rank, for a call.

        Args:
            batch: the rows.
            replay: send ranks the routes of their rows.
            single_part: refuse a batch of several parts.
            packing: how rows become microbatches; None for the policy's own packing.

        Raises:
            InputError: rows do not fit the model or a microbatch.
        """
        if single_part and len(batch.parts) != 1:
            raise ValueError(f"the batch has {len(batch.parts)} parts, one per optimizer step: split() it first")
        of_parts = self._deal(batch, packing)
        of_ranks = [[places for dealt in of_parts for places in dealt[rank]] for rank in range(self.packing.num_shares)]
        if replay:
            self._move_routes(batch, of_ranks)
        shares = [Share.of(batch, microbatches) for microbatches in of_ranks]
        num_rows = [sum(map(len, microbatches)) for microbatches in of_ranks]
        counts: dict[Denominator, int] = {
            "tokens": sum(int(sequence.loss_mask[1:].sum()) for sequence in batch.sequences),
            "sequences": batch.num_episodes,
            "pairs": sum(number // 2 for number in num_rows),
            "positions": sum(batch.lengths),
            "chosen_tokens": sum(int(sequence.loss_mask[1:].sum()) for sequence in batch.sequences[::2]),
        }
        return GlobalBatch(len(of_ranks[0]), counts), shares

    def first_rows(self, batch: Batch) -> list[int]:
        """Returns the rows of `batch` in each data rank's first microbatch."""
        return [row for of_rank in self._deal(batch)[0] for row in of_rank[0]]

    def _deal(self, batch: Batch, packing: Packing | None = None) -> list[Dealt]:
        """Packs each part of a batch. Raises InputError if rows do not fit the model or a microbatch."""
        if batch not in self._dealt:
            self._check_tokens(batch)
            of_parts = []
            for part in batch.parts:
                dealt = (packing or self.packing).deal(
                    [len(batch.sequences[row]) for row in part], batch.sequences_per_example
                )
                of_parts.append([[[part[place] for place in places] for places in share] for share in dealt])
            self._dealt[batch] = of_parts
        return self._dealt[batch]

    def _check_ids(self, batch: Batch, name: str | None) -> None:
        """Raises InputError unless the rows have values of this name that are token ids of the model, or -1."""
        if name is None or not len(batch):
            return
        if name not in batch:
            raise InputError(f"ids={name!r}: the rows have values {sorted(batch.sequences[0].values)}")
        for row, ids in enumerate(batch[name]):
            if ids.dtype != torch.int64 or ids.ndim != 2:
                raise InputError(
                    f"{name} of row {row} has dtype {ids.dtype} and shape {list(ids.shape)}: pass int64 [n, K]"
                )
            if ids.numel() and not -1 <= int(ids.min()) <= int(ids.max()) < self.vocab_size:
                raise InputError(
                    f"{name} of row {row} has token ids {int(ids.min())} to {int(ids.max())}, but the model's are 0 to "
                    f"{self.vocab_size - 1}, or -1 for none"
                )

    def _check_tokens(self, batch: Batch) -> None:
        if not len(batch):
            return
        ids = torch.cat([sequence.input_ids for sequence in batch.sequences])
        outside = (ids < 0) | (ids >= self.vocab_size)
        if not outside.any():
            return
        place = int(outside.nonzero()[0])
        row, start = 0, 0
        while start + len(batch.sequences[row]) <= place:
            start += len(batch.sequences[row])
            row += 1
        raise InputError(
            f"row {row} has {ids[place]} in input_ids at index {place - start}, but the model's token ids are 0 to "
            f"{self.vocab_size - 1}: use the tokenizer that belongs to the model"
        )

    def _move_routes(self, batch: Batch, of_ranks: list[list[list[int]]]) -> None:
        """Sends ranks the routes of their rows that they lack."""
        moves = [
            (at, rank)
            for rank, microbatches in enumerate(of_ranks)
            for places in microbatches
            for row in places
            for at in batch.routes[row]
            if self._routes_at.get(at) != rank
        ]
        if moves:
            self._ask("move_routes", moves)
            self._routes_at |= dict(moves)


def _in_order(answers: Sequence[RowValues], count: int) -> list[Any]:
    """Merges the results of all data ranks in row order."""
    found: dict[int, Tensor] = {}
    for answer in answers:
        found |= answer.by_row()
    return [found[row] for row in range(count)]
