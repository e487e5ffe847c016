"""Published weights: the versions of a model's weights in a folder, as what changed since the version before.

Whoever reads the folder brings tensors to any version, bit for bit, wherever it runs and whenever it comes:

    FOLDER/00000007/version.json    the version, its tensors with checksums, its files, and which version it changes
    FOLDER/00000007/sender_0.bin    blocks of one sender: a JSON line, then compressed numbers, whole or a delta
    FOLDER/newest.json              the number of the newest version

A run's first version is whole, and so is one in `WHOLE_EVERY`. Versions before the last but one of these are removed.
Hashes are SHA-256, and a version's own covers those of its files and that of the version before. So whoever has it from
the run, or its signature, has all the rest from the run, too.
"""

import contextlib
import hashlib
import json
import shutil
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

import torch
import zstandard
from torch import Tensor

from automodel_rl.errors import InputError, innermost
from automodel_rl.hf.buckets import Bucket, Plan
from automodel_rl.manifest import inner_name
from automodel_rl.weight_sync.checksum import checksum
from automodel_rl.weight_sync.delta import apply_delta, delta_of, num_changed
from automodel_rl.weight_sync.signatures import SignatureCheck, Signer
from automodel_rl.weight_sync.version_files import VERSION_FILE, VersionFiles

FORMAT = 2
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
        files: size and hash of every file, by name.
        changed: how many numbers differ from the version before.
        hash: of all of this.
        signature: that of the hash, by the run; None if it signs none.
    """

    number: int
    before: tuple[int, str] | None
    tensors: dict[str, tuple[tuple[int, ...], torch.dtype, int]]
    files: dict[str, tuple[int, str]]
    changed: int
    hash: str
    signature: str | None


def folder_of(folder: Path, number: int) -> Path:
    """The folder of a version."""
    return folder / f"{number:08d}"


def unfinished_folder(folder: Path, number: int) -> Path:
    """The folder of a version that is being written."""
    return folder / f".{number:08d}.unfinished"


def write_version(
    place: Path,
    number: int,
    before: tuple[int, str] | None,
    plans: Iterable[Plan],
    sums: Mapping[str, int],
    files: Mapping[str, tuple[int, str]],
    changed: int,
    signer: Signer | None,
) -> str:
    """Writes a version's own file, once all others are there, and returns its hash."""
    tensors = {
        spec.name: [list(spec.shape), str(spec.dtype).removeprefix("torch."), sums[spec.name]]
        for plan in plans
        for spec in plan.tensors
    }
    values = {"format": FORMAT, "version": number, "before": before, "tensors": tensors, "files": {**files}}
    values |= {"changed": changed}
    digest = _hash_values(values)
    signature = None if signer is None else signer.sign(digest)
    (place / VERSION_FILE).write_text(json.dumps(values | {"hash": digest, "signature": signature}))
    return digest


def _hash_values(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _size_and_hash(file: BufferedReader) -> tuple[int, str]:
    digest = hashlib.file_digest(file, "sha256").hexdigest()
    return file.tell(), digest


def read_version(files: VersionFiles, number: int) -> Version:
    """What is known of a version.

    Raises:
        InputError: it is not there, damaged or of another format.
    """
    try:
        values = json.loads(files.description(number))
        digest, signature = values.pop("hash"), values.pop("signature", None)
        if digest != _hash_values(values):
            raise ValueError("its hash is another")
        if values["format"] != FORMAT:
            raise ValueError(f"format {values['format']}, and this version of automodel_rl reads {FORMAT}")
        tensors = {
            name: (tuple(shape), getattr(torch, dtype), int(total))
            for name, (shape, dtype, total) in values["tensors"].items()
        }
        stored = {inner_name(name): (int(size), str(of_file)) for name, (size, of_file) in values["files"].items()}
        before = None if values["before"] is None else (int(values["before"][0]), str(values["before"][1]))
        if values["version"] != number:
            raise ValueError(f"it is version {values['version']}")
    except InputError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{files.where(number, VERSION_FILE)}: is no published version ({error}): wait for the next whole one"
        ) from None
    return Version(number, before, tensors, stored, values["changed"], digest, signature)


