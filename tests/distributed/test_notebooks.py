"""The notebooks run from top to bottom, with fewer steps and a model of this machine's size."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.processes import run_command

FOLDER = Path(__file__).parents[2] / "configs" / "notebooks"


def script(name: str, **parameters: Any) -> str:
    """The code of a notebook's cells, with other values after the cell tagged `parameters`."""
    cells = [cell for cell in json.loads((FOLDER / name).read_text())["cells"] if cell["cell_type"] == "code"]
    assert "parameters" in cells[0]["metadata"]["tags"]
    own = "\n".join(f"{key} = {value!r}" for key, value in parameters.items())
    return "\n".join(["from pathlib import Path", "".join(cells[0]["source"]), own, *map(code, cells[1:])])


def code(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def run(text: str, folder: Path) -> str:
    done = run_command([sys.executable, "-c", text], cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "2"})
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def first_steps(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("notebooks")
    return folder, run(script("first_steps.ipynb", WARM_UP_STEPS=4, STEPS=2), folder)


def test_the_first_steps_train_and_reward(first_steps: tuple[Path, str]) -> None:
    folder, said = first_steps
    assert "mean reward on held-out problems, by step: {0: " in said
    assert "| answer: " in said
    assert (folder / "runs" / "first_steps" / "grpo" / "report.html").is_file()


def test_grpo_runs_with_a_model_of_the_first_steps(first_steps: tuple[Path, str]) -> None:
    folder, _ = first_steps
    data = folder / "runs" / "first_steps" / "data"
    parameters = {
        "MODEL": str(folder / "runs" / "first_steps" / "sft" / "final"),
        "TRAIN": {"path": str(data / "prompts.jsonl")},
        "HELD_OUT": {"path": str(data / "held_out.jsonl")},
        "GENERATOR": {"kind": "transformers"},
        "ROLLOUT": {"prompts": 4, "group_size": 4, "max_prompt_tokens": 96, "max_new_tokens": 16},
        "STEPS": 2,
        "VALIDATE_EVERY": 1,
    }
    said = run(script("grpo_on_a_gpu.ipynb", **parameters), folder)
    assert "mean reward on held-out problems, by step: {0: " in said
    assert (folder / "runs" / "grpo_notebook.yaml").is_file()
