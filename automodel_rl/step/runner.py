"""Runs a step: microbatches through a model on any layout, forward and backward or forward only."""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from automodel_rl.batch import LocalMicrobatch, Microbatch, empty_microbatch
from automodel_rl.block_sizes import block_sizes
from automodel_rl.compat.fsdp import reset_fsdp
from automodel_rl.encoder.media_encoders import MediaEncoders, make_encoders
from automodel_rl.errors import MicrobatchError, describe_root_cause
from automodel_rl.losses import Denominator, LossFn, Readout
from automodel_rl.mixture.router_replay import replay_metrics
from automodel_rl.mixture.routers import global_loads, load_metric
from automodel_rl.model.handle import ModelHandle
from automodel_rl.model.head import OutputFn
from automodel_rl.model.indexer_loss import cross_entropy
from automodel_rl.model.readouts import read
from automodel_rl.parallel.gradients import local_square_norm, sum_partial_gradients
from automodel_rl.parallel.host_collectives import tensor_from_last_stage
from automodel_rl.parallel.sharding import abandon_step, release_gathered
from automodel_rl.step.agreement import GlobalBatch, agree_on_batch, raise_everywhere
from automodel_rl.step.drivers import Driver, PipelineDriver, SequentialDriver
from automodel_rl.step.local_microbatches import local_microbatches
from automodel_rl.step.outputs import LogitsCapturer, PPLossAdapter, whole_microbatches
from automodel_rl.step.totals import LossTotals


