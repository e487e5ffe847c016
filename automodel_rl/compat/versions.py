"""Installed versions of libraries, and the versions with which the private names in this room were checked."""

from importlib.metadata import PackageNotFoundError, version

CHECKED = {
    "torch": ("2.11.0", "2.13.0", "2.15.0"),
    "transformers": ("5.18.0", "5.20.2", "5.24.0"),
    "nemo_automodel": ("0.7.0",),
}
"""Checked versions by library. A test fails if another one is installed: then review this room's files, run `make
test`, and add the version."""

TORCH = tuple(map(int, version("torch").split(".")[:2]))
"""Installed torch as (major, minor), for the few places where torch 2.11 to 2.15 differ."""

TRANSFORMERS = tuple(map(int, version("transformers").split(".")[:2]))
"""Installed transformers as (major, minor), for the few places where 5.18 to 5.24 differ."""


def own_version() -> str:
    """The version of this package; `uninstalled` where it is only a folder that Python finds."""
    try:
        return version("automodel-rl")
    except PackageNotFoundError:
        return "uninstalled"
