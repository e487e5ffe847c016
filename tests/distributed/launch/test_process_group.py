"""After a rank has left its job nothing of ours is left, however often it leaves; the store goes last."""

import os
import socket
import threading
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from automodel_rl.errors import InputError
from automodel_rl.launch import watchdog
from automodel_rl.launch.local import free_port
from automodel_rl.launch.process_group import join_process_group, leave_process_group
from tests.rank_pool import RankPool


def threads_and_sockets() -> tuple[set[str], int]:
    """What this process has: threads of Python by name, and open sockets."""
    sockets = [link for link in Path("/proc/self/fd").iterdir() if _target(link).startswith("socket:")]
    return {thread.name for thread in threading.enumerate()}, len(sockets)


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:  # that of the listing itself
        return ""


def join_and_leave(destroys: bool) -> None:
    before = threads_and_sockets()
    join_process_group(2)
    dist.all_reduce(torch.ones(1))
    joined, _ = threads_and_sockets()
    assert "peer-watch" in joined
    if destroys:  # a user's script may, and ours must not mind
        dist.destroy_process_group()
    leave_process_group()
    assert threads_and_sockets() == before
    leave_process_group()


@pytest.mark.parametrize("destroys", [False, True])
def test_no_thread_and_no_connection_outlives_the_job(ranks: RankPool, destroys: bool) -> None:
    ranks(2).run(join_and_leave, destroys)


def join_twice() -> set[str]:
    join_process_group(2)
    port = torch.tensor(free_port())
    dist.broadcast(port, 0)
    dist.destroy_process_group()
    os.environ["MASTER_PORT"] = str(port.item())  # the store of before may still be there
    join_process_group(2)
    return {str(thread) for thread in threading.enumerate() if thread.name == "peer-watch"}


def test_a_group_that_its_user_destroyed_leaves_no_watch_to_the_next_one(ranks: RankPool) -> None:
    assert [len(watches) for watches in ranks(2).run(join_twice)] == [1, 1]


def leave_after_the_store() -> list[str]:
    """What this rank does, in order. The second rank waits until the first is leaving, and then needs the store."""
    join_process_group(2)
    assert watchdog._watch is not None
    store, done = watchdog._watch.store, []
    with mock.patch.object(watchdog, "is_guarded", True):
        if dist.get_rank() == 1:
            store.wait([watchdog._key("left/0")])
            store.set("late", "1")
            done.append("used the store")
        leave_process_group()
        done.append("left")
    return done


def test_the_rank_with_the_store_leaves_last(ranks: RankPool) -> None:
    assert ranks(2).run(leave_after_the_store) == [["left"], ["used the store", "left"]]


def join_on_a_taken_port() -> str:
    with socket.create_server(("localhost", 0)) as taken:
        os.environ["MASTER_PORT"] = str(taken.getsockname()[1])
        with pytest.raises(InputError) as refused:
            join_process_group(1)
    return str(refused.value)


def test_a_port_that_is_taken_is_one_line_with_the_remedy(ranks: RankPool) -> None:
    (line,) = ranks(1).run(join_on_a_taken_port)
    assert "another process listens on it: choose another port, such as torchrun --master-port" in line
