"""What a planted bug is, and the ways to plant one."""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock


@dataclass(frozen=True)
class Verified:
    """A layout that `verify` says is different once the fault is there.

    Attributes:
        family: of the tiny model.
        sizes: of the layout.
        tied: whether embedding and head share their weight.
        components: in place of `sizes`, for a vision-language model.
        case: further fields of the comparison's `Case`.
    """

    family: str
    sizes: dict[str, Any] = field(default_factory=dict)
    tied: bool = False
    components: dict[str, Any] | None = None
    case: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Fault:
    """One planted bug, and what notices it.

    Attributes:
        plant: makes the context in which it is there.
        caught_by: a layout, or the name of a test, below `tests/`.
    """

    plant: Callable[[], AbstractContextManager[Any]]
    caught_by: Verified | str


def patch(target: str, replacement: Any = None, **options: Any) -> Any:
    """Replaces something of the package, named by its module and name, or changes it as `mock.patch` can."""
    options = options or {"new": replacement}
    return mock.patch(f"automodel_rl.{target}", **options)


@contextlib.contextmanager
def everywhere(replacement: Any, *targets: str) -> Iterator[None]:
    """Replaces a function in all places that have imported it by name."""
    with contextlib.ExitStack() as stack:
        for target in targets:
            stack.enter_context(patch(target, replacement))
        yield
