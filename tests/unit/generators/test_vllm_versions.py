"""Versions of vLLM: which were tested, and whether the one that is installed is as this package uses it."""

from pathlib import Path

import pytest

from automodel_rl.generators.vllm_versions import untested
from tests.versions import vllm_contract
from tests.versions.vllm_contract import ROOMS, Sources, problems_of
from tests.vllm_environment import FOLDER, needs_vllm


@pytest.mark.parametrize("version", ["0.23.0", "0.28.1", "0.33.0rc1", "0.32.0+cpu"])
def test_tested_versions_need_no_warning(version: str) -> None:
    assert untested(version) == ""


@pytest.mark.parametrize("version", ["0.22.1", "0.34.0", "1.0.0", "dev"])
def test_others_are_told_which_were_tested(version: str) -> None:
    expected = f"warning: automodel_rl was not tested with vLLM {version}, only with 0.23 to 0.33"
    assert untested(version) == expected


@pytest.fixture(name="installed", scope="module")
def read_installed() -> Sources:
    (package,) = FOLDER.glob("lib/python*/site-packages/vllm")
    files = {str(path.relative_to(package.parent)): path for path in package.rglob("*.py")}
    wanted = {name: path for name, path in files.items() if name.removeprefix("vllm/").startswith(ROOMS)}
    return Sources({name: path.read_text() for name, path in wanted.items()})


@needs_vllm
def test_the_installed_version_is_as_it_is_used(installed: Sources) -> None:
    assert list(problems_of(installed)) == []


@needs_vllm
def test_what_is_not_there_would_be_noticed(
    installed: Sources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tmp_path / "engine.py"
    engine.write_text(vllm_contract.ENGINE.read_text().replace("def finish_weight_update", "def end_weight_update"))
    monkeypatch.setattr(vllm_contract, "ENGINE", engine)
    monkeypatch.setitem(vllm_contract.METHODS, "LLM", {"start_weight_update": {"nothing"}, "begin": set()})
    monkeypatch.setitem(vllm_contract.FIELDS, "SamplingParams", {"seed", "luck"})
    monkeypatch.setattr(vllm_contract, "ROUTES", {"/pause", "/rest"})
    assert list(problems_of(installed)) == [
        "LLM.start_weight_update has no nothing",
        "LLM has no begin",
        "SamplingParams has no luck",
        "WeightTransferEngine.finish_weight_update is abstract",
        "no route /rest",
    ]
