"""The server's end of the ranks: connections that are not rank 0, and ranks that end."""

import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection

import pytest

from automodel_rl.errors import InputError
from automodel_rl.rollout.sampled import Refused
from automodel_rl.serve.messages import Done, Forget, Ready, SampleJob
from automodel_rl.serve.ranks import Ranks, RanksLostError, RefusedError
from automodel_rl.serve.worker import _connect_to_server
from automodel_rl.serve.worker_address import ADDRESS_VARIABLE, KEY_VARIABLE, read_address

SECONDS = 60


@pytest.fixture(name="lost")
def make_lost() -> threading.Event:
    return threading.Event()


@pytest.fixture(name="ranks")
def make_ranks(lost: threading.Event, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    for name in (ADDRESS_VARIABLE, KEY_VARIABLE):
        monkeypatch.setenv(name, "")  # put back after the test
    ranks = Ranks(lost.set, lambda: None, 0, "localhost")
    yield ranks
    ranks.close()


def connect(key: bytes | None = None) -> Connection:
    address = read_address()
    return replace(address, key=address.key if key is None else key).connect()


def test_connections_that_are_no_ranks_keep_no_ranks_waiting(ranks: Ranks, lost: threading.Event) -> None:
    answer = ranks.submit(Forget())
    address = read_address()
    silent = socket.create_connection((address.host, address.port))
    socket.create_connection((address.host, address.port)).close()
    with pytest.raises((AuthenticationError, OSError, EOFError)):
        connect(b"another key")
    connect().close()  # rank 0 that ended before it was ready
    for _ in range(2):  # a start, and another after the ranks have ended
        with connect() as rank:
            rank.send(Ready(9, {}))
            assert rank.poll(SECONDS)
            assert rank.recv() == Forget()
            assert (ranks.are_ready, ranks.vocab_size, lost.is_set()) == (True, 9, False)
            rank.send(Done(None, 1))
            assert answer.result(SECONDS) is None
            answer = ranks.submit(Forget())
            assert rank.poll(SECONDS)
        with pytest.raises(RanksLostError):
            answer.result(SECONDS)
        assert lost.is_set()
        assert not ranks.are_ready
        lost.clear()
        answer = ranks.submit(Forget())
    silent.close()


def test_a_job_that_nobody_waits_for_and_one_that_is_refused_end_nothing(ranks: Ranks) -> None:
    left, refused = ranks.submit(Forget()), ranks.submit(SampleJob(None, None, None, []))
    with connect() as rank:
        rank.send(Ready(9, {}))
        assert rank.poll(SECONDS)
        left.cancel()
        rank.send(Done(None, 1))
        assert rank.poll(SECONDS)
        rank.recv()
        rank.send(Done(Refused("too odd"), 1))
        with pytest.raises(RefusedError, match="too odd"):
            refused.result(SECONDS)
        assert ranks.are_ready


def test_ranks_on_a_machine_that_is_gone_are_let_go_of(ranks: Ranks, lost: threading.Event) -> None:
    """Its connection says nothing any more, and does not end."""
    with connect() as gone:
        gone.send(Ready(9, {}))
        answer = ranks.submit(Forget())
        assert gone.poll(SECONDS)
        ranks.drop()
        with pytest.raises(RanksLostError):
            answer.result(SECONDS)
        assert lost.is_set()
        answer = ranks.submit(Forget())
        with connect() as again:
            again.send(Ready(9, {}))
            assert again.poll(SECONDS)
            again.recv()
            again.send(Done(None, 1))
            assert answer.result(SECONDS) is None


def test_ranks_that_cannot_reach_the_server_say_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ADDRESS_VARIABLE, "127.0.0.1:9")
    monkeypatch.setenv(KEY_VARIABLE, "00")
    with pytest.raises(
        InputError, match=r"^the server at 127\.0\.0\.1:9 cannot be reached .*: allow the machines of ranks"
    ):
        _connect_to_server()
