"""Published weights: versions of a model's weights in a folder, each stored as the changes since the one before.

Readers reach any version bit for bit, on any machine and at any time:

    FOLDER/00000007/version.json    tensors with checksums, files with hashes, and the version that this one changes
    FOLDER/00000007/sender_0.bin    blocks of one sender: a JSON line, then compressed numbers, whole or a delta
    FOLDER/newest.json              number of the newest version

The first version of a run is whole, as is one in `FULL_VERSION_EVERY`. Versions older than the last but one of these
are removed. A version's SHA-256 hash covers those of its files and of the version before, so an authentic hash or
signature verifies everything.
"""

import contextlib
import functools
import hashlib
import json
import math
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
import torch
import zstandard
from torch import Tensor

from automodel_rl.errors import InputError, describe_root_cause
from automodel_rl.hf.buckets import Bucket, Plan
from automodel_rl.manifest import inner_name
from automodel_rl.weight_sync.checksum import change_of_checksum, checksum
from automodel_rl.weight_sync.delta import bits_of, changes_of, num_changed
from automodel_rl.weight_sync.signatures import SignatureCheck, Signer
from automodel_rl.weight_sync.version_files import VERSION_FILE, VersionFiles

FORMAT = 2
FULL_VERSION_EVERY = 50
LEVEL = 1
"""zstd compression level. Higher levels are slower than disks, and save little."""

THREADS = 4
"""Threads for packing, unpacking and checksums."""

MAX_LINE_BYTES = 2**26
"""Longest description of a block."""

MALFORMED_FILE_ERRORS = (
    *(ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError, MemoryError),
    zstandard.ZstdError,
)
"""Errors raised for files that no run has written: others may write to the folder."""

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Version:
    """Description of a published version.

    Attributes:
        base: number and hash of the version that it changes; None if it is whole.
        tensors: shape, dtype and checksum.
        files: size and hash.
        changed: count of numbers that differ from the version before.
        hash: of all of the above.
        signature: of the hash; None if the run signs none.
    """

    number: int
    base: tuple[int, str] | None
    tensors: dict[str, tuple[tuple[int, ...], torch.dtype, int]]
    files: dict[str, tuple[int, str]]
    changed: int
    hash: str
    signature: str | None


def folder_of(folder: Path, number: int) -> Path:
    return folder / f"{number:08d}"


def unfinished_folder(folder: Path, number: int) -> Path:
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
    """Writes a version's `VERSION_FILE`, after all other files, and returns its hash."""
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
    """Reads the description of a version. Raises InputError if it is missing, damaged or of another format."""
    try:
        values = json.loads(files.description(number))
        if not isinstance(values, dict):
            raise ValueError("not a JSON object")
        digest, signature = values.pop("hash"), values.pop("signature", None)
        if digest != _hash_values(values):
            raise ValueError("hash mismatch")
        if values["format"] != FORMAT:
            raise ValueError(f"format {values['format']}, but this automodel_rl release reads {FORMAT}")
        tensors = {
            name: (_shape_of(shape), _dtype_of(dtype), int(total))
            for name, (shape, dtype, total) in values["tensors"].items()
        }
        _check_fits(tensors)
        stored = {inner_name(name): (int(size), str(of_file)) for name, (size, of_file) in values["files"].items()}
        before = None if values["before"] is None else (int(values["before"][0]), str(values["before"][1]))
        if values["version"] != number:
            raise ValueError(f"it describes version {values['version']}")
    except InputError:
        raise
    except (OSError, *MALFORMED_FILE_ERRORS) as error:
        raise InputError(
            f"{files.where(number, VERSION_FILE)}: is not a published version ({error}): wait for the next full one"
        ) from None
    return Version(number, before, tensors, stored, values["changed"], digest, signature)


def _shape_of(shape: Any) -> tuple[int, ...]:
    if not all(isinstance(size, int) and 0 <= size < 2**48 for size in shape):
        raise ValueError(f"{str(shape)[:60]} is not a shape")
    return tuple(shape)


