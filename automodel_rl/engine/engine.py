"""Engine: optimizer steps and forward-only work on a ModelHandle, the same on every layout."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from automodel_rl.batch import LocalMicrobatch, Microbatch, set_values, sum_by_sequence, unpack
from automodel_rl.config import OptimizerConfig
from automodel_rl.engine.microbatch_dump import dump_microbatches
from automodel_rl.engine.parameter_groups import Settings, check_groups, check_masters, of_components
from automodel_rl.engine.trained_state import TrainedState, snapshot_state
from automodel_rl.errors import TrainingDivergedError
from automodel_rl.losses import Denominator, LossFn, Readout
from automodel_rl.model.handle import ModelHandle
from automodel_rl.model.head import Head, OutputFn
from automodel_rl.model.logprobs import top_logits, top_logprobs
from automodel_rl.model.mtp import with_mtp
from automodel_rl.model.offload import Offload
from automodel_rl.model.readouts import read
from automodel_rl.optimizers import OPTIMIZERS, AdamWSettings, ModelOptimizer, learning_rate, warmup_steps
from automodel_rl.parallel.sharding import by_mesh
from automodel_rl.step.agreement import GlobalBatch
from automodel_rl.step.runner import StepRunner
from automodel_rl.step.totals import LossTotals, share_totals

LOGPROBS = Readout()


@dataclass(frozen=True)
class TrainOutput:
    """The result of one optimizer step over the global batch; equal on every rank.

    Attributes:
        loss: the global batch's loss: each of its sums divided by that sum's global count, all added up.
        grad_norm: global gradient norm before clipping.
        num_tokens: tokens that counted in the loss.
        lr: learning rate of the step.
        skipped: whether no weight changed: loss or gradient were not finite, or there was nothing to train.
        nothing_to_train: whether the global batch had no microbatches, or neither trained tokens nor a gradient. A
            step would have moved the weights only by the optimizer's moments.
        metrics: the loss's own, a mixture's routers', and `indexer/cross_entropy` of trained indexers.

    Example:
        >>> TrainOutput(loss=0.5, grad_norm=1.0, num_tokens=2, lr=1e-5, skipped=False).metrics
        {}
    """

    loss: float
    grad_norm: float
    num_tokens: int
    lr: float
    skipped: bool
    nothing_to_train: bool = False
    metrics: dict[str, float] = field(default_factory=dict)


class Engine:
    """Trains and evaluates a model. Every method is a collective: all ranks call it with their data rank's
    microbatches.

    Args:
        handle: the model.
        optimizer: settings of optimizer and learning rate schedule, for all components or by component name.
        total_steps: number of optimizer steps of the run; required if the learning rate decays.

    Attributes:
        microbatch_dump_folder: folder for the microbatches at which training diverged; None saves none.

    Raises:
        InputError: the learning rate decays and `total_steps` is missing.

    Example:
        >>> import torch
        >>> engine = Engine(ModelHandle.from_pretrained(checkpoint), OptimizerConfig(lr=1e-4, decay="constant"))
        >>> sequence = TokenSequence(torch.tensor([5, 6, 7, 8]), torch.tensor([False, False, True, True]))
        >>> microbatches = pack([sequence], capacity=16)
        >>> out = engine.train_step(microbatches, sft_loss)
        >>> out.num_tokens, out.skipped
        (2, False)
        >>> (logprobs,) = engine.logprobs(microbatches)
        >>> logprobs.shape, logprobs.dtype, logprobs[0].item()
        (torch.Size([4]), torch.float32, 0.0)
    """

    def __init__(self, handle: ModelHandle, optimizer: Settings | None = None, total_steps: int | None = None):
        self.handle, self.runner = handle, StepRunner(handle)
        configs = of_components(optimizer or OptimizerConfig(decay="constant"), handle.meshes.encoders)
        check_masters(handle.model, configs)
        self.config = configs["language"]
        # Raises if the rate decays and total_steps is missing.
        learning_rate(self.config, warmup_steps(self.config, total_steps), total_steps)
        self.total_steps = total_steps
        parts = [(p, c.layout.group_of, configs[c.name]) for c in handle.components for p in c.parts]
        self.optimizer = ModelOptimizer(parts, OPTIMIZERS, self.config.lr)
        check_groups(handle, configs)
        self._moments = Offload(self.optimizer.moments)
        self.step = 0
        self.skipped_in_a_row = 0
        self._has_gradients = False
        self.microbatch_dump_folder: Path | None = None

    def train_step(
        self,
        microbatches: Sequence[Microbatch],
        loss_fn: LossFn,
        readout: Readout = LOGPROBS,
        global_batch: GlobalBatch | None = None,
        step_index: float | None = None,
    ) -> TrainOutput:
        """Takes one optimizer step over the global batch.

        Args:
            microbatches: this data rank's microbatches, on the host, equally many on every data rank (see `pack`).
            loss_fn: returns sums over a microbatch, which are divided by the counts of the global batch.
            readout: the per-token values that the loss needs.
            global_batch: the global batch, if one process has made and checked all ranks' microbatches. None: ranks
                check them with each other.
            step_index: index of the step among `total_steps`, from 0, for the learning rate; None for the number of
                steps so far.

        Returns:
            Loss, gradient norm and metrics, equal on every rank.

        Raises:
            InputError: on every rank, if the microbatches do not fit the model or each other.
            MicrobatchError: a forward, loss or backward failed; on every rank for a loss. The weights are unchanged.
            TrainingDivergedError: loss or gradient was not finite in too many steps in a row.
        """
        self.handle.check_head(is_linear=readout.scores)
        self.handle.check_mtp(is_read=readout.mtp)
        loss_fn, readout = self._with_mtp(loss_fn, readout)
        global_batch = self.runner.global_batch(microbatches, global_batch)
        lr = learning_rate(self.config, self.step if step_index is None else step_index, self.total_steps)
        if global_batch.num_microbatches == 0:
            self.step += 1
            return TrainOutput(0.0, 0.0, 0, lr, skipped=True, nothing_to_train=True)
        totals = self.runner.forward_backward(microbatches, loss_fn, readout, global_batch.counts)
        with self.runner.abandoning_on_failure():
            shared = share_totals(totals, self.runner.square_norm(), self.handle.layout)
            loss, grad_norm = shared.mean_loss(global_batch.counts), math.sqrt(shared.square_norm)
            is_finite = math.isfinite(loss) and math.isfinite(grad_norm)
            is_nothing = global_batch.counts["tokens"] == 0 and grad_norm == 0.0
            skipped = not is_finite or is_nothing
            if not skipped:
                self._optimizer_step(lr, grad_norm, self.config.max_grad_norm)
            routing = self.runner.balance_routers() if self.handle.is_mixture and not skipped else {}
            indexing = self.runner.indexer_metric()
        self.zero_grad()
        self.step += 1
        if not is_nothing:
            self._count_not_finite(not is_finite, loss, grad_norm, microbatches)
        metrics = {**shared.all_metrics, **routing, **indexing}
        return TrainOutput(loss, grad_norm, global_batch.counts["tokens"], lr, skipped, is_nothing, metrics)

    def forward_backward(
        self,
        microbatches: Sequence[Microbatch],
        loss_fn: LossFn,
        readout: Readout = LOGPROBS,
        counts: dict[Denominator, int] | None = None,
        global_batch: GlobalBatch | None = None,
    ) -> tuple[float, dict[str, float]]:
        """Adds the gradients of a global batch to those of earlier batches, until `optimizer_step` or `zero_grad`.

        For a loss whose derivatives by log-probabilities are computed elsewhere, pass a `LinearLoss` with these as
        weights.

        Args:
            microbatches, loss_fn, readout, global_batch: as for `train_step`.
            counts: divisors of the loss's sums; None for the counts of this global batch, `UNDIVIDED` for none.

        Returns:
            The loss and its metrics, equal on every rank.

        Raises:
            InputError: as `train_step`; gradients of earlier calls are kept.
            MicrobatchError: as `train_step`; all gradients are lost, including those of earlier calls.
        """
        self.handle.check_head(is_linear=readout.scores)
        self.handle.check_mtp(is_read=readout.mtp)
        loss_fn, readout = self._with_mtp(loss_fn, readout)
        global_batch = self.runner.global_batch(microbatches, global_batch)
        counts = global_batch.counts if counts is None else counts
        if global_batch.num_microbatches == 0:
            return 0.0, {}
        with self._adding_gradients():
            totals = self.runner.forward_backward(microbatches, loss_fn, readout, counts)
            indexing = self.runner.indexer_metric()
        loss, metrics = self._shared(totals, counts)
        return loss, {**metrics, **indexing}

    def optimizer_step(self, settings: AdamWSettings | None = None) -> TrainOutput:
        """Takes one optimizer step with the accumulated gradients, and clears them. Without gradients, or if their
        norm is not finite, the step is skipped. `settings` replace AdamW's settings from config and schedule."""
        lr = learning_rate(self.config, self.step, self.total_steps) if settings is None else settings.lr
        largest = self.config.max_grad_norm
        if settings is not None:
            self.optimizer.adopt(settings)
            largest = settings.max_grad_norm
        had_gradients, grad_norm = self._has_gradients, 0.0
        if had_gradients:
            with self.runner.abandoning_on_failure():
                shared = share_totals(LossTotals(), self.runner.square_norm(), self.handle.layout)
                grad_norm = math.sqrt(shared.square_norm)
                if math.isfinite(grad_norm):
                    self._optimizer_step(lr, grad_norm, largest)
        self.zero_grad()
        self.step += 1
        skipped = not had_gradients or not math.isfinite(grad_norm)
        return TrainOutput(0.0, grad_norm, 0, lr, skipped, not had_gradients)

    @property
    def has_gradients(self) -> bool:
        """Whether `forward_backward` has accumulated gradients."""
        return self._has_gradients

    def zero_grad(self) -> None:
        """Releases the accumulated gradients."""
        self.handle.zero_grad()
        self._has_gradients = False

    def snapshot_state(self) -> TrainedState:
        """Copies to the host what training changes on this rank: trained weights, gradients, moments, step count."""
        return snapshot_state(self.handle, self.optimizer, self.step, self._has_gradients)

    def restore_state(self, state: TrainedState) -> None:
        """Restores a `state` from `snapshot_state`, possibly of another training, on the same rank and layout."""
        self.handle.wait_for_readers()
        self.handle.has_changed = True
        with self.moments_on_device():
            state.put(self.handle, self.optimizer)
        self.step, self._has_gradients = state.step, state.has_gradients

    @contextlib.contextmanager
    def _adding_gradients(self) -> Iterator[None]:
        """Adds the block's gradients to earlier ones, which are set aside meanwhile: sums over tp ranks and of tied
        embeddings must contain one batch only."""
        parameters = [parameter for part in self.handle.parts for parameter in part.parameters()]
        before = [parameter.grad for parameter in parameters]
        self.zero_grad()
        yield
        self._has_gradients = True
        for parameter, gradient in zip(parameters, before, strict=True):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)

    def evaluate(
        self,
        microbatches: Sequence[Microbatch],
        loss_fn: LossFn,
        readout: Readout = LOGPROBS,
        counts: dict[Denominator, int] | None = None,
        global_batch: GlobalBatch | None = None,
    ) -> tuple[float, dict[str, float]]:
        """Computes loss and metrics over the global batch, equal on every rank, without gradients or optimizer steps.

        Args:
            microbatches, loss_fn, readout, counts, global_batch: as for `forward_backward`.

        Raises:
            InputError: on every rank, if the microbatches do not fit the model or each other.
            MicrobatchError: on every rank, if the loss raises on any.
        """
        self.handle.check_head(is_linear=readout.scores)
        self.handle.check_mtp(is_read=readout.mtp)
        global_batch = self.runner.global_batch(microbatches, global_batch)
        totals = self.runner.evaluate(microbatches, loss_fn, readout, global_batch)
        return self._shared(totals, global_batch.counts if counts is None else counts)

    def logprobs(self, microbatches: Sequence[Microbatch], temperature: float = 1.0) -> list[Tensor]:
        """Returns log-probabilities of the tokens in this data rank's `microbatches`, equal on all its stages: [n]
        per sequence in order, fp32 or float64, with 0 for the first token. `temperature` divides the logits."""
        outputs = self.runner.forward(microbatches, self._read(Readout(temperature)))
        return [
            piece
            for output, microbatch in zip(outputs, microbatches, strict=True)
            for piece in unpack(output[:, 0], microbatch)
        ]

    def add_logprobs(
        self,
        microbatches: Sequence[Microbatch],
        name: str,
        temperature: float = 1.0,
        global_batch: GlobalBatch | None = None,
        ids: str | None = None,
    ) -> list[Microbatch]:
        """Returns this data rank's microbatches with the log-probabilities of their tokens added to `values`.

        Args:
            microbatches: this data rank's microbatches.
            name: key in `values`: [T] on the host, fp32 or float64; position t holds the value for token t + 1.
            temperature: divides the logits.
            global_batch: as for `train_step`.
            ids: key in `values` of other token ids, [T, K], to score instead, [T, K].
        """
        outputs = self.runner.forward(microbatches, self._read(Readout(temperature, ids=ids)), global_batch, ids)
        return [
            set_values(microbatch, name, (output[:, 0] if ids is None else output[:, 1:]).cpu())
            for microbatch, output in zip(microbatches, outputs, strict=True)
        ]

    def entropies(
        self, microbatches: Sequence[Microbatch], temperature: float = 1.0, global_batch: GlobalBatch | None = None
    ) -> list[Tensor]:
        """Returns the entropies of the model's distributions over each token, in nats; otherwise as `logprobs`, with
        its `microbatches` and `temperature`. `global_batch` is as for `train_step`."""
        outputs = self.runner.forward(microbatches, self._read(Readout(temperature, entropy=True)), global_batch)
        return [
            piece
            for output, microbatch in zip(outputs, microbatches, strict=True)
            for piece in unpack(output[:, 1], microbatch)
        ]

    def sequence_scores(self, microbatches: Sequence[Microbatch]) -> Tensor:
        """Returns each sequence's sum of log-probabilities over `loss_mask`, [N], fp32 or float64, in the order of
        the sequences in this data rank's `microbatches`."""
        outputs = self.runner.forward(microbatches, self._read(LOGPROBS))
        on_device = (microbatch.to(self.handle.layout.device) for microbatch in microbatches)
        scores = (
            sum_by_sequence(torch.where(microbatch.loss_mask, output[:, 0], 0.0), microbatch)[
                : microbatch.num_sequences
            ]
            for microbatch, output in zip(on_device, outputs, strict=True)
        )
        dtype = torch.promote_types(self.handle.dtype, torch.float32)
        return torch.cat([torch.empty(0, dtype=dtype, device=self.handle.layout.device), *scores])

    def scores(self, microbatches: Sequence[Microbatch], global_batch: GlobalBatch | None = None) -> list[Tensor]:
        """Returns a linear head's outputs at each token, [n, L] per sequence, fp32 or float64, in the order of this
        data rank's `microbatches`. `global_batch` is as for `train_step`."""
        outputs = self.runner.forward(microbatches, self._read(Readout(scores=True)), global_batch)
        return [
            piece
            for output, microbatch in zip(outputs, microbatches, strict=True)
            if not microbatch.is_empty
            for piece in output.split(microbatch.lengths)
        ]

    def top_logits(
        self, microbatches: Sequence[Microbatch], k: int, global_batch: GlobalBatch | None = None
    ) -> list[tuple[Tensor, Tensor]]:
        """Returns the `k` largest logits of each token and their ids, largest first.

        They are fp32 or float64, and int64, both [n, k] per sequence, in the order of this data rank's
        `microbatches`. Entry i is the prediction for token i; the first entry is 0. `global_batch` is as for
        `train_step`.
        """

        return self._top(top_logits, microbatches, k, global_batch)

    def top_logprobs(
        self,
        microbatches: Sequence[Microbatch],
        k: int,
        temperature: float = 1.0,
        global_batch: GlobalBatch | None = None,
    ) -> list[tuple[Tensor, Tensor]]:
        """Returns the `k` largest log-probabilities of each token and their ids, largest first; otherwise as
        `top_logits`, with its `microbatches` and `global_batch`. `temperature` divides the logits."""
        return self._top(functools.partial(top_logprobs, temperature=temperature), microbatches, k, global_batch)

    def _top(
        self,
        largest: Callable[[Tensor, Head, int], tuple[Tensor, Tensor]],
        microbatches: Sequence[Microbatch],
        k: int,
        global_batch: GlobalBatch | None,
    ) -> list[tuple[Tensor, Tensor]]:
        def both(hidden: Tensor, head: Head, _: LocalMicrobatch) -> Tensor:
            values, ids = largest(hidden, head, k)
            return torch.stack([values, ids.to(values.dtype)], dim=1)  # fp32 holds ids up to 2 ** 24

        self.handle.check_head(is_linear=False)
        outputs = self.runner.forward(microbatches, both, global_batch)
        pieces = [
            piece
            for output, microbatch in zip(outputs, microbatches, strict=True)
            for piece in unpack(output, microbatch)
        ]
        return [(piece[:, 0], piece[:, 1].long()) for piece in pieces]

    def next_tokens(self, microbatches: Sequence[Microbatch], global_batch: GlobalBatch | None = None) -> Tensor:
        """Returns the most likely token after each sequence, int64 [N], in the order of this data rank's
        `microbatches`. `global_batch` is as for `train_step`."""

        def likeliest(hidden: Tensor, head: Head, _: LocalMicrobatch) -> Tensor:
            return top_logits(hidden, head, 1)[1][:, 0]

        self.handle.check_head(is_linear=False)
        outputs = self.runner.forward(microbatches, likeliest, global_batch)
        ends = [
            microbatch.cu_seqlens[1 : microbatch.num_sequences + 1].to(output.device) - 1
            for output, microbatch in zip(outputs, microbatches, strict=True)
        ]
        nothing = torch.empty(0, dtype=torch.int64, device=self.handle.layout.device)
        return torch.cat([nothing, *(output[end] for output, end in zip(outputs, ends, strict=True))])

    def moments_to_host(self) -> int:
        """Moves the optimizer's moments to the host, until the next optimizer step or checkpoint. Returns the freed
        bytes, as `Offload.to_host`."""
        self.handle.wait_for_readers()
        return self._moments.to_host()

    @contextlib.contextmanager
    def moments_on_device(self) -> Iterator[None]:
        """Keeps the optimizer's moments on the device inside the block. Afterwards they return to the host if so
        configured."""
        self._moments.to_device()  # if it raises, all moments are still on the host
        try:
            yield
        finally:
            if self.handle.memory.offloads_optimizer:
                self._moments.to_host()

    def _with_mtp(self, loss_fn: LossFn, readout: Readout) -> tuple[LossFn, Readout]:
        """Adds the MTP loss and readout, if the MTP layer is trained."""
        mtp = self.handle.model.mtp
        return (loss_fn, readout) if mtp is None else (with_mtp(loss_fn, mtp.weight), replace(readout, mtp=True))

    def _read(self, readout: Readout) -> OutputFn:
        """Returns the output function of a readout. Raises InputError if the model lacks the required head or MTP
        layer."""
        self.handle.check_head(is_linear=readout.scores)
        self.handle.check_mtp(is_read=readout.mtp)
        return read(readout)

    def _shared(self, totals: LossTotals, counts: dict[Denominator, int]) -> tuple[float, dict[str, float]]:
        """Returns loss and metrics over all ranks."""
        nothing = torch.zeros((), dtype=torch.float64, device=self.handle.layout.device)
        shared = share_totals(totals, nothing, self.handle.layout)
        return shared.mean_loss(counts), shared.all_metrics

    def _optimizer_step(self, lr: float, grad_norm: float, max_grad_norm: float | None) -> None:
        every_copy = [named for part in self.handle.parts for named in part.named_parameters()]
        apart = [parameter for name, parameter in every_copy if self.handle.is_auxiliary(name)]
        norm_apart = self._auxiliary_norm() if self.handle.trains_auxiliary else 0.0
        if not math.isfinite(norm_apart):  # the model itself is still trained
            for parameter in apart:
                parameter.grad = None
        if max_grad_norm is not None:
            model = [parameter for name, parameter in every_copy if not self.handle.is_auxiliary(name)]
            for parameters, norm in ((model, grad_norm), (apart, norm_apart)):
                whole = torch.tensor(norm, dtype=torch.float64, device=self.handle.layout.device)
                for of_mesh in by_mesh(parameters):
                    torch.nn.utils.clip_grads_with_norm_(of_mesh, max_grad_norm, whole)
        self.handle.wait_for_readers()
        self.handle.has_changed = True
        with self.moments_on_device():
            self.optimizer.step(lr)

    def _auxiliary_norm(self) -> float:
        """Returns the global gradient norm of parameters trained apart (`ModelHandle.is_auxiliary`). A collective."""
        shared = share_totals(LossTotals(), self.runner.square_norm(auxiliary=True), self.handle.layout)
        return math.sqrt(shared.square_norm)

    def _count_not_finite(
        self, skipped: bool, loss: float, grad_norm: float, microbatches: Sequence[Microbatch]
    ) -> None:
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        if self.skipped_in_a_row < self.config.max_skipped_steps:
            return
        kept = ""
        if self.microbatch_dump_folder is not None:
            layout = self.handle.layout
            if layout.is_first_of_data_rank:
                about = {"loss": str(loss), "grad_norm": str(grad_norm), "step": str(self.step)}
                dump_microbatches(
                    self.microbatch_dump_folder / f"data_rank_{layout.data_rank}.safetensors", microbatches, about
                )
            kept = f" (its microbatches are in {self.microbatch_dump_folder})"
        raise TrainingDivergedError(
            f"{self.skipped_in_a_row} steps in a row were skipped, the last{kept} with loss {loss} and gradient norm "
            f"{grad_norm}: lower optimizer.lr, or check the data of these steps"
        )
