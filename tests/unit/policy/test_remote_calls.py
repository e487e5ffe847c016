"""What a program calls on ranks by name is there, and takes the arguments."""

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

from automodel_rl.generators.fleet_rank import FleetRank
from automodel_rl.policy.policy_rank import PolicyRank
from automodel_rl.serve.runs import Runs
from automodel_rl.serve.service_rank import ServiceRank

PACKAGE = Path(__file__).parents[3] / "automodel_rl"

CALLED = {"POLICY": PolicyRank, "FLEET": FleetRank, "RUNS": Runs, "SERVICE": ServiceRank}
"""Classes of the objects that are called, by the constants that name them; a model's name stands for `PolicyRank`."""

ASKS = {"ask", "gather", "_ask", "_with_other_weights", "_of_rows", "RunMethodCall"}


def calls() -> Iterator[tuple[str, ast.Call, str]]:
    """Every call by name: its place, the call, and the name of the method."""
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Call):
                continue
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            named = [arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
            if called in ASKS and named:
                yield f"{file.relative_to(PACKAGE)}:{node.lineno}", node, named[0]


def target_of(call: ast.Call) -> type:
    if isinstance(call.func, ast.Name):  # RunMethodCall
        return Runs
    first = call.args[0]
    return CALLED.get(first.id, PolicyRank) if isinstance(first, ast.Name) else PolicyRank


def is_right(call: ast.Call, name: str) -> bool:
    """Whether the class has the method, and as many parameters as the call has arguments."""
    method = getattr(target_of(call), name, None)
    if method is None or name.startswith("_"):
        return False
    place = next(n for n, arg in enumerate(call.args) if isinstance(arg, ast.Constant) and arg.value == name)
    given = call.args[place + 1 :]
    if isinstance(call.func, ast.Name):
        given = [call.args[0], *(call.args[2].elts if call.args[2:] and isinstance(call.args[2], ast.Tuple) else ())]
    has_rows = any(keyword.arg == "shares" for keyword in call.keywords)
    if has_rows != (next((one for one in inspect.signature(method).parameters if one != "self"), "") == "share"):
        return False
    if any(isinstance(argument, ast.Starred) for argument in given):
        return True
    try:
        inspect.signature(method).bind(None, *([None] if has_rows else []), *given)
    except TypeError:
        return False
    return True


def test_every_call_by_name_is_answered() -> None:
    found = [*calls()]
    assert not [(where, name) for where, call, name in found if not is_right(call, name)]
    called = {(target_of(call), name) for _, call, name in found}
    public = {
        (kind, name)
        for kind in (PolicyRank, FleetRank, Runs)
        for name, member in vars(kind).items()
        if callable(member) and not name.startswith("_")
    }
    assert public - called == {(Runs, "show")}, "methods that nobody calls"  # `ServiceRank.show` calls it