class HashedFile:
    """A file of a version, which is hashed while it is written.

    Args:
        path: the file, which is made anew.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, path: Path):
        self._file, self._hash, self._size = path.open("wb"), hashlib.sha256(), 0

    def write(self, content: bytes) -> None:
        """Writes bytes at the end. Raises OSError if there is no room."""
        self._file.write(content)
        self._hash.update(content)
        self._size += len(content)

    def finish(self) -> tuple[int, str]:
        """Closes the file, and returns its size and hash. Raises OSError if something could not be written."""
        self._file.close()
        return self._size, self._hash.hexdigest()

    def give_up(self) -> None:
        """Closes the file, whatever is in it."""
        with contextlib.suppress(OSError):
            self._file.close()


def write_block(file: HashedFile, plan: Plan, bucket: Bucket, old: Tensor | None, new: Tensor) -> int:
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
        place: the folder that a run publishes to, the address at which others have it, such as https://HOST/weights, or
            its files.
        public_key: the file of the key with which the run's signatures are verified; None verifies none.

    Attributes:
        version: the version of the tensors that `bring` got last; None before.

    Raises:
        InputError: the address or the key cannot be used.

    Example:
        >>> weights = PublishedWeights(Path("runs/math/weights"))
        >>> tensors = {}
        >>> weights.bring(tensors)  # the newest; again later, only what has changed since is read
        12
    """

    def __init__(self, place: Path | str | VersionFiles, public_key: Path | None = None):
        self.files = place if isinstance(place, VersionFiles) else VersionFiles(place)
        self.signatures = None if public_key is None else SignatureCheck(public_key)
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
        number = self.files.newest() if number is None else number
        if number is None:
            raise InputError(f"{self.files.place}: holds no published version yet")
        target, chain = read_version(self.files, number), list[Version]()
        if digest not in (None, target.hash):
            raise InputError(f"{self.files.where(number)}: is of another run: give each run a folder of its own")
        if self.signatures is not None and not self.signatures.accepts(target.hash, target.signature):
            raise InputError(f"{self.files.where(number)}: is not signed with the run's key: use nothing of it")
        now, self.version = self.version, None
        if now is not None and now.tensors.keys() - tensors.keys():
            now = None  # they are not those of the last call
        step = target
        while now is None or step.hash != now.hash:
            chain.append(step)
            if step.before is None:
                break
            before = read_version(self.files, step.before[0])
            if before.hash != step.before[1]:
                raise InputError(f"{self.files.where(before.number)}: is not what version {step.number} changes")
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
        for name, stored in version.files.items():
            where = self.files.where(version.number, name)
            try:
                with self.files.opened(version.number, name, is_shared=self.signatures is None) as file:
                    if _size_and_hash(file) != stored:
                        raise InputError(f"{where}: is damaged: wait for the next whole version")
                    file.seek(0)
                    while line := file.readline():
                        _load_block(json.loads(line), file, tensors)
            except OSError as error:
                raise InputError(f"{where}: is gone ({innermost(error)}): wait for the next whole version") from None

    def _check(self, version: Version, tensors: Mapping[str, Tensor]) -> None:
        wrong = [name for name, (*_, total) in version.tensors.items() if int(checksum(tensors[name])) != total]
        if wrong:
            raise InputError(
                f"{self.files.where(version.number)}: {len(wrong)} tensors are not those of this version, the first "
                f"{wrong[0]}"
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
        return read_version(VersionFiles(folder), number).before is None
    except InputError:
        return False


def remove_versions(folder: Path, numbers: Iterable[int]) -> None:
    """Removes versions."""
    for number in numbers:
        shutil.rmtree(folder_of(folder, number), ignore_errors=True)