def _dtype_of(name: Any) -> torch.dtype:
    dtype = getattr(torch, name) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{str(name)[:60]} is not a dtype")
    return dtype


def _check_fits(tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype, int]]) -> None:
    """Raises ValueError if the tensors need more memory than this machine has."""
    needed = sum(math.prod(max(size, 1) for size in shape) * dtype.itemsize for shape, dtype, _ in tensors.values())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > memory:
        raise ValueError(f"its tensors take {needed / 2**30:,.0f} GiB, but this machine has {memory / 2**30:,.0f} GiB")


class HashedFile:
    """A new file that is hashed while it is written."""

    def __init__(self, path: Path):
        self._file, self._hash, self._size = path.open("wb"), hashlib.sha256(), 0

    def write(self, content: bytes) -> None:
        self._file.write(content)
        self._hash.update(content)
        self._size += len(content)

    def finish(self) -> tuple[int, str]:
        self._file.close()
        return self._size, self._hash.hexdigest()

    def abort(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()


def write_block(file: HashedFile, plan: Plan, bucket: Bucket, elements: Tensor, delta: bytes | None = None) -> int:
    """Writes a bucket to a sender's file, and returns how many of its numbers have changed.

    Args:
        elements: on the CPU.
        delta: difference from the version before; None in a whole version.
    """
    written = delta if delta is not None and len(delta) < bucket.num_bytes else None
    content = bits_of(elements).data if written is None else written
    packed = zstandard.ZstdCompressor(level=LEVEL, threads=THREADS).compress(content)
    chunks = [[plan.tensors[chunk.tensor].name, chunk.start, chunk.count] for chunk in bucket.chunks]
    kind = {"whole": written is None, "dtype": str(bucket.dtype).removeprefix("torch."), "chunks": chunks}
    file.write(json.dumps(kind | {"bytes": len(packed)}).encode() + b"\n" + packed)
    return bucket.numel if delta is None else num_changed(delta, bucket.numel, bucket.dtype.itemsize)


class PublishedWeights:
    """Reads the versions in a folder.

    Args:
        location: the folder, its address, such as https://HOST/weights, or its files.
        public_key: file of the key that verifies signatures; None skips this.

    Attributes:
        version: of the tensors; None if they are of none.
        num_bytes: bytes read by the last `load_version`, without descriptions.

    Raises:
        InputError: the address or the key cannot be used.

    Example:
        >>> weights = PublishedWeights(Path("runs/math/weights"))
        >>> tensors = {}
        >>> weights.load_version(tensors)  # the newest; again later, only what has changed since is read
        12
    """

    def __init__(self, location: Path | str | VersionFiles, public_key: Path | None = None):
        self.files = location if isinstance(location, VersionFiles) else VersionFiles(location)
        self.signatures = None if public_key is None else SignatureCheck(public_key)
        self.version: Version | None = None
        self.num_bytes = 0
        self._sums: dict[str, int] = {}  # checksums of the tensors after the last `load_version`
        self._stamps: dict[str, tuple[int, int]] = {}

    def load_version(
        self, tensors: MutableMapping[str, Tensor], number: int | None = None, digest: str | None = None
    ) -> int:
        """Brings tensors on the CPU to a version, and returns its number. Missing tensors are created.

        If torch's version counters show that tensors have changed since the last call, all are read anew. Changes
        through NumPy or `.data` go unnoticed, and may persist: do not make any.

        Args:
            tensors: by name in the Hugging Face checkpoint, as the last call left them. An error may leave them of
                no version; the next call then starts from a whole one.
            number: None for the newest.
            digest: required hash of the version; None for any.

        Raises:
            InputError: the version is missing, is another one, or something that it needs is damaged.
        """
        number = self.files.newest() if number is None else number
        if number is None:
            raise InputError(f"{self.files.location}: contains no published version yet")
        target, chain = read_version(self.files, number), list[Version]()
        if digest not in (None, target.hash):
            raise InputError(f"{self.files.where(number)}: belongs to another run: use one folder per run")
        if self.signatures is not None and not self.signatures.accepts(target.hash, target.signature):
            raise InputError(f"{self.files.where(number)}: is not signed with the run's key: do not use it")
        now, self.version = self.version, None
        if now is not None and self._stamps != _stamps_of(tensors, now):
            now = None  # changed since the last call
        step = target
        while now is None or step.hash != now.hash:
            chain.append(step)
            if step.base is None:
                break
            before = read_version(self.files, step.base[0])
            if before.hash != step.base[1]:
                raise InputError(
                    f"{self.files.where(before.number)}: is not the version that {step.number} is based on"
                )
            step = before
        self.num_bytes = sum(size for version in chain for size, _ in version.files.values())
        for version in reversed(chain):
            self._apply(version, tensors)
        self._check(target)
        self.version, self._stamps = target, _stamps_of(tensors, target)
        return number

    def _apply(self, version: Version, tensors: MutableMapping[str, Tensor]) -> None:
        if version.base is None:
            for name, (shape, dtype, _) in version.tensors.items():
                held = tensors.get(name)
                if held is None or held.shape != shape or held.dtype != dtype:
                    tensors[name] = torch.empty(shape, dtype=dtype)
        lacking = sorted(version.tensors.keys() - tensors.keys())
        if lacking:
            raise InputError(
                f"{self.files.where(version.number)}: changes tensors that the previous version lacks, the first "
                f"{lacking[0]}: do not use it"
            )
        for name, stored in version.files.items():
            where = self.files.where(version.number, name)
            try:
                with self.files.opened(version.number, name, stored[0], is_shared=self.signatures is None) as file:
                    if _size_and_hash(file) != stored:
                        raise InputError(f"{where}: is damaged: wait for the next full version")
                    file.seek(0)
                    for changes in _in_threads(functools.partial(_load_block, tensors=tensors), _blocks_in(file)):
                        self._note(changes)
            except MALFORMED_FILE_ERRORS as error:
                raise InputError(
                    f"{where}: is not a file of a published version ({describe_root_cause(error)}): do not use it"
                ) from None
            except OSError as error:
                raise InputError(
                    f"{where}: cannot be read ({describe_root_cause(error)}): wait for the next full version"
                ) from None
        unknown = [name for name in version.tensors if name not in self._sums]
        self._sums |= zip(unknown, _in_threads(lambda name: int(checksum(tensors[name])), unknown), strict=True)

    def _note(self, changes: Mapping[str, int | None]) -> None:
        for name, change in changes.items():
            if change is None:
                self._sums.pop(name, None)
            elif name in self._sums:
                self._sums[name] = _sum(self._sums[name], change)

    def _check(self, version: Version) -> None:
        wrong = [name for name, (*_, total) in version.tensors.items() if self._sums[name] != total]
        if wrong:
            raise InputError(
                f"{self.files.where(version.number)}: {len(wrong)} tensors have wrong checksums, the first {wrong[0]}"
            )


def _stamps_of(tensors: Mapping[str, Tensor], version: Version) -> dict[str, tuple[int, int]]:
    held = {name: tensors[name] for name in version.tensors if name in tensors}
    return {name: (one.data_ptr(), 0 if one.is_inference() else one._version) for name, one in held.items()}


def _blocks_in(file: BinaryIO) -> Iterator[tuple[dict[str, Any], bytes]]:
    size = os.fstat(file.fileno()).st_size
    while line := file.readline(MAX_LINE_BYTES):
        block = json.loads(line)
        if not isinstance(block["bytes"], int) or not 0 <= block["bytes"] <= size - file.tell():
            raise ValueError(f"a block of {block['bytes']} bytes exceeds the file")
        yield block, file.read(block["bytes"])


def _load_block(packed: tuple[dict[str, Any], bytes], tensors: Mapping[str, Tensor]) -> dict[str, int | None]:
    """Applies a block, and returns the changes of checksums; None where the tensor must be summed."""
    block = packed[0]
    dtype = _dtype_of(block["dtype"])
    stretches = [_stretch(tensors[name], dtype, start, count) for name, start, count in block["chunks"]]
    itemsize, numel = dtype.itemsize, sum(len(stretch) for stretch in stretches)
    if numel > sum(tensors[name].numel() for name in {name for name, *_ in block["chunks"]}):
        raise ValueError("a block contains some numbers twice")
    content = _unpacked(packed[1], itemsize * numel, is_full=bool(block["whole"]), numel=numel)
    ends = np.cumsum([len(stretch) for stretch in stretches])
    if block["whole"]:
        for stretch, part in zip(stretches, np.split(np.frombuffer(content, f"i{itemsize}"), ends[:-1]), strict=True):
            stretch[:] = part
        return {name: None for name, *_ in block["chunks"]}
    indices, differences = changes_of(content, numel, itemsize)
    bounds, changes = np.searchsorted(indices, ends), dict[str, int | None]()
    first = 0
    for (name, start, count), stretch, end, last in zip(block["chunks"], stretches, ends, bounds, strict=True):
        within = indices[first:last] - (end - count)
        before = stretch[within]
        stretch[within] = after = before ^ differences[first:last]
        changes[name] = _sum(changes.get(name) or 0, change_of_checksum(before, after, start + within))
        first = last
    return changes


def _stretch(tensor: Tensor, dtype: torch.dtype, start: int, count: int) -> np.ndarray:
    """Returns a range of a tensor as integers. Raises ValueError beyond its bounds."""
    if tensor.dtype != dtype or not 0 <= start <= start + count <= tensor.numel():
        raise ValueError(f"numbers {start} to {start + count} of {dtype} are not in a tensor of {tensor.numel()}")
    return bits_of(tensor)[start : start + count]


def _unpacked(packed: bytes, num_bytes: int, *, is_full: bool, numel: int) -> bytes:
    """Decompresses a block. Raises ValueError, before decompressing, if it is too long."""
    most = num_bytes if is_full else num_bytes + -(-numel // 8)
    said = zstandard.frame_content_size(packed)
    if said > most:
        raise ValueError(f"a block unpacks to {said:,} bytes, more than {most:,}")
    content = zstandard.ZstdDecompressor().decompress(packed, max_output_size=max(most, 1))
    if is_full and len(content) != num_bytes:
        raise ValueError(f"a block unpacks to {len(content):,} bytes instead of {num_bytes:,}")
    return content


def _in_threads(work: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """Yields results in order. At most `THREADS` + 1 items are held at a time."""
    with ThreadPoolExecutor(THREADS) as pool:
        waiting = deque[Future[Result]]()
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) > THREADS:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _sum(*terms: int) -> int:
    """Adds checksums, modulo 2 ** 64."""
    return int(np.array(terms, np.int64).sum())


def has_version(folder: Path, number: int, digest: str) -> bool:
    """Returns whether the folder has the version with this hash, and all that it builds on."""
    step: tuple[int, str] | None = (number, digest)
    try:
        while step is not None:
            version = read_version(VersionFiles(folder), step[0])
            if version.hash != step[1]:
                return False
            step = version.base
    except InputError:
        return False
    return True


def is_full(folder: Path, number: int) -> bool:
    """Returns whether the version exists, and builds on no other."""
    try:
        return read_version(VersionFiles(folder), number).base is None
    except InputError:
        return False


def remove_versions(folder: Path, numbers: Iterable[int]) -> None:
    for number in numbers:
        shutil.rmtree(folder_of(folder, number), ignore_errors=True)
