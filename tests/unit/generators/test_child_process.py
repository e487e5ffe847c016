"""Child processes end with everything that they have started, by themselves if they are given time."""

import sys
from pathlib import Path

from automodel_rl.generators.child_process import ChildProcess
from tests.processes import is_alive

CHILD = """
import pathlib, subprocess, sys
from multiprocessing.connection import Connection

connection = Connection(int(sys.argv[-1]))
own = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], close_fds=True)
connection.send(own.pid)
try:
    connection.recv()
except EOFError:
    pathlib.Path(sys.argv[1]).touch()
"""


def test_children_of_a_child_are_gone_once_it_is_closed(tmp_path: Path) -> None:
    for seconds in (0.0, 60.0):
        mark = tmp_path / str(seconds)
        child = ChildProcess([sys.executable, "-c", CHILD, str(mark)])
        own = child.receive(60.0)
        child.close(seconds)
        assert not is_alive(own)
        assert mark.exists() or not seconds
