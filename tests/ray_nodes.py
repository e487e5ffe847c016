"""A Ray cluster on this machine, in a process of its own. Each of its nodes has two processors.

A line `remove` on its standard input takes the last node away, as if its machine had died. `add` brings another one.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from tests.processes import Job, wait_for_end

COMMAND = "from tests.ray_nodes import serve; serve()"


class RayNodes:
    """The cluster, as a context manager.

    Args:
        folder: gets the orders to the cluster.
        count: number of nodes.
    """

    def __init__(self, folder: Path, count: int = 2):
        folder.mkdir(parents=True, exist_ok=True)
        self._orders, self._count, self._given = folder / "orders", count, 0
        self._orders.write_text("")

    def __enter__(self) -> "RayNodes":
        self.job = Job([sys.executable, "-c", COMMAND, str(self._orders), str(self._count)])
        self.job.__enter__()
        self._wait_until(lambda: "address " in self.job.stdout)
        self.address = self.job.stdout.split("address ")[1].split()[0]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None:
            error.add_note(f"the cluster said:\n{self.job.stdout}\n{self.job.stderr}")
        below = self.job.processes()
        self.order("end")
        self.job.__exit__()
        wait_for_end(below)

    def order(self, what: str) -> None:
        """Gives an order, and waits until it is carried out."""
        with self._orders.open("a") as file:
            file.write(f"{what}\n")
        self._given += 1
        self._wait_until(lambda: self.job.stdout.count("done") >= self._given)

    def _wait_until(self, happens: Callable[[], bool]) -> None:
        assert self.job.wait_until(happens), f"{self.job.stdout}{self.job.stderr}"


def serve() -> None:
    """Carries out the orders in a file until one is to end."""
    import time

    from ray.cluster_utils import Cluster

    orders, count = Path(sys.argv[1]), int(sys.argv[2])
    node = {"num_cpus": 2, "object_store_memory": 80 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    others = [cluster.add_node(**node) for _ in range(count - 1)]
    print(f"address {cluster.address} ", flush=True)
    number, order = 0, ""
    while order != "end":
        given = orders.read_text().splitlines()
        if len(given) == number:
            time.sleep(0.05)
            continue
        order, number = given[number], number + 1
        if order == "remove":
            cluster.remove_node(others.pop(), allow_graceful=False)
        elif order == "add":
            others.append(cluster.add_node(**node))
        else:
            cluster.shutdown()
        print("done", flush=True)
