"""Loading of global batches: what is in them, and where loading goes on."""

import json
import multiprocessing
import os
import signal
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from automodel_rl.config import DataConfig, SourceConfig
from automodel_rl.config.data import CommonBatchConfig
from automodel_rl.data.chat import ChatTokenizer
from automodel_rl.data.examples import ChatDataset
from automodel_rl.data.loader import ExampleLoader, LoadedStep
from automodel_rl.data.sampler import Order
from automodel_rl.errors import InputError
from automodel_rl.hf.tokenizer import load_tokenizer
from automodel_rl.quickstart.model import train_tokenizer
from automodel_rl.quickstart.problems import make_problems
from automodel_rl.trainers.left_out import LeftOut


@pytest.fixture(name="folder", scope="module")
def make_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    records, _ = make_problems(50, 0, seed=0)
    records[0]["messages"][1]["content"] *= 9  # longer than a microbatch
    (folder / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    train_tokenizer([m["content"] for r in records for m in r["messages"]], 300).save_pretrained(folder)
    return folder


def loader_of(folder: Path, overlong: str = "truncate", num_workers: int = 0) -> ExampleLoader:
    source = SourceConfig(path=str(folder / "data.jsonl"))
    chat = ChatTokenizer(load_tokenizer(folder, 10_000), "all")
    data = DataConfig.model_validate({"train": [source], "overlong": overlong})
    dataset = ChatDataset((source,), chat, CommonBatchConfig(microbatch_tokens=128), None, data)
    return ExampleLoader(dataset, 16, Order(1, epochs=1), num_workers)


def ids_of(steps: list[LoadedStep]) -> list[list[list[int]]]:
    return [[sequence.input_ids.tolist() for sequence in step.batch.sequences] for step in steps]


@pytest.mark.parametrize(("overlong", "rows", "cut", "dropped"), [("truncate", 50, 1, 0), ("drop", 49, 0, 1)])
def test_an_epoch_has_every_record_once(folder: Path, overlong: str, rows: int, cut: int, dropped: int) -> None:
    steps = [*loader_of(folder, overlong)]
    assert [len(step.batch) for step in steps][-1] == 2
    assert sum(len(step.batch) for step in steps) == rows
    assert len({draw for step in steps for draw in step.draws}) == rows
    assert (sum(step.num_truncated for step in steps), sum(step.num_dropped for step in steps)) == (cut, dropped)
    assert any("data.jsonl:1 has" in step.too_long for step in steps)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_loading_goes_on_between_two_steps(folder: Path, num_workers: int) -> None:
    expected = ids_of([*loader_of(folder)])
    stopped = loader_of(folder, num_workers=num_workers)
    assert ids_of([*islice(stopped, 2)]) == expected[:2]
    resumed = loader_of(folder, num_workers=2 - num_workers)
    resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
    assert ids_of([*resumed]) == expected[2:]


def test_processes_that_tokenise_outlive_signals_to_stop(folder: Path) -> None:
    expected = ids_of([*loader_of(folder)])
    steps = iter(loader_of(folder, num_workers=1))
    found = [next(steps)]
    for child in multiprocessing.active_children():
        os.kill(child.pid or 0, signal.SIGTERM)
    assert ids_of([*found, *steps]) == expected


def loader_of_lines(folder: Path, lines: list[dict[str, Any]], **data: Any) -> ExampleLoader:
    """A loader of one record a step, in their order."""
    path = folder / "lines.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    source = SourceConfig(path=str(path))
    config = DataConfig.model_validate({"train": [source]} | data)
    chat = ChatTokenizer(load_tokenizer(folder, 10_000), "all")
    dataset = ChatDataset((source,), chat, CommonBatchConfig(microbatch_tokens=128), None, config)
    return ExampleLoader(dataset, 1, Order(None, epochs=1))


LONG, SHORT, BAD = {"text": "word " * 500}, {"text": "word"}, {"text": "caf\udce9"}


def test_a_step_whose_examples_are_all_left_out_has_no_rows(folder: Path) -> None:
    loader = loader_of_lines(folder, [SHORT, LONG, BAD, SHORT], overlong="drop", on_bad_record="drop")
    loader.dataset.check_fit()
    steps = [*loader]
    found = [(len(step.batch), step.num_dropped, step.num_refused) for step in steps]
    assert found == [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 0)]
    said: list[str] = []
    left_out = LeftOut(said.append)
    left_out.note_held_out(steps)
    assert left_out.held_out == {"val/num_truncated": 0, "val/num_dropped": 1, "val/num_bad_records": 1}
    assert [line.partition("lines.jsonl:")[2][0] for line in said] == ["2", "3"]
    assert all("of the validation data" in line for line in said)


def test_a_record_that_is_refused_ends_loading_unless_it_may_be_left_out(folder: Path) -> None:
    with pytest.raises(InputError, match=r"lines.jsonl:2: .*lone surrogate"):
        [*loader_of_lines(folder, [SHORT, BAD])]


@pytest.mark.parametrize(("line", "reason"), [(LONG, "none of the 2 records has a trained token"), (BAD, "lone surr")])
def test_data_of_which_nothing_can_be_trained_are_refused(folder: Path, line: dict[str, Any], reason: str) -> None:
    loader = loader_of_lines(folder, [line] * 2, overlong="drop", on_bad_record="drop")
    with pytest.raises(InputError, match=reason):
        loader.dataset.check_fit()
