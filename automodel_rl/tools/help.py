"""Command-line help: a text per command, the config keys, and shell completion."""

import shutil
import textwrap
import typing
from collections.abc import Iterable
from dataclasses import dataclass

from automodel_rl.config import ALGORITHMS, Key, describe_keys
from automodel_rl.errors import InputError, closest


@dataclass(frozen=True)
class Command:
    """Help entry of a command.

    Attributes:
        usage: the text after its name.
        brief: one line on what it does.
        more: the rest of its own help.
        options: its options other than config keys.
    """

    usage: str
    brief: str
    more: str = ""
    options: tuple[str, ...] = ()


TRAINING = """\
CONFIG.yaml is a config file; any of its keys may follow as --dotted.key value. The command starts as many local ranks
as the layout needs, or joins those of torchrun.

  --launcher ray       places the ranks on a Ray cluster, as set in launch.ray; local ignores launch.ray
  --resume auto        resumes the run in the output folder from its newest complete checkpoint
  --resume CHECKPOINT  resumes from that one, which may be from another run, in another output folder
  --max-minutes M      saves and stops in time for the end of a batch job
  --show N             prints the first N records with marks around what is trained, and exits
  --help WORDS         shows only keys with these words, such as --help optimizer"""

_TRAIN = (
    "CONFIG.yaml [--resume auto|never|CHECKPOINT] [--launcher ray|local] [--max-minutes M] [--show N] "
    "[--dotted.key value ...]",
    TRAINING,
)
_TRAINING_OPTIONS = ("--resume", "--launcher", "--max-minutes", "--show", "--help")


def _training(brief: str) -> Command:
    return Command(_TRAIN[0], brief, _TRAIN[1], _TRAINING_OPTIONS)


