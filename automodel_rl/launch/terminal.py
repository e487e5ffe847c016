"""Lets a run outlive its terminal: if that is closed, output is lost and nothing else."""

import os


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
