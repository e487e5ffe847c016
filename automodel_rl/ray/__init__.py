"""Ranks on a Ray cluster: whole runs, and policies that another program trains."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from automodel_rl.ray.actor_crew import PolicyLostError
    from automodel_rl.ray.policy_group import PolicyGroup

_HOMES = {"PolicyGroup": "policy_group", "PolicyLostError": "actor_crew"}

__all__ = ["PolicyGroup", "PolicyLostError"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'automodel_rl.ray' has no attribute {name!r}")
    from automodel_rl.launch.quiet import quiet_imports

    with quiet_imports():  # imports torch, which the command line need not wait for
        return getattr(importlib.import_module(f"automodel_rl.ray.{_HOMES[name]}"), name)
