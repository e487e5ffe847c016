"""The table of saved weights: which are the newest, which may be deleted, and which a server can compute with."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from automodel_rl.config import LoraConfig
from automodel_rl.errors import InputError
from automodel_rl.serve import saved_weights
from automodel_rl.serve.messages import RunShape
from automodel_rl.serve.saved_weights import ABOUT, Saved, SavedWeights, about

NOTHING = SimpleNamespace(ttl_seconds=None, overwrite=True, user_metadata=None)


def table_of(folder: Path, lora: LoraConfig | None = None, base: str = "Qwen/Qwen3-0.6B") -> SavedWeights:
    return SavedWeights(folder, 2**20, lora or LoraConfig(rank=8), base)


def save(table: SavedWeights, name: str, kind: str = "weights", rank: int = 8, seconds: float | None = None) -> Saved:
    body = SimpleNamespace(ttl_seconds=seconds, overwrite=True, user_metadata=None)
    saved = table.new("run", kind, name, RunShape(rank, first=4), body)  # type: ignore[arg-type]
    saved.folder.mkdir(parents=True)
    (saved.folder / ABOUT).write_text(json.dumps(about(saved)))
    table.add(saved)
    return saved


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that tests move."""
    clock = SimpleNamespace(now=1000.0, time=lambda: clock.now)
    monkeypatch.setattr(saved_weights, "time", clock)
    return clock


def test_the_newest_weights_are_those_that_were_saved_last(tmp_path: Path, clock: SimpleNamespace) -> None:
    table = table_of(tmp_path)
    for name in ("b", "c", "a"):
        clock.now += 1
        save(table, name)
    clock.now += 1
    save(table, "d", "sampler_weights")  # it cannot be trained on
    assert table.newest("another") is None
    for one in (table, table_of(tmp_path)):  # a server that is started again finds them, too
        newest = one.newest("run")
        assert newest is not None
        assert (newest.path, newest.created, newest.run) == ("tinker://run/weights/a", 1003.0, "run")
        assert len(one) == 4
    clock.now += 1
    before = table["tinker://run/weights/b"]
    saved = save(table, "b")
    assert table.newest("run") == saved
    assert not table.is_current(before)
    assert table.is_current(saved)


def test_weights_with_a_time_to_live_expire_after_it_and_others_never(tmp_path: Path, clock: SimpleNamespace) -> None:
    table = table_of(tmp_path)
    for name, seconds in (("short", 5.0), ("long", 50.0), ("ever", None)):
        save(table, name, seconds=seconds)
    expired = []
    for clock.now in (1000.0, 1004.0, 1006.0, 1049.0, 1051.0, 1e9):
        expired.append([path.rpartition("/")[2] for path in table.expired])
    assert expired == [[], [], ["short"], ["short"], ["short", "long"], ["short", "long"]]


@pytest.mark.parametrize(
    ("lora", "base", "message"),
    [
        (LoraConfig(rank=8), "Qwen/Qwen3-0.6B", None),
        (LoraConfig(rank=16), "Qwen/Qwen3-0.6B", None),
        (LoraConfig(rank=8), "Qwen/Qwen3-4B", "belongs to base=Qwen/Qwen3-0.6B, and this server has Qwen/Qwen3-4B"),
        (LoraConfig(rank=8, alpha=3.0), "Qwen/Qwen3-0.6B", "belongs to alpha="),
        (LoraConfig(rank=4), "Qwen/Qwen3-0.6B", "has adapters of rank 8, and this server's model.lora.rank is 4"),
    ],
    ids=["the same", "a larger rank", "another model", "another alpha", "a smaller rank"],
)
def test_weights_are_used_with_the_model_and_settings_that_they_belong_to(
    tmp_path: Path, lora: LoraConfig, base: str, message: str | None
) -> None:
    saved = save(table_of(tmp_path), "a")
    table = table_of(tmp_path, lora, base)
    if message is None:
        assert table.usable(saved.path).folder == saved.folder
        return
    with pytest.raises(InputError, match=message):
        table.usable(saved.path)
