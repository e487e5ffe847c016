"""Published weights are the trainer's, bit for bit, at every step, on any layout, and after failures and restarts."""

import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from automodel_rl.errors import InputError, WeightSyncError
from automodel_rl.tools.export import export
from automodel_rl.weight_sync import publisher
from automodel_rl.weight_sync.local import LocalTransport
from automodel_rl.weight_sync.published import HashedFile, PublishedWeights, folder_of, has_version, read_version
from automodel_rl.weight_sync.publisher import Publisher
from automodel_rl.weight_sync.receiver import Receiver
from automodel_rl.weight_sync.sync import WeightSync
from automodel_rl.weight_sync.version_files import VERSION_FILE, VersionFiles, numbers_in
from tests.distributed.weight_sync.generators import empty_homes, sync_config, train, trained_model
from tests.rank_pool import RankPool
from tests.tiny import save_tiny_model

FULL_VERSION_EVERY = 8


def same_bits(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def publish(
    model: Path,
    folder: Path,
    parallel: dict[str, Any],
    steps: int,
    lr: float = 1e-5,
    lora: dict[str, Any] | None = None,
) -> tuple[list[str], list[float]]:
    """Publishes after every step, next to a weight sync of all weights.

    Returns:
        Names of tensors that differ from it, for one who reads each version and one who reads every fifth, and the
        share of numbers that each version has changed.
    """
    handle, engine = trained_model(model, parallel, lora=lora, lr=lr)
    receiver = Receiver(empty_homes(model, torch.bfloat16))
    config = sync_config(dtype="bfloat16", buffer_mib=0.01)
    full = WeightSync(handle, LocalTransport(receiver, handle.layout.device), config)
    wrong, shares = list[str](), list[float]()
    always, sometimes = PublishedWeights(folder), PublishedWeights(folder)
    held: dict[str, Tensor] = {}
    held_sometimes: dict[str, Tensor] = {}
    with mock.patch.object(publisher, "FULL_VERSION_EVERY", FULL_VERSION_EVERY):
        publishing = Publisher(handle, folder, config)
        for number in range(1, steps + 1):
            publishing.publish(number)
            shares.append(publishing.changed / sum(home.numel() for home in receiver.homes.values()))
            full.send()
            readers = [(always, held), *([(sometimes, held_sometimes)] if number % 5 == 0 else [])]
            for reader, tensors in readers:
                assert reader.load_version(tensors) == number
                assert tensors.keys() == receiver.homes.keys()
                wrong += [name for name in tensors if not same_bits(tensors[name], receiver.homes[name])]
            train(handle, engine, seed=number)
    return wrong, shares


@pytest.mark.parametrize(
    ("family", "tied", "parallel", "steps"),
    [
        ("qwen3", False, {}, 100),
        ("qwen3", True, {"pp": 2}, 12),
        ("qwen3_moe", False, {"dp_shard": 2, "ep": 2}, 12),
        ("gpt_oss", False, {"dp_shard": 2}, 12),
    ],
    ids=str,
)
def test_every_version_is_what_a_whole_weight_sync_sends(
    ranks: RankPool, tmp_path: Path, family: str, tied: bool, parallel: dict[str, Any], steps: int
) -> None:
    save_tiny_model(tmp_path / "model", family, tied=tied, dtype=torch.float32)
    num_ranks = 2 if parallel else 1
    for wrong, shares in ranks(num_ranks).run(publish, tmp_path / "model", tmp_path / "weights", parallel, steps):
        assert wrong == []
        whole = [step for step, share in enumerate(shares) if share == 1]
        assert whole == list(range(0, steps, FULL_VERSION_EVERY))
        assert 0 < min(shares) < 0.5
    assert numbers_in(tmp_path / "weights")[0] == 1 + FULL_VERSION_EVERY * ((steps - 1) // FULL_VERSION_EVERY - 1)


def test_frozen_weights_are_in_whole_versions_alone(ranks: RankPool, tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model", dtype=torch.float32)
    lora = {"rank": 2, "targets": ["q_proj"]}
    ((wrong, shares),) = ranks(1).run(publish, tmp_path / "model", tmp_path / "weights", {}, 10, 1e-2, lora)
    assert wrong == []
    assert [step for step, share in enumerate(shares) if share == 1] == [0, FULL_VERSION_EVERY]
    assert max(share for share in shares if share < 1) < 0.1


def publish_with_a_reader(model: Path, folder: Path) -> tuple[list[bool], list[int]]:
    """Versions of which somebody reads one still: whether it is there at every later one, and what is there at last."""
    handle, _ = trained_model(model, {})
    is_there = []
    with mock.patch.object(publisher, "FULL_VERSION_EVERY", 4):
        publishing = Publisher(handle, folder, sync_config(dtype="bfloat16"))
        for number in range(1, 20):
            digest = publishing.publish(number)
            if number == 3:
                publishing.needed, needed = number, digest
            if number >= 3:
                is_there.append(has_version(folder, 3, needed))
        publishing.needed = None
        publishing.publish(20)
        assert not has_version(folder, 20, needed)
    return is_there, numbers_in(folder)


def test_a_version_that_is_still_read_is_kept_with_those_that_it_changes(ranks: RankPool, tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model", dtype=torch.float32)
    ((is_there, last),) = ranks(1).run(publish_with_a_reader, tmp_path / "model", tmp_path / "weights")
    assert is_there == [True] * 17
    assert last == [*range(13, 21)]


def fail_and_go_on(model: Path, folder: Path, parallel: dict[str, Any], what: str) -> list[str]:
    """Versions 1 and 2, of which the last rank cannot write the second, or only notices at its end; then 3."""
    handle, engine = trained_model(model, parallel)
    publishing = Publisher(handle, folder, sync_config(dtype="bfloat16"))
    publishing.publish(1)
    train(handle, engine, seed=1)
    problems = []
    is_last = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
    full = OSError(28, "No space left on device")
    fails = mock.patch.object(
        *((publisher, "write_block") if what == "block" else (HashedFile, "finish")),
        side_effect=full if is_last else None,
        return_value=0 if what == "block" else (0, ""),
    )
    with fails:
        try:
            publishing.publish(2)
        except WeightSyncError as error:
            problems.append(str(error))
    publishing.publish(3)
    return problems


@pytest.mark.parametrize("what", ["block", "end"])
def test_a_version_that_cannot_be_written_is_told_on_all_ranks_and_the_next_is_whole(
    ranks: RankPool, tmp_path: Path, what: str
) -> None:
    save_tiny_model(tmp_path / "model", dtype=torch.float32)
    for problems in ranks(2).run(fail_and_go_on, tmp_path / "model", tmp_path / "weights", {"pp": 2}, what):
        assert len(problems) == 1
        assert "No space left on device" in problems[0]
    assert numbers_in(tmp_path / "weights") == [1, 3]
    assert read_version(VersionFiles(tmp_path / "weights"), 3).base is None
    assert PublishedWeights(tmp_path / "weights").load_version({}) == 3


def publish_some(model: Path, folder: Path, numbers: list[int]) -> None:
    handle, engine = trained_model(model, {})
    publishing = Publisher(handle, folder, sync_config(dtype="bfloat16"))
    for number in numbers:
        publishing.publish(number)
        train(handle, engine, seed=number)


def test_a_run_that_goes_on_from_an_earlier_step_replaces_what_it_had_published(
    ranks: RankPool, tmp_path: Path
) -> None:
    save_tiny_model(tmp_path / "model", dtype=torch.float32)
    reader, tensors = PublishedWeights(tmp_path / "weights"), dict[str, Tensor]()
    ranks(1).run(publish_some, tmp_path / "model", tmp_path / "weights", [1, 2, 3, 4])
    assert reader.load_version(tensors) == 4
    ranks(1).run(publish_some, tmp_path / "model", tmp_path / "weights", [3])
    assert numbers_in(tmp_path / "weights") == [1, 2, 3]
    assert reader.load_version(tensors) == 3
    fresh: dict[str, Tensor] = {}
    PublishedWeights(tmp_path / "weights").load_version(fresh)
    assert all(same_bits(tensors[name], fresh[name]) for name in fresh)


@pytest.fixture
def weights(ranks: RankPool, tmp_path: Path) -> Path:
    """Three versions."""
    save_tiny_model(tmp_path / "model", dtype=torch.float32)
    ranks(1).run(publish_some, tmp_path / "model", tmp_path / "weights", [1, 2, 3])
    return tmp_path / "weights"


def test_damage_is_noticed_and_an_older_version_is_still_there(weights: Path) -> None:
    file = folder_of(weights, 3) / "sender_0.bin"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    reader, tensors = PublishedWeights(weights), dict[str, Tensor]()
    with pytest.raises(InputError, match=r"sender_0\.bin: is damaged"):
        reader.load_version(tensors)
    assert reader.load_version(tensors, 2) == 2
    (folder_of(weights, 3) / VERSION_FILE).write_text("{}")
    with pytest.raises(InputError, match="is not a published version"):
        reader.load_version(tensors)


def test_a_version_of_another_run_is_no_base(weights: Path, ranks: RankPool, tmp_path: Path) -> None:
    ranks(1).run(publish_some, tmp_path / "model", tmp_path / "other", [2])
    shutil.rmtree(folder_of(weights, 2))
    shutil.copytree(folder_of(tmp_path / "other", 2), folder_of(weights, 2))
    with pytest.raises(InputError, match="is not the version that 3 is based on"):
        PublishedWeights(weights).load_version({})


def test_an_empty_folder_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="contains no published version yet"):
        PublishedWeights(tmp_path).load_version({})


def test_a_version_is_exported(weights: Path, tmp_path: Path) -> None:
    version, model, out = folder_of(weights, 2), tmp_path / "model", tmp_path / "out"
    with pytest.raises(InputError, match=r"only weights: add --model\.path"):
        export(version, out)
    export(version, out, ["--model.path", str(model)])
    tensors: dict[str, Tensor] = {}
    PublishedWeights(weights).load_version(tensors, 2)
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16).state_dict()
    assert all(same_bits(loaded[name], tensor) for name, tensor in tensors.items())
    assert loaded.keys() == tensors.keys()
