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
from automodel_rl.errors import InputError
from automodel_rl.generators.child_process import ChildProcess
from automodel_rl.generators.visible_devices import VISIBLE, local_rank, visible_devices

WORKER = Path(__file__).with_name("vllm_worker.py")

_RANK_VARIABLES = ("RANK", "LOCAL_", "WORLD_SIZE", "MASTER_", "GROUP_", "ROLE_", "TORCHELASTIC_")
"""Beginnings of environment variables of this job, which vLLM would take for its own."""

_ALLOCATOR_VARIABLES = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}

EXPANDABLE = "expandable_segments"
"""An option of torch's allocator with which vLLM's sleep frees nothing."""

_Key = tuple[str, bool, str | None]
"""Interpreter, whether vLLM is to sleep, and the devices that it sees."""

_early: dict[_Key, list[ChildProcess]] = {}


def start_early(spec: GeneratorSpec) -> None:
    """Starts the processes of this rank's generator, if it is a vLLM that this rank is sure to lead.

    An interpreter that cannot be started, and devices that are not there, are told of when the generator starts. A
    process that nobody has taken ends with this one, or notices within a second that this one is gone.

    Args:
        spec: the generator that is asked for.
    """
    choice = spec.choice
    if not isinstance(choice, VllmGeneratorConfig) or _early:
        return
    leads = os.environ.get("RANK", "0") == "0" or (spec.tensor_parallel == 1 and not choice.devices)
    if not leads:
        return
    with contextlib.suppress(OSError, InputError):
        visible = visible_devices(choice.devices, local_rank(), spec.tensor_parallel)
        key = (choice.python or sys.executable, spec.sleep_level > 0, visible)
        for _ in range(choice.replicas):
            child = _start(*key)
            _early.setdefault(key, []).append(child)
            atexit.register(child.close)


def vllm_child(python: str, sleeps: bool, visible: str | None) -> ChildProcess:
    """A process that was started early, or a new one.

    Args:
        python: the interpreter of an environment that has vLLM.
        sleeps: whether vLLM is to give its memory back between rollouts.
        visible: the process's CUDA_VISIBLE_DEVICES; None to inherit it.

    Raises:
        OSError: it cannot be started.
    """
    key = (python, sleeps, visible)
    children = _early.pop(key, [])
    while _early:  # of other settings than the generator has in the end
        for child in _early.popitem()[1]:
            child.close()
    if not children:
        return _start(*key)
    child = children.pop()
    if children:
        _early[key] = children
    return child


def _start(python: str, sleeps: bool, visible: str | None) -> ChildProcess:
    """Starts a process. It sees its devices from the start, as it imports vLLM, which may look for them, before it is
    told what to do."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_RANK_VARIABLES)}
    if visible is not None:
        environment[VISIBLE] = visible
    # With processes of its own, a killed worker would leave a child behind.
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if sleeps:
        for name in _ALLOCATOR_VARIABLES & environment.keys():
            parts = environment.pop(name).split(",")
            if kept := [part for part in parts if EXPANDABLE not in part]:  # even an empty one hides the other
                environment[name] = ",".join(kept)
    # CUDA may be initialised where vLLM starts its workers, and must not be forked then.
    environment["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    return ChildProcess([python, str(WORKER)], environment)
