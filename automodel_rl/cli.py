"""Command line: reads the config, then starts the layout's ranks, or becomes one of them under torchrun."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast, get_args

from automodel_rl.compat.versions import own_version
from automodel_rl.config import ALGORITHMS, RayConfig, RunConfig, config_of_model, load_config, load_serve_config
from automodel_rl.config.algorithms import OnlineConfig
from automodel_rl.config.launch import LaunchConfig
from automodel_rl.errors import EXIT_BAD_INPUT, EXIT_FAILURE, EXIT_OK, DoesNotFitError, InputError, closest
from automodel_rl.files import as_input_error
from automodel_rl.generators.vllm_child import start_early
from automodel_rl.launch.failure import guard
from automodel_rl.launch.lifeline import hold_lifeline
from automodel_rl.launch.local import is_rank, run_local_ranks
from automodel_rl.launch.quiet import quiet_libraries
from automodel_rl.launch.record import RECORD_FOLDER_VARIABLE
from automodel_rl.observe.run_directory import RunDirectory
from automodel_rl.observe.run_files import FLIGHTS
from automodel_rl.serve.worker_address import is_serving_rank
from automodel_rl.tools.help import Shell, completion, help_of, overview
from automodel_rl.tools.verify.layout import ranks_to_verify

if TYPE_CHECKING:
    from automodel_rl.ray.job import RanksOnRay

HELP = ("-h", "--help")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns the exit code: 0 for success, 2 for bad input, 1 for anything else."""
    try:
        code = _run([*(sys.argv[1:] if arguments is None else arguments)] or ["--help"])
        sys.stdout.flush()
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except OSError as error:
        if not _has_lost_output():
            raise
        if isinstance(error, BrokenPipeError):  # the reader closed the pipe, as head does
            return EXIT_FAILURE
        print(
            f"error: standard output cannot be written ({error.strerror}): make room, or choose another place",
            file=sys.stderr,
        )
        return EXIT_BAD_INPUT
    return code