COMMANDS: dict[str, Command] = {
    "sft": _training("supervised fine-tuning on chats and texts"),
    "dpo": _training("preference training on pairs of a chosen and a rejected completion"),
    "kto": _training("preference training on completions that are each labeled good or bad"),
    "reward": _training("a reward model from pairs of a chosen and a rejected completion"),
    "distill": _training("distillation of larger models into a student, on chats"),
    "grpo": _training("reinforcement learning on prompts with rewards, or with teachers that judge each token"),
    "ppo": _training("reinforcement learning on prompts with rewards and a critic"),
    "run": Command(
        "LOOP.py --config CONFIG.yaml [--resume auto|never|CHECKPOINT] [--launcher ray|local] [--max-minutes M] "
        "[--dotted.key value ...]",
        "your own program, a file with a function main(policy, fleet, run), on the ranks of a config",
        "CONFIG.yaml is a config of sft, dpo or grpo, which sets what the program reads, trains and generates with. "
        "The other options are those of sft. configs/loops has two examples.",
        ("--config", "--resume", "--launcher", "--max-minutes"),
    ),
    "serve": Command(
        "CONFIG.yaml [--launcher ray|local] [--dotted.key value ...]",
        "a training service: several clients train adapters and sample through Tinker's API over HTTP",
        "Scripts and recipes for the package tinker run against it with TINKER_BASE_URL and TINKER_API_KEY, which it "
        "prints. It needs automodel-rl[serve]. Ctrl-C saves all runs.",
        ("--launcher",),
    ),
    "init": Command(
        "sft|dpo|kto|reward|distill|grpo|ppo MODEL DATA [--out my.yaml] [--lora] [--teacher MODEL] [--gpus N] "
        "[--device H200]",
        "writes a commented config for a model and a data file",
        "It looks at the data's columns and lengths, the model's chat template, and the GPUs of this machine or those "
        "that you name. The config is checked before it is written. --lora trains adapters, with their learning rate, "
        "even if all weights fit. --teacher is for distill.",
        ("--out", "--gpus", "--device", "--lora", "--teacher"),
    ),
    "convert": Command(
        "FILE [--out converted.yaml] [--algorithm sft|dpo|kto|reward|grpo|ppo] [--gpus N]",
        "writes a config from a config or script of TRL, axolotl, LLaMA-Factory, verl or NeMo RL",
        "FILE is YAML, JSON or a shell script. Settings without a counterpart are listed with the reason, on screen "
        "and at the end of the config. --algorithm says what to train if the file does not; --gpus how many GPUs the "
        "run had, by which batch sizes per device are multiplied.",
        ("--out", "--algorithm", "--gpus"),
    ),
    "verify": Command(
        "CONFIG.yaml | --config MODEL_FOLDER [--family-like NAME] [--launcher ray|local] [--json] "
        "[--dotted.key value ...]",
        "verifies the config's layout: compares a small model of the same architecture on it with one process",
        "--config takes a model instead, of which only config.json is read. --family-like tries a family that is not "
        "in the table with the properties of one that is.",
        ("--config", "--family-like", "--launcher", "--json"),
    ),
    "plan": Command(
        "CONFIG.yaml [--gpus N] [--device H200] [--device-gib G] [--json] [--dotted.key value ...]",
        "memory, stages, bubble and time of the config's layout, without GPUs and without weights",
        "If the layout does not fit, or a faster one is known, it shows the best alternatives. --device-gib is the "
        "memory of a device that is not in its list.",
        ("--gpus", "--device", "--device-gib", "--json"),
    ),
    "watch": Command(
        "RUN [RUN ...] [--port 6060]",
        "shows runs in a browser as they progress, from a small server on this machine",
        "",
        ("--port",),
    ),
    "report": Command(
        "RUN [RUN ...] [--out PAGE.html]",
        "writes the page of one or more runs, including finished, stopped and failed ones",
        "",
        ("--out",),
    ),
    "export": Command(
        "RUN|CHECKPOINT OUT [--merge | --per-expert] [--dotted.key value ...]",
        "writes a Hugging Face folder from a run's newest checkpoint or any other (runs/my_run/checkpoints/step_100)",
        "--merge writes a whole model instead of adapters, --per-expert adapters of a mixture of experts as vLLM reads "
        "them; CHECKPOINT may then also be a folder of adapters. A version written by weight_sync.publish needs "
        "--model.path with the model that the run started from.",
        ("--merge", "--per-expert", "--model.path"),
    ),
    "generate": Command(
        "--join FOLDER | HOST:PORT --key FILE [--weights HOST:PORT] [--wait MINUTES] [--vllm PYTHON] "
        "[--memory-fraction F] [--evaluate]",
        "writes completions for a run on any machine, and may join and leave at any time",
        "FOLDER is weight_sync.publish of a run with rollout.generator.kind=joined, from which it reads the weights. "
        "Without the folder it joins HOST:PORT, with the run's rollout.generator.key in FILE; --weights is where it "
        "reads weights if a tunnel uses a different port for them. It computes on the first visible GPU, or on the "
        "CPU, with transformers, or with --vllm, the interpreter of an environment with vLLM, which takes the fraction "
        "F of the GPU's memory (0.9). With --evaluate it writes only for validation, of a run with "
        "rollout.generator.evaluators. It ends with the run, on Ctrl-C or on SIGTERM. It waits at most MINUTES (30) "
        "for a run that has not started yet or was interrupted.",
        ("--join", "--key", "--weights", "--wait", "--vllm", "--memory-fraction", "--evaluate"),
    ),
    "verify-checkpoint": Command(
        "FOLDER", "checks that a checkpoint or exported folder is intact: every file as written"
    ),
    "quickstart": Command(
        "FOLDER [--task problems|calculator|agent|images] [--vllm PYTHON] [--seed N]",
        "makes a small model and data and trains it with GRPO, on a laptop",
        "It takes about five minutes on two cores. With --task calculator the model learns to call a tool, with --task "
        "agent the same for a program that uses OpenAI's API, with --task images it looks at pictures. With --vllm, "
        "the interpreter of an environment with vLLM, vLLM writes the completions; a CPU build is enough. FOLDER then "
        "has model/ (random weights, a vocabulary of 500 tokens), data/, the configs sft.yaml and grpo.yaml, and both "
        "runs, whose final/ are trained models.",
        ("--task", "--vllm", "--seed"),
    ),
    "doctor": Command(
        "[--vllm PYTHON]",
        "shows versions, devices, and what is missing for each feature",
        "With the interpreter of an environment with vLLM it checks that too. It exits with 1 if a requirement of "
        "automodel-rl is missing or has an unsupported version, and prints the command that installs it.",
        ("--vllm",),
    ),
    "tasks": Command(
        "TASKSET --python PYTHON [--args JSON]",
        "prints the tasks of a taskset for verifiers as prompts, one line of JSON each",
        "PYTHON is the interpreter of an environment with verifiers, JSON the taskset's settings. A run with "
        "rollout.verifiers reads such a file as data.",
        ("--python", "--args"),
    ),
    "completion": Command(
        "bash|zsh|fish",
        "prints a script that completes commands and keys in your shell",
        'For bash or zsh: eval "$(automodel-rl completion bash)" in ~/.bashrc or ~/.zshrc. For fish: automodel-rl '
        "completion fish > ~/.config/fish/completions/automodel-rl.fish",
    ),
}


def overview() -> str:
    width = max(map(len, COMMANDS))
    rows = [
        textwrap.fill(f"  {name:<{width}}  {command.brief}", _width(), subsequent_indent=" " * (width + 4))
        for name, command in COMMANDS.items()
    ]
    end = "automodel-rl COMMAND --help describes a command and lists the keys of its config."
    return "\n".join(["usage: automodel-rl COMMAND ...", "", *rows, "", end])


def help_of(name: str, words: str = "") -> str:
    """Returns the help of a command, with only the config keys whose names or meanings contain all of `words`.

    Raises:
        InputError: no key matches.
    """
    command = COMMANDS[name]
    text = f"usage: automodel-rl {name} {command.usage}\n\n{_filled(command.brief)}\n"
    text += "" if not command.more else f"\n{command.more if name in ALGORITHMS else _filled(command.more)}\n"
    return text + (f"\nkeys of the config:\n{_keys(name, words)}\n" if name in ALGORITHMS else "")


