"""Environments in processes of their own: what odd ones cost, and that nothing of them is left behind."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from automodel_rl.errors import InputError
from automodel_rl.rollout.episodes.environment_pool import EnvironmentPool
from automodel_rl.rollout.episodes.environment_server import Setup
from automodel_rl.rollout.episodes.fork_server import MAX_LOG_BYTES
from automodel_rl.rollout.episodes.protocol import Outcome, Turn
from tests.odd_environments import RESULTS, TRICKS
from tests.processes import descendants_of, is_alive


def setup_of(folder: Path, environment: str, seconds: float = 600.0) -> Setup:
    return Setup(environment, (), seconds, "auto", str(folder / "environments" / "rank0.log"))


def descendants(parent: int) -> list[int]:
    """Processes below a process that have not ended."""
    return [pid for pid in descendants_of(parent) if is_alive(pid)]


def wait_until(happens: Callable[[], bool]) -> None:
    while not happens():
        time.sleep(0.01)


@pytest.fixture(name="pool", scope="module")
def make_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnvironmentPool]:
    folder = tmp_path_factory.mktemp("pool")
    pool = EnvironmentPool(setup_of(folder, "tests.odd_environments:Odd"), ends_on_bad_call=False)
    yield pool
    pool.close()


@pytest.fixture(name="impatient", scope="module")
def make_impatient_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnvironmentPool]:
    """A pool whose calls may take half a second."""
    folder = tmp_path_factory.mktemp("impatient")
    pool = EnvironmentPool(setup_of(folder, "tests.odd_environments:Odd", 0.5), ends_on_bad_call=False)
    yield pool
    pool.close()


def play(pool: EnvironmentPool, example: dict[str, Any]) -> Outcome:
    environment = pool.open(example, 5)
    try:
        assert environment.reset() == []
        return environment.step(Turn("a vowel, too"))
    finally:
        environment.close()
        wait_until(lambda: not descendants(pool._processes._server.process.pid))


def test_an_environment_answers_from_its_process(pool: EnvironmentPool) -> None:
    environment = pool.open({}, 5)
    assert environment.reset() == []
    first, second = (environment.step(Turn(text)) for text in ("aa", "b"))
    assert first == Outcome([{"role": "user", "content": "1, and now?"}], False, 2.0, {"vowels": 2.0})
    assert second.messages == [{"role": "user", "content": "2, and now?"}]
    environment.close()
    wait_until(lambda: not descendants(pool._processes._server.process.pid))


MESSAGES = {
    "raise": "ValueError: the world has ended",
    "hang": "took longer than rollout.tool_seconds=0.5",
    "hold on": "took longer than rollout.tool_seconds=0.5",
    "die": "its process exited in",
    "leave": "its process exited in",
}


@pytest.mark.parametrize("place", ["make", "reset", "step", "close"])
@pytest.mark.parametrize("trick", TRICKS)
def test_odd_environments_cost_themselves_alone(
    pool: EnvironmentPool, impatient: EnvironmentPool, trick: str, place: str
) -> None:
    if trick in MESSAGES and place != "close":
        with pytest.raises(RuntimeError, match=MESSAGES[trick]):
            play(impatient if "seconds" in MESSAGES[trick] else pool, {"trick": trick, "place": place})
    else:
        assert play(pool, {"trick": trick, "place": place}).reward == 5
    assert play(pool, {}).reward == 5


@pytest.mark.parametrize("returns", RESULTS)
def test_what_is_no_outcome_is_an_error(pool: EnvironmentPool, returns: str) -> None:
    with pytest.raises(RuntimeError, match="step returned"):
        play(pool, {"returns": returns})


def test_what_environments_print_is_kept_up_to_a_size(pool: EnvironmentPool) -> None:
    play(pool, {"trick": "flood", "place": "step"})
    log = Path(pool.setup.log)
    wait_until(lambda: log.stat().st_size < MAX_LOG_BYTES and "was dropped" in log.read_text())


def test_a_server_that_dies_is_started_again(pool: EnvironmentPool) -> None:
    environment = pool.open({}, 5)
    environment.reset()
    os.kill(pool._processes._server.process.pid, 9)
    with pytest.raises(RuntimeError, match="its process exited|no server"):
        pool.open({}, 5).step(Turn("")) and environment.step(Turn(""))
    assert play(pool, {}).reward == 5


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ("tests.odd_environments:Missing", "cannot import it"),
        ("tests.odd_environments:TRICKS", "is not a function but"),
    ],
)
def test_what_is_no_environment_is_refused(tmp_path: Path, environment: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        EnvironmentPool(setup_of(tmp_path, environment), ends_on_bad_call=False)
