"""Import of functions that a config names as `package.module:function`."""

import importlib
from collections.abc import Callable

from automodel_rl.errors import InputError


def import_function(key: str, path: str) -> Callable:
    """The function at an import path.

    Args:
        key: the config's key that holds the path, for error messages.
        path: the import path, `package.module:function`.

    Raises:
        InputError: the function cannot be imported.
    """
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(f"{key}={path}: cannot import it ({error})") from None