def _has_lost_output() -> bool:
    """Whether standard output can no longer be written. If so, redirects it, so that Python does not report it again
    at exit."""
    try:
        print(flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False


def _run(arguments: list[str]) -> int:
    command, *rest = arguments
    if command == "--version":
        print(own_version())
        return EXIT_OK
    if command in HELP:
        print(overview())
        return EXIT_OK
    commands: dict[str, Callable[[list[str]], int]] = {
        **dict.fromkeys(ALGORITHMS, lambda rest: _train(command, rest)),
        "run": _run_loop,
        "generate": _generate,
        "serve": _serve,
        "init": _init,
        "convert": _convert,
        "verify": _verify,
        "plan": _plan,
        "watch": _watch,
        "report": _report,
        "export": _export,
        "verify-checkpoint": _verify_checkpoint,
        "quickstart": _quickstart,
        "doctor": _doctor,
        "tasks": _tasks,
        "completion": _completion,
    }
    if command not in commands:
        near = closest(command, commands)
        hint = f"did you mean {near}?" if near else f"use one of {', '.join(commands)}"
        raise InputError(f"unknown command {command!r}: {hint}")
    asked = next((place for place, argument in enumerate(rest) if argument in HELP), None)
    if asked is not None:
        print(help_of(command, " ".join(rest[asked + 1 :])), end="")
        return EXIT_OK
    quiet_libraries()
    return commands[command](rest)


def _train(algorithm: str, arguments: list[str]) -> int:
    path, rest = _config_file(algorithm, arguments)
    shown, rest = _take_shown(rest)
    return _start(lambda overrides: load_config(path, overrides, algorithm), [algorithm, *arguments], rest, shown=shown)


def _run_loop(arguments: list[str]) -> int:
    if not arguments or not arguments[0].endswith(".py"):
        raise InputError("run takes a file with a function main first: automodel-rl run LOOP.py --config CONFIG.yaml")
    loop, rest = arguments[0], arguments[1:]
    path, rest = _take_option("--config", rest)
    if path is None:
        raise InputError(f"run {loop}: needs --config CONFIG.yaml, with a config of {', '.join(ALGORITHMS)}")
    return _start(lambda overrides: load_config(path, overrides), ["run", *arguments], rest, loop=loop)


def _start(
    load: Callable[[list[str]], RunConfig], command: list[str], rest: list[str], *, shown: int = 0, loop: str = ""
) -> int:
    """Starts a run, or becomes one of its ranks.

    Args:
        load: loads the config, given the config keys on the command line.
        command: the command for other ranks.
        rest: arguments that `load` has not consumed.
        shown: number of records to show instead of running; 0 to run.
        loop: the program's file; "" for the program of the config's algorithm.
    """
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # for a config's loss_function; rewards and other ranks search it, too
    resume, rest = _take_resume(rest)
    launcher, rest = _take_launcher(rest)
    max_minutes, rest = _take_positive("--max-minutes", rest)
    config = load(rest)
    if shown:
        return _show_examples(config, shown)
    on_ray = _chosen_cluster(launcher, config.launch)
    is_alone = config.world_size == 1 and on_ray is None
    if config.generation is not None and not loop and (is_rank() or is_alone):  # a program may set variables first
        start_early(config.generation.generator_spec)
    # Checked once for all ranks: by the launcher, before they import anything heavy, or by rank 0 under torchrun.
    if RECORD_FOLDER_VARIABLE not in os.environ and os.environ.get("RANK", "0") == "0":
        print("checking config, data and model ...", flush=True)
        _check_input(config, resume)
    if on_ray is not None:
        return _run_on_ray(config, on_ray, command)
    if not is_rank() and config.world_size > 1:
        print(f"starting {config.world_size} ranks ...", flush=True)
        ranks = [sys.executable, "-m", "automodel_rl", *command]
        return run_local_ranks(ranks, config.world_size, Path(config.output) / FLIGHTS)

    def work() -> None:  # deferred: these imports are heavy
        from automodel_rl.trainers.train import open_loop, run_program, train

        if loop:
            run_program(open_loop(Path(loop)), config, resume, max_minutes)
        else:
            train(config, resume, max_minutes)

    return guard(work)


def _check_input(config: RunConfig, resume: str) -> None:
    """Raises InputError if the run's folder, data, rewards or model are unusable. Prints warnings about suspicious
    chats."""
    from automodel_rl.data.checks import check_data
    from automodel_rl.rollout.rewards.scorer import check_rewards

    RunDirectory(config, config.output, resume)
    chats = check_data(config)
    if isinstance(config, OnlineConfig):
        check_rewards(config.rewards)
        if config.validation.lm_eval is not None or config.validation.inspect is not None:
            from automodel_rl.rollout.evaluations.harnesses import check_harnesses

            check_harnesses(config.validation)
    from automodel_rl.data.chat import check_chats  # deferred: imports torch, which the errors above need not wait for
    from automodel_rl.hf.opened_model import OpenedModel

    for warning in check_chats(config, OpenedModel.open(config.model), chats):
        print(f"warning: {warning}", file=sys.stderr, flush=True)


def _chosen_cluster(launcher: str | None, config: LaunchConfig) -> RayConfig | None:
    """The Ray cluster on which to start ranks; None for this machine, and in ranks."""
    if is_rank() or launcher == "local":
        return None
    return RayConfig() if launcher == "ray" and config.ray is None else config.ray


@contextlib.contextmanager
def _with_ray() -> Iterator[None]:
    """Turns a missing Ray into an InputError."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise InputError("a Ray cluster needs ray, which is not installed: pip install 'automodel-rl[ray]'") from None


def _run_on_ray(config: RunConfig, settings: RayConfig, arguments: list[str]) -> int:
    with _with_ray():
        from automodel_rl.ray.job import run_on_ray
    return run_on_ray(config, settings, arguments)


def _serve(arguments: list[str]) -> int:
    path, rest = _config_file("serve", arguments)
    launcher, overrides = _take_launcher(rest)
    config = load_serve_config(path, overrides)
    if is_serving_rank():
        from automodel_rl.serve.worker import serve_rank

        return guard(lambda: serve_rank(config))
    try:
        from automodel_rl.serve.server import RanksStarter, serve
    except ImportError as error:
        raise InputError(
            f"serve needs {error.name}, which is not installed: pip install 'automodel-rl[serve]'"
        ) from None
    command, num_ranks = ["serve", *arguments], config.parallel.world_size
    on_ray = _chosen_cluster(launcher, config.launch)
    if on_ray is None:
        ranks = [sys.executable, "-m", "automodel_rl", *command]
        return serve(config, RanksStarter(lambda: run_local_ranks(ranks, num_ranks)))
    restarts = on_ray.restarts
    return _on_cluster(
        on_ray, command, num_ranks, lambda cluster: serve(config, RanksStarter(cluster.run, cluster.host, restarts))
    )


def _on_cluster(
    settings: RayConfig, command: Sequence[str], num_ranks: int, work: Callable[["RanksOnRay"], int]
) -> int:
    """Starts the ranks of a command other than a run on a Ray cluster, and returns the exit code of `work`."""
    with _with_ray():
        from automodel_rl.ray.job import RanksOnRay
    try:
        with RanksOnRay(settings, command, num_ranks) as cluster:
            return work(cluster)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_FAILURE


def _generate(arguments: list[str]) -> int:
    joined, rest = _take_option("--join", arguments)
    key, rest = _take_option("--key", rest)
    weights, rest = _take_option("--weights", rest)
    minutes, rest = _take_positive("--wait", rest)
    python, rest = _take_vllm(rest)
    fraction, rest = _take_positive("--memory-fraction", rest)
    evaluates, rest = _take_flag("--evaluate", rest)
    if joined is None or rest:
        given = f"generate {rest[0]}: unknown argument; " if rest else ""
        raise InputError(f"{given}generate takes the folder that a run publishes to: automodel-rl generate --join DIR")
    place, key_file = joined, Path(key) if key else None
    if fraction is not None and (fraction > 1 or python is None):
        raise InputError(
            f"--memory-fraction {fraction:g}: must be vLLM's share of a GPU's memory, at most 1, with --vllm"
        )

    def work() -> None:
        from automodel_rl.generators.joined import JoinOptions, generate
        from automodel_rl.generators.run_locations import parse_location

        choice = JoinOptions(python, fraction or JoinOptions.memory_fraction, evaluates)
        generate(parse_location(place, key_file, weights), choice, minutes or LONGEST_WAIT)

    return guard(work)


LONGEST_WAIT = 30.0
"""Default of `generate --wait`, in minutes."""


def _take_resume(arguments: list[str]) -> tuple[str, list[str]]:
    given, rest = _take_option("--resume", arguments)
    if given not in (None, "auto", "never") and not Path(given).is_dir():
        raise InputError(f"--resume {given}: must be auto, never or the folder of a checkpoint")
    return given or "never", rest


def _take_launcher(arguments: list[str]) -> tuple[str | None, list[str]]:
    launcher, rest = _take_option("--launcher", arguments)
    if launcher not in (None, "ray", "local"):
        raise InputError(f"--launcher {launcher}: use ray or local")
    return launcher, rest


def _take_positive(option: str, arguments: list[str]) -> tuple[float | None, list[str]]:
    text, rest = _take_option(option, arguments)
    if text is None:
        return None, rest
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise InputError(f"{option} {text}: must be a number above 0")
    return number, rest


def _take_shown(arguments: list[str]) -> tuple[int, list[str]]:
    text, rest = _take_option("--show", arguments)
    if text is not None and not (text.isdecimal() and int(text)):
        raise InputError(f"--show {text}: must be a number of records, 1 or more")
    return int(text or 0), rest


def _show_examples(config: RunConfig, count: int) -> int:
    """Prints which tokens of a run's first records are trained, without starting it."""
    from automodel_rl.data.show import first_examples

    for example in first_examples(config, count):
        print(example)
    return EXIT_OK


def _export(arguments: list[str]) -> int:
    merge, arguments = _take_flag("--merge", arguments)
    per_expert, arguments = _take_flag("--per-expert", arguments)
    if merge and per_expert:
        raise InputError("--merge and --per-expert: a merged model has no adapters: remove one of them")
    if len(arguments) < 2 or arguments[1].startswith("-"):
        raise InputError("export takes a run or a checkpoint, and a new folder: automodel-rl export RUN OUT")
    hold_lifeline()
    from automodel_rl.tools.export import Adapters, export

    adapters: Adapters = "merged" if merge else "per-expert" if per_expert else "peft"
    export(Path(arguments[0]), Path(arguments[1]), arguments[2:], adapters)
    return EXIT_OK


def _verify_checkpoint(arguments: list[str]) -> int:
    if len(arguments) != 1:
        raise InputError("verify-checkpoint takes one folder: automodel-rl verify-checkpoint RUN/checkpoints/step_100")
    from automodel_rl.tools.verify_checkpoint import verify_checkpoint

    verify_checkpoint(Path(arguments[0]))
    return EXIT_OK


def _doctor(arguments: list[str]) -> int:
    python, rest = _take_vllm(arguments)
    if rest:
        raise InputError(f"doctor {rest[0]}: takes only --vllm PYTHON")
    from automodel_rl.tools.doctor import doctor

    return EXIT_OK if doctor(python) else EXIT_FAILURE


def _report(arguments: list[str]) -> int:
    out, folders = _take_option("--out", arguments)
    if not folders:
        raise InputError("report takes the folders of runs: automodel-rl report RUN [RUN ...] [--out PAGE.html]")
    from automodel_rl.report.page import write_report

    path = Path(out or Path(folders[0]) / "report.html")
    with as_input_error(f"--out {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_report(path, [Path(folder) for folder in folders])
    print(path)
    return EXIT_OK


def _watch(arguments: list[str]) -> int:
    port, folders = _take_number("--port", arguments)
    if not folders:
        raise InputError("watch takes the folders of runs: automodel-rl watch RUN [RUN ...] [--port P]")
    from automodel_rl.report.server import RunServer

    with RunServer([Path(folder) for folder in folders], port) as server:
        for folder in (folder for folder in folders if not Path(folder).is_dir()):
            print(f"{folder}: does not exist yet; the page waits for it")
        print(f"{server.url} shows the runs as they progress; Ctrl-C exits", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
    return EXIT_OK


ANY_BATCH = ("--batch.sequences", "65536", "--batch.microbatch_tokens", "65536")
"""A batch large enough for any layout of `verify --config`, which generates its own sequences."""


def _verify(arguments: list[str]) -> int:
    as_json, rest = _take_flag("--json", arguments)
    like, rest = _take_option("--family-like", rest)
    folder, rest = _take_option("--config", rest)
    launcher, rest = _take_launcher(rest)
    if folder is None:
        if like is not None:
            raise InputError(f"--family-like {like}: needs --config FOLDER, with the config.json of the new family")
        path, overrides = _config_file("verify", rest)
        config = load_config(path, overrides)
    else:
        config = config_of_model(folder, [*ANY_BATCH, *rest])
    num_ranks = ranks_to_verify(config)
    on_ray = _chosen_cluster(launcher, config.launch) if launcher == "ray" else None
    if on_ray is not None:
        if as_json:
            raise InputError(
                "--json with --launcher ray: the driver prints its own lines in between: remove one of them"
            )
        return _on_cluster(on_ray, ["verify", *arguments], num_ranks, lambda cluster: cluster.run())
    if not is_rank() and num_ranks > 1:
        return run_local_ranks([sys.executable, "-m", "automodel_rl", "verify", *arguments], num_ranks)

    def work() -> None:
        from automodel_rl.tools.verify.command import verify
        from automodel_rl.tools.verify.new_family import try_family

        if like is not None:
            try_family(Path(config.model.path), like)
        verify(config, as_json)

    return guard(work)


def _plan(arguments: list[str]) -> int:
    path, rest = _config_file("plan", arguments)
    as_json, rest = _take_flag("--json", rest)
    gpus, rest = _take_number("--gpus", rest)
    device, rest = _take_option("--device", rest)
    gib, overrides = _take_gib(rest)
    config = load_config(path, overrides)
    from automodel_rl.tools.plan.command import plan
    from automodel_rl.tools.plan.devices import find_device

    card = find_device(device, gib)
    try:
        plan(config, gpus, card, as_json)
    except DoesNotFitError as error:
        print(error, file=sys.stderr)
        return EXIT_FAILURE
    return EXIT_OK


def _take_gib(arguments: list[str]) -> tuple[float | None, list[str]]:
    text, rest = _take_option("--device-gib", arguments)
    try:
        gib = None if text is None else float(text)
    except ValueError:
        gib = 0.0
    if gib is not None and not 0 < gib < 10_000:
        raise InputError(f"--device-gib {text}: must be a number of GiB above 0")
    return gib, rest


def _init(arguments: list[str]) -> int:
    out, rest = _take_option("--out", arguments)
    gpus, rest = _take_number("--gpus", rest)
    device, rest = _take_option("--device", rest)
    teacher, rest = _take_option("--teacher", rest)
    lora, rest = _take_flag("--lora", rest)
    if len(rest) != 3 or rest[0] not in ALGORITHMS:
        raise InputError("init takes an algorithm, a model and a data file: automodel-rl init sft MODEL DATA.jsonl")
    from automodel_rl.tools.init import init

    init(rest[0], rest[1], rest[2], Path(out or f"{rest[0]}.yaml"), (gpus, device), lora=lora, teacher=teacher)
    return EXIT_OK


def _convert(arguments: list[str]) -> int:
    out, rest = _take_option("--out", arguments)
    algorithm, rest = _take_option("--algorithm", rest)
    gpus, rest = _take_number("--gpus", rest)
    if algorithm is not None and algorithm not in ALGORITHMS:
        raise InputError(f"--algorithm {algorithm}: use one of {', '.join(ALGORITHMS)}")
    if len(rest) != 1 or rest[0].startswith("-"):
        raise InputError(
            "convert takes a config or script of TRL, axolotl, LLaMA-Factory, verl or NeMo RL: automodel-rl convert "
            "FILE --out my.yaml"
        )
    from automodel_rl.tools.convert.command import convert

    convert(Path(rest[0]), Path(out or "converted.yaml"), algorithm, gpus or 1)
    return EXIT_OK


def _completion(arguments: list[str]) -> int:
    if len(arguments) != 1 or arguments[0] not in get_args(Shell):
        raise InputError(f"completion takes a shell, one of {', '.join(get_args(Shell))}: automodel-rl completion bash")
    print(completion(cast(Shell, arguments[0])), end="")
    return EXIT_OK


def _quickstart(arguments: list[str]) -> int:
    from automodel_rl.quickstart.demo import TASKS, run_demo

    seed, arguments = _take_number("--seed", arguments)
    vllm, arguments = _take_vllm(arguments)
    task, folders = _take_option("--task", arguments)
    if task is not None and task not in TASKS:
        raise InputError(f"--task {task}: use {' or '.join(TASKS)}")
    if len(folders) != 1 or folders[0].startswith("-"):
        raise InputError("quickstart takes one folder, which it creates: automodel-rl quickstart runs/demo")
    return run_demo(folders[0], seed or 0, task or "problems", vllm)


def _tasks(arguments: list[str]) -> int:
    from automodel_rl.rollout.agents.runner import print_tasks

    python, rest = _take_option("--python", arguments)
    args, rest = _take_option("--args", rest)
    if python is None or len(rest) != 1:
        raise InputError("tasks takes a taskset and an interpreter: automodel-rl tasks TASKSET --python PYTHON")
    print_tasks(rest[0], python, args or "{}")
    return EXIT_OK


def _take_vllm(arguments: list[str]) -> tuple[str | None, list[str]]:
    python, rest = _take_option("--vllm", arguments)
    if python is not None and not Path(python).is_file():
        raise InputError(f"--vllm {python}: is not a file: pass the interpreter of an environment with vLLM")
    return python, rest


def _config_file(command: str, arguments: list[str]) -> tuple[str, list[str]]:
    if not arguments or arguments[0].startswith("-"):
        raise InputError(f"{command} takes a config file first: automodel-rl {command} CONFIG.yaml; see --help")
    return arguments[0], arguments[1:]


def _take_flag(name: str, arguments: list[str]) -> tuple[bool, list[str]]:
    return name in arguments, [argument for argument in arguments if argument != name]


def _take_option(name: str, arguments: list[str]) -> tuple[str | None, list[str]]:
    """Returns the value of `name VALUE` or `name=VALUE`, None if absent, and the remaining arguments."""
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
