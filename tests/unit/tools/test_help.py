"""What the command line says of itself, and what shells complete."""

import shutil
import subprocess

import pytest

from automodel_rl.cli import main
from automodel_rl.config import ALGORITHMS, describe_keys
from automodel_rl.tools.help import COMMANDS, COMMON, completion


@pytest.mark.parametrize("command", list(COMMANDS))
def test_every_command_has_help_of_its_own(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"usage: automodel-rl {command} ")
    assert all(len(line) <= 120 for line in said.splitlines() if not line.startswith(("usage", "  --")))
    assert all(option in said for option in COMMANDS[command].options if option != "--model.path")
    assert ("keys of the config" in said) == (command in ALGORITHMS)


def test_help_after_a_config_shows_the_keys_that_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sft", "my.yaml", "--help", "lora"]) == 0
    said = capsys.readouterr().out
    assert "--model.lora.rank N  (16)" in said
    assert "--optimizer.lr" not in said
    assert main(["grpo", "--help", "optimizer.decay"]) == 0
    assert "--optimizer.decay constant|linear|cosine  (cosine)" in capsys.readouterr().out
    assert main(["sft", "--help", "gradient", "clipping"]) == 0
    assert capsys.readouterr().out.partition("keys of the config:\n")[2].startswith("  --optimizer.max_grad_norm ")
    assert main(["sft", "--help", "optimzer"]) == 2
    said = capsys.readouterr().err
    assert "--help optimzer: no key of sft has this in its name or meaning: did you mean optimizer?" in said
    assert main(["stf", "my.yaml"]) == 2
    assert "unknown command 'stf': did you mean sft?" in capsys.readouterr().err


def test_help_lists_first_what_most_configs_set(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["grpo", "--help"]) == 0
    _, _, keys = capsys.readouterr().out.partition("keys of the config:\n")
    shown = [line.split()[0] for line in keys.splitlines() if line.startswith("  --")]
    assert shown[:3] == ["--output", "--model.path", "--model.lora"]
    assert set(shown) == {f"--{key.name}" for key in describe_keys(ALGORITHMS["grpo"])}
    assert all(
        any(name in {key.name for key in describe_keys(kind)} for kind in ALGORITHMS.values()) for name in COMMON
    )


def test_help_says_what_values_are_allowed() -> None:
    keys = {key.name: key for kind in ALGORITHMS.values() for key in describe_keys(kind)}
    shown = {name: (keys[name].values, keys[name].default) for name in ("model.fp8", "data.shuffle", "rollout.stop")}
    assert shown == {
        "model.fp8": ("rowwise|tensorwise|null", "null"),
        "data.shuffle": ("true|false", "true"),
        "rollout.stop": ("[TEXT, ...]", "[]"),
    }
    assert keys["optimizer.betas"].values == "[X, X]"
    assert keys["batch.microbatch_tokens"].values == "auto|N"
    assert keys["memory.compile"].choices == ("auto", "true", "false")
    assert keys["output"].choices == ()
    assert all(key.values for key in keys.values())


def completed(line: str) -> list[str]:
    """What bash offers after a line."""
    words = line.split(" ")
    array = " ".join(f"'{word}'" for word in words)
    script = f"{completion('bash')}\nCOMP_WORDS=({array}); COMP_CWORD={len(words) - 1}; _automodel_rl\n"
    done = subprocess.run(
        ["bash", "-c", script + 'printf "%s\\n" "${COMPREPLY[@]}"'], capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_commands_keys_and_values() -> None:
    assert completed("automodel-rl ver") == ["verify", "verify-checkpoint"]
    assert completed("automodel-rl sft my.yaml --optimizer.warmup_") == [
        "--optimizer.warmup_steps",
        "--optimizer.warmup_ratio",
    ]
    assert completed("automodel-rl sft my.yaml --memory.compile ") == ["auto", "true", "false"]
    assert "--device-gib" in completed("automodel-rl plan my.yaml --de")
    assert completed("automodel-rl sft my.yaml --rollout.gro") == []
    assert "--rollout.group_size" in completed("automodel-rl verify my.yaml --rollout.gro")


def test_other_shells_have_scripts_and_wrong_names_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "zsh"]) == 0
    assert capsys.readouterr().out.startswith("autoload -U +X bashcompinit")
    assert main(["completion", "fish"]) == 0
    said = capsys.readouterr().out
    assert "-l optimizer.decay -x -a 'constant linear cosine'" in said
    assert main(["completion", "tcsh"]) == 2
    assert "completion takes a shell, one of bash, zsh, fish" in capsys.readouterr().err
