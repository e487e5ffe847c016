"""Import of functions that a config names as `package.module:function`."""

import importlib
import os
from collections.abc import Callable

from automodel_rl.errors import InputError


def import_function(key: str, path: str) -> Callable:
    """Returns the function at `path`, `package.module:function`. Raises InputError, which names the config key
    `key`, if it cannot be imported."""
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        module, _, _ = module.removesuffix(".py").replace("/", ".").partition(":")
        hint = f": use {module}:{name}" if path.partition(":")[0] != module else f"; looked in {os.getcwd()} first"
        raise InputError(f"{key}={path}: cannot import it ({error}){hint}") from None