class StepRunner:
    """Runs microbatches through a model. Every method is a collective: all ranks call it with their data rank's
    microbatches.

    Args:
        handle: the model.

    Example:
        >>> import torch
        >>> runner = StepRunner(ModelHandle.from_pretrained(checkpoint))
        >>> microbatches = pack([TokenSequence(torch.tensor([5, 6, 7]), torch.tensor([False, True, True]))], capacity=8)
        >>> counts = runner.global_batch(microbatches).counts
        >>> totals = runner.forward_backward(microbatches, sft_loss, Readout(), counts)
        >>> name, gradient = next(runner.handle.named_hf_gradients())
        >>> name, bool(gradient.any())
        ('model.embed_tokens.weight', True)
    """

    def __init__(self, handle: ModelHandle):
        self.handle, self.layout = handle, handle.layout
        self._encoder: MediaEncoders | None = make_encoders(handle)
        self._driver: Driver | None = None
        if len(handle.stages) and self.layout.parallel.pp > 1:
            self._driver = PipelineDriver(
                handle.stages, self.layout, handle.config.hidden_size, handle.dtype, handle.num_deepstack
            )
        elif handle.stages:
            self._driver = SequentialDriver(handle.stages[0].part, self.layout.parallel)

    def global_batch(self, microbatches: Sequence[Microbatch], global_batch: GlobalBatch | None = None) -> GlobalBatch:
        """Checks `microbatches`, and returns their number and the denominators of losses, over all data ranks.

        `global_batch` is the result if one process has made and checked all ranks' microbatches. Ranks then need not
        agree.

        Raises:
            InputError: on every rank, if the microbatches do not fit the model or each other.
            RuntimeError: the weights are on the host.
        """
        self.handle.check_on_device()
        return global_batch or agree_on_batch(microbatches, self.handle.config.vocab_size, self.layout)

    def forward_backward(
        self, microbatches: Sequence[Microbatch], loss_fn: LossFn, readout: Readout, counts: dict[Denominator, int]
    ) -> LossTotals:
        """Adds the gradients of one optimizer step to every parameter, summed over data ranks.

        Args:
            microbatches: this data rank's microbatches, equally many on every data rank.
            loss_fn: returns sums over a microbatch.
            readout: the per-token values that the loss needs.
            counts: global denominators of the sums, `global_batch(microbatches).counts`.

        Returns:
            Undivided sums of this data rank, on ranks with the last stage; empty elsewhere.

        Raises:
            MicrobatchError: on every rank, if the loss raises on any.
        """
        with self.abandoning_on_failure():
            self._start_step(counts["positions"])
            microbatches = self._filled_up(microbatches)
            embeddings = [] if self._encoder is None else self._encoder.forward(microbatches, train=True)
            # Only the loss, on the last stage, needs whole microbatches.
            whole = (
                [microbatch.to(self.layout.device) for microbatch in microbatches]
                if self.layout.has_last_stage
                else microbatches
            )
            adapter = PPLossAdapter(loss_fn, whole, counts, readout, stage=self.layout.parallel.num_stages - 1)
            if self._driver is not None:
                with self._microbatches_let_go():
                    known = adapter.gradient_known_before if self.layout.has_last_stage else None
                    local = self._local(microbatches, embeddings, known, readout)
                    self._driver.forward_backward(local, adapter, self._whole_microbatches(self._read(readout)))
            self._complete_gradients()
            if self._encoder is not None:
                self._encoder.backward()
                self._raise_for_media()
            raise_everywhere(adapter.failure, self.layout)
            return adapter.totals

    def forward(
        self,
        microbatches: Sequence[Microbatch],
        output_fn: OutputFn,
        global_batch: GlobalBatch | None = None,
        ids: str | None = None,
    ) -> list[Tensor]:
        """Runs `output_fn` on every microbatch, without gradients.

        Args:
            microbatches: this data rank's microbatches, equally many on every data rank.
            output_fn: (final hidden states [t, H], `Head`, this rank's `LocalMicrobatch`) -> [t, ...], computed in
                chunks to avoid materialising [t, V].
            global_batch: as for `global_batch`.
            ids: `Readout.ids`, if `output_fn` uses such a readout.

        Returns:
            A tensor [T, ...] per microbatch, of `output_fn`'s dtype; equal on all stages of this data rank.

        Raises:
            InputError: on every rank, if the microbatches do not fit the model or each other.
        """
        num_microbatches = self.global_batch(microbatches, global_batch).num_microbatches
        return self._forward(microbatches, num_microbatches, output_fn, Readout(ids=ids))

    def _forward(
        self, microbatches: Sequence[Microbatch], num_microbatches: int, output_fn: OutputFn, readout: Readout
    ) -> list[Tensor]:
        """`forward` once the ranks have agreed on the number of microbatches."""
        for part in self.handle.parts:
            part.eval()
        results: list[Tensor] = []
        try:
            # In blocks: a pipeline has receive buffers for all microbatches of a run.
            for start in range(0, num_microbatches, block_sizes.forward_microbatches):
                block = microbatches[start : start + block_sizes.forward_microbatches]
                results += self._forward_block(block, output_fn, readout)
        except BaseException:  # FSDP may be midway through a layer; earlier gradients are kept
            for part in self.handle.parts:
                reset_fsdp(part)
            raise
        finally:
            for part in self.handle.parts:
                release_gathered(part)
        return results

    def evaluate(
        self, microbatches: Sequence[Microbatch], loss_fn: LossFn, readout: Readout, global_batch: GlobalBatch
    ) -> LossTotals:
        """Computes the sums of a loss over this data rank's microbatches, without gradients.

        Args:
            microbatches, loss_fn, readout: as for `forward_backward`.
            global_batch: `global_batch(microbatches)`.

        Returns:
            Undivided sums of this data rank, equal on all its stages.

        Raises:
            MicrobatchError: on every rank, if the loss raises on any.
        """
        columns = self._forward(microbatches, global_batch.num_microbatches, self._read(readout), readout)
        whole = [microbatch.to(self.layout.device) for microbatch in microbatches]
        adapter = PPLossAdapter(loss_fn, whole, global_batch.counts, readout, stage=self.layout.parallel.num_stages - 1)
        with torch.no_grad():
            for index, of_microbatch in enumerate(columns):
                adapter(of_microbatch, index)
        raise_everywhere(adapter.failure, self.layout)
        return adapter.totals

    def square_norm(self, *, auxiliary: bool = False) -> Tensor:
        """Returns this rank's summand of the squared global gradient norm, float64, of parameters trained apart if
        `auxiliary` (`ModelHandle.is_auxiliary`), else of the others."""
        norms = [
            local_square_norm(
                [p for name, p in self.handle.named_parameters(of) if self.handle.is_auxiliary(name) == auxiliary],
                of.layout,
            )
            for of in self.handle.components
        ]
        return torch.stack(norms).sum()

    def indexer_metric(self) -> dict[str, float]:
        """Returns `CROSS_ENTROPY` of trained indexers, equal on every rank; empty if none are trained. A collective."""
        losses = [extras.indexer_loss for extras in self.handle.extras if extras.indexer_loss is not None]
        return cross_entropy(losses, self.handle.config.num_hidden_layers, self.layout) if losses else {}

    def balance_routers(self) -> dict[str, float]:
        """Adjusts the routers' biases after an optimizer step of a mixture, if configured.

        Returns:
            Metrics of the step: `LOAD_METRIC` and, with router replay, how often routes and routers differed.
        """
        watches = [extras.router_watch for extras in self.handle.extras]
        loads = global_loads(watches, self.layout)
        for watch in watches:
            if watch.config.bias_update_rate:
                watch.update_biases(loads)
        replays = [extras.router_replay for extras in self.handle.extras]
        return {**load_metric(loads, self.layout), **replay_metrics(replays, self.layout)}

    @contextlib.contextmanager
    def abandoning_on_failure(self) -> Iterator[None]:
        """Restores the model if the block raises: no gradients, no gathered weights, no microbatch in any layer.

        Ranks agree only on failures of a loss. Anything else may fail on one rank and leave the others in a
        collective: this rank's model is still restored, but the job cannot continue.
        """
        try:
            yield
        except BaseException as error:
            try:
                self._abandon_step()
            except Exception as more:  # a failed device or a lost peer: the first error matters
                error.add_note(f"the model can no longer be used: {type(more).__name__}: {more}")
            raise

    def _abandon_step(self) -> None:
        for extras in self.handle.extras:
            extras.microbatch_scope.clear()
        if self._encoder is not None:
            self._encoder.abandon_step()
        for part in self.handle.parts:
            abandon_step(part)

    def _start_step(self, num_tokens: int) -> None:
        for part in self.handle.parts:
            part.train()
        for extras in self.handle.extras:
            extras.microbatch_scope.start_step()
            extras.router_watch.start_step(num_tokens)
            extras.router_replay.start_step()
            if extras.indexer_loss is not None:
                extras.indexer_loss.start_step(num_tokens, self.layout.device)

    def _complete_gradients(self) -> None:
        """Adds gradients that FSDP does not reduce: of tp ranks, and of the other copy of a tied embedding."""
        if self.layout.tp_group is not None:
            partial = [pair for extras in self.handle.extras for pair in extras.partial_gradients]
            sum_partial_gradients([module.get_parameter(name) for module, name in partial], self.layout.tp_group)
        if self.handle.tied is not None:
            self.handle.tied.sum_gradients()

    def _forward_block(self, microbatches: Sequence[Microbatch], output_fn: OutputFn, readout: Readout) -> list[Tensor]:
        capturer = LogitsCapturer(self._whole_microbatches(output_fn))
        filled = self._filled_up(microbatches)
        embeddings = [] if self._encoder is None else self._encoder.forward(filled, train=False)
        if self._driver is not None:
            with self._microbatches_let_go():
                self._driver.forward(self._local(filled, embeddings, readout=readout), capturer)
        if self._encoder is not None:
            self._raise_for_media()
        if self._driver is None:
            return []
        whole = torch.cat(capturer.outputs) if self.layout.has_last_stage else None
        results = tensor_from_last_stage(whole, self.layout).split([microbatch.num_tokens for microbatch in filled])
        return list(results[: len(microbatches)])

    def _raise_for_media(self) -> None:
        """Raises on every rank if an encoder failed to read or encode media on any. A collective."""
        assert self._encoder is not None
        failure = self._encoder.failure
        problem = None if failure is None else MicrobatchError("encoding of media", describe_root_cause(failure))
        try:
            raise_everywhere(problem, self.layout)
        except MicrobatchError:
            if failure is not None:
                raise failure from None
            raise

    def _filled_up(self, microbatches: Sequence[Microbatch]) -> list[Microbatch]:
        """Appends empty microbatches if the driver needs more."""
        if self._driver is None:
            return []
        missing = self._driver.fill_up_to(len(microbatches)) - len(microbatches)
        return [*microbatches, *(empty_microbatch(microbatches[0]) for _ in range(missing))]

    def _read(self, readout: Readout) -> OutputFn:
        mtp = self.handle.model.mtp
        return read(readout, detaches_mtp=mtp is None or mtp.detached)

    def _whole_microbatches(self, output_fn: OutputFn) -> OutputFn:
        return whole_microbatches(output_fn, self.layout.cp_group)

    def _local(
        self,
        microbatches: Sequence[Microbatch],
        embeddings: Sequence[Callable[[], Tensor]],
        logprob_gradient: Callable[[Microbatch, int], Tensor | None] | None = None,
        readout: Readout | None = None,
    ) -> list[LocalMicrobatch]:
        """Returns this rank's share of every microbatch, as `local_microbatches`."""
        if not self.handle.is_mixture and any(microbatch.routes is not None for microbatch in microbatches):
            raise ValueError("a microbatch has routes, but no layer of this model has a router: remove routes")
        return local_microbatches(microbatches, embeddings, self.handle, logprob_gradient, readout)

    @contextlib.contextmanager
    def _microbatches_let_go(self) -> Iterator[None]:
        """Clears the microbatch of every layer after the block, also on errors."""
        try:
            yield
        finally:
            for extras in self.handle.extras:
                extras.microbatch_scope.clear()
