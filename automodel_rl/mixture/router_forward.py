"""The forward of routers: the family's own computation, then routes to follow, then counts of the load of experts.

It is one function, and what it needs lies on the router, so that compiled layers that are equal share a graph.
"""

from collections.abc import Iterable
from types import MethodType
from typing import Any

import torch


def install_router_forwards(routers: Iterable[Any]) -> None:
    """Replaces the forwards of routers that have got `replayed` (mixture/router_replay.py) and `watched`
    (mixture/routers.py)."""
    for router in routers:
        router.forward = MethodType(_forward, router)


def _forward(router: Any, *args: Any) -> Any:
    choose, routes = type(router).forward, router.replayed.routes
    output = choose(router, *args) if routes is None else router.replayed.follow(routes, router, choose, *args)
    return router.watched.count(output) if router.training and torch.is_grad_enabled() else output
