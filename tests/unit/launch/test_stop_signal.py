"""What asks a run to stop, and what interrupts it."""

import signal
from collections.abc import Iterator

import pytest

from automodel_rl.launch.stop_signal import StopSignal, stop_signals


@pytest.fixture(autouse=True)
def default_handlers() -> Iterator[None]:
    """As a process begins, and as this one was when the test is over."""
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.SIG_DFL) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_asks_to_stop_and_is_named(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with StopSignal() as stop:
        assert not stop
        signal.raise_signal(number)
        assert stop
        assert stop.name == number.name
    assert signal.getsignal(number) == before


def test_those_who_wait_for_something_are_told_once() -> None:
    received: list[str] = []
    with StopSignal(received):
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)
    assert received == ["SIGHUP"]


def test_the_second_signal_interrupts() -> None:
    with StopSignal():
        signal.raise_signal(signal.SIGHUP)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)


def test_a_terminal_may_say_twice_that_it_is_closed() -> None:
    with StopSignal() as stop:
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)
    assert stop.name == "SIGHUP"


def test_under_nohup_the_end_of_the_terminal_is_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert signal.SIGHUP not in stop_signals()
    with StopSignal() as stop:
        signal.raise_signal(signal.SIGHUP)
        assert not stop
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
