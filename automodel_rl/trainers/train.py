"""Runs a program, an algorithm's or one from a file: rank 0 drives the others through it."""

import contextlib
import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from automodel_rl.batch import Packing
from automodel_rl.config import RunConfig
from automodel_rl.config.algorithms import (
    DistillConfig,
    DPOConfig,
    GRPOConfig,
    KTOConfig,
    PPOConfig,
    RewardModelConfig,
    SFTConfig,
)
from automodel_rl.errors import InputError, JobEndedError, describe_root_cause, line_of_caller
from automodel_rl.generators.fleet import Fleet
from automodel_rl.generators.fleet_rank import FleetRank
from automodel_rl.generators.vllm_child import start_early
from automodel_rl.launch.stop_signal import StopSignal
from automodel_rl.model.handle import ModelHandle
from automodel_rl.policy.crew import FLEET, POLICY, TreeCrew, further_model
from automodel_rl.policy.policy import Policy
from automodel_rl.policy.policy_rank import PolicyRank
from automodel_rl.trainers.distill import distill
from automodel_rl.trainers.dpo import dpo
from automodel_rl.trainers.grpo import grpo
from automodel_rl.trainers.kto import kto
from automodel_rl.trainers.open_run import OpenedRun, open_run
from automodel_rl.trainers.ppo import ppo
from automodel_rl.trainers.reward import reward
from automodel_rl.trainers.run import Run
from automodel_rl.trainers.sft import sft

Program = Callable[[Policy, Fleet, Run], Any]
"""A whole run in one process: a function of the model in training, its generators, and the frame around the steps."""

PROGRAMS: dict[type[RunConfig], Program] = {
    SFTConfig: lambda policy, fleet, run: sft(policy, run),
    DPOConfig: lambda policy, fleet, run: dpo(policy, run),
    KTOConfig: lambda policy, fleet, run: kto(policy, run),
    RewardModelConfig: lambda policy, fleet, run: reward(policy, run),
    DistillConfig: lambda policy, fleet, run: distill(policy, run),
    GRPOConfig: grpo,
    PPOConfig: ppo,
}
"""The algorithms' programs, by config class."""


def train(config: RunConfig, resume: str = "never", max_minutes: float | None = None) -> Path:
    """Trains as a config says. Must be called on every rank of the job.

    Args:
        config: the run's config.
        resume: "auto" to resume from the newest checkpoint in the run directory, if any; "never" to start anew; or
            the folder of a checkpoint to resume from.
        max_minutes: minutes after which the run saves and stops; None for no limit.

    Returns:
        The folder of the trained Hugging Face checkpoint.

    Raises:
        InputError: the config, the data or the checkpoint is invalid. Nothing has been written.
        StoppedError: the run was stopped by SIGTERM, SIGHUP, Ctrl-C or its time limit; a checkpoint is saved.
        RolloutError: generators failed, or rewards never differed; a checkpoint is saved.

    Example:
        >>> train(load_config("my_sft.yaml")).name  # doctest: +ELLIPSIS
        loading ...
        1 steps: ...
        'final'
    """
    if config.generation is not None:
        start_early(config.generation.generator_spec)
    folder: Path = run_program(PROGRAMS[type(config)], config, resume, max_minutes)
    return folder


def run_program(program: Program, config: RunConfig, resume: str = "never", max_minutes: float | None = None) -> Any:
    """Runs a program and returns its result. Must be called on every rank of the job; the program runs on rank 0,
    and the other ranks serve its calls.

    Args:
        program: a function of policy, fleet and run.
        config, resume, max_minutes: as in `train`.

    Example:
        >>> run_program(lambda policy, fleet, run: run.config.seed, load_config("my_sft.yaml"))  # doctest: +ELLIPSIS
        loading ...
        0
    """
    opened = open_run(config, resume)
    targets = _targets(opened)
    crew = TreeCrew(opened.handle.layout, targets)
    try:
        result = _follow(crew) if crew.rank else _lead(program, crew, opened, max_minutes)
    except (InputError, JobEndedError):  # after other errors ranks do not wait for their child processes
        _close(targets)
        raise
    _close(targets)
    return result


def _targets(opened: OpenedRun) -> dict[str, Any]:
    tokenizer, variables = opened.chat.tokenizer, opened.config.data.chat_template_kwargs
    policy = PolicyRank(opened.handle, tokenizer, variables)
    further = {further_model(name): PolicyRank(handle, tokenizer, variables) for name, handle in opened.further.items()}
    fleet = {} if opened.config.generation is None else {FLEET: FleetRank(policy, tokenizer)}
    return {POLICY: policy, **further, **fleet}


def _close(targets: dict[str, Any]) -> None:
    if FLEET in targets:
        targets[FLEET].close()


def _follow(crew: TreeCrew) -> Any:
    """Serves the program's calls on another rank. A stop signal is reported to the program and does not interrupt."""
    with StopSignal() as stop:
        return crew.follow(stop)


def _lead(program: Program, crew: TreeCrew, opened: OpenedRun, max_minutes: float | None) -> Any:
    policy = _policy(crew, opened.handle, opened, POLICY)
    further = {name: _policy(crew, handle, opened, further_model(name)) for name, handle in opened.further.items()}
    try:
        with contextlib.closing(Run(opened, policy, further, max_minutes)) as run:
            result = program(policy, Fleet(crew), run)
    except BaseException as error:
        crew.end(error)
        raise
    crew.end(value=result)
    return result


def _policy(crew: TreeCrew, handle: ModelHandle, opened: OpenedRun, name: str) -> Policy:
    packing = Packing.of(opened.config.batch, opened.config.parallel, handle.flops)
    return Policy(crew, packing, handle.config.vocab_size, name)


def open_loop(file: Path) -> Callable[..., Any]:
    """Returns the function `main(policy, fleet, run)` of a file.

    The file becomes a module of its own name, so that ranks find losses defined in it.

    Raises:
        InputError: there is no such file, it cannot be imported, or it has no such function.
    """
    if not file.is_file():
        raise InputError(f"run {file}: file not found")
    if not file.stem.isidentifier():
        raise InputError(f"run {file}: its name is not a valid Python module name: use letters, digits and _")
    sys.path.append(str(file.parent.absolute()))  # last, so that files beside it shadow no other module
    try:
        module = importlib.import_module(file.stem)
    except Exception as error:
        raise InputError(
            f"run {file}: cannot be imported ({describe_root_cause(error)}{line_of_caller(error)})"
        ) from error
    if Path(module.__file__ or "").absolute() != file.absolute():
        raise InputError(f"run {file}: Python has another module named {file.stem}: rename the file")
    main = vars(module).get("main")
    if not callable(main):
        raise InputError(f"run {file}: has no function main(policy, fleet, run)")
    try:
        inspect.signature(main).bind("policy", "fleet", "run")
    except TypeError as error:
        raise InputError(f"run {file}: main cannot be called as main(policy, fleet, run) ({error})") from None
    return main