def _keys(algorithm: str, words: str) -> str:
    """Formats the keys that match: those that most configs set first, and keys that match by name before others."""
    keys = describe_keys(ALGORITHMS[algorithm])
    wanted = words.replace(".", " ").lower().split()
    named = [key for key in keys if all(word in key.name for word in wanted)]
    if not wanted:
        named.sort(key=lambda key: COMMON.index(key.name) if key.name in COMMON else len(COMMON))
    meant = [
        key for key in keys if key not in named and all(word in f"{key.name} {key.meaning}".lower() for word in wanted)
    ]
    found = named + meant
    if not found:
        parts = dict.fromkeys(part for key in keys for part in key.name.split("."))
        near = closest(words, parts)
        hint = f"did you mean {near}?" if near else f"automodel-rl {algorithm} --help lists all"
        raise InputError(f"--help {words}: no key of {algorithm} has this in its name or meaning: {hint}")
    return "\n".join(f"  --{key.name} {key.values}  ({key.default})\n{_filled(key.meaning, '      ')}" for key in found)


def _filled(text: str, indent: str = "") -> str:
    return textwrap.fill(" ".join(text.split()), _width(), initial_indent=indent, subsequent_indent=indent)


def _width() -> int:
    return max(60, min(120, shutil.get_terminal_size((100, 24)).columns))


COMMON = (
    *("output", "model.path", "model.lora", "model.lora.rank", "teachers", "data.train", "data.train.0.path"),
    *("data.train.0.columns", "data.validation", "batch.sequences", "batch.pairs", "batch.microbatch_tokens"),
    *("rollout.prompts", "rollout.group_size", "rollout.max_prompt_tokens", "rollout.max_new_tokens", "rewards"),
    *("rewards.0.function", "rollout.generator", "length.steps", "length.epochs", "length.validate_every"),
    *("optimizer.lr", "optimizer.warmup_steps", "optimizer.warmup_ratio", "parallel.pp", "parallel.dp_shard"),
    *("parallel.tp", "parallel.cp", "parallel.ep", "checkpoint.every_steps"),
)
"""Keys that most configs set, in the order of a config."""

Shell = typing.Literal["bash", "zsh", "fish"]


def completion(shell: Shell) -> str:
    if shell == "fish":
        return "\n".join(_fish()) + "\n"
    load = "autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else ""
    cases = [f'    {name}) words="{" ".join(_options(name))}";;' for name in COMMANDS]
    values = [f'    --{key.name}) words="{" ".join(key.choices)}";;' for key in _all_keys() if key.choices]
    lines = [
        "_automodel_rl() {",
        '  local current="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}" words=""',
        '  if [ "$COMP_CWORD" = 1 ]; then',
        f'    COMPREPLY=($(compgen -W "{" ".join(COMMANDS)}" -- "$current")); return',
        "  fi",
        '  case "$before" in',
        *values,
        "  esac",
        '  if [ -n "$words" ]; then COMPREPLY=($(compgen -W "$words" -- "$current")); return; fi',
        '  if [[ "$current" != -* ]]; then COMPREPLY=($(compgen -f -- "$current")); return; fi',
        '  case "${COMP_WORDS[1]}" in',
        *cases,
        "  esac",
        '  COMPREPLY=($(compgen -W "$words" -- "$current"))',
        "}",
        "complete -o filenames -F _automodel_rl automodel-rl",
    ]
    return load + "\n".join(lines) + "\n"


def _fish() -> Iterable[str]:
    for name, command in COMMANDS.items():
        yield f"complete -c automodel-rl -n __fish_use_subcommand -a {name} -d {_quoted(command.brief)}"
        seen = f"-n '__fish_seen_subcommand_from {name}'"
        yield from (f"complete -c automodel-rl {seen} -l {option[2:]} -r" for option in command.options)
        for key in describe_keys(ALGORITHMS[name]) if name in ALGORITHMS else ():
            choices = f" -x -a {_quoted(' '.join(key.choices))}" if key.choices else " -r"
            brief = _quoted(key.meaning.split(".")[0])
            yield f"complete -c automodel-rl {seen} -l {key.name}{choices} -d {brief}"


def _quoted(text: str) -> str:
    return "'" + " ".join(text.split()).replace("\\", "\\\\").replace("'", "\\'") + "'"


def _options(name: str) -> list[str]:
    takes_keys = "dotted.key" in COMMANDS[name].usage
    keys = describe_keys(ALGORITHMS[name]) if name in ALGORITHMS else _all_keys() if takes_keys else []
    return [*COMMANDS[name].options, *(f"--{key.name}" for key in keys)]


def _all_keys() -> list[Key]:
    return [*{key.name: key for kind in ALGORITHMS.values() for key in describe_keys(kind)}.values()]
