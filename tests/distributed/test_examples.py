"""The examples of public names and of the pages run, and give what they say."""

import contextlib
import doctest
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import automodel_rl
from tests.distributed.trainers.runs import settings_of
from tests.pages import PACKAGE, ROOT, public_methods
from tests.rank_pool import RankPool
from tests.tiny import save_tiny_model


def failures(name: str, checkpoint: str, folder: Path) -> str:
    """What goes wrong with the examples of a public name and its methods; run where a user would run them."""
    names = {public: getattr(automodel_rl, public) for public in automodel_rl.__all__} | {"checkpoint": checkpoint}
    thing = names[name]
    things = [thing, *(method for _, method in public_methods(thing))] if isinstance(thing, type) else [thing]
    report: list[str] = []
    runner = doctest.DocTestRunner(verbose=False)
    for number, documented in enumerate(things):
        test = doctest.DocTestParser().get_doctest(documented.__doc__ or "", dict(names), f"{name}-{number}", name, 0)
        with contextlib.chdir(folder if "my_" in (documented.__doc__ or "") else ROOT):
            runner.run(test, out=report.append)
    assert runner.tries, f"{name} has no example"
    return "".join(report)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("examples") / "checkpoint"
    save_tiny_model(folder)
    return folder


@pytest.mark.parametrize("name", automodel_rl.__all__)
def test_examples_of_public_names(
    ranks: RankPool, workspace: Path, checkpoint: Path, tmp_path: Path, name: str
) -> None:
    for algorithm in ("sft", "dpo", "grpo"):
        settings = settings_of(algorithm, workspace, tmp_path / algorithm, length={"steps": 1})
        if algorithm == "grpo":  # one that is found from any folder
            settings["rewards"] = [{"function": "length", "options": {"longest": 3}}]
        (tmp_path / f"my_{algorithm}.yaml").write_text(yaml.safe_dump(settings))
    assert ranks(1).run(failures, name, str(checkpoint), tmp_path) == [""]


def run_script(script: str, folder: Path) -> dict[str, Any]:
    os.chdir(folder)
    names: dict[str, Any] = {}
    exec(compile(script, "losses/README.md", "exec"), names)
    return {"num_tokens": names["out"].num_tokens, "logprobs": [tensor.shape[0] for tensor in names["logprobs"]]}


def test_the_script_of_the_page_on_losses(ranks: RankPool, tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "path-or-hub-id")
    page = (PACKAGE / "losses" / "README.md").read_text()
    (script,) = re.findall(r"```python\n(import torch\n.*?)```", page, re.DOTALL)
    for result in ranks(2).run(run_script, script, tmp_path):
        assert result == {"num_tokens": 4, "logprobs": [3, 4]}
    assert (tmp_path / "out" / "config.json").is_file()
