"""A small chat model with chats, pairs and prompts for whole runs."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from automodel_rl.launch.local import free_port
from automodel_rl.launch.process_group import leave_process_group
from automodel_rl.quickstart.model import train_tokenizer, write_model
from automodel_rl.quickstart.problems import as_prompt, make_problems, write_jsonl


@pytest.fixture(scope="session")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model and data."""
    folder = tmp_path_factory.mktemp("workspace")
    make_workspace(folder)
    return folder


def make_workspace(folder: Path) -> None:
    """Writes the small model and the data."""
    train, held_out = make_problems(96, 8, seed=0)
    for name, problems in {"train": train, "held_out": held_out}.items():
        write_jsonl(folder / f"{name}.jsonl", problems)
        write_jsonl(folder / f"{name}_prompts.jsonl", [as_prompt(problem) for problem in problems])
        write_jsonl(folder / f"{name}_pairs.jsonl", [as_pair(problem) for problem in problems])
        write_jsonl(folder / f"{name}_judged.jsonl", [*as_judged(problems)])
    tokenizer = train_tokenizer([m["content"] for r in train for m in r["messages"]], 300)
    write_model(folder / "model", tokenizer, seed=0, hidden_size=64)


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process is the only rank of a job, as under torchrun; its process group ends with the test."""
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}
    for name, value in {**variables, "MASTER_PORT": str(free_port())}.items():
        monkeypatch.setenv(name, value)
    yield
    leave_process_group()


def as_judged(problems: list[dict]) -> Iterator[dict]:
    """One completion of each problem: more right ones than wrong ones, and several of a kind in a row."""
    for number, pair in enumerate(map(as_pair, problems)):
        is_good = number % 3 != 2
        completion = pair["chosen" if is_good else "rejected"]
        yield {"prompt": pair["prompt"], "completion": completion, "label": is_good}


def as_pair(problem: dict) -> dict:
    """The right answer, and one that says something else at another length."""
    question, answer = problem["messages"]
    wrong = {"role": "assistant", "content": "I do not know how many. " + question["content"][:20]}
    return {"prompt": [question], "chosen": [answer], "rejected": [wrong]}
