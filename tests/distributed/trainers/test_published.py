"""A run publishes its weights: one version after every optimizer step, also after it has been resumed."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from automodel_rl.config import WeightSyncConfig
from automodel_rl.weight_sync.published import PublishedWeights, read_version
from automodel_rl.weight_sync.publisher import FileTransport
from automodel_rl.weight_sync.version_files import VersionFiles, numbers_in
from tests.distributed.trainers.runs import Settings, assert_refused, settings_of, train
from tests.keys import signing_keys
from tests.rank_pool import RankPool


def publishing(workspace: Path, output: Path, steps: int = 3) -> Settings:
    settings = settings_of("grpo", workspace, output, parallel={"pp": 2})
    settings["weight_sync"] = {"publish": str(output.with_name("weights"))}
    settings["length"] = {"steps": steps}
    return settings


def test_every_optimizer_step_is_a_version_and_the_last_is_the_final_model(
    ranks: RankPool, workspace: Path, tmp_path: Path
) -> None:
    private, public = signing_keys(tmp_path)
    settings = publishing(workspace, tmp_path / "run")
    settings["weight_sync"]["signing_key"] = str(private)
    ranks(2).run(train, settings)
    assert numbers_in(tmp_path / "weights") == [0, 2, 4, 6]  # two optimizer steps in each step
    tensors: dict[str, Tensor] = {}
    PublishedWeights(tmp_path / "weights", public).load_version(tensors)
    final = [load_file(path) for path in (tmp_path / "run" / "final").glob("*.safetensors")]
    saved = {name: tensor for file in final for name, tensor in file.items()}
    assert saved.keys() == tensors.keys()
    assert all(torch.equal(tensors[name], saved[name].to(tensors[name].dtype)) for name in saved)


def train_on_a_full_disk(settings: Settings) -> None:
    send = FileTransport.send

    def fails_at_first(self: FileTransport, sender: int, number: int, slot: object) -> None:
        if self._unfinished.name.startswith(".00000002"):
            raise OSError(28, "No space left on device")
        send(self, sender, number, slot)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileTransport, "send", fails_at_first)
        train(settings)


def test_a_full_disk_ends_no_run(ranks: RankPool, workspace: Path, tmp_path: Path) -> None:
    ranks(2).run(train_on_a_full_disk, publishing(workspace, tmp_path / "run"))
    assert numbers_in(tmp_path / "weights") == [0, 4, 6]
    files = VersionFiles(tmp_path / "weights")
    assert [read_version(files, number).base is None for number in (0, 4, 6)] == [True, True, False]


@pytest.mark.usefixtures("one_rank")
def test_a_key_that_cannot_sign_is_refused_before_the_first_step(
    workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = publishing(workspace, tmp_path / "run") | {"parallel": {}}
    settings["weight_sync"]["signing_key"] = str(tmp_path / "nowhere.pem")
    assert_refused("grpo", settings, "nowhere.pem: cannot be read", tmp_path, capsys)


def test_adapters_alone_are_not_published() -> None:
    with pytest.raises(ValueError, match="set adapters to merged, or remove publish"):
        WeightSyncConfig(publish=Path("weights"), adapters="alone")
