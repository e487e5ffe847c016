"""A generator's supervisor: versions of weights, and what a failure costs. Ranks and weights are stand-ins."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from automodel_rl.errors import InputError, WeightSyncError
from automodel_rl.rollout import supervisor
from automodel_rl.rollout.supervisor import GeneratorSupervisor


class Sync:
    """A weight sync that fails when `fails` says so, and notes what is done with it."""

    fails = False

    def __init__(self, handle: Any, transport: str, config: Any):
        self.transport, self.version = transport, 0
        self.log: list[str] = []

    def send(self) -> None:
        self.version += 1
        if Sync.fails:
            raise WeightSyncError("its process ended with code -9")
        self.log.append(f"sent {self.version} to {self.transport}")

    def disconnect(self) -> None:
        self.log.append("disconnected")

    def reconnect(self, transport: str) -> None:
        self.transport = transport


class Generators:
    """Makes numbered ones, and knows which are closed."""

    def __init__(self) -> None:
        self.made = 0
        self.closed: list[int] = []
        self.problem = ""

    def make(self, *_: Any) -> tuple[Any, str]:
        if self.problem:
            raise InputError(self.problem)
        self.made += 1
        number = self.made
        return SimpleNamespace(close=lambda: self.closed.append(number)), f"way {number}"


@pytest.fixture
def generators(monkeypatch: pytest.MonkeyPatch) -> Generators:
    made = Generators()
    monkeypatch.setattr(supervisor, "make_generator", made.make)
    monkeypatch.setattr(supervisor, "WeightSync", Sync)
    monkeypatch.setattr(supervisor.dist, "new_group", lambda **_: None)
    monkeypatch.setattr(supervisor, "gather_objects", lambda own, _group: [own])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(Sync, "fails", False)
    return made


def make_supervisor() -> tuple[GeneratorSupervisor, Any]:
    config: Any = SimpleNamespace(weight_sync=None)
    made = GeneratorSupervisor(config, None, None)  # type: ignore[arg-type]
    return made, made.sync


@pytest.mark.usefixtures("generators")
def test_syncs_that_mend_a_failure_bring_the_same_policy_version() -> None:
    made, sync = make_supervisor()
    assert made.policy_versions((0, 0)) == (0, 0)  # the checkpoint's weights
    made.load_weights()
    made.load_weights()
    made.restart(failed=False)
    made.load_weights()
    assert made.policy_version == 3
    assert made.policy_versions((1, 4)) == (1, 3)
    assert made.policy_versions((2, 3)) == (2, 2)
    assert sync.log[2] == "disconnected"


def test_a_generator_that_lost_its_weights_is_closed_and_made_anew(
    generators: Generators, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, sync = make_supervisor()
    monkeypatch.setattr(Sync, "fails", True)
    made.load_weights()
    assert made.problem == "its process ended with code -9"
    assert generators.made == 1
    monkeypatch.setattr(Sync, "fails", False)
    made.restart(failed=True)
    assert made.problem == ""
    assert (generators.made, generators.closed) == (2, [1])
    assert sync.log == ["disconnected", "sent 2 to way 2"]
    assert made.policy_versions((2, 2)) == (1, 1)
    made.close()
    assert generators.closed == [1, 2]


def test_a_generator_that_does_not_start_again_is_a_problem_until_it_does(generators: Generators) -> None:
    made, _ = make_supervisor()
    generators.problem = "no room"
    made.restart(failed=True)
    assert made.generator is None
    assert made.problem == "InputError: no room"
    generators.problem = ""
    made.restart(failed=True)
    assert made.generator is not None
    assert made.problem == ""
    assert generators.closed == [1]
