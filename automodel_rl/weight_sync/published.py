"""Published weights: the versions of a model's weights in a folder, as what changed since the version before.

Whoever shares the folder brings tensors to any version, bit for bit, wherever it runs and whenever it comes:

    FOLDER/00000007/version.json    the version, its tensors with checksums, its files, and which version it changes
    FOLDER/00000007/sender_0.bin    blocks of one sender: a JSON line, then compressed numbers, whole or a delta

A run's first version is whole, and so is one in `WHOLE_EVERY`. Versions before the last but one of these are removed.
"""

import json
import shutil
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
import zstandard
from torch import Tensor

from automodel_rl.errors import InputError
from automodel_rl.hf.buckets import Bucket, Plan
from automodel_rl.manifest import StoredFile, hash_file, hash_values, inner_name
from automodel_rl.weight_sync.checksum import checksum
from automodel_rl.weight_sync.delta import apply_delta, delta_of, num_changed

VERSION_FILE = "version.json"
FORMAT = 1
WHOLE_EVERY = 50
LEVEL = 1
"""Level of zstd's compression. Higher ones are slower than disks, and save little."""


@dataclass(frozen=True)
class Version:
    """What is known of a published version.

    Attributes:
        number: the policy version.
        before: number and hash of the version that it changes; None if it is whole.
        tensors: shape, dtype and checksum of every tensor, by name.
        files: its files.
        changed: how many numbers differ from the version before.
        hash: of all of this.
    """

    number: int
    before: tuple[int, str] | None
    tensors: dict[str, tuple[tuple[int, ...], torch.dtype, int]]
    files: dict[str, StoredFile]
    changed: int
    hash: str


def folder_of(folder: Path, number: int) -> Path:
    """The folder of a version."""
    return folder / f"{number:08d}"


def unfinished_folder(folder: Path, number: int) -> Path:
    """The folder of a version that is being written."""
    return folder / f".{number:08d}.unfinished"


def numbers_in(folder: Path) -> list[int]:
    """The numbers of the complete versions in a folder, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(
        int(path.name) for path in folder.iterdir() if path.name.isdigit() and (path / VERSION_FILE).is_file()
    )


def write_version(
    place: Path,
    number: int,
    before: tuple[int, str] | None,
    plans: Iterable[Plan],
    sums: Mapping[str, int],
    changed: int,
) -> str:
    """Writes a version's own file, once all others are there, and returns its hash."""
    tensors = {
        spec.name: [list(spec.shape), str(spec.dtype).removeprefix("torch."), sums[spec.name]]
        for plan in plans
        for spec in plan.tensors
    }
    files = {path.name: vars(hash_file(path)) for path in sorted(place.iterdir())}
    values = {"format": FORMAT, "version": number, "before": before, "tensors": tensors, "files": files}
    values |= {"changed": changed}
    digest = hash_values(values)
    (place / VERSION_FILE).write_text(json.dumps(values | {"hash": digest}))
    return digest


