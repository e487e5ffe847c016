"""Writing checkpoints by all ranks together while training goes on; a failure leaves it and older ones intact."""

import json
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from automodel_rl.checkpoint.folder import (
    CONFIG,
    PROGRESS,
    RANKS,
    TENSORS,
    Marker,
    StoredFile,
    rank_file,
    sync,
    write_hashed,
    write_marker,
)
from automodel_rl.checkpoint.host_copies import HostCopies
from automodel_rl.checkpoint.random_state import random_state
from automodel_rl.checkpoint.state import engine_tensors
from automodel_rl.checkpoint.storage import SafetensorsWriter, WritePlan, keys_of
from automodel_rl.engine.engine import Engine
from automodel_rl.engine.optimizer import MOMENTS
from automodel_rl.errors import innermost
from automodel_rl.files import publish_folder
from automodel_rl.parallel.host_collectives import gather_objects
from automodel_rl.parallel.layout import own_group
from automodel_rl.parallel.sharding import local_tensor

Nested = dict[str, dict[str, dict[str, Tensor]]]


@dataclass(frozen=True)
class _Job:
    """What one checkpoint is made of.

    Attributes:
        folder: its name when it is complete.
        tensors: this rank's, of which the plan takes shapes and places only.
        shards: this rank's values by key.
        texts: of the files that are this rank's own.
        step: after which it was taken.
        then: called on rank 0 with the complete folder.
    """

    folder: Path
    tensors: Nested
    shards: dict[str, Tensor]
    texts: dict[str, str]
    step: int
    then: Callable[[Path], None]


@dataclass
class _Outcome:
    """What came of a job, equal on all ranks but for `written`."""

    error: str | None = None
    written: dict[str, StoredFile] = field(default_factory=dict)


class CheckpointSaver:
    """Writes checkpoints of an engine, one after the other. Made and called by all ranks together.

    A checkpoint is filled under a hidden name, its marker comes last, and then it gets its name.

    Args:
        engine: whose weights, moments and step are stored.
        config: text of the run's config, kept with every checkpoint.
        in_background: return at once; everything is copied to the host before it changes next, and written from a
            thread.
    """

    def __init__(self, engine: Engine, config: str, *, in_background: bool):
        self.engine, self.config, self.in_background = engine, config, in_background
        # Collectives of the thread must not meet those of training.
        group = own_group([[*range(dist.get_world_size())]], backend="gloo")
        assert group is not None
        self.group: dist.ProcessGroup = group
        # Before the first step there are no moments, but it is known what they will be.
        trained = [local_tensor(p.detach()) for _, p in engine.handle.named_parameters() if p.requires_grad]
        coming = [tensor for tensor in trained for _ in ("weight", *MOMENTS)]
        self._copies = HostCopies(coming if in_background else [])
        self._plan: WritePlan | None = None
        self._thread: threading.Thread | None = None
        self._error: str | None = None

    def save(
        self, folder: Path, progress: dict[str, Any], rank_state: dict[str, Any], then: Callable[[Path], None]
    ) -> str | None:
        """Writes a checkpoint, or begins to, after the one before is done. A collective.

        Args:
            folder: on a file system that all ranks share; replaced if it exists.
            progress: the trainer's place, the same on every rank; JSON, with `step`.
            rank_state: what each rank needs for itself, such as its data loader's state; JSON.
            then: called on rank 0 when the folder is complete, perhaps from the thread.

        Returns:
            As `wait`, of the one before if this one is written in the background, else of this one.
        """
        error = self.wait()
        engine = self.engine
        of_engine = {"step": engine.step, "skipped_in_a_row": engine.skipped_in_a_row}
        own = {"random": random_state(engine.handle.layout.device), **rank_state}
        texts = {rank_file(dist.get_rank()): json.dumps(own)}
        if dist.get_rank() == 0:
            texts |= {PROGRESS: json.dumps({"engine": of_engine, **progress}, indent=2), CONFIG: self.config}
        with engine.moments_on_device():
            tensors = engine_tensors(engine)
            shards = {key: local_tensor(tensor.detach()) for key, tensor in keys_of(tensors)}
            if self.in_background:
                shards = self._copies.begin(shards)
                engine.handle.let_read(self._copies.hold)
                if engine.handle.memory.offload_optimizer:  # moments leave the device with this block
                    self._copies.wait()
            job = _Job(folder, tensors, shards, texts, progress["step"], then)
            if not self.in_background:
                self._run(job)
                return self.wait()
        self._thread = threading.Thread(target=self._run, args=(job,), name="checkpoint")
        self._thread.start()
        return error

    def wait(self) -> str | None:
        """Waits for the checkpoint that is being written.

        Returns:
            Why it could not be written, once and on all ranks alike; None if it was, or if there is none.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        return error

    @property
    def is_done(self) -> bool:
        """Whether no checkpoint is being written."""
        return self._thread is None or not self._thread.is_alive()

    def _run(self, job: _Job) -> None:
        try:
            self._error = self._write(job)
        except Exception as error:  # a peer is gone: the main thread will know more
            self._error = _reason(error)

    def _write(self, job: _Job) -> str | None:
        unfinished = job.folder.with_name(f".{job.folder.name}.unfinished")
        outcome = _Outcome()
        self._copies.wait()
        self._together(outcome, lambda: self._make_folder(unfinished))
        self._together(outcome, lambda: self._write_tensors(job, unfinished, outcome))
        self._together(outcome, lambda: self._write_texts(job, unfinished, outcome))
        files = {name: of for written in gather_objects(outcome.written, self.group) for name, of in written.items()}
        self._together(outcome, lambda: self._publish(job, unfinished, files))
        if outcome.error is not None and self.group.rank() == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
        return outcome.error

    def _together(self, outcome: _Outcome, work: Callable[[], None]) -> None:
        """Does a part of the work, unless one before has failed on any rank."""
        if outcome.error is not None:
            return
        own = None
        try:
            work()
        except Exception as error:  # training goes on without this checkpoint, whatever is wrong with it
            own = _reason(error)
        outcome.error = next((reason for reason in gather_objects(own, self.group) if reason is not None), None)

    def _make_folder(self, unfinished: Path) -> None:
        if self.group.rank() == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
            (unfinished / TENSORS).mkdir(parents=True)
            (unfinished / RANKS).mkdir()

    def _write_tensors(self, job: _Job, unfinished: Path, outcome: _Outcome) -> None:
        writer = SafetensorsWriter(unfinished / TENSORS, self.group.rank(), job.shards)
        if self._plan is None:  # DCP's planning is Python that training would wait for
            dcp.save(job.tensors, storage_writer=writer, process_group=self.group)
            self._plan = writer.plan
        else:
            writer.write(self._plan)
        outcome.written |= {f"{TENSORS}/{name}": of for name, of in writer.written.items()}

    def _write_texts(self, job: _Job, unfinished: Path, outcome: _Outcome) -> None:
        for name, text in job.texts.items():
            outcome.written[name] = write_hashed(unfinished / name, text)

    def _publish(self, job: _Job, unfinished: Path, files: dict[str, StoredFile]) -> None:
        if self.group.rank() == 0:
            sync(unfinished / TENSORS)
            sync(unfinished / RANKS)
            write_marker(unfinished, Marker(job.step, self.group.size(), files))
            publish_folder(unfinished, job.folder)
            sync(job.folder.parent)
            job.then(job.folder)


def _reason(error: BaseException) -> str:
    """Why something could not be written, without the stacks that DCP adds."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return innermost(error)
