"""The command line: reads the config, then starts the layout's ranks or joins those that are there."""

import os
import sys
from collections.abc import Sequence
from importlib.metadata import version

from automodel_rl.config import SFTConfig, describe_keys, load_config
from automodel_rl.errors import EXIT_BAD_INPUT, EXIT_FAILURE, EXIT_OK, DoesNotFitError, InputError
from automodel_rl.launch.failure import RECORD_FOLDER_VARIABLE, guard
from automodel_rl.launch.local import is_rank, run_local_ranks
from automodel_rl.launch.quiet import quiet_libraries
from automodel_rl.observe.run_directory import RunDirectory

USAGE = """\
usage: automodel-rl sft CONFIG.yaml [--resume auto] [--dotted.key value ...]
       automodel-rl verify CONFIG.yaml [--json] [--dotted.key value ...]
       automodel-rl plan CONFIG.yaml [--gpus N] [--device H200] [--json] [--dotted.key value ...]
       automodel-rl quickstart FOLDER

  sft         supervised fine-tuning; starts as many local ranks as the layout asks for, or joins torchrun's
  verify      proves the config's layout: a small model of the same architecture on it against one process
  plan        memory, stages and bubble of the config's layout, without GPUs and without weights
  quickstart  makes a small model and data and fine-tunes it, on a laptop

  automodel-rl sft --help lists every key of the config. --resume auto goes on with the run in the output folder.
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
    commands = {"sft": _sft, "verify": _verify, "plan": _plan, "quickstart": _quickstart}
    try:
        if command not in commands:
            raise InputError(f"unknown command {command!r}: use one of {', '.join(commands)}")
        return commands[command](rest)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT


def _sft(arguments: list[str]) -> int:
    if not arguments:
        raise InputError("sft takes a config file: automodel-rl sft CONFIG.yaml; --help lists its keys")
    if arguments[0] in ("-h", "--help"):
        print(USAGE, "\nkeys of the config:", sep="")
        for key, default, meaning in describe_keys(SFTConfig):
            print(f"  --{key}  ({default})\n      {' '.join(meaning.split())}")
        return EXIT_OK
    quiet_libraries()
    path, *overrides = arguments
    resume, overrides = _take_resume(overrides)
    config = load_config(path, overrides)
    if not _was_started_by_us():
        # Here, so that it is done once for all ranks and before they import anything heavy.
        from automodel_rl.data.sources import check_records

        RunDirectory(config, config.output, resume)
        check_records([*config.data.train, *config.data.validation])
    if not is_rank() and config.parallel.world_size > 1:
        command = [sys.executable, "-m", "automodel_rl", "sft", *arguments]
        return run_local_ranks(command, config.parallel.world_size)

    def train() -> None:
        from automodel_rl.trainers.sft import SFTTrainer

        SFTTrainer(config, resume).train()

    return guard(train)


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
    if len(arguments) != 1 or arguments[0].startswith("-"):
        raise InputError("quickstart takes one folder, which it creates: automodel-rl quickstart runs/demo")
    quiet_libraries()
    from automodel_rl.quickstart.demo import run_demo

    return run_demo(arguments[0])


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
