"""Distillation end to end: exact divergences on every layout, several teachers, and what can be wrong."""

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from automodel_rl.config.load import ALGORITHMS
from automodel_rl.data.chat import open_chat_tokenizer
from automodel_rl.data.examples import ChatDataset
from automodel_rl.hf.opened_model import OpenedModel
from tests.distributed.trainers.runs import Settings, assert_refused, metrics_of, settings_of, train
from tests.rank_pool import RankPool
from tests.tiny import save_lively

LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "pp": {"pp": 2},
    "tp": {"tp": 2},
    "cp": {"cp": 2},
    "three data ranks": {"dp_shard": 3},
    "dp and tp": {"dp_shard": 2, "tp": 2},
}
TEMPERATURE = 1.3
LOSSES: dict[str, Settings] = {
    "the whole vocabulary": {"divergence": "jsd", "beta": 0.3, "top_k": 100_000},
    "the teacher's likeliest": {"divergence": "forward_kl", "top_k": 7, "scaled_likelihood": 0.5},
    "the student's likeliest": {"divergence": "reverse_kl", "top_k": 5, "tokens_of": "student"},
}


@pytest.fixture(name="teacher", scope="module")
def make_teacher(workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of another architecture with the tokenizer of the small one."""
    folder = tmp_path_factory.mktemp("teacher") / "model"
    vocab_size = AutoConfig.from_pretrained(workspace / "model").vocab_size
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model("llama", vocab_size=vocab_size, num_key_value_heads=2, **sizes)
    save_lively(AutoModelForCausalLM.from_config(config), folder, torch.float64, plain_norms=True)
    AutoTokenizer.from_pretrained(workspace / "model").save_pretrained(folder)
    return folder


def values(workspace: Path, output: Path, teacher: Path, **changes: Any) -> Settings:
    settings = settings_of("distill", workspace, output, teachers={"large": {"path": str(teacher)}})
    settings["data"] |= {"shuffle": False}
    return settings | changes


def rows_of(settings: Settings) -> list[tuple[Tensor, Tensor]]:
    """Token ids and masks of the chats of the first steps."""
    config = ALGORITHMS["distill"].model_validate(settings)
    chat = open_chat_tokenizer(config, OpenedModel.open(config.model))
    dataset = ChatDataset(config.data.train, chat, config.batch, None, config.data)
    sequences = [dataset[(0, number)].sequences[0] for number in range(24)]
    return [(sequence.input_ids, sequence.loss_mask) for sequence in sequences]


def divergence(student: Tensor, teacher: Tensor, targets: Tensor, loss: Settings) -> Tensor:
    """The loss of each place, written out over the whole vocabulary, [n]."""
    p, q = ((logits / TEMPERATURE).softmax(1) for logits in (student, teacher))
    if loss["divergence"] == "jsd":
        m = 0.3 * q + 0.7 * p
        return 0.3 * (q * (q / m).log()).sum(1) + 0.7 * (p * (p / m).log()).sum(1)
    first = p if loss.get("tokens_of") == "student" else q
    ids = first.detach().topk(loss["top_k"]).indices
    p_k, q_k = (torch.cat([of.gather(1, ids), 1 - of.gather(1, ids).sum(1, keepdim=True)], 1) for of in (p, q))
    if loss["divergence"] == "reverse_kl":
        return (p_k * (p_k / q_k).log()).sum(1)
    return (q_k * (q_k / p_k).log()).sum(1) - loss["scaled_likelihood"] * p.gather(1, targets[:, None])[:, 0].log()


def by_transformers(settings: Settings, teacher: Path) -> list[float]:
    """Losses and gradient norms of the same steps by transformers and torch, one sequence at a time."""
    student = AutoModelForCausalLM.from_pretrained(settings["model"]["path"], dtype=torch.float64)
    other = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float64)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    rows, found = rows_of(settings), []
    for step in range(3):
        of_step = rows[8 * step : 8 * step + 8]
        total = torch.zeros((), dtype=torch.float64)
        for ids, mask in of_step:
            with torch.no_grad():
                theirs = other(ids[None]).logits[0, :-1]
            of_row = divergence(student(ids[None]).logits[0, :-1], theirs, ids[1:], settings["loss"])
            total = total + of_row[mask[1:]].sum()
        loss = total / sum(int(mask[1:].sum()) for _, mask in of_step)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        found += [loss.item(), norm.item()]
    return found


@pytest.fixture(name="expected", scope="module")
def make_expected(ranks: RankPool, workspace: Path, teacher: Path) -> Callable[[str], list[float]]:
    @functools.cache
    def of(name: str) -> list[float]:
        settings = values(workspace, Path("none"), teacher, loss={"temperature": TEMPERATURE, **LOSSES[name]})
        found: list[float] = ranks(1).run(by_transformers, settings, teacher)[0]
        return found

    return of


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("loss", LOSSES)
def test_a_student_learns_as_by_transformers(
    ranks: RankPool,
    workspace: Path,
    tmp_path: Path,
    teacher: Path,
    expected: Callable[[str], list[float]],
    loss: str,
    layout: str,
) -> None:
    sizes, world_size = LAYOUTS[layout], 1
    for size in sizes.values():
        world_size *= size
    settings = values(workspace, tmp_path / "run", teacher, loss={"temperature": TEMPERATURE, **LOSSES[loss]})
    ranks(world_size).run(train, settings | {"parallel": sizes})
    found = [row[f"train/{name}"] for row in metrics_of(tmp_path / "run") for name in ("loss", "grad_norm")]
    assert found == pytest.approx(expected(loss), rel=1e-7)


def test_a_model_is_its_own_perfect_teacher(ranks: RankPool, workspace: Path, tmp_path: Path) -> None:
    settings = values(workspace, tmp_path / "run", workspace / "model", length={"steps": 1})
    settings["teachers"]["large"]["between"] = "host"
    ranks(2).run(train, settings | {"parallel": {"dp_shard": 2}})
    (row,) = metrics_of(tmp_path / "run")
    assert row["train/loss"] == pytest.approx(0, abs=1e-12)
    assert row["train/grad_norm"] == pytest.approx(0, abs=1e-10)
    assert 0 < row["train/teacher_mass"] <= 1


def test_each_source_has_its_own_teacher(ranks: RankPool, workspace: Path, tmp_path: Path, teacher: Path) -> None:
    data = [str(tmp_path / f"{name}.jsonl") for name in ("one", "two")]
    lines = (workspace / "train.jsonl").read_text().splitlines(keepends=True)
    for path, own in zip(data, (lines[:8], lines[8:16]), strict=True):
        Path(path).write_text("".join(own))
    settings = values(workspace, tmp_path / "run", teacher, length={"steps": 2})
    settings["data"] = {"train": [{"path": path} for path in data], "validation": [{"path": data[0]}]}
    settings["teachers"] = {
        "own": {"path": str(workspace / "model"), "sources": [data[0]]},
        "large": {"path": str(teacher)},
    }
    settings["batch"]["sequences"] = 16
    settings["optimizer"]["lr"] = 1e-12
    ranks(1).run(train, settings)
    (first, last) = metrics_of(tmp_path / "run")
    assert last["val/loss"] == pytest.approx(0, abs=1e-8)  # the source whose teacher is the student itself
    assert first["train/loss"] > 0.01


def test_a_small_student_comes_close_to_its_teacher(ranks: RankPool, workspace: Path, tmp_path: Path) -> None:
    sft = settings_of("sft", workspace, tmp_path / "teacher", length={"steps": 60, "validate_every": 60})
    sft["optimizer"] = {"lr": 1e-2, "warmup_steps": 5}
    ranks(1).run(train, sft)
    (of_teacher,) = [row["val/loss"] for row in metrics_of(tmp_path / "teacher") if "val/loss" in row]
    settings = values(workspace, tmp_path / "student", tmp_path / "teacher" / "final", length={"steps": 150})
    settings["model"]["dtype"] = "float32"
    settings["optimizer"] = {"lr": 1e-2, "warmup_steps": 5}
    settings["batch"] = {"sequences": 16, "microbatch_tokens": 512}
    settings["loss"] = {"scaled_likelihood": 0.0}
    ranks(1).run(train, settings)
    evaluated = settings_of("sft", workspace, tmp_path / "evaluated", length={"steps": 1, "validate_every": 1})
    evaluated["model"]["path"] = str(tmp_path / "student" / "final")
    evaluated["optimizer"] = {"lr": 1e-12}
    ranks(1).run(train, evaluated)
    (row,) = metrics_of(tmp_path / "evaluated")
    assert row["val/loss"] < 1.02 * of_teacher


def other_tokens(settings: Settings, folder: Path) -> None:
    """A teacher whose tokenizer has two tokens the other way round."""
    teacher = folder / "other"
    shutil.copytree(settings["model"]["path"], teacher)
    file = teacher / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocab = tokenizer["model"]["vocab"]
    first, second = [*vocab][-2:]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    file.write_text(json.dumps(tokenizer))
    settings["teachers"]["large"]["path"] = str(teacher)


BAD: list[tuple[Callable[[Settings, Path], None], str]] = [
    (other_tokens, "teachers.large: its tokenizer differs from the trained model's"),
    (lambda s, f: s["teachers"]["large"].update(path=str(f / "none")), "teachers.large: model.path="),
    (lambda s, _: s.update(teachers={}), "teachers: "),
    (
        lambda s, _: s["teachers"]["large"].update(sources=["else.jsonl"]),
        "else.jsonl is not the path of a source in data",
    ),
    (
        lambda s, _: s["teachers"]["large"].update(sources=[s["data"]["validation"][0]["path"]]),
        "no teacher teaches it",
    ),
    (lambda s, _: s.update(loss={"divergence": "reverse_kl", "outside": "drop"}), "outside=drop with divergence"),
    (lambda s, _: s.update(loss={"beta": 0.2}), "beta=0.2 is for jsd and mixed, not forward_kl"),
]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("change", "message"), BAD, ids=[message[:40] for _, message in BAD])
def test_bad_input_is_one_line_and_writes_nothing(
    workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Callable, message: str
) -> None:
    settings = values(workspace, tmp_path / "run", workspace / "model")
    change(settings, tmp_path)
    assert_refused("distill", settings, message, tmp_path, capsys)
