"""Processes of generators see the devices of their ranks, or their own."""

import pytest

from automodel_rl.errors import InputError
from automodel_rl.generators.visible_devices import visible_devices


def device(
    monkeypatch: pytest.MonkeyPatch, local_rank: int, devices: tuple[int, ...], visible: str | None
) -> str | None:
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    return visible_devices(devices, local_rank)


def test_devices_of_their_own_are_dealt_to_the_ranks_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [device(monkeypatch, rank, (6, 7), None) for rank in (0, 1)] == ["6", "7"]
    assert [device(monkeypatch, rank, (2, 3), "4,5,6,7") for rank in (0, 1)] == ["6", "7"]
    with pytest.raises(InputError, match="ranks see 4 devices .CUDA_VISIBLE_DEVICES=4,5,6,7.*numbered 0 to 3"):
        device(monkeypatch, 0, (6, 7), "4,5,6,7")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert visible_devices((3, 4, 5, 6), 1, 2) == "5,6"


def test_a_generator_shares_the_device_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [device(monkeypatch, rank, (), None) for rank in (0, 1)] == ["0", "1"]
    assert [device(monkeypatch, rank, (), "4,5") for rank in (0, 1)] == ["4", "5"]
    for none in ("", "-1", "0"):  # ranks on CPUs
        assert device(monkeypatch, 1, (), none) == none


@pytest.mark.parametrize(("visible", "expected"), [(None, "2,3"), ("7,6,5,4", "5,4")])
def test_a_generator_that_is_split_has_the_devices_of_its_ranks_in_their_order(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, expected: str
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert visible_devices((), 2, 2) == expected
