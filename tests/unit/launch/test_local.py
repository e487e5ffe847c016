"""Ports for the ranks of a job."""

import socket
from pathlib import Path

import pytest

from automodel_rl.launch import local


def test_a_port_is_not_one_that_a_connection_may_take_before_the_rank_listens() -> None:
    assert len({local.free_port() for _ in range(20)}) > 10  # two launchers at once rarely find the same one
    given = Path("/proc/sys/net/ipv4/ip_local_port_range")
    if given.is_file():
        assert local.PORTS.stop <= int(given.read_text().split()[0])


def test_a_port_that_is_taken_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        taken = listener.getsockname()[1]
        monkeypatch.setattr(local, "PORTS", range(taken, taken + 1))
        with pytest.raises(OSError, match=f"no TCP port from {taken} to {taken} is free"):
            local.free_port()
