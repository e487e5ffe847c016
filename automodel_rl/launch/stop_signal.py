"""Deferred stop requests: SIGTERM, Ctrl-C or a closed terminal stops the run after the current step."""

import os
import signal
from types import FrameType


class Terminal:
    """The terminal that this process prints to, if any. Construct it while the terminal is open."""

    def __init__(self) -> None:
        self._descriptors = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]

    def discard_output_if_closed(self) -> None:
        """Discards all further output if the terminal has been closed."""
        for descriptor in self._descriptors:
            if not os.isatty(descriptor):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, descriptor)
                os.close(nowhere)


def stop_signals() -> list[signal.Signals]:
    """Returns the signals that request a stop. SIGHUP is not one of them where it is ignored, as under nohup."""
    always = [signal.SIGTERM, signal.SIGINT]
    return always if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else [*always, signal.SIGHUP]


class StopSignal:
    """Context manager that is true once a stop signal has arrived. A second signal interrupts at once.

    SIGHUP never interrupts: a closing terminal sends it, and its shell may send it again.

    Args:
        received: list to which the signal's name is appended, for code that waits and must end at a stop.
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
            self._terminal.discard_output_if_closed()
        elif self.name is not None:
            raise KeyboardInterrupt
        if self.name is None:
            self.name = signal.Signals(number).name
            if self._received is not None:
                self._received.append(self.name)
