"""Which versions of libraries are here, and with which the private names in this room were checked."""

from importlib.metadata import version

CHECKED = {
    "torch": ("2.11.0", "2.13.0"),
    "transformers": ("5.18.0",),
    "nemo_automodel": ("0.7.0",),
}
"""A test says when another one is installed: then look at each file here, run `make test`, and add it."""

TORCH = tuple(map(int, version("torch").split(".")[:2]))
"""(major, minor), for the few places where torch 2.11 to 2.13 differ."""
