"""The probe of generators' weights: it says nothing of right ones, and stops a run whose generator keeps old ones."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from automodel_rl.errors import RolloutError
from automodel_rl.generators import weight_probe
from automodel_rl.generators.supervisor import GeneratorSupervisor
from automodel_rl.generators.transformers_generator import TransformersGenerator
from automodel_rl.trainers.run import Run
from tests.distributed.trainers.runs import Settings, metrics_of, settings_of, train
from tests.rank_pool import RankPool

LAYOUTS = [{}, {"pp": 2}, {"dp_shard": 2}, {"tp": 2}]

STALE = ["embed_tokens", "layers.0.self_attn.q_norm", "layers.1.mlp.down_proj", "model.norm"]
"""Parts of names of weights that a generator keeps."""


def probed(workspace: Path, output: Path, **changes: Any) -> Settings:
    settings = settings_of("grpo", workspace, output, **changes)
    settings["weight_sync"] = {"check_every": 1, **changes.get("weight_sync", {})}
    settings["loss"] = {}
    settings["length"] = {"steps": 2}
    return settings


@contextmanager
def stale_weights(name: str, from_version: int) -> Iterator[None]:
    """The generator on the last rank keeps weights, by a part of their names, as they were before a weight sync."""
    send = GeneratorSupervisor._send

    def send_but_one(self: GeneratorSupervisor) -> None:
        weights = dict(self.generator.model.named_parameters()) if _is_last(self) else {}
        kept = {key: weight.detach().clone() for key, weight in weights.items() if name in key}
        send(self)
        for key, weight in kept.items() if self.sync.version >= from_version else ():
            weights[key].data.copy_(weight)

    def _is_last(self: GeneratorSupervisor) -> bool:
        return (
            isinstance(self.generator, TransformersGenerator) and torch.distributed.get_rank() == self.world.size() - 1
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GeneratorSupervisor, "_send", send_but_one)
        yield


def train_with_a_stale_weight(settings: Settings, name: str, from_version: int) -> str:
    with stale_weights(name, from_version), pytest.raises(RolloutError) as caught:
        train(settings)
    return str(caught.value)


@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
def test_right_weights_pass(ranks: RankPool, workspace: Path, tmp_path: Path, sizes: dict) -> None:
    settings = probed(workspace, tmp_path / "run", parallel=sizes)
    ranks(2 if sizes else 1).run(train, settings)
    plain = settings | {"output": str(tmp_path / "plain"), "weight_sync": {"check_every": 0}}
    ranks(2 if sizes else 1).run(train, plain)
    losses = [[record["train/loss"] for record in metrics_of(tmp_path / name)] for name in ("run", "plain")]
    assert losses[0] == losses[1]


def test_right_weights_pass_with_adapters_and_in_another_process(
    ranks: RankPool, workspace: Path, tmp_path: Path
) -> None:
    settings = probed(workspace, tmp_path / "run", weight_sync={"adapters": "alone"})
    settings["model"]["lora"] = {"rank": 4}
    settings["rollout"]["generator"] = {"kind": "transformers", "place": "shared"}
    ranks(1).run(train, settings)


def train_without_tolerances(settings: Settings) -> list[str]:
    """What the run says of the probe."""
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_probe, "TOLERANCES", dict.fromkeys(weight_probe.TOLERANCES, 1e-12))
        patch.setattr(Run, "say", lambda self, text: said.append(text))
        train(settings)
    return [text for text in said if "weight_sync.check_every" in text]


@pytest.mark.parametrize("sizes", [{"pp": 2}, {"tp": 2}], ids=str)
def test_noise_explains_more_than_what_is_known_of_other_models(
    ranks: RankPool, workspace: Path, tmp_path: Path, sizes: dict
) -> None:
    settings = probed(workspace, tmp_path / "run", parallel=sizes)
    settings["model"]["dtype"] = "bfloat16"
    assert ranks(2).run(train_without_tolerances, settings) == [[], []]
    assert len(metrics_of(tmp_path / "run")) == 2


def train_where_rounding_explains_everything(settings: Settings) -> list[str]:
    with pytest.MonkeyPatch.context() as patch, stale_weights("", 0):
        patch.setattr(weight_probe, "AS_NOISE", 1e6)
        return train_without_tolerances(settings)


def test_a_run_says_once_that_the_probe_cannot_tell(ranks: RankPool, workspace: Path, tmp_path: Path) -> None:
    """A generator that keeps all of its weights differs by as much as other weights make."""
    settings = probed(workspace, tmp_path / "run")
    settings["model"]["dtype"] = "bfloat16"
    ((said,),) = ranks(1).run(train_where_rounding_explains_everything, settings)
    assert "cannot tell whether generators use the weights that they received" in said


@pytest.mark.parametrize("name", STALE)
def test_a_weight_that_stays_as_in_the_checkpoint_stops_the_run_before_its_first_step(
    ranks: RankPool, workspace: Path, tmp_path: Path, name: str
) -> None:
    settings = probed(workspace, tmp_path / "run", parallel={"dp_shard": 2})
    for message in ranks(2).run(train_with_a_stale_weight, settings, name, 0):
        assert message.startswith("the generator of rank 1 does not compute with the weights that it received: ")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_weight_that_stays_later_stops_the_run_in_the_next_step(
    ranks: RankPool, workspace: Path, tmp_path: Path
) -> None:
    settings = probed(workspace, tmp_path / "run")
    (message,) = ranks(1).run(train_with_a_stale_weight, settings, "embed_tokens", 3)
    assert "does not compute with the weights that it received" in message
    assert len(metrics_of(tmp_path / "run")) == 1
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_1"]
