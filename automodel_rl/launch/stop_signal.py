"""A request to stop, by SIGTERM or Ctrl-C, that waits for the end of the step."""

import signal
from types import FrameType


class StopSignal:
    """Counts as true once a signal has come. The second signal interrupts at once. Use as a context manager."""

    SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self) -> None:
        self.name: str | None = None

    def __enter__(self) -> "StopSignal":
        self._before = {number: signal.signal(number, self._receive) for number in self.SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def __bool__(self) -> bool:
        return self.name is not None

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.name is not None:
            raise KeyboardInterrupt
        self.name = signal.Signals(number).name
