"""vLLM generators in processes beside this rank.

Log-probabilities are *processed* ones. The default of vLLM, raw ones, are those of temperature 1.
"""

import dataclasses
import sys
from collections.abc import Callable

from automodel_rl.errors import InputError
from automodel_rl.generator_messages import VllmSettings
from automodel_rl.generators.child_process import ChildProcess
from automodel_rl.generators.generator_process import GeneratorProcess, NotStartedError
from automodel_rl.generators.vllm_child import vllm_child
from automodel_rl.generators.vllm_replicas import VllmReplicas

END_SECONDS = 15.0
"""Time for a tensor-parallel vLLM to end by itself, which frees the shared memory of its processes."""


def start_vllm(
    python: str | None,
    settings: VllmSettings,
    visible: str | None = None,
    num_replicas: int = 1,
    meanwhile: Callable[[], None] = lambda: None,
) -> GeneratorProcess | VllmReplicas:
    """Starts vLLM's offline engine in one process, or in `num_replicas`.

    Args:
        python: interpreter with vLLM; None for this process's.
        visible: CUDA_VISIBLE_DEVICES; None to inherit it.
        meanwhile: called while they start.

    Raises:
        InputError: vLLM does not start.
    """
    # vLLM 0.32 overwrites the logits of drafted tokens before it computes processed log-probabilities. At temperature
    # 1, without top-p or top-k, raw ones are the same.
    drafts = "speculative_config" in settings.options
    options = {**settings.options, "logprobs_mode": "raw_logprobs" if drafts else "processed_logprobs"}
    num_workers = int(options.get("tensor_parallel_size", 1))
    sleeps = bool(options.get("enable_sleep_mode"))
    children: list[ChildProcess] = []
    try:
        for _ in range(num_replicas):
            children.append(vllm_child(python or sys.executable, sleeps, visible))
    except OSError as error:
        for child in children:
            child.close()
        raise InputError(
            f"the interpreter for vLLM, {python}: cannot be started ({error.strerror}): set rollout.generator.python "
            "(serve: generator.python; generate: --vllm)"
        ) from None
    replicas = [
        GeneratorProcess(
            child,
            dataclasses.replace(settings, options=options),
            num_workers=num_workers,
            end_seconds=END_SECONDS if num_workers > 1 else 0.0,
        )
        for child in children
    ]
    process = replicas[0] if num_replicas == 1 else VllmReplicas(replicas)
    try:
        process.start(meanwhile)
    except NotStartedError as error:
        raise InputError(
            f"generator=vllm: failed to start ({error}): set generator.python to the "
            "interpreter of an environment with vLLM, or change memory_fraction or options"
        ) from None
    return process