def read_version(folder: Path, number: int) -> Version:
    """What is known of a version.

    Raises:
        InputError: it is not there, damaged or of another format.
    """
    path = folder_of(folder, number) / VERSION_FILE
    try:
        values = json.loads(path.read_text())
        digest = values.pop("hash")
        if digest != hash_values(values):
            raise ValueError("its hash is another")
        if values["format"] != FORMAT:
            raise ValueError(f"format {values['format']}, and this version of automodel_rl reads {FORMAT}")
        tensors = {
            name: (tuple(shape), getattr(torch, dtype), int(total))
            for name, (shape, dtype, total) in values["tensors"].items()
        }
        files = {inner_name(name): StoredFile(**stored) for name, stored in values["files"].items()}
        before = None if values["before"] is None else (int(values["before"][0]), str(values["before"][1]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path}: is no published version ({error}): wait for the next whole one") from None
    return Version(values["version"], before, tensors, files, values["changed"], digest)


def write_block(file: BinaryIO, plan: Plan, bucket: Bucket, old: Tensor | None, new: Tensor) -> int:
    """Writes a bucket to a sender's file, and returns how many of its numbers have changed.

    Args:
        file: the file.
        plan: the sender's plan.
        bucket: the bucket.
        old: its elements in the version before, on the CPU; None in a whole version.
        new: its elements now.
    """
    delta = None if old is None else delta_of(old, new)
    if old is not None and delta is None:
        return 0
    changed = bucket.numel if old is None else num_changed(delta, bucket.numel, bucket.dtype.itemsize)
    raw = new.view(torch.uint8).numpy().tobytes() if delta is None or len(delta) >= bucket.num_bytes else None
    packed = zstandard.ZstdCompressor(level=LEVEL).compress(raw if raw is not None else delta or b"")
    chunks = [[plan.tensors[chunk.tensor].name, chunk.start, chunk.count] for chunk in bucket.chunks]
    kind = {"whole": raw is not None, "dtype": str(bucket.dtype).removeprefix("torch."), "chunks": chunks}
    file.write(json.dumps(kind | {"bytes": len(packed)}).encode() + b"\n" + packed)
    return changed


class PublishedWeights:
    """Reads the versions of a folder.

    Args:
        folder: the folder that a run publishes to.

    Attributes:
        version: the version of the tensors that `bring` got last; None before.

    Example:
        >>> weights = PublishedWeights(Path("runs/math/weights"))
        >>> tensors = {}
        >>> weights.bring(tensors)  # the newest; again later, only what has changed since is read
        12
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.version: Version | None = None

    def bring(self, tensors: MutableMapping[str, Tensor], number: int | None = None, digest: str | None = None) -> int:
        """Brings tensors on the CPU to a version, and returns its number. Tensors that are not there are made.

        Args:
            tensors: by their names in a Hugging Face checkpoint; as the last call has left them. After an error they
                are of no version, and the next call begins with a whole one.
            number: the version; None for the newest.
            digest: the version's hash, if it must be that of a run that said so; None for any.

        Raises:
            InputError: the version is not there, is another one, or something that it needs is damaged.
        """
        there = numbers_in(self.folder)
        if not there:
            raise InputError(f"{self.folder}: holds no published version yet")
        number = there[-1] if number is None else number
        target, chain = read_version(self.folder, number), list[Version]()
        if digest not in (None, target.hash):
            raise InputError(f"{folder_of(self.folder, number)}: is of another run: give each run a folder of its own")
        now, self.version = self.version, None
        step = target
        while now is None or step.hash != now.hash:
            chain.append(step)
            if step.before is None:
                break
            before = read_version(self.folder, step.before[0])
            if before.hash != step.before[1]:
                raise InputError(f"{folder_of(self.folder, before.number)}: is not what version {step.number} changes")
            step = before
        for version in reversed(chain):
            self._apply(version, tensors)
        self._check(target, tensors)
        self.version = target
        return number

    def _apply(self, version: Version, tensors: MutableMapping[str, Tensor]) -> None:
        if version.before is None:
            for name, (shape, dtype, _) in version.tensors.items():
                held = tensors.get(name)
                if held is None or held.shape != shape or held.dtype != dtype:
                    tensors[name] = torch.empty(shape, dtype=dtype)
        place = folder_of(self.folder, version.number)
        for name, stored in version.files.items():
            if not (place / name).is_file() or hash_file(place / name) != stored:
                raise InputError(f"{place / name}: is damaged or gone: wait for the next whole version")
            with (place / name).open("rb") as file:
                while line := file.readline():
                    _load_block(json.loads(line), file, tensors)

    def _check(self, version: Version, tensors: Mapping[str, Tensor]) -> None:
        wrong = [name for name, (*_, total) in version.tensors.items() if int(checksum(tensors[name])) != total]
        if wrong:
            raise InputError(
                f"{self.folder}: {len(wrong)} tensors are not those of version {version.number}, the first {wrong[0]}"
            )


def _load_block(block: dict[str, Any], file: BinaryIO, tensors: Mapping[str, Tensor]) -> None:
    dtype = getattr(torch, block["dtype"])
    content = zstandard.ZstdDecompressor().decompress(file.read(block["bytes"]))
    places = [tensors[name].view(-1)[start : start + count] for name, start, count in block["chunks"]]
    if block["whole"]:
        elements = torch.frombuffer(bytearray(content), dtype=dtype)
    else:
        elements = torch.cat(places)
        apply_delta(elements, content)
    for place, part in zip(places, elements.split([len(place) for place in places]), strict=True):
        place.copy_(part)


def is_whole(folder: Path, number: int) -> bool:
    """Whether a version is there that needs no other one."""
    try:
        return read_version(folder, number).before is None
    except InputError:
        return False


def remove_versions(folder: Path, numbers: Iterable[int]) -> None:
    """Removes versions."""
    for number in numbers:
        shutil.rmtree(folder_of(folder, number), ignore_errors=True)
