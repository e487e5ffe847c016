"""What goes wrong in a sync: it is said, nobody waits longer than allowed, and the next sync mends it."""

import queue
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from automodel_rl.errors import WeightSyncError
from automodel_rl.generator_messages import Call, Failure
from automodel_rl.generators.generator_process import GeneratorProcess
from automodel_rl.weight_sync.collective import CollectiveTransport
from automodel_rl.weight_sync.generator_end import GeneratorEnd
from automodel_rl.weight_sync.ipc import IpcTransport
from automodel_rl.weight_sync.receiver import Receiver
from automodel_rl.weight_sync.sync import WeightSync
from automodel_rl.weight_sync.transport import Transport
from tests.distributed.weight_sync.generators import (
    CPU,
    empty_homes,
    make_transport,
    receiving_process,
    sync_config,
    trained_model,
)
from tests.rank_pool import RankPool
from tests.tiny import save_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_tiny_model(folder, "qwen3", dtype=torch.float32)
    return folder


def way_to_process(
    way: str, folder: Path, kind: str, handle: Any, seconds: float
) -> tuple[Transport, GeneratorProcess]:
    generator = receiving_process(folder, kind)
    if way == "ipc":
        return IpcTransport(generator, CPU, seconds), generator
    return CollectiveTransport(generator, handle, seconds), generator


def lose_a_generator(folder: Path, way: str, kind: str, seconds: float) -> tuple[str, float, list[str]]:
    """What the first sync says where the second rank's generator goes wrong, how long it took, and what a second one
    with a new generator says: checksums prove it."""
    handle, _ = trained_model(folder, {"pp": 2, "schedule": "Interleaved1F1B", "virtual_stages": 2})
    second = handle.layout.pp_rank == 1
    config = sync_config(timeout=seconds, checksum=True)
    transport, generator = way_to_process(way, folder, kind if second else "sound", handle, seconds)
    sync = WeightSync(handle, transport, config)
    started, problem = time.monotonic(), ""
    try:
        sync.send()
    except WeightSyncError as error:
        problem = str(error)
    took = time.monotonic() - started
    if second:
        generator.close()
        transport, generator = way_to_process(way, folder, "sound", handle, 60.0)
        sync.reconnect(transport)
    else:
        transport.seconds = 60.0  # type: ignore[attr-defined]
    after = []
    try:
        sync.send()
    except WeightSyncError as error:
        after.append(str(error))
    generator.close()
    return problem, took, after


@pytest.mark.parametrize(("way", "kind", "seconds"), [("collective", "dies", 60.0), ("ipc", "hangs", 4.0)])
def test_an_generator_that_is_lost_in_a_sync_is_noticed_and_replaced(
    ranks: RankPool, model: Path, way: str, kind: str, seconds: float
) -> None:
    of_ranks = ranks(2).run(lose_a_generator, model, way, kind, seconds)
    (first, took, after), (second, second_took, second_after) = of_ranks
    assert max(took, second_took) < 360.0  # a generator that hangs does so for an hour
    assert kind == "hangs" or "took longer than" not in first + second
    expected = "its process exited with code -9|the peer has disconnected" if kind == "dies" else "took longer than"
    assert any(part in second for part in [*expected.split("|"), "the sync failed in another process"])
    assert bool(first) == (way == "collective")  # generators of one broadcast fail together
    assert after == second_after == []


def sync_wrong_shape(folder: Path, way: str) -> tuple[str, bool]:
    handle, _ = trained_model(folder, {"pp": 2})
    homes = empty_homes(folder, torch.float32)
    if handle.layout.pp_rank == 1:
        homes["model.norm.weight"] = torch.full((7,), -77.0)
    return sync_of(Receiver(homes), handle, way, sync_config())


def sync_of(receiver: Receiver, handle: Any, way: str, config: Any) -> tuple[str, bool]:
    transport, _ = make_transport(way, receiver, handle, config.timeout)
    try:
        WeightSync(handle, transport, config).send()
    except WeightSyncError as error:
        return str(error), touched(receiver)
    return "", touched(receiver)


def touched(receiver: Receiver) -> bool:
    return any((home != -77.0).any().item() for home in receiver.homes.values())


