"""Which device a generator gets."""

import pytest
import torch

from automodel_rl.config import WeightSyncConfig
from automodel_rl.config.generator_spec import GeneratorSpec
from automodel_rl.config.generators import VllmGeneratorConfig
from automodel_rl.errors import InputError
from automodel_rl.generators import engine_ranks
from automodel_rl.generators.engine_ranks import EngineRanks
from automodel_rl.generators.make_generator import _check_devices, visible_devices, with_asked


def device(
    monkeypatch: pytest.MonkeyPatch, local_rank: int, devices: tuple[int, ...], visible: str | None
) -> str | None:
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    return visible_devices(devices, torch.device("cuda", local_rank))


def test_devices_of_their_own_are_dealt_to_the_ranks_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [device(monkeypatch, rank, (6, 7), None) for rank in (0, 1)] == ["6", "7"]
    assert [device(monkeypatch, rank, (2, 3), "4,5,6,7") for rank in (0, 1)] == ["6", "7"]
    with pytest.raises(InputError, match="ranks see 4 devices .CUDA_VISIBLE_DEVICES=4,5,6,7.*numbers are 0 to 3"):
        device(monkeypatch, 0, (6, 7), "4,5,6,7")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    with pytest.raises(InputError, match="each of the 2 ranks on a machine needs one: list 2"):
        _check_devices((6,))
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert visible_devices((3, 4, 5, 6), torch.device("cuda", 1), 2) == "5,6"


@pytest.mark.parametrize(
    ("devices", "size", "leaders"), [((4,), 1, (0, 4)), ((4, 5), 1, (0, 1, 4, 5)), ((4, 5, 6, 7), 2, (0, 1, 4, 5))]
)
def test_the_first_ranks_of_each_machine_lead_a_vllm_on_devices_of_its_own(
    monkeypatch: pytest.MonkeyPatch, devices: tuple[int, ...], size: int, leaders: tuple[int, ...]
) -> None:
    monkeypatch.setattr(engine_ranks.dist, "get_world_size", lambda: 8)
    monkeypatch.setattr(engine_ranks.dist, "get_rank", lambda: 5)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    spec = GeneratorSpec(VllmGeneratorConfig(place=devices, tensor_parallel=size), 8, WeightSyncConfig())
    ranks = EngineRanks.join(spec)
    assert (ranks.leaders, ranks.size, ranks.group) == (leaders, size, None)
    assert ranks.leads == (5 in leaders)


@pytest.mark.parametrize(("devices", "size"), [((4, 5, 6, 7, 8, 9), 2), ((4, 5, 6), 1)])
def test_devices_that_no_rank_could_use_are_refused(
    monkeypatch: pytest.MonkeyPatch, devices: tuple[int, ...], size: int
) -> None:
    monkeypatch.setattr(engine_ranks.dist, "get_world_size", lambda: 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    spec = GeneratorSpec(VllmGeneratorConfig(place=devices, tensor_parallel=size), 8, WeightSyncConfig())
    with pytest.raises(
        InputError, match=f"one of the 2 ranks on a machine leads it: list {size} for each of at most 2"
    ):
        EngineRanks.join(spec)


def test_a_generator_shares_the_device_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [device(monkeypatch, rank, (), None) for rank in (0, 1)] == ["0", "1"]
    assert [device(monkeypatch, rank, (), "4,5") for rank in (0, 1)] == ["4", "5"]


@pytest.mark.parametrize(("visible", "expected"), [(None, "2,3"), ("7,6,5,4", "5,4")])
def test_a_generator_that_is_split_has_the_devices_of_its_ranks_in_their_order(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, expected: str
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert visible_devices((), torch.device("cuda", 2), 2) == expected


def test_tokens_that_the_run_asks_for_join_those_of_the_model() -> None:
    assert with_asked({2, 7}, (3,), 8) == (2, 3, 7)
    with pytest.raises(InputError, match=r"rollout.stop_token_ids=\[1, 8\]: .* has 8 tokens, .* leave 8 out"):
        with_asked({2}, (1, 8), 8)
