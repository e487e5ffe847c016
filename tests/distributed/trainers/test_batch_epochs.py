"""Several passes over the completions of a step."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from automodel_rl.batch import Microbatch, unpack
from automodel_rl.config import load_config
from automodel_rl.engine import Engine
from automodel_rl.errors import InputError
from tests.distributed.trainers.runs import Settings, settings_of, train, write
from tests.rank_pool import RankPool

COMPARED = ("advantages", "old_logprobs", "ref_logprobs", "rollout_logprobs")


def watch(settings: Settings) -> tuple[list[list[dict[str, Any]]], list[float]]:
    """The sequences of every optimizer step on this rank, each with its values, and the learning rates."""
    train_step, seen, rates = Engine.train_step, [], []

    def watching(engine: Engine, microbatches: list[Microbatch], *arguments: Any) -> Any:
        sequences = []
        for microbatch in microbatches:
            columns = {name: unpack(microbatch.values[name], microbatch) for name in COMPARED}
            ids = microbatch.input_ids.split(microbatch.lengths)
            sequences += [
                {"ids": ids[n].tolist(), **{name: column[n].tolist() for name, column in columns.items()}}
                for n in range(len(microbatch.order))
            ]
        seen.append(sequences)
        output = train_step(engine, microbatches, *arguments)
        rates.append((output.lr, output.metrics["train/ratio_max"]))
        return output

    with mock.patch.object(Engine, "train_step", watching):
        train(settings)
    return seen, rates


def test_every_pass_trains_each_completion_once_in_other_company(
    ranks: RankPool, workspace: Path, tmp_path: Path
) -> None:
    settings = settings_of("grpo", workspace, tmp_path / "run", length={"steps": 1}, observe={"samples": 0})
    settings |= {"parallel": {"dp_shard": 2}, "optimizer": {"lr": 1e-3, "decay": "linear"}}
    settings["model"] |= {"dtype": "float64"}
    settings["rollout"] |= {"prompts": 8}
    settings["batch"] |= {"optimizer_steps": 2, "epochs": 3}
    settings["loss"] = {"kl": {"coefficient": 0.1}}
    of_ranks = ranks(2).run(watch, settings)
    steps = [[sequence for seen, _ in of_ranks for sequence in seen[number]] for number in range(6)]
    passes = [sorted(steps[n] + steps[n + 1], key=lambda s: (s["ids"], s["rollout_logprobs"])) for n in (0, 2, 4)]
    for again in passes[1:]:
        assert [sequence["ids"] for sequence in again] == [sequence["ids"] for sequence in passes[0]]
        for one, other in zip(passes[0], again, strict=True):
            for name in COMPARED:
                assert other[name] == pytest.approx(one[name], abs=1e-12), name
    companies = [{tuple(sequence["ids"]) for sequence in step} for step in steps]
    assert len({frozenset(companies[n]) for n in (0, 1, 2, 3, 4, 5)}) > 2
    rates, ratios = zip(*of_ranks[0][1], strict=True)
    assert rates == pytest.approx([1e-3 * (1 - n / 6) for n in range(6)])
    assert ratios[0] == pytest.approx(1, abs=1e-9)
    assert min(ratios[1:]) > 1 + 1e-9


def test_several_passes_are_not_on_policy(workspace: Path, tmp_path: Path) -> None:
    settings = settings_of("grpo", workspace, tmp_path / "run")
    settings["batch"] |= {"optimizer_steps": 1, "epochs": 2}
    config = load_config(write(settings, tmp_path))
    assert not config.is_on_policy
    settings["loss"] = {"on_policy": True}
    with pytest.raises(InputError, match="loss.on_policy=true with batch.epochs=2: later optimizer steps are off"):
        load_config(write(settings, tmp_path))
