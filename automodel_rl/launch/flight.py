"""Flight recorder: a rank's most recent phases, in a file that survives however the rank ends.

The file is a ring of fixed-size lines. A note costs one small write without a flush. The last line of a killed
process says what it was doing. A full or missing disk loses notes and has no other effect.
"""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from automodel_rl.errors import MicrobatchError, describe_root_cause, line_of_caller

LINE_BYTES = 160
NUM_LINES = 1024


class FlightRecorder:
    """Notes of one rank. Only its main thread writes them; other threads may read.

    Attributes:
        last_note: `time.monotonic()` of the last note.
        started: `time.time()` at which the recorder was created, at process start.
        file: None while the notes are only in memory.
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
        """The current phases, outermost first."""
        return ", ".join(self._phases)

    def record_in(self, file: Path) -> None:
        """Writes all notes, earlier ones included, to a file from now on. An existing file is replaced."""
        self._close()
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.unlink(missing_ok=True)
            self._descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
            self.file = file
            os.pwrite(self._descriptor, self._ring, 0)

    def discard(self) -> None:
        """Deletes the file after the rank has ended successfully."""
        file = self.file
        self._close()
        if file is not None:
            with contextlib.suppress(OSError):  # the folder may hold other ranks' files
                file.unlink(missing_ok=True)
                file.parent.rmdir()

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = self.file = None

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Marks a phase for the duration of the block. If the block raises, the phase stays on record until the
        outer one ends."""
        depth = len(self._phases)
        self._enter(name)
        yield
        del self._phases[depth:]
        self._note()

    @contextlib.contextmanager
    def top_phase(self, name: str) -> Iterator[None]:
        """Marks an outermost phase, after dropping all phases left behind by errors."""
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


@contextlib.contextmanager
def in_microbatch(phase: str, stage: int, index: int) -> Iterator[None]:
    """Records work on one microbatch during the block; an error of the block becomes a `MicrobatchError` that names
    it.

    Args:
        phase: the kind of work, such as "forward".
        stage: index of the pipeline stage.
    """
    place = f"{phase} of microbatch {index} on stage {stage}"
    with flight.phase(place):
        try:
            yield
        except Exception as error:
            raise MicrobatchError(place, describe_root_cause(error) + line_of_caller(error)) from error


def read_flight(file: Path) -> list[str]:
    """Returns a rank's notes, oldest first; none if there is no file."""
    try:
        lines = file.read_text(errors="replace").splitlines()
    except OSError:
        return []
    return sorted(line.strip() for line in lines if line[:1].isdigit())


def last_phase(file: Path) -> str:
    notes = read_flight(file)
    return notes[-1].partition(" ")[2].partition(" ")[2] if notes else ""


def left_flight(folder: Path | None, rank: int, since: float) -> Path | None:
    """Returns the file of a rank that has ended, if it was written after `since`; older files are from earlier
    attempts."""
    file = None if folder is None else flight_file(folder, rank)
    return file if file is not None and file.is_file() and file.stat().st_mtime >= since else None


def flight_file(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank}.log"
