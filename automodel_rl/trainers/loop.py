"""A program of the user's own, in a file."""

import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from automodel_rl.errors import InputError, innermost, line_of_caller


def open_loop(file: Path) -> Callable[..., Any]:
    """The function `main(policy, fleet, run)` of a file.

    The file becomes a module of its own name, so that ranks find losses that are defined in it.

    Raises:
        InputError: there is no such file, it cannot be imported, or it has no such function.
    """
    if not file.is_file():
        raise InputError(f"run {file}: there is no such file")
    if not file.stem.isidentifier():
        raise InputError(f"run {file}: its name is no name of a Python module: use letters, digits and _")
    sys.path.append(str(file.parent.absolute()))  # last, so that a file beside it takes the place of no other module
    try:
        module = importlib.import_module(file.stem)
    except Exception as error:
        raise InputError(f"run {file}: cannot be imported ({innermost(error)}{line_of_caller(error)})") from error
    if Path(module.__file__ or "").absolute() != file.absolute():
        raise InputError(f"run {file}: Python has another module named {file.stem}: rename the file")
    main = vars(module).get("main")
    if not callable(main):
        raise InputError(f"run {file}: has no function main(policy, fleet, run)")
    try:
        inspect.signature(main).bind("policy", "fleet", "run")
    except TypeError as error:
        raise InputError(f"run {file}: main cannot be called as main(policy, fleet, run) ({error})") from None
    return main
