"""A rank of a policy: its engine, and what each job does with it."""

import contextlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from automodel_rl.batch import Microbatch, unpack
from automodel_rl.checkpoint.load import check_whole, load_checkpoint, newest_whole
from automodel_rl.checkpoint.saver import CheckpointSaver
from automodel_rl.data.ends import new_ends
from automodel_rl.data.padding import padding_of
from automodel_rl.engine import Engine
from automodel_rl.engine.reference_weights import ReferenceWeights
from automodel_rl.errors import JobEndedError
from automodel_rl.files import is_of_files
from automodel_rl.launch.flight import flight, flight_file
from automodel_rl.model.changed_weights import changed_weights
from automodel_rl.model.handle import ModelHandle
from automodel_rl.model.rounding_noise import rounding_noise
from automodel_rl.policy import jobs
from automodel_rl.policy.jobs import Job, Settled
from automodel_rl.policy.routes import RouteStore
from automodel_rl.policy.shares import RowValues, Share


class PolicyRank:
    """Does a policy's jobs on this rank. Every rank has one, and does every job with the others.

    Args:
        handle: the model.
        tokenizer: its tokenizer, which is saved along.
        variables: further variables for the chat template.

    Attributes:
        engine: trains the model; there from the job `Begin` on.
        routes: the routes that this rank has.
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
        self.handlers: dict[type[Job], Callable[[Any, Share | None], Any]] = {
            Job: lambda job, _: None,
            jobs.Begin: self._begin,
            jobs.ToHost: self._to_host,
            jobs.ToDevice: lambda job, _: handle.to_device(),
            jobs.TrainStep: self._train_step,
            jobs.ForwardBackward: self._forward_backward,
            jobs.OptimizerStep: lambda job, _: self.engine.optimizer_step(job.settings),
            jobs.ZeroGrad: lambda job, _: self.engine.zero_grad(),
            jobs.Evaluate: self._evaluate,
            jobs.Logprobs: self._logprobs,
            jobs.Entropies: self._entropies,
            jobs.Scores: self._scores,
            jobs.TopLogits: self._top_logits,
            jobs.NextTokens: self._next_tokens,
            jobs.KeepWeights: self._keep_weights,
            jobs.UseWeights: lambda job, _: self._use(self._kept[job.name].in_place()),
            jobs.UseChangedWeights: lambda job, _: self._use(changed_weights(handle)),
            jobs.UseRoundingNoise: lambda job, _: self._use(rounding_noise(handle, job.dtype)),
            jobs.UseWeightsBefore: lambda job, _: self._in_use.pop().close(),
            jobs.MoveRoutes: lambda job, _: self.routes.move(job.pieces),
            jobs.ForgetRoutes: lambda job, _: self.routes.forget(job.rollouts),
            jobs.OpenSaver: self._open_saver,
            jobs.SaveCheckpoint: self._save_checkpoint,
            jobs.SettleCheckpoint: self._settle_checkpoint,
            jobs.NewestCheckpoint: self._newest_checkpoint,
            jobs.CheckCheckpoint: lambda job, _: check_whole(job.folder, handle.layout.world_control),
            jobs.LoadCheckpoint: lambda job, _: load_checkpoint(self.engine, job.folder),
            jobs.SaveModel: self._save_model,
            jobs.KeepNotes: lambda job, _: flight.keep_in(flight_file(job.folder, dist.get_rank())),
        }

    def do(self, job: Job, share: Share | None) -> Any:
        """Does a job. A collective.

        Args:
            job: the job.
            share: the rows of this rank's data rank; None for an outsider, and for a job without rows.
        """
        return self.handlers[type(job)](job, share)

    def _begin(self, job: jobs.Begin, _: Share | None) -> None:
        self.engine = Engine(self.handle, job.optimizer, job.total_steps)
        self.engine.keep_microbatches_in = job.keep_microbatches_in

    def _to_host(self, job: jobs.ToHost, _: Share | None) -> None:
        self.engine.moments_to_host()
        self.handle.to_host()

    def _microbatches(self, share: Share | None, replay: bool = False) -> list[Microbatch]:
        if share is None:
            return []
        return share.pack(self.routes.arrived if replay else None)

    def _train_step(self, job: jobs.TrainStep, share: Share | None) -> Any:
        microbatches = self._microbatches(share, job.replay)
        return self.engine.train_step(microbatches, job.loss, job.readout, job.agreed, job.place)

    def _forward_backward(self, job: jobs.ForwardBackward, share: Share | None) -> Any:
        microbatches = self._microbatches(share, job.replay)
        return self.engine.forward_backward(microbatches, job.loss, job.readout, job.counts, job.agreed)

    def _evaluate(self, job: jobs.Evaluate, share: Share | None) -> Any:
        return self.engine.evaluate(self._microbatches(share), job.loss, job.readout, job.counts, job.agreed)

    def _logprobs(self, job: jobs.Logprobs, share: Share | None) -> RowValues | None:
        microbatches = self._microbatches(share, job.replay)
        scored = self.engine.add_logprobs(microbatches, "logprobs", job.temperature, job.agreed, job.ids)
        # Alone, for a value of this name may come with the rows.
        return self._of_rows(scored, [piece for one in scored for piece in unpack(one.values["logprobs"], one)])

    def _entropies(self, job: jobs.Entropies, share: Share | None) -> RowValues | None:
        microbatches = self._microbatches(share, job.replay)
        found = self.engine.entropies(microbatches, job.temperature, job.agreed)
        return self._of_rows(microbatches, [piece.cpu() for piece in found])

    def _scores(self, job: jobs.Scores, share: Share | None) -> RowValues | None:
        microbatches = self._microbatches(share)
        return self._of_rows(microbatches, [piece.cpu() for piece in self.engine.scores(microbatches, job.agreed)])

    def _top_logits(self, job: jobs.TopLogits, share: Share | None) -> tuple[RowValues, RowValues] | None:
        microbatches = self._microbatches(share)
        if job.normalised:
            found = self.engine.top_logprobs(microbatches, job.k, job.temperature, job.agreed)
        else:
            found = self.engine.top_logits(microbatches, job.k, job.agreed)
        logits = self._of_rows(microbatches, [of_row[0].cpu() for of_row in found])
        ids = self._of_rows(microbatches, [of_row[1].cpu() for of_row in found])
        return None if logits is None or ids is None else (logits, ids)

    def _next_tokens(self, job: jobs.NextTokens, share: Share | None) -> dict[int, int] | None:
        microbatches = self._microbatches(share)
        tokens = self.engine.next_tokens(microbatches, job.agreed).tolist()
        if not self.handle.layout.is_first_of_data_rank:
            return None
        return dict(zip(_rows(microbatches), tokens, strict=True))

    def _of_rows(self, microbatches: list[Microbatch], pieces: list[Tensor]) -> RowValues | None:
        """Results of rows, from one rank of each data rank."""
        if not self.handle.layout.is_first_of_data_rank:
            return None
        return RowValues.of(_rows(microbatches), pieces)

    def _keep_weights(self, job: jobs.KeepWeights, _: Share | None) -> None:
        self._kept[job.name] = ReferenceWeights(self.handle, lends_memory=job.lends_memory)

    def _use(self, others: AbstractContextManager[None]) -> None:
        stack = contextlib.ExitStack()
        stack.enter_context(others)
        self._in_use.append(stack)

    def _open_saver(self, job: jobs.OpenSaver, _: Share | None) -> None:
        self._saver = CheckpointSaver(self.engine, job.texts, in_background=job.in_background)

    def _save_checkpoint(self, job: jobs.SaveCheckpoint, _: Share | None) -> str | None:
        return self._saver.save(job.folder, job.progress, job.state if dist.get_rank() == 0 else {})

    def _settle_checkpoint(self, job: jobs.SettleCheckpoint, _: Share | None) -> Settled:
        if not (job.waits or self._saver.is_done):
            return Settled(False, None, self._saver.seconds)
        return Settled(True, self._saver.wait(), self._saver.seconds)

    def _newest_checkpoint(self, job: jobs.NewestCheckpoint, _: Share | None) -> tuple[Any, list[str]]:
        warnings: list[str] = []
        return newest_whole(job.folders, self.handle.layout.world_control, warnings.append), warnings

    def _save_model(self, job: jobs.SaveModel, _: Share | None) -> str:
        handle, is_adapters = self.handle, self.handle.adapter_origin is not None
        try:
            if handle.has_linear_head:
                padding = padding_of(handle.whole_config, self.tokenizer, self.variables)
                handle.save_pretrained(job.folder, padding.tokenizer, pads_with=padding.token)
                return padding.note
            ends = new_ends(handle.source, handle.whole_config, self.tokenizer, self.variables, adapters=is_adapters)
            handle.save_pretrained(job.folder, self.tokenizer, ends.ids)
        except Exception as error:
            if not is_of_files(error):
                raise
            # Others may wait for this rank's part of the folder, so that the job ends.
            raise JobEndedError(
                f"error: {job.folder} could not be written ({error}): make room or change its rights; --resume auto "
                "then writes it"
            ) from error
        return ends.note


def _rows(microbatches: list[Microbatch]) -> list[int]:
    return [row for microbatch in microbatches for row in microbatch.order]
