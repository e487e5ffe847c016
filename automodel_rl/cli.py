"""The command line: reads the config, then starts the layout's ranks, or becomes one of them under torchrun."""

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

import automodel_rl
from automodel_rl.config import ALGORITHMS, GRPOConfig, describe_keys, load_config
from automodel_rl.errors import EXIT_BAD_INPUT, EXIT_FAILURE, EXIT_OK, DoesNotFitError, InputError
from automodel_rl.launch.failure import guard
from automodel_rl.launch.lifeline import hold_lifeline
from automodel_rl.launch.local import is_rank, run_local_ranks
from automodel_rl.launch.quiet import quiet_libraries
from automodel_rl.launch.record import RECORD_FOLDER_VARIABLE
from automodel_rl.observe.run_directory import RunDirectory
from automodel_rl.observe.run_files import FLIGHTS
from automodel_rl.tools.verify.layout import ranks_to_verify

USAGE = """\
usage: automodel-rl sft|dpo|grpo CONFIG.yaml [--resume auto|never|CHECKPOINT] [--max-minutes M] [--dotted.key value ...]
       automodel-rl verify CONFIG.yaml [--json] [--dotted.key value ...]
       automodel-rl plan CONFIG.yaml [--gpus N] [--device H200] [--json] [--dotted.key value ...]
       automodel-rl export CHECKPOINT OUT [--merge] [--dotted.key value ...]
       automodel-rl verify-checkpoint CHECKPOINT
       automodel-rl watch RUN [RUN ...] [--port 6060]
       automodel-rl report RUN [RUN ...] [--out PAGE.html]
       automodel-rl quickstart FOLDER [--seed N]

  sft         supervised fine-tuning on chats
  dpo         preference training on pairs of a chosen and a rejected completion
  grpo        reinforcement learning on prompts with rewards
              all three start as many local ranks as the layout asks for, or join torchrun's
  verify      proves the config's layout: a small model of the same architecture on it against one process
  plan        memory, stages and bubble of the config's layout, without GPUs and without weights
  export      a Hugging Face folder from any checkpoint of a run (runs/my_run/checkpoints/step_100), on any machine;
              with --merge a whole model in place of adapters, also from a folder of adapters
  verify-checkpoint
              says whether a checkpoint is whole: every file as it was written
  watch       shows runs in a browser as they go on, from a small server on this machine
  report      writes the page of one run or several: of finished, stopped and failed ones, too
  quickstart  makes a small model and data and trains it with GRPO, on a laptop

  automodel-rl grpo --help (or sft, dpo) lists every key of the config. --resume auto goes on with the run in the
  output folder, from its newest whole checkpoint; --resume CHECKPOINT from that one, perhaps of another run; never is
  the default. --max-minutes saves and stops in time for the end of a batch job.
"""


HELP = ("-h", "--help")

TRAINERS = {"sft": "SFTTrainer", "dpo": "DPOTrainer", "grpo": "GRPOTrainer"}
"""The trainers' public names, by algorithm. They are looked up late, because a trainer imports everything it runs."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns the exit code: 0 done, 2 bad input, 1 anything else."""
    command, *rest = [*(sys.argv[1:] if arguments is None else arguments)] or ["--help"]
    if command == "--version":
        print(version("automodel-rl"))
        return EXIT_OK
    if command in HELP:
        _help(command)
        return EXIT_OK
    commands: dict[str, Callable[[list[str]], int]] = {
        **dict.fromkeys(ALGORITHMS, lambda rest: _train(command, rest)),
        "verify": _verify,
        "plan": _plan,
        "export": _export,
        "verify-checkpoint": _verify_checkpoint,
        "report": _report,
        "watch": _watch,
        "quickstart": _quickstart,
    }
    try:
        if command not in commands:
            raise InputError(f"unknown command {command!r}: use one of {', '.join(commands)}")
        if rest[:1] and rest[0] in HELP:
            _help(command)
            return EXIT_OK
        quiet_libraries()
        return commands[command](rest)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT


def _help(command: str) -> None:
    print(USAGE, end="")
    if command in ALGORITHMS:
        print("\nkeys of the config:")
        for key, default, meaning in describe_keys(ALGORITHMS[command]):
            print(f"  --{key}  ({default})\n      {' '.join(meaning.split())}")


def _train(algorithm: str, arguments: list[str]) -> int:
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # a config's loss_function may be there; rewards and other ranks look there, too
    path, rest = _config_file(algorithm, arguments)
    resume, rest = _take_resume(rest)
    max_minutes, overrides = _take_minutes(rest)
    config = load_config(path, overrides, algorithm)
    # Checked once for all ranks: by the launcher, before they import anything heavy, or by torchrun's first rank.
    if RECORD_FOLDER_VARIABLE not in os.environ and os.environ.get("RANK", "0") == "0":
        from automodel_rl.data.checks import check_data
        from automodel_rl.rollout.rewards.scorer import check_rewards

        RunDirectory(config, config.output, resume)
        chats = check_data(config)
        if isinstance(config, GRPOConfig):
            check_rewards(config.rewards)
        from automodel_rl.data.chat import check_chats  # imports torch, which errors found above need not wait for

        check_chats(config, chats)
    if not is_rank() and config.world_size > 1:
        print(f"starting {config.world_size} ranks ...", flush=True)
        command = [sys.executable, "-m", "automodel_rl", algorithm, *arguments]
        return run_local_ranks(command, config.world_size, Path(config.output) / FLIGHTS)
    return guard(lambda: getattr(automodel_rl, TRAINERS[algorithm])(config, resume, max_minutes).train())


