"""vLLM's process. It is started before the run needs it, and imports vLLM while this process imports torch and loads
its model: each takes a quarter of a minute, on another core.

This file imports little, so that it can do that.
"""

import atexit
import contextlib
import os
import sys
from pathlib import Path

from automodel_rl.config.generator_spec import GeneratorSpec
from automodel_rl.config.generators import VllmGeneratorConfig
from automodel_rl.generators.child_process import ChildProcess

WORKER = Path(__file__).with_name("vllm_worker.py")

_RANK_VARIABLES = ("RANK", "LOCAL_", "WORLD_SIZE", "MASTER_", "GROUP_", "ROLE_", "TORCHELASTIC_")
"""Beginnings of environment variables of this job, which vLLM would take for its own."""

_ALLOCATOR_VARIABLES = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}

EXPANDABLE = "expandable_segments"
"""An option of torch's allocator with which vLLM's sleep frees nothing."""

_early: dict[tuple[str, bool], list[ChildProcess]] = {}


def start_early(spec: GeneratorSpec) -> None:
    """Starts the processes of this rank's generator, if it is a vLLM that this rank is sure to lead.

    An interpreter that cannot be started is told of when the generator starts. A process that nobody has taken ends
    with this one, or notices within a second that this one is gone.

    Args:
        spec: the generator that is asked for.
    """
    choice = spec.choice
    if not isinstance(choice, VllmGeneratorConfig) or _early:
        return
    leads = os.environ.get("RANK", "0") == "0" or (spec.tensor_parallel == 1 and not choice.devices)
    if not leads:
        return
    python, sleeps = choice.python or sys.executable, spec.sleep_level > 0
    with contextlib.suppress(OSError):
        for _ in range(choice.replicas):
            child = ChildProcess([python, str(WORKER)], _environment(sleeps))
            _early.setdefault((python, sleeps), []).append(child)
            atexit.register(child.close)


def vllm_child(python: str, sleeps: bool) -> ChildProcess:
    """A process that was started early, or a new one.

    Args:
        python: the interpreter of an environment that has vLLM.
        sleeps: whether vLLM is to give its memory back between rollouts.

    Raises:
        OSError: it cannot be started.
    """
    children = _early.pop((python, sleeps), [])
    while _early:  # of other settings than the generator has in the end
        for child in _early.popitem()[1]:
            child.close()
    if not children:
        return ChildProcess([python, str(WORKER)], _environment(sleeps))
    child = children.pop()
    if children:
        _early[python, sleeps] = children
    return child


def _environment(sleeps: bool) -> dict[str, str]:
    """The environment variables of vLLM's process."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_RANK_VARIABLES)}
    # With processes of its own, a killed worker would leave a child behind.
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if sleeps:
        for name in _ALLOCATOR_VARIABLES & environment.keys():
            parts = environment.pop(name).split(",")
            if kept := [part for part in parts if EXPANDABLE not in part]:  # even an empty one hides the other
                environment[name] = ",".join(kept)
    # CUDA may be initialised where vLLM starts its workers, and must not be forked then.
    environment["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    return environment
