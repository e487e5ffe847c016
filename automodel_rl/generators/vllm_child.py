"""vLLM's process. It starts early, to import vLLM while this process imports torch and loads its model: each takes a
quarter of a minute, on another core. For the same reason, this file imports little."""

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
"""Prefixes of this job's environment variables that vLLM would use as its own."""

_ALLOCATOR_VARIABLES = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}

EXPANDABLE = "expandable_segments"
"""Option of torch's allocator with which vLLM's sleep frees nothing."""

_Key = tuple[str, bool, str | None]
"""Interpreter, whether vLLM sleeps, and its CUDA_VISIBLE_DEVICES."""

_early: dict[_Key, list[ChildProcess]] = {}


def start_early(spec: GeneratorSpec) -> None:
    """Starts the processes of this rank's generator, if it is a vLLM that this rank is certain to lead.

    Errors are reported later, when the generator starts. An unused process ends with this one, or within a second of
    its end.
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
    """Returns a process that was started early, or a new one. Raises OSError if it cannot start.

    Args:
        python: interpreter with vLLM.
        sleeps: vLLM frees its memory between rollouts.
        visible: its CUDA_VISIBLE_DEVICES; None to inherit it.
    """
    key = (python, sleeps, visible)
    children = _early.pop(key, [])
    while _early:  # started with settings that have changed since
        for child in _early.popitem()[1]:
            child.close()
    if not children:
        return _start(*key)
    child = children.pop()
    if children:
        _early[key] = children
    return child


def _start(python: str, sleeps: bool, visible: str | None) -> ChildProcess:
    """Starts a process. Its devices are set from the start, because importing vLLM may look for them."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_RANK_VARIABLES)}
    if visible is not None:
        environment[VISIBLE] = visible
    # Otherwise vLLM starts a process of its own, which outlives a killed worker.
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if sleeps:
        for name in _ALLOCATOR_VARIABLES & environment.keys():
            parts = environment.pop(name).split(",")
            if kept := [part for part in parts if EXPANDABLE not in part]:  # even an empty one overrides the other
                environment[name] = ",".join(kept)
    # CUDA may be initialised when vLLM starts its workers, so that it must not fork.
    environment["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    return ChildProcess([python, str(WORKER)], environment)