def test_a_wrong_shape_on_one_side_is_refused_before_anything_is_sent(ranks: RankPool, model: Path) -> None:
    message = "the trainer sends model.norm.weight [32] float32, but the generator's is [7] float32"
    (first, first_touched), (second, second_touched) = ranks(2).run(sync_wrong_shape, model, "collective")
    assert second == message
    assert first == f"rank 1: {message}"
    assert not first_touched
    assert not second_touched
    (first, _), (second, second_touched) = ranks(2).run(sync_wrong_shape, model, "ipc")
    assert (first, second) == ("", message)
    assert not second_touched


class Slow(Receiver):
    def load(self, *bucket: Any) -> None:
        time.sleep(0.01)
        super().load(*bucket)


class Forgetful(Receiver):
    """Leaves out a bucket."""

    def load(self, sender: int, number: int, buffer: torch.Tensor) -> None:
        if number != 2:
            super().load(sender, number, buffer)


class Behind(Receiver):
    """Reports another version than it was told."""

    def commit(self, version: int) -> None:
        super().commit(version - 1)


def sync_into(folder: Path, way: str, receiver_class: type[Receiver], changes: dict[str, Any]) -> tuple[str, bool]:
    handle, _ = trained_model(folder, {"dp_shard": 2})
    return sync_of(receiver_class(empty_homes(folder, torch.float32)), handle, way, sync_config(**changes))


@pytest.mark.parametrize("way", ["local", "ipc", "collective"])
@pytest.mark.parametrize("num_buffers", [1, 4])
def test_slow_generators_and_any_number_of_buffers(ranks: RankPool, model: Path, way: str, num_buffers: int) -> None:
    changes = {"num_buffers": num_buffers, "checksum": True}
    assert [problem for problem, _ in ranks(2).run(sync_into, model, way, Slow, changes)] == ["", ""]


@pytest.mark.parametrize("way", ["local", "ipc", "collective"])
def test_checksums_notice_a_bucket_that_did_not_arrive(ranks: RankPool, model: Path, way: str) -> None:
    for problem, _ in ranks(2).run(sync_into, model, way, Forgetful, {"checksum": True}):
        assert "weight_sync.checksum: " in problem
        assert "tensors differ in the generator, the first model." in problem
    assert [problem for problem, _ in ranks(2).run(sync_into, model, way, Forgetful, {})] == ["", ""]


def test_an_generator_with_another_version_is_not_up_to_date(ranks: RankPool, model: Path) -> None:
    for problem, _ in ranks(2).run(sync_into, model, "ipc", Behind, {}):
        assert problem == "the generator reports version 0 after weight sync 1"


def sync_into_little_room(folder: Path, bytes_free: list[int]) -> tuple[str, int]:
    """What a sync says to generators with so much room, and how many buffers this rank's has."""
    handle, _ = trained_model(folder, {"pp": 2})
    receiver, config = Receiver(empty_homes(folder, torch.float32)), sync_config(num_buffers=3, checksum=True)
    transport, generator = make_transport("collective", receiver, handle, config.timeout)
    allocate_buffers = GeneratorEnd._allocate_buffers
    own = bytes_free[handle.layout.pp_rank]

    def in_little_room(end: GeneratorEnd, *size: int) -> int:
        with mock.patch("automodel_rl.weight_sync.generator_end._room", return_value=own):
            return allocate_buffers(end, *size)

    generator.end._allocate_buffers = in_little_room.__get__(generator.end)
    try:
        WeightSync(handle, transport, config).send()
    except WeightSyncError as error:
        return str(error), 0
    return "", len(generator.end.slots)


def test_generators_with_less_memory_have_fewer_buffers_and_the_same_buckets(ranks: RankPool, model: Path) -> None:
    assert ranks(2).run(sync_into_little_room, model, [100_000, 5_100]) == [("", 3), ("", 1)]
    (first, _), (second, _) = ranks(2).run(sync_into_little_room, model, [100_000, 100])
    assert second.startswith("the generator's device has no room for a buffer of 0 MiB: lower weight_sync.buffer_mib")
    assert first == f"rank 1: {second}"


def test_a_trainer_that_falls_silent_leaves_the_generator_without_weights() -> None:
    receiver = Receiver({"a": torch.zeros(1)})
    receiver.commit(3)
    answers: list[Any] = []

    class Silence(queue.Queue[Any]):
        def get(self, block: bool = True, timeout: float | None = None) -> Any:
            assert timeout == 7.0
            raise queue.Empty

    GeneratorEnd(receiver, CPU, Silence(), answers.append).handle(Call("begin", (4, 7.0)))
    (answer,) = answers
    assert answer == Failure("the trainer sent nothing for 7 s during a weight sync")
    assert receiver.version is None
