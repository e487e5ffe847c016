"""Generators that join a run, as actors on any nodes of a Ray cluster. Ray restarts those on lost nodes."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from automodel_rl.config.launch import RayConfig
from automodel_rl.errors import describe_root_cause
from automodel_rl.generators.joined import JoinOptions, generate
from automodel_rl.generators.run_locations import SharedFolder
from automodel_rl.ray.cluster import environment_for_nodes

MAX_MOVES = 20
"""Maximum number of restarts by Ray of a generator whose node or process is gone."""

SPREAD: dict[str, Any] = {
    "max_restarts": MAX_MOVES,
    "max_task_retries": MAX_MOVES,
    "scheduling_strategy": "SPREAD",
}
"""Actor options: spread over the nodes with room, and restarted elsewhere after a node is lost."""

MIN_WAIT = 30.0
"""Minimum time in minutes that a generator waits for its run, which has to load its model."""


class GeneratorActor:
    """A generator on a node. It ends with its actor."""

    def write(
        self, folder: Path, choice: JoinOptions, minutes: float, environment: Mapping[str, str], cwd: str
    ) -> None:
        """Generates for the run that publishes to a folder, until the run ends.

        Args:
            folder, choice, minutes: as in `generate`.
            environment: the driver's variables, for those that this node lacks.
            cwd: the driver's working directory.
        """
        os.chdir(cwd)
        os.environ.update({**environment, **os.environ})
        generate(SharedFolder(folder), choice, minutes)


class JoinedGenerators:
    """The generators that a driver starts for its run. `folder` is where the run publishes its weights."""

    def __init__(self, settings: RayConfig, folder: Path):
        self.settings, self.folder = settings, folder.absolute()
        has_gpus = any("GPU" in node["Resources"] for node in ray.nodes() if node["Alive"])
        self._options = {"num_cpus": 1, "num_gpus": 1 if has_gpus else 0, **SPREAD}
        self._failures = 0
        self._working: dict[Any, Any] = {}  # actors by their running task
        for _ in range(settings.generators):
            self._start()

    def poll(self) -> None:
        """Restarts failed generators, at most `launch.ray.restarts` times in total."""
        done, _ = ray.wait([*self._working], num_returns=len(self._working), timeout=0) if self._working else ([], [])
        for task in done:
            actor = self._working.pop(task)
            try:
                ray.get(task)
            except RayError as error:
                ray.kill(actor)
                self._failures += 1
                again = self._failures <= self.settings.restarts
                what = "starting another one" if again else "not starting another one (launch.ray.restarts)"
                print(
                    f"warning: a generator has exited ({describe_root_cause(error)}); {what}",
                    file=sys.stderr,
                    flush=True,
                )
                if again:
                    self._start()

    def close(self) -> None:
        for actor in self._working.values():
            ray.kill(actor)
        self._working = {}

    def _start(self) -> None:
        actor: Any = ray.remote(GeneratorActor).options(**self._options).remote()
        choice = JoinOptions(self.settings.generator_python)
        minutes = max(MIN_WAIT, self.settings.wait_minutes)
        task = actor.write.remote(self.folder, choice, minutes, environment_for_nodes(), str(Path.cwd()))
        self._working[task] = actor
