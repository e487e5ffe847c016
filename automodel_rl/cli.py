"""The command line: reads the config, then starts the layout's ranks or joins those that are there."""

import functools
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

from automodel_rl.config import (
    ALGORITHMS,
    DPOConfig,
    GRPOConfig,
    RunConfig,
    SFTConfig,
    describe_keys,
    load_config,
)
from automodel_rl.errors import EXIT_BAD_INPUT, EXIT_FAILURE, EXIT_OK, DoesNotFitError, InputError
from automodel_rl.launch.failure import RECORD_FOLDER_VARIABLE, guard
from automodel_rl.launch.local import is_rank, run_local_ranks
from automodel_rl.launch.quiet import quiet_libraries
from automodel_rl.observe.run_directory import RunDirectory

USAGE = """\
usage: automodel-rl sft|dpo|grpo CONFIG.yaml [--resume auto] [--dotted.key value ...]
       automodel-rl verify CONFIG.yaml [--json] [--dotted.key value ...]
       automodel-rl plan CONFIG.yaml [--gpus N] [--device H200] [--json] [--dotted.key value ...]
       automodel-rl quickstart FOLDER [--seed N]

  sft         supervised fine-tuning on chats
  dpo         preference training on pairs of a chosen and a rejected completion
  grpo        reinforcement learning on prompts with rewards
              all three start as many local ranks as the layout asks for, or join torchrun's
  verify      proves the config's layout: a small model of the same architecture on it against one process
  plan        memory, stages and bubble of the config's layout, without GPUs and without weights
  quickstart  makes a small model and data and trains it with GRPO, on a laptop

  automodel-rl grpo --help (or sft, dpo) lists every key of the config. --resume auto goes on with the run in the
  output folder.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns the exit code: 0 done, 2 bad input, 1 anything else."""
    command, *rest = [*(sys.argv[1:] if arguments is None else arguments)] or ["--help"]
    if command in ("-h", "--help"):
        print(USAGE, end="")
        return EXIT_OK
    if command == "--version":
        print(version("automodel-rl"))
        return EXIT_OK
    commands: dict[str, Callable[[list[str]], int]] = {
        **{name: functools.partial(_train, name) for name in ALGORITHMS},
        "verify": _verify,
        "plan": _plan,
        "quickstart": _quickstart,
    }
    try:
        if command not in commands:
            raise InputError(f"unknown command {command!r}: use one of {', '.join(commands)}")
        return commands[command](rest)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT


def _train(algorithm: str, arguments: list[str]) -> int:
    if not arguments:
        raise InputError(
            f"{algorithm} takes a config file: automodel-rl {algorithm} CONFIG.yaml; --help lists its keys"
        )
    if arguments[0] in ("-h", "--help"):
        print(USAGE, "\nkeys of the config:", sep="")
        for key, default, meaning in describe_keys(ALGORITHMS[algorithm]):
            print(f"  --{key}  ({default})\n      {' '.join(meaning.split())}")
        return EXIT_OK
    quiet_libraries()
    path, *overrides = arguments
    resume, overrides = _take_resume(overrides)
    config = load_config(path, overrides, algorithm)
    if not _was_started_by_us():
        # Here, so that it is done once for all ranks and before they import anything heavy.
        from automodel_rl.data.records import check_data

        RunDirectory(config, config.output, resume)
        check_data(config)
    if not is_rank() and config.parallel.world_size > 1:
        command = [sys.executable, "-m", "automodel_rl", algorithm, *arguments]
        return run_local_ranks(command, config.parallel.world_size)
    return guard(lambda: _trainer(config, resume).train())


def _trainer(config: RunConfig, resume: bool) -> Any:
    if isinstance(config, SFTConfig):
        from automodel_rl.trainers.sft import SFTTrainer

        return SFTTrainer(config, resume)
    if isinstance(config, DPOConfig):
        from automodel_rl.trainers.dpo import DPOTrainer

        return DPOTrainer(config, resume)
    assert isinstance(config, GRPOConfig)
    from automodel_rl.trainers.grpo import GRPOTrainer

    return GRPOTrainer(config, resume)


def _verify(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        if arguments:
            print(USAGE, end="")
            return EXIT_OK
        raise InputError("verify takes a config file: automodel-rl verify CONFIG.yaml")
    quiet_libraries()
    path, *rest = arguments
    as_json = "--json" in rest
    config = load_config(path, [argument for argument in rest if argument != "--json"])
    if not is_rank():
        from automodel_rl.tools.verify import layout_to_verify

        num_ranks = layout_to_verify(config.parallel).world_size
        if num_ranks > 1:
            return run_local_ranks([sys.executable, "-m", "automodel_rl", "verify", *arguments], num_ranks)

    def work() -> None:
        from automodel_rl.tools.verify import verify

        verify(config, as_json)

    return guard(work)


def _plan(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        if arguments:
            print(USAGE, end="")
            return EXIT_OK
        raise InputError("plan takes a config file: automodel-rl plan CONFIG.yaml")
    quiet_libraries()
    path, *rest = arguments
    as_json = "--json" in rest
    gpus, rest = _take_option("--gpus", [argument for argument in rest if argument != "--json"])
    device, rest = _take_option("--device", rest)
    if gpus is not None and not gpus.isdecimal():
        raise InputError(f"--gpus {gpus}: must be a number of GPUs")
    config = load_config(path, rest)
    from automodel_rl.tools.plan import DEVICES, plan

    if device is not None and device not in DEVICES:
        raise InputError(f"--device {device}: known devices are {', '.join(DEVICES)}")
    try:
        plan(config, None if gpus is None else int(gpus), device or "H200", as_json)
    except DoesNotFitError as error:
        print(error, file=sys.stderr)
        return EXIT_FAILURE
    return EXIT_OK


def _take_option(name: str, arguments: list[str]) -> tuple[str | None, list[str]]:
    """Takes `name VALUE` or `name=VALUE` out of the overrides."""
    for place, argument in enumerate(arguments):
        key, equals, value = argument.partition("=")
        if key != name:
            continue
        if equals:
            return value, arguments[:place] + arguments[place + 1 :]
        if place + 1 == len(arguments):
            raise InputError(f"{name} has no value")
        return arguments[place + 1], arguments[:place] + arguments[place + 2 :]
    return None, arguments


def _quickstart(arguments: list[str]) -> int:
    if arguments[:1] in (["-h"], ["--help"]):
        print(USAGE, end="")
        return EXIT_OK
    seed, folders = _take_option("--seed", arguments)
    if len(folders) != 1 or folders[0].startswith("-"):
        raise InputError("quickstart takes one folder, which it creates: automodel-rl quickstart runs/demo")
    if seed is not None and not seed.isdecimal():
        raise InputError(f"--seed {seed}: must be a number")
    quiet_libraries()
    from automodel_rl.quickstart.demo import run_demo

    return run_demo(folders[0], int(seed or 0))


def _take_resume(arguments: list[str]) -> tuple[bool, list[str]]:
    """Takes `--resume auto` out of the overrides."""
    if "--resume=auto" in arguments:
        return True, [argument for argument in arguments if argument != "--resume=auto"]
    if "--resume" not in arguments:
        return False, arguments
    place = arguments.index("--resume")
    if arguments[place + 1 : place + 2] != ["auto"]:
        raise InputError("--resume takes one value: --resume auto")
    return True, arguments[:place] + arguments[place + 2 :]


def _was_started_by_us() -> bool:
    return RECORD_FOLDER_VARIABLE in os.environ