def _take_resume(arguments: list[str]) -> tuple[str, list[str]]:
    """The value of --resume, which says what to go on from, and the other arguments."""
    given, rest = _take_option("--resume", arguments)
    if given not in (None, "auto", "never") and not Path(given).is_dir():
        raise InputError(f"--resume {given}: is neither auto, never nor the folder of a checkpoint")
    return given or "never", rest


def _take_minutes(arguments: list[str]) -> tuple[float | None, list[str]]:
    text, rest = _take_option("--max-minutes", arguments)
    if text is None:
        return None, rest
    try:
        minutes = float(text)
    except ValueError:
        minutes = 0.0
    if not 0 < minutes < float("inf"):
        raise InputError(f"--max-minutes {text}: must be a number above 0")
    return minutes, rest


def _export(arguments: list[str]) -> int:
    merge, arguments = _take_flag("--merge", arguments)
    if len(arguments) < 2 or arguments[1].startswith("-"):
        raise InputError("export takes a checkpoint and a new folder: automodel-rl export RUN/checkpoints/step_100 OUT")
    hold_lifeline()
    from automodel_rl.tools.export import export

    export(Path(arguments[0]), Path(arguments[1]), arguments[2:], merge=merge)
    return EXIT_OK


def _verify_checkpoint(arguments: list[str]) -> int:
    if len(arguments) != 1:
        raise InputError("verify-checkpoint takes one folder: automodel-rl verify-checkpoint RUN/checkpoints/step_100")
    from automodel_rl.tools.verify_checkpoint import verify_checkpoint

    verify_checkpoint(Path(arguments[0]))
    return EXIT_OK


def _report(arguments: list[str]) -> int:
    out, folders = _take_option("--out", arguments)
    if not folders:
        raise InputError("report takes the folders of runs: automodel-rl report RUN [RUN ...] [--out PAGE.html]")
    from automodel_rl.report.page import write_report

    path = Path(out or Path(folders[0]) / "report.html")
    try:
        write_report(path, [Path(folder) for folder in folders])
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror}): choose another --out") from None
    print(path)
    return EXIT_OK


def _watch(arguments: list[str]) -> int:
    port, folders = _take_number("--port", arguments)
    if not folders:
        raise InputError("watch takes the folders of runs: automodel-rl watch RUN [RUN ...] [--port P]")
    from automodel_rl.report.server import RunServer

    with RunServer([Path(folder) for folder in folders], 6060 if port is None else port) as server:
        print(f"{server.url} shows the runs as they go on; Ctrl-C ends this", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
    return EXIT_OK


def _verify(arguments: list[str]) -> int:
    path, rest = _config_file("verify", arguments)
    as_json, overrides = _take_flag("--json", rest)
    config = load_config(path, overrides)
    num_ranks = ranks_to_verify(config)
    if not is_rank() and num_ranks > 1:
        return run_local_ranks([sys.executable, "-m", "automodel_rl", "verify", *arguments], num_ranks)

    def work() -> None:
        from automodel_rl.tools.verify.command import verify

        verify(config, as_json)

    return guard(work)


def _plan(arguments: list[str]) -> int:
    path, rest = _config_file("plan", arguments)
    as_json, rest = _take_flag("--json", rest)
    gpus, rest = _take_number("--gpus", rest)
    device, overrides = _take_option("--device", rest)
    config = load_config(path, overrides)
    from automodel_rl.tools.plan.command import DEVICES, plan

    if device is not None and device not in DEVICES:
        raise InputError(f"--device {device}: known devices are {', '.join(DEVICES)}")
    try:
        plan(config, gpus, device or "H200", as_json)
    except DoesNotFitError as error:
        print(error, file=sys.stderr)
        return EXIT_FAILURE
    return EXIT_OK


def _quickstart(arguments: list[str]) -> int:
    seed, folders = _take_number("--seed", arguments)
    if len(folders) != 1 or folders[0].startswith("-"):
        raise InputError("quickstart takes one folder, which it creates: automodel-rl quickstart runs/demo")
    from automodel_rl.quickstart.demo import run_demo

    return run_demo(folders[0], seed or 0)


def _config_file(command: str, arguments: list[str]) -> tuple[str, list[str]]:
    """The path of the config, and the other arguments."""
    if not arguments or arguments[0].startswith("-"):
        raise InputError(f"{command} takes a config file first: automodel-rl {command} CONFIG.yaml; see --help")
    return arguments[0], arguments[1:]


def _take_flag(name: str, arguments: list[str]) -> tuple[bool, list[str]]:
    """Whether `name` is among the arguments, and the arguments without it."""
    return name in arguments, [argument for argument in arguments if argument != name]


def _take_option(name: str, arguments: list[str]) -> tuple[str | None, list[str]]:
    """The value of `name VALUE` or `name=VALUE`, None if it is not given, and the arguments without it."""
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


def _take_number(name: str, arguments: list[str]) -> tuple[int | None, list[str]]:
    value, rest = _take_option(name, arguments)
    if value is not None and not value.isdecimal():
        raise InputError(f"{name} {value}: must be a whole number")
    return None if value is None else int(value), rest
