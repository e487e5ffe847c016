"""Generation by vLLM in a process beside this rank.

vLLM is asked for *processed* log-probabilities. Its default, raw ones, are those of temperature 1.
"""

import dataclasses
import os
import sys
from pathlib import Path

from automodel_rl.errors import InputError
from automodel_rl.generator_messages import VllmSettings
from automodel_rl.generators.generator_process import GeneratorProcess

WORKER = Path(__file__).with_name("vllm_worker.py")

_RANK_VARIABLES = ("RANK", "LOCAL_", "WORLD_SIZE", "MASTER_", "GROUP_", "ROLE_", "TORCHELASTIC_")
"""Beginnings of environment variables of this job, which vLLM would take for its own."""

_ALLOCATOR_VARIABLES = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}
END_SECONDS = 15.0
"""Longest wait for a split vLLM to end by itself, and with it to give back the shared memory of its processes."""

EXPANDABLE = "expandable_segments"
"""An option of torch's allocator with which vLLM's sleep frees nothing."""


def start_vllm(python: str | None, settings: VllmSettings, device: str | None) -> GeneratorProcess:
    """Starts vLLM's offline engine in a process of its own.

    Args:
        python: the interpreter of an environment that has vLLM; None for this process's interpreter.
        settings: options of vLLM and of its sampling.
        device: the process's CUDA_VISIBLE_DEVICES; None to inherit it.

    Raises:
        InputError: vLLM does not start.
    """
    python = python or sys.executable
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_RANK_VARIABLES)}
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = (
        "0"  # without it, a killed worker would leave a child of its own behind
    )
    if settings.options.get("enable_sleep_mode"):
        for name in _ALLOCATOR_VARIABLES & environment.keys():
            parts = environment.pop(name).split(",")
            if kept := [part for part in parts if EXPANDABLE not in part]:  # even an empty one hides the other
                environment[name] = ",".join(kept)
    # CUDA may be initialised where vLLM starts its workers, and must not be forked then.
    environment["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    if device is not None:
        environment["CUDA_VISIBLE_DEVICES"] = device
    # vLLM 0.32 overwrites the logits of drafted tokens before it makes processed log-probabilities. Of temperature 1,
    # without limits, raw ones are the same.
    drafts = "speculative_config" in settings.options
    options = {**settings.options, "logprobs_mode": "raw_logprobs" if drafts else "processed_logprobs"}
    num_workers = int(options.get("tensor_parallel_size", 1))
    try:
        return GeneratorProcess(
            [python, str(WORKER)],
            environment,
            dataclasses.replace(settings, options=options),
            num_workers=num_workers,
            end_seconds=END_SECONDS if num_workers > 1 else 0.0,
        )
    except OSError as error:
        raise InputError(f"generator.python={python}: cannot start it ({error.strerror})") from None
    except RuntimeError as error:
        raise InputError(
            f"generator=vllm: it does not start ({error}): give generator.python the "
            "interpreter of an environment with vLLM, or change its memory_fraction or options"
        ) from None
