"""Installed library versions, and the versions with which this room's private names were checked."""

from importlib.metadata import PackageNotFoundError, version

CHECKED = {
    "torch": ("2.11.0", "2.13.0", "2.15.0"),
    "transformers": ("5.18.0", "5.20.2", "5.24.0"),
    "nemo_automodel": ("0.7.0",),
}
"""Checked versions by library. A test fails if another one is installed: then review this room's files, run `make
test`, and add the version."""

TORCH = tuple(map(int, version("torch").split(".")[:2]))
"""Installed torch as (major, minor), for differences between torch 2.11 and 2.15."""

TRANSFORMERS = tuple(map(int, version("transformers").split(".")[:2]))
"""Installed transformers as (major, minor), for differences between 5.18 and 5.24."""


def own_version() -> str:
    """Returns this package's version; `uninstalled` if it is only a folder on Python's path."""
    try:
        return version("automodel-rl")
    except PackageNotFoundError:
        return "uninstalled"
