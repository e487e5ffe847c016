"""The trainer's side of published weights: writes versions to a folder."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from automodel_rl.config import WeightSyncConfig
from automodel_rl.errors import InputError, WeightSyncError, reason
from automodel_rl.files import publish_folder
from automodel_rl.generator_messages import Committed
from automodel_rl.hf.buckets import Plan
from automodel_rl.model.handle import ModelHandle
from automodel_rl.parallel.host_collectives import gather_objects
from automodel_rl.weight_sync.checksum import checksum
from automodel_rl.weight_sync.delta import delta_of
from automodel_rl.weight_sync.published import (
    FULL_VERSION_EVERY,
    HashedFile,
    folder_of,
    is_full,
    remove_versions,
    unfinished_folder,
    write_block,
    write_version,
)
from automodel_rl.weight_sync.senders import Senders
from automodel_rl.weight_sync.signatures import Signer
from automodel_rl.weight_sync.slots import Slot, Slots
from automodel_rl.weight_sync.sync import WeightSync
from automodel_rl.weight_sync.transport import Transport
from automodel_rl.weight_sync.version_files import numbers_in, write_newest

T = TypeVar("T")


class Publisher:
    """Publishes a model's weights to a folder that all ranks share. Every rank of the job has one.

    Raises:
        InputError: on all ranks: the first rank cannot use the signing key.

    Attributes:
        changed: count of numbers that the last version changes; all of them in a whole version.
        num_bytes: size of its files.
        needed: oldest version still being read, which is kept; None if there is none.
    """

    def __init__(self, handle: ModelHandle, folder: Path, config: WeightSyncConfig):
        self.folder, self.control = folder, handle.layout.world_control
        self.changed = self.num_bytes = 0
        self.needed: int | None = None
        self._files = FileTransport(handle)
        self._sync = WeightSync(handle, self._files, config.model_copy(update={"checksum": False}))
        self._signer = self._open_signer(config.signing_key)
        self._before: tuple[int, str] | None = None
        self._full_versions: list[int] | None = None  # numbers of whole versions; None before this run's first version

    def _open_signer(self, file: Path | None) -> Signer | None:
        signer, problem = None, ""
        if file is not None and dist.get_rank() == 0:
            try:
                signer = Signer(file)
            except InputError as error:
                problem = str(error)
        problem = gather_objects(problem, self.control)[0] if file is not None else ""
        if problem:
            raise InputError(problem)
        return signer

    def publish(self, number: int) -> str:
        """Writes the current weights as policy version `number`, higher than the last, and returns its hash. A
        collective of all ranks.

        Raises:
            WeightSyncError: on all ranks: the version could not be written. The next one will be whole.
        """
        before, self._before = self._before, None  # until the version is complete
        unfinished = unfinished_folder(self.folder, number)
        self._full_versions = self._on_first(lambda: self._begin(number, unfinished))
        whole = before is None or number - self._full_versions[-1] >= FULL_VERSION_EVERY
        self._files.open(unfinished, whole)
        try:
            self._sync.send()
            problem = ""
        except WeightSyncError as error:
            problem = str(error)
        shares = gather_objects((problem, self._files.changed, self._files.sums, self._files.file_hashes), self.control)
        problem = next((text for text, *_ in shares if text), "")
        if problem:
            raise WeightSyncError(problem)
        self.changed = sum(changed for _, changed, *_ in shares)
        sums = {name: total for _, _, share, _ in shares for name, total in share.items()}
        files = {name: about for *_, share in shares for name, about in share.items()}
        self._full_versions += [number] if whole else []
        base = None if whole else before
        self._before, self.num_bytes = self._on_first(lambda: self._finish(number, unfinished, base, sums, files))
        return self._before[1]

    def _begin(self, number: int, unfinished: Path) -> list[int]:
        """Creates an empty folder, and returns the numbers of whole versions. At first also removes versions from
        `number` on, left by an earlier run."""
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        if self._full_versions is None:
            remove_versions(self.folder, [old for old in numbers_in(self.folder) if old >= number])
            return [old for old in numbers_in(self.folder) if is_full(self.folder, old)]
        return self._full_versions

    def _finish(
        self,
        number: int,
        unfinished: Path,
        before: tuple[int, str] | None,
        sums: dict[str, int],
        files: dict[str, tuple[int, str]],
    ) -> tuple[tuple[int, str], int]:
        """Publishes a written version, and removes obsolete ones."""
        digest = write_version(
            unfinished, number, before, self._sync.producer.plans, sums, files, self.changed, self._signer
        )
        num_bytes = sum(path.stat().st_size for path in unfinished.iterdir())
        publish_folder(unfinished, folder_of(self.folder, number))
        write_newest(self.folder, number)
        oldest = (self._full_versions or [number])[-2:][0]
        if self.needed is not None:
            oldest = min(
                oldest, max((whole for whole in self._full_versions or () if whole <= self.needed), default=oldest)
            )
        remove_versions(self.folder, [old for old in numbers_in(self.folder) if old < oldest])
        return (number, digest), num_bytes

    def _on_first(self, work: Callable[[], T]) -> T:
        """Calls `work` on the first rank. Returns its result, or raises its error, on all ranks."""
        result: T | None = None
        problem = ""
        if dist.get_rank() == 0:
            try:
                result = work()
            except (OSError, InputError) as error:
                problem = reason(error)
        result, problem = gather_objects((result, problem), self.control)[0]
        if problem:
            raise WeightSyncError(problem)
        return cast(T, result)


class FileTransport(Transport):
    """Writes each sender's buckets to a file, whole or as a delta. One rank of each stage keeps the previous version
    in host memory, in the dtype that is sent.

    Attributes:
        changed: count of changed numbers in this rank's files.
        file_hashes: by name: size and hash of these files.
    """

    reach = "own stages"

    def __init__(self, handle: ModelHandle):
        self.device, self.senders = handle.layout.device, Senders(handle).assigned
        self.changed = 0
        self.file_hashes: dict[str, tuple[int, str]] = {}
        self._unfinished, self._is_full = Path(), True
        self._plans: Sequence[Plan] = []
        self._files: dict[int, HashedFile] = {}
        self._last: dict[tuple[int, int], Tensor] = {}  # elements of the previous version, by (sender, bucket)
        self._sums: dict[tuple[int, int], dict[str, list[int]]] = {}

    def open(self, unfinished: Path, is_full: bool) -> None:
        self._unfinished, self._is_full = unfinished, is_full

    @property
    def sums(self) -> dict[str, int]:
        found: dict[str, list[int]] = {}
        for of_bucket in self._sums.values():
            for name, parts in of_bucket.items():
                found.setdefault(name, []).extend(parts)
        return {name: int(torch.tensor(parts).sum()) for name, parts in found.items()}

    def connect(self, plans: Sequence[Plan], num_bytes: int, num_buffers: int) -> Slots:
        self._plans, self._last, self._sums = plans, {}, {}
        return Slots.allocate(num_bytes, num_buffers, self.device)

    def begin(self, version: int, *, frozen: bool) -> None:
        self.changed, self.file_hashes = 0, {}
        self._files = {sender: HashedFile(self._unfinished / f"sender_{sender}.bin") for sender in self.senders}
        if self._is_full and not frozen:
            for (sender, number), elements in self._last.items():
                bucket = self._plans[sender].buckets[number]
                if bucket.is_frozen:
                    self.changed += write_block(self._files[sender], self._plans[sender], bucket, elements)

    def release(self, slot: Slot) -> None:
        """Does nothing: `send` copies the slot to the host."""

    def send(self, sender: int, number: int, slot: Slot) -> None:
        if sender not in self._files:
            return
        plan, key = self._plans[sender], (sender, number)
        bucket = plan.buckets[number]
        elements = bucket.elements(slot.buffer)
        sums = self._sums[key] = {}
        for chunk in bucket.chunks:
            stretch = elements[chunk.offset : chunk.offset + chunk.count]
            sums.setdefault(plan.tensors[chunk.tensor].name, []).append(int(checksum(stretch, chunk.start)))
        last, delta = self._last.get(key), None
        if last is None:
            last = self._last[key] = torch.empty_like(elements, device="cpu")
        elif not self._is_full:
            delta = delta_of(last, elements)
            if delta is None:
                return
        self.changed += write_block(self._files[sender], plan, bucket, last.copy_(elements), delta)

    def commit(self, version: int, *, sums: bool) -> Committed:
        self.file_hashes = {f"sender_{sender}.bin": file.finish() for sender, file in self._files.items()}
        return Committed(version, None)

    def abort(self) -> None:
        self.close()

    def close(self) -> None:
        for file in self._files.values():
            file.abort()
        self._files = {}
