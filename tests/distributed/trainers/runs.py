"""Small whole runs of every algorithm, and what is asked of all of them."""

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import automodel_rl
from automodel_rl.batch import Batch
from automodel_rl.cli import main
from automodel_rl.config.load import ALGORITHMS
from automodel_rl.generators.make_generator import make_generator
from automodel_rl.policy.policy import Policy

Settings = dict[str, Any]

OF_ALGORITHM: dict[str, Settings] = {
    "sft": {
        "batch": {"sequences": 8, "microbatch_tokens": 128},
        "length": {"steps": 4, "validate_every": 2},
        "optimizer": {"lr": 1e-3, "warmup_steps": 1},
    },
    "dpo": {
        "batch": {"pairs": 16, "microbatch_tokens": 208},
        "length": {"steps": 6, "validate_every": 6},
        "optimizer": {"lr": 3e-4, "decay": "constant"},
        "checkpoint": {"every_steps": None},
    },
    "distill": {
        "batch": {"sequences": 8, "microbatch_tokens": 128},
        "length": {"steps": 3},
        "optimizer": {"lr": 1e-3, "decay": "constant"},
        "checkpoint": {"every_steps": None},
    },
    "kto": {
        "batch": {"sequences": 12, "microbatch_tokens": 128},
        "length": {"steps": 2},
        "optimizer": {"lr": 1e-3, "decay": "constant"},
        "checkpoint": {"every_steps": None},
    },
    "reward": {
        "batch": {"pairs": 16, "microbatch_tokens": 208},
        "length": {"steps": 6, "validate_every": 6},
        "optimizer": {"lr": 1e-3, "decay": "constant"},
        "checkpoint": {"every_steps": None},
    },
    "grpo": {
        "batch": {"microbatch_tokens": 128, "optimizer_steps": 2},
        "rollout": {"prompts": 4, "group_size": 4, "max_prompt_tokens": 64, "max_new_tokens": 10},
        "rewards": [{"function": "tests.light_rewards:vowels"}],
        "loss": {"kl": {"coefficient": 0.05}},
        "length": {"steps": 3},
        "optimizer": {"lr": 1e-3, "decay": "constant"},
        "checkpoint": {"every_steps": None},
    },
}
OF_ALGORITHM["ppo"] = {**OF_ALGORITHM["grpo"], "loss": {}}
DATA = {
    "ppo": "_prompts",
    "kto": "_judged",
    "sft": "",
    "distill": "",
    "dpo": "_pairs",
    "reward": "_pairs",
    "grpo": "_prompts",
}


def settings_of(algorithm: str, workspace: Path, output: Path, **changes: Any) -> Settings:
    """A config of a small run, in float64 but for sft."""
    data = {name: [{"path": str(workspace / f"{file}{DATA[algorithm]}.jsonl")}] for name, file in SPLITS.items()}
    model = {"path": str(workspace / "model"), "dtype": "float32" if algorithm == "sft" else "float64"}
    observe = {"samples": 1, "sample_tokens": 4}
    common = {"algorithm": algorithm, "output": str(output), "model": model, "data": data, "observe": observe}
    return json.loads(json.dumps(common | OF_ALGORITHM[algorithm])) | changes


def add_turns(settings: Settings) -> None:
    """Lets completions of a GRPO run have several turns, which an environment answers."""
    settings["batch"]["microbatch_tokens"] = 256
    settings["rollout"] |= {
        "environment": "tests.odd_environments:Greeting",
        "max_turns": 3,
        "max_new_tokens": 8,
        "max_tokens": 60,
        "max_prompt_tokens": 96,
    }
    settings["rewards"] = [{"function": "environment"}, {"function": "tests.light_rewards:turns"}]


SPLITS = {"train": "train", "validation": "held_out"}


def train(settings: Settings, resume: str = "never") -> None:
    """A run on the ranks that call it."""
    automodel_rl.train(ALGORITHMS[settings["algorithm"]].model_validate(settings), resume)


@contextlib.contextmanager
def generators_of(kind: type) -> Iterator[None]:
    """Lets this rank's generators, which are made in the block, be of a class that extends theirs."""

    def make(*arguments: Any) -> Any:
        generator, transport = make_generator(*arguments)
        generator.__class__ = kind
        return generator, transport

    with mock.patch("automodel_rl.generators.supervisor.make_generator", make):
        yield


def metrics_of(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def num_lines(file: Path) -> int:
    return len(file.read_bytes().splitlines()) if file.is_file() else 0


def train_noting(settings: Settings, file: Path) -> None:
    """Trains, and keeps the rows of the last optimizer step."""
    own = Policy.train_step

    def noted(policy: Policy, batch: Batch, *given: Any, **options: Any) -> Any:
        torch.save(batch.sequences, file)
        return own(policy, batch, *given, **options)

    with mock.patch.object(Policy, "train_step", noted):
        train(settings)


def rollouts_of(output: Path, step: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "rollouts" / f"step_{step}.jsonl").read_text().splitlines()]


def write(settings: Settings, folder: Path) -> str:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(settings))
    return str(path)


def assert_refused(
    algorithm: str, settings: Settings, message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command ends with 2 and one line, and leaves nothing behind."""
    path = write(settings, folder)
    before = sorted(folder.rglob("*"))
    assert main([algorithm, path]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    line = lines[0]
    assert line.startswith("error: ")
    assert message in line
    assert sorted(folder.rglob("*")) == before


def assert_same_weights(one: Path, other: Path) -> None:
    """Two checkpoints hold the same tensors, bit for bit, in whatever files."""
    expected, actual = (tensors_of(folder) for folder in (one, other))
    assert expected
    assert expected.keys() == actual.keys()
    assert all(torch.equal(expected[key], actual[key]) for key in expected)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def copy_with_frequent_ends(model: Path, folder: Path, share: float = 0.15) -> None:
    """A copy of a tiny model that ends its turns more often: the end token's mean probability is about `share`."""
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    end = AutoTokenizer.from_pretrained(folder).eos_token_id
    (file,) = folder.glob("*.safetensors")
    weights = load_file(file)
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"]).clone()
    with torch.no_grad():
        ids = torch.randint(config["vocab_size"], (8, 32), generator=torch.Generator().manual_seed(0))
        policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        hidden = policy.model(ids).last_hidden_state.flatten(0, 1).double()
        logits, direction = hidden @ head.double().T, hidden.mean(0)
        low, high = 0.0, 100.0
        for _ in range(40):
            scale = (low + high) / 2
            logits[:, end] = hidden @ (scale * direction)
            low, high = (scale, high) if logits.softmax(-1)[:, end].mean() < share else (low, scale)
    head[end] = (scale * direction).to(head.dtype)
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    save_file({**weights, "lm_head.weight": head}, file, {"format": "pt"})
