"""A terminal that is closed under a run costs what would have been printed there, and nothing else."""

import os


class Terminal:
    """What this process prints to, where that is a terminal; made while it is there."""

    def __init__(self) -> None:
        self._descriptors = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]

    def outlive(self) -> None:
        """If it is closed by now, what is printed goes nowhere from here on."""
        for descriptor in self._descriptors:
            if not os.isatty(descriptor):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, descriptor)
                os.close(nowhere)
