"""A flight recorder: the last things that a rank did, in a file that is left however the rank ends.

The file is a ring of lines. A note costs a small write without a flush. After a process is killed, its last line says
what it was doing. If the disk is full or gone, notes are lost and nothing else.
"""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from automodel_rl.errors import MicrobatchError, innermost, line_of_caller

LINE_BYTES = 160
NUM_LINES = 1024


class FlightRecorder:
    """Notes of one rank. Its main thread makes them; other threads only read.

    Attributes:
        last_note: time of the last note, by the monotonic clock.
        started: time at which the recorder was made, and so the process, by the wall clock.
        file: the file with the notes; None while they are only in memory.
    """

    def __init__(self) -> None:
        self._ring = bytearray(b" " * LINE_BYTES * NUM_LINES)
        self._count = 0
        self._phases: list[str] = []
        self._descriptor: int | None = None
        self.last_note = time.monotonic()
        self.started = time.time()
        self.file: Path | None = None

    @property
    def where(self) -> str:
        """The phases that the rank is in, outermost first."""
        return ", ".join(self._phases)

    def keep_in(self, file: Path) -> None:
        """Keeps all notes in a file from here on, earlier ones included.

        Args:
            file: a file for this rank alone; replaced if it exists.
        """
        self._close()
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.unlink(missing_ok=True)
            self._descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
            self.file = file
            os.pwrite(self._descriptor, self._ring, 0)

    def discard(self) -> None:
        """Removes the file: the rank has ended well."""
        file = self.file
        self._close()
        if file is not None:
            with contextlib.suppress(OSError):  # the folder may have files of other ranks
                file.unlink(missing_ok=True)
                file.parent.rmdir()

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = self.file = None

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Notes what the rank does during the block. If the block raises, the phase stays until the outer one ends."""
        depth = len(self._phases)
        self._enter(name)
        yield
        del self._phases[depth:]
        self._note()

    @contextlib.contextmanager
    def top_phase(self, name: str) -> Iterator[None]:
        """An outermost phase. It first ends all phases that errors have left."""
        self._phases.clear()
        with self.phase(name):
            yield

    def _enter(self, name: str) -> None:
        self._phases.append(name)
        self._note()

    def _note(self) -> None:
        self.last_note = time.monotonic()
        line = f"{self._count:010d} {time.time():.3f} {self.where}".encode()[: LINE_BYTES - 1]
        start = self._count % NUM_LINES * LINE_BYTES
        line = line.ljust(LINE_BYTES - 1) + b"\n"
        self._ring[start : start + LINE_BYTES] = line
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.pwrite(self._descriptor, line, start)
        self._count += 1


flight = FlightRecorder()
"""The recorder of this process."""


@contextlib.contextmanager
def in_microbatch(phase: str, stage: int, index: int) -> Iterator[None]:
    """Notes the work on one microbatch during the block, and names the microbatch in an error.

    Args:
        phase: name of the work, such as "forward".
        stage: index of the pipeline stage.
        index: the microbatch's index.

    Raises:
        MicrobatchError: the block raised something.
    """
    place = f"{phase} of microbatch {index} on stage {stage}"
    with flight.phase(place):
        try:
            yield
        except Exception as error:
            raise MicrobatchError(place, innermost(error) + line_of_caller(error)) from error


def read_flight(file: Path) -> list[str]:
    """The notes of a rank, oldest first; none if there is no file."""
    try:
        lines = file.read_text(errors="replace").splitlines()
    except OSError:
        return []
    return sorted(line.strip() for line in lines if line[:1].isdigit())


def last_place(file: Path) -> str:
    """The phases in which a rank was when it made its last note."""
    notes = read_flight(file)
    return notes[-1].partition(" ")[2].partition(" ")[2] if notes else ""


def left_flight(folder: Path | None, rank: int, since: float) -> Path | None:
    """The file of a rank that is gone, if it wrote to one after a time; older files are of earlier attempts."""
    file = None if folder is None else flight_file(folder, rank)
    return file if file is not None and file.is_file() and file.stat().st_mtime >= since else None


def flight_file(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank}.log"
