"""Damage of an exported folder is told when a run starts from it, and by verify-checkpoint."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from automodel_rl import manifest
from automodel_rl.cli import main
from automodel_rl.config import ModelConfig
from automodel_rl.errors import InputError
from automodel_rl.hf.find import find_model
from automodel_rl.manifest import MANIFEST, check_exported, write_manifest
from automodel_rl.quickstart.model import train_tokenizer
from tests.tiny import save_tiny_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_tiny_model(tmp_path / "model")
    train_tokenizer(["a b c"], 300).save_pretrained(tmp_path / "model")
    write_manifest(tmp_path / "model")
    return tmp_path / "model"


def flip(name: str, place: int) -> Callable[[Path], None]:
    """Changes one bit of a file."""

    def change(folder: Path) -> None:
        content = bytearray((folder / name).read_bytes())
        content[place] ^= 1
        (folder / name).write_bytes(content)

    return change


def cut(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-8])


WEIGHTS = "model.safetensors: differs from what was written"
DAMAGES: list[tuple[Callable[[Path], object], str]] = [
    (flip("model.safetensors", -5), WEIGHTS),
    (flip("config.json", 40), "config.json: differs from what was written"),
    (flip("tokenizer.json", 900), "tokenizer.json: differs"),
    (flip("chat_template.jinja", 9), "chat_template.jinja: differs"),
    (cut, "but was written with"),
    (lambda folder: (folder / "generation_config.json").unlink(), "generation_config.json: is missing"),
    (lambda folder: (folder / "config.json").write_text("{}\n"), "config.json: has 3 bytes but was written with"),
    (lambda folder: (folder / MANIFEST).write_text("{"), f"{MANIFEST}: damaged"),
    (lambda folder: (folder / MANIFEST).write_text('{"files": {}, "hash": "x"}'), f"{MANIFEST}: damaged"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES)
def test_damage_is_told_in_one_line(
    folder: Path, damage: Callable[[Path], object], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(folder)
    with pytest.raises(InputError) as caught:
        find_model(ModelConfig(path=str(folder)))
    assert message in str(caught.value)
    assert main(["verify-checkpoint", str(folder)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_a_whole_folder_is_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "README.md").write_text("Mine.")  # a file that came later is nobody's business
    find_model(ModelConfig(path=str(folder)))
    assert main(["verify-checkpoint", str(folder)]) == 0
    assert "intact. 6 files" in capsys.readouterr().out


def test_a_change_that_is_meant_is_allowed_without_the_manifest(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.raises(InputError, match=f"if the change is intended, remove {MANIFEST}"):
        find_model(ModelConfig(path=str(folder)))
    (folder / MANIFEST).unlink()
    find_model(ModelConfig(path=str(folder)))
    assert main(["verify-checkpoint", str(folder)]) == 2
    assert f"no {MANIFEST} to compare the files with" in capsys.readouterr().err


def test_a_start_compares_only_the_size_of_large_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "HASHED_AT_START", 1000)
    flip("model.safetensors", -5)(folder)
    check_exported(folder, whole=False)
    with pytest.raises(InputError, match=WEIGHTS):
        check_exported(folder, whole=True)


def test_names_outside_the_folder_are_refused(folder: Path) -> None:
    shutil.copy(folder / "config.json", folder.parent / "outside.json")
    values = json.loads((folder / MANIFEST).read_text())["files"]
    values = {"../outside.json": values["config.json"]}
    (folder / MANIFEST).write_text(json.dumps({"files": values, "hash": manifest.hash_values(values)}))
    with pytest.raises(InputError, match="is not a name within the folder"):
        check_exported(folder, whole=True)
