"""A run publishes its weights: one version after every optimizer step, also after it has been resumed."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from automodel_rl.config import WeightSyncConfig
from automodel_rl.weight_sync.published import PublishedWeights, numbers_in, read_version
from automodel_rl.weight_sync.publisher import SenderFiles
from tests.distributed.trainers.runs import Settings, settings_of, train
from tests.rank_pool import RankPool


def publishing(workspace: Path, output: Path, steps: int = 3) -> Settings:
    settings = settings_of("grpo", workspace, output, parallel={"pp": 2})
    settings["weight_sync"] = {"publish": str(output.with_name("weights"))}
    settings["length"] = {"steps": steps}
    return settings


def test_every_optimizer_step_is_a_version_and_the_last_is_the_final_model(
    ranks: RankPool, workspace: Path, tmp_path: Path
) -> None:
    ranks(2).run(train, publishing(workspace, tmp_path / "run"))
    assert numbers_in(tmp_path / "weights") == [0, 2, 4, 6]  # two optimizer steps in each step
    tensors: dict[str, Tensor] = {}
    PublishedWeights(tmp_path / "weights").bring(tensors)
    final = [load_file(path) for path in (tmp_path / "run" / "final").glob("*.safetensors")]
    saved = {name: tensor for file in final for name, tensor in file.items()}
    assert saved.keys() == tensors.keys()
    assert all(torch.equal(tensors[name], saved[name].to(tensors[name].dtype)) for name in saved)


def train_on_a_full_disk(settings: Settings) -> None:
    send = SenderFiles.send

    def fails_at_first(self: SenderFiles, sender: int, number: int, slot: object) -> None:
        if self._place.name.startswith(".00000002"):
            raise OSError(28, "No space left on device")
        send(self, sender, number, slot)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SenderFiles, "send", fails_at_first)
        train(settings)


def test_a_full_disk_ends_no_run(ranks: RankPool, workspace: Path, tmp_path: Path) -> None:
    ranks(2).run(train_on_a_full_disk, publishing(workspace, tmp_path / "run"))
    assert numbers_in(tmp_path / "weights") == [0, 4, 6]
    assert [read_version(tmp_path / "weights", number).before is None for number in (0, 4, 6)] == [True, True, False]


def test_adapters_alone_are_not_published() -> None:
    with pytest.raises(ValueError, match="set adapters to merged, or leave publish out"):
        WeightSyncConfig(publish=Path("weights"), adapters="alone")
