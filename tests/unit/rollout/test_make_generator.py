"""Which device a generator gets."""

import pytest
import torch

from automodel_rl.errors import InputError
from automodel_rl.rollout.make_generator import visible_devices


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
    with pytest.raises(InputError, match="each of the 2 ranks on a machine needs one: list 2"):
        device(monkeypatch, 0, (6,), None)


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
