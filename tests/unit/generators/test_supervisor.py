"""A generator's supervisor: versions of weights, and what a failure costs. Ranks and weights are stand-ins."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from automodel_rl.config import WeightSyncConfig
from automodel_rl.config.generator_spec import GeneratorSpec
from automodel_rl.config.generators import TransformersGeneratorConfig, VllmServersConfig
from automodel_rl.config.model import OffloadConfig
from automodel_rl.errors import InputError, WeightSyncError
from automodel_rl.generators import supervisor
from automodel_rl.generators.generator_process import GeneratorProcess
from automodel_rl.generators.supervisor import GeneratorSupervisor
from automodel_rl.generators.vllm_servers import VllmServers


class Sync:
    """A weight sync that fails when `fails` says so, and notes what is done with it."""

    fails = False

    def __init__(self, handle: Any, transport: str, config: Any, *, resends_frozen: bool):
        self.transport, self.version, self.resends_frozen = transport, 0, resends_frozen
        self.log: list[str] = []

    def send(self) -> None:
        self.version += 1
        if Sync.fails:
            raise WeightSyncError("its process exited with code -9")
        self.log.append(f"sent {self.version} to {self.transport}")

    def disconnect(self) -> None:
        self.log.append("disconnected")

    def reconnect(self, transport: str) -> None:
        self.transport = transport


class Sleeper(GeneratorProcess):
    """A generator that notes in a log what happens to its memory."""

    def __init__(self, number: int, generators: "Generators"):
        self.number, self.generators = number, generators

    def close(self) -> None:
        self.generators.closed.append(self.number)

    def sleep(self, level: int, seconds: float) -> None:
        self._note(f"sleep {level}")

    def wake(self, what: str, seconds: float) -> None:
        self._note(f"wake {what}")

    def _note(self, what: str) -> None:
        if what == self.generators.fails_at:
            raise WeightSyncError(f"{what} failed")
        self.generators.log.append(what)


class Generators:
    """Makes numbered ones, and knows which are closed."""

    def __init__(self) -> None:
        self.made = 0
        self.closed: list[int] = []
        self.log: list[str] = []
        self.problem = self.fails_at = ""

    def make(self, *_: Any) -> tuple[Any, str]:
        if self.problem:
            raise InputError(self.problem)
        self.made += 1
        return Sleeper(self.made, self), f"way {self.made}"


@pytest.fixture
def generators(monkeypatch: pytest.MonkeyPatch) -> Generators:
    made = Generators()
    monkeypatch.setattr(supervisor, "make_generator", made.make)
    monkeypatch.setattr(supervisor, "WeightSync", Sync)
    monkeypatch.setattr(supervisor.dist, "new_group", lambda **_: None)
    monkeypatch.setattr(supervisor.dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(supervisor, "gather_objects", lambda own, _group: [own])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(Sync, "fails", False)
    return made


def make_supervisor(sleep_level: int = 0, log: list[str] | None = None) -> tuple[GeneratorSupervisor, Any]:
    """A supervisor and its weight sync; with a log, the trainer shares its memory."""
    spec = GeneratorSpec(TransformersGeneratorConfig(), 8, WeightSyncConfig(timeout=1.0), sleep_level, log is not None)
    notes = [] if log is None else log
    offload = OffloadConfig() if log is not None else None
    handle = SimpleNamespace(
        memory=SimpleNamespace(offload=offload),
        layout=SimpleNamespace(device=torch.device("cpu")),
        to_host=lambda: notes.append("weights to host"),
        to_device=lambda: notes.append("weights to device"),
    )
    engine: Any = SimpleNamespace(handle=handle, moments_to_host=lambda: notes.append("moments to host"))
    made = GeneratorSupervisor(spec, engine, None)  # type: ignore[arg-type]
    sync: Any = made.sync
    if log is not None:
        sync.log = log
    return made, sync


@pytest.mark.usefixtures("generators")
def test_syncs_that_mend_a_failure_bring_the_same_policy_version() -> None:
    made, sync = make_supervisor()
    assert made.policy_versions((0, 0)) == (0, 0)  # the checkpoint's weights
    made.load_weights(1)
    made.load_weights(2)
    made.restart(failed=False)
    made.load_weights(3)
    assert made.policy_version == 3
    assert made.policy_versions((1, 4)) == (1, 3)
    assert made.policy_versions((2, 3)) == (2, 2)
    assert sync.log[2] == "disconnected"


def test_a_generator_that_lost_its_weights_is_closed_and_made_anew(
    generators: Generators, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, sync = make_supervisor()
    monkeypatch.setattr(Sync, "fails", True)
    made.load_weights(1)
    assert made.problem == "its process exited with code -9"
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


WAKING = [
    "moments to host",
    "wake weights",
    "sent {} to way {}",
    "weights to host",
    "wake kv_cache",
]
RESTING = ["sleep 2", "weights to device"]


@pytest.mark.usefixtures("generators")
def test_servers_that_have_gone_or_come_make_the_ranks_connect_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    made, sync = make_supervisor()
    assert not sync.resends_frozen
    made.spec = dataclasses.replace(made.spec, choice=VllmServersConfig(urls=("http://localhost:1",)))
    servers = VllmServers.__new__(VllmServers)
    made.generator = servers
    for have_changed in (False, True):
        monkeypatch.setattr(VllmServers, "have_changed", have_changed)
        sync.log.clear()
        made.load_weights(1)
        assert ("disconnected" in sync.log) == have_changed
        assert sync.log[-1].startswith("sent")


def waking(sync: int, way: int = 1) -> list[str]:
    return [line.format(sync, way) for line in WAKING]


def test_generator_and_trainer_have_the_memory_in_turns(generators: Generators) -> None:
    log = generators.log
    made, sync = make_supervisor(2, log)
    assert sync.resends_frozen  # it sleeps so deeply that it drops the weights
    assert log == ["weights to host", "sleep 2", "weights to device"]  # it starts in the memory that it will have
    log.clear()
    made.load_weights(1)
    assert log == []  # it sleeps
    for sync in (1, 2):  # a rollout and a validation
        made.wake()
        made.sleep_and_restore()
        made.sleep()
        assert log == [*waking(sync), *RESTING]
        log.clear()
    assert made.policy_versions((1, 2)) == (1, 1)


@pytest.mark.parametrize("fails_at", ["wake weights", "wake kv_cache"])
def test_a_generator_that_does_not_wake_is_made_anew_in_the_memory_that_it_will_have(
    generators: Generators, monkeypatch: pytest.MonkeyPatch, fails_at: str
) -> None:
    log = generators.log
    made, _ = make_supervisor(2, log)
    made.load_weights(1)
    generators.fails_at = fails_at
    monkeypatch.setattr(Sync, "fails", fails_at == "wake weights")  # one without memory takes none, either
    made.wake()
    assert made.problem == f"{fails_at} failed"
    generators.fails_at = ""
    monkeypatch.setattr(Sync, "fails", False)
    log.clear()
    made.restart(failed=True)
    assert generators.closed == [1]
    assert log == ["disconnected", "sleep 2", *RESTING, *waking(2, 2)]
    assert made.problem == ""


def test_a_generator_that_does_not_sleep_is_closed_for_the_trainer_needs_the_memory(generators: Generators) -> None:
    made, _ = make_supervisor(2, generators.log)
    made.load_weights(1)
    made.wake()
    generators.fails_at = "sleep 2"
    made.sleep_and_restore()
    assert generators.closed == [1]
    assert generators.log[-1] == "weights to device"
    assert made.problem == "sleep 2 failed"


def test_the_other_ranks_generators_sleep_while_one_is_restarted(generators: Generators) -> None:
    made, _ = make_supervisor(2, generators.log)
    made.load_weights(1)
    made.wake()
    generators.log.clear()
    made.restart(failed=False)
    assert generators.log == ["disconnected", *RESTING, *waking(2)]


def test_generators_that_stay_awake_get_weights_before_the_trainer_leaves(generators: Generators) -> None:
    log = generators.log
    made, _ = make_supervisor(0, log)
    made.load_weights(1)
    made.wake()
    made.sleep_and_restore()
    expected = ["weights to host", "weights to device"]  # while it starts
    assert log == [*expected, "sent 1 to way 1", "moments to host", "weights to host", "weights to device"]
