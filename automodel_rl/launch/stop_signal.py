"""A request to stop, by SIGTERM, Ctrl-C or a closed terminal, that waits for the end of the step. Also the terminal."""

import os
import signal
from types import FrameType


class Terminal:
    """The terminal that this process prints to, if there is one. Make it while the terminal is open."""

    def __init__(self) -> None:
        self._descriptors = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]

    def outlive(self) -> None:
        """Discards output from here on, if the terminal is closed by now."""
        for descriptor in self._descriptors:
            if not os.isatty(descriptor):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, descriptor)
                os.close(nowhere)


def stop_signals() -> list[signal.Signals]:
    """The signals that ask this process to stop. Under nohup the end of the terminal does not."""
    always = [signal.SIGTERM, signal.SIGINT]
    return always if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else [*always, signal.SIGHUP]


class StopSignal:
    """A request to stop, true once a signal has come. A second signal interrupts at once. Use as a context manager.

    A closed terminal sends SIGHUP, and its shell may send it again. SIGHUP never interrupts.

    Args:
        received: gets the signal's name, for those who wait for something that a stop ends.
    """

    def __init__(self, received: list[str] | None = None) -> None:
        self.name: str | None = None
        self._received = received
        self._terminal = Terminal()

    def __enter__(self) -> "StopSignal":
        self._before = {number: signal.signal(number, self._receive) for number in stop_signals()}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def __bool__(self) -> bool:
        return self.name is not None

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            self._terminal.outlive()
        elif self.name is not None:
            raise KeyboardInterrupt
        if self.name is None:
            self.name = signal.Signals(number).name
            if self._received is not None:
                self._received.append(self.name)
