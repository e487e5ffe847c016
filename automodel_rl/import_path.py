"""Functions that a config names by `package.module:function`."""

import importlib
from collections.abc import Callable

from automodel_rl.errors import InputError


def import_function(key: str, path: str) -> Callable:
    """The function.

    Args:
        key: of the config, for the message.
        path: its import path.

    Raises:
        InputError: there is none.
    """
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(f"{key}={path}: cannot import it ({error})") from None
