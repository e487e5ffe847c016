"""Writes checkpoints from all ranks while training continues. A failure affects neither training nor older
checkpoints."""

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from automodel_rl.checkpoint.folder import (
    PROGRESS,
    RANKS,
    TENSORS,
    Marker,
    fsync_folder,
    rank_file,
    write_hashed,
    write_marker,
)
from automodel_rl.checkpoint.host_copies import HostCopies
from automodel_rl.checkpoint.random_state import random_state
from automodel_rl.checkpoint.state import engine_tensors
from automodel_rl.checkpoint.storage import WritePlan, keys_of, plan_writes, write_shards
from automodel_rl.engine.engine import Engine
from automodel_rl.errors import describe_root_cause
from automodel_rl.files import publish_folder
from automodel_rl.hf.read import stored_buffers
from automodel_rl.manifest import StoredFile
from automodel_rl.parallel.host_collectives import gather_objects
from automodel_rl.parallel.layout import own_group
from automodel_rl.parallel.sharding import local_tensor

Nested = dict[str, dict[str, dict[str, Tensor]]]


@dataclass
class _Job:
    """One checkpoint to write.

    Attributes:
        folder: the final folder.
        tensors: this rank's tensors, kept until copied. The plan reads only their shapes and boxes.
        texts: contents of the files that this rank writes, by name.
        shards: the values that this rank writes, by key.
    """

    folder: Path
    tensors: Nested
    texts: dict[str, str]
    step: int
    shards: dict[str, Tensor] = field(default_factory=dict)


class CheckpointSaver:
    """Writes checkpoints of an engine, one after the other. All ranks construct it and call it together.

    A checkpoint's folder is filled under a hidden name, its marker is written last, and then it is renamed.

    Args:
        texts: contents of additional files in every checkpoint, by name; at least the run's config.
        in_background: return at once: everything is copied to the host before the next optimizer step changes it, and
            a thread writes the copies.

    Attributes:
        seconds: duration of the last checkpoint, from `save` to the renaming.
    """

    def __init__(self, engine: Engine, texts: dict[str, str], *, in_background: bool):
        self.engine, self.texts, self.in_background = engine, texts, in_background
        # The thread's collectives need a group of their own, apart from training's.
        group = own_group([[*range(dist.get_world_size())]], backend="gloo")
        assert group is not None
        self.group: dist.ProcessGroup = group
        device = engine.handle.layout.device
        self._copies = HostCopies(_sizes_to_come(engine) if in_background else [], device)
        self._plan: WritePlan | None = None
        self._thread: threading.Thread | None = None
        self._error: str | None = None
        self.seconds = 0.0

    def save(self, folder: Path, progress: dict[str, Any], rank_state: dict[str, Any]) -> str | None:
        """Waits for the previous checkpoint, then writes the new one, or starts writing it in the background. A
        collective.

        Args:
            folder: the checkpoint's folder, on a file system shared by all ranks; replaced if it exists.
            progress: the trainer's progress, the same on every rank; JSON values, with the key `step`.
            rank_state: this rank's own state (on rank 0, the program's); JSON values.

        Returns:
            Why a checkpoint could not be written, else None: this one or, in the background, the previous one.
        """
        self.engine.handle.check_on_device()
        error = self.wait()
        started = time.monotonic()
        with self.engine.moments_on_device():
            job = _Job(folder, engine_tensors(self.engine), self._texts(progress, rank_state), progress["step"])
            for key, tensor in keys_of(job.tensors):
                job.shards[key] = local_tensor(tensor.detach())
            if not self.in_background:
                self._run(job, started)
                return self.wait()
            no_memory = self._together(lambda: self._begin_copies(job))
        if no_memory is not None:
            return no_memory
        self._thread = threading.Thread(target=self._run, args=(job, started), name="checkpoint")
        self._thread.start()
        return error

    def _begin_copies(self, job: _Job) -> None:
        job.shards = self._copies.begin(job.shards)
        self.engine.handle.add_reader(self._copies.hold)
        if self.engine.handle.memory.offloads_optimizer:  # moments will leave the device
            self._copies.wait()

    def _texts(self, progress: dict[str, Any], rank_state: dict[str, Any]) -> dict[str, str]:
        """Returns the contents of the files that this rank writes, by name."""
        engine = self.engine
        own = {"random": random_state(engine.handle.layout.device), **rank_state}
        texts = {rank_file(dist.get_rank()): json.dumps(own)}
        if dist.get_rank() == 0:
            of_engine = {"step": engine.step, "skipped_in_a_row": engine.skipped_in_a_row}
            texts |= {PROGRESS: json.dumps({"engine": of_engine, **progress}, indent=2), **self.texts}
        return texts

    def wait(self) -> str | None:
        """Waits for a checkpoint being written.

        Returns:
            Once, and the same on all ranks, why it could not be written; otherwise None.
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

    def _run(self, job: _Job, started: float) -> None:
        try:
            self._error = self._write(job)
        except Exception as error:  # a peer is lost: the main thread will find out why
            self._error = _reason(error)
        self.seconds = time.monotonic() - started

    def _write(self, job: _Job) -> str | None:
        """Writes a checkpoint in several steps. If one fails on a rank, all ranks stop and return the reason."""
        unfinished = job.folder.with_name(f".{job.folder.name}.unfinished")
        written: dict[str, StoredFile] = {}
        self._copies.wait()
        error = (
            self._together(lambda: self._make_folder(unfinished))
            or self._together(lambda: written.update(self._write_tensors(job, unfinished)))
            or self._together(lambda: written.update(_write_texts(job, unfinished)))
        )
        files = {name: of for of_rank in gather_objects(written, self.group) for name, of in of_rank.items()}
        error = error or self._together(lambda: self._publish(job, unfinished, files))
        if error is not None and self.group.rank() == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
        return error

    def _together(self, work: Callable[[], object]) -> str | None:
        """Runs a function on all ranks. If it fails on any rank, all return the reason, else None."""
        own = None
        try:
            work()
        except Exception as error:  # training continues without this checkpoint
            own = _reason(error)
        return next((reason for reason in gather_objects(own, self.group) if reason is not None), None)

    def _make_folder(self, unfinished: Path) -> None:
        if self.group.rank() == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
            (unfinished / TENSORS).mkdir(parents=True)
            (unfinished / RANKS).mkdir()

    def _write_tensors(self, job: _Job, unfinished: Path) -> dict[str, StoredFile]:
        if self._plan is None:  # reused by later checkpoints: planning slows training down
            self._plan = plan_writes(job.tensors, self.group)
        written = write_shards(unfinished / TENSORS, self.group.rank(), job.shards, self._plan)
        return {f"{TENSORS}/{name}": of for name, of in written.items()}

    def _publish(self, job: _Job, unfinished: Path, files: dict[str, StoredFile]) -> None:
        if self.group.rank() == 0:
            fsync_folder(unfinished / TENSORS)
            fsync_folder(unfinished / RANKS)
            write_marker(unfinished, Marker(job.step, self.group.size(), files))
            publish_folder(unfinished, job.folder)
            fsync_folder(job.folder.parent)


def _sizes_to_come(engine: Engine) -> Iterator[int]:
    """Yields the bytes of each tensor that `engine_tensors` will return on this rank once the optimizer has its
    state."""
    for part in engine.handle.parts:
        for _, parameter in part.named_parameters():
            if parameter.requires_grad:
                shard = local_tensor(parameter.detach())
                yield from [shard.nbytes, *engine.optimizer.state_names[parameter].sizes(parameter)]
        yield from (buffer.nbytes for _, buffer in stored_buffers(part))


def _write_texts(job: _Job, unfinished: Path) -> dict[str, StoredFile]:
    return {name: write_hashed(unfinished / name, text) for name, text in job.texts.items()}


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return describe_root_cause(error)
