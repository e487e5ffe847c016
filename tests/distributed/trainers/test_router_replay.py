"""Reinforcement learning of a mixture on the experts that its rollouts used, with generators that choose others."""

import dataclasses
import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from automodel_rl.errors import RolloutError
from automodel_rl.families.known import FAMILIES
from automodel_rl.generators.make_generator import make_generator
from automodel_rl.generators.protocol import Completion, RankGenerator
from automodel_rl.generators.transformers_generator import TransformersGenerator
from automodel_rl.mixture.router_replay import Selection
from automodel_rl.mixture.routers import routers_of
from automodel_rl.model.part_forward import numbered_layers
from automodel_rl.weight_sync.transport import Transport
from tests.distributed.trainers.runs import (
    Settings,
    assert_refused,
    copy_with_frequent_ends,
    generators_of,
    metrics_of,
    settings_of,
    train,
)
from tests.rank_pool import RankPool
from tests.tiny import save_tiny_model


@pytest.fixture(scope="session")
def mixture(workspace: Path) -> Path:
    """A mixture whose first layer is dense, with the workspace's tokenizer."""
    folder, tokenizer = workspace / "mixture", AutoTokenizer.from_pretrained(workspace / "model")
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 512, "num_experts": 8, "mlp_only_layers": [0]}
    save_tiny_model(folder, "qwen3_moe", **sizes)
    tokenizer.save_pretrained(folder)
    return folder


def values(workspace: Path, mixture: Path, output: Path, **changes: Any) -> Settings:
    settings = settings_of("grpo", workspace, output, length={"steps": 2}, router_replay={"enabled": True})
    settings["batch"]["microbatch_tokens"] = 256  # several sequences a row
    settings["weight_sync"] = {"check_every": 0}  # it would stop at the noise
    return settings | {"model": {"path": str(mixture), "dtype": "float64"}} | changes


def other_experts(live: Tensor) -> Tensor:
    """Noise in choosing: a third of the tokens go to the next experts."""
    moved = torch.rand(len(live), 1, device=live.device) < 1 / 3
    return torch.where(moved, (live + 3) % 8, live)


def noisy_generator(*arguments: Any) -> tuple[RankGenerator, Transport]:
    """This rank's generator, with noise in its routers' choices, but not in what they weigh."""
    generator, transport = make_generator(*arguments)
    assert isinstance(generator, TransformersGenerator)
    torch.manual_seed(torch.distributed.get_rank())
    family = FAMILIES[generator.model.config.model_type]
    for router in routers_of(numbered_layers(generator.model), family).values():
        router.forward = functools.partial(noisy, router.forward, router.top_k)
    return generator, transport


def noisy(inner: Callable[..., Any], top_k: int, hidden: Tensor) -> Any:
    with Selection(other_experts, torch.Size((hidden.numel() // hidden.shape[-1], top_k)), 8):
        return inner(hidden)


def train_noisily(settings: Settings) -> None:
    with mock.patch("automodel_rl.generators.supervisor.make_generator", noisy_generator):
        train(settings)


def test_log_probabilities_are_the_generators_with_replay_alone(
    ranks: RankPool, workspace: Path, mixture: Path, tmp_path: Path
) -> None:
    parallel = {"pp": 2, "schedule": "Interleaved1F1B", "virtual_stages": 2, "cp": 2, "ep": 2}
    replay = {"enabled": True, "compare": True}
    settings = values(workspace, mixture, tmp_path / "run", parallel=parallel, router_replay=replay)
    ranks(4).run(train_noisily, settings)
    for row in metrics_of(tmp_path / "run"):
        assert row["train/logprob_error"] == pytest.approx(1, abs=1e-5)
        assert row["train/logprob_error_live"] > 1.01
        assert row["rollout/routes_missing"] == 0
        layers = [row[f"replay/differs_layer_{number}"] for number in (1, 2, 3)]
        assert all(0.1 < share < 0.6 for share in layers)
        assert row["replay/differs"] == pytest.approx(sum(layers) / 3)
        assert "replay/differs_layer_0" not in row
        assert row["train/grad_norm"] > 0


def test_a_pipeline_with_replay_follows_one_process(
    ranks: RankPool, workspace: Path, mixture: Path, tmp_path: Path
) -> None:
    """The reference stays with its own choices, unless it is asked to follow."""
    rows = {}
    for name, parallel, stages in (
        ("one", {}, ("old_logprobs", "train")),
        ("two", {"pp": 2}, ("old_logprobs", "train")),
        ("reference, too", {}, ("old_logprobs", "ref_logprobs", "train")),
    ):
        replay = {"enabled": True, "stages": stages}
        settings = values(workspace, mixture, tmp_path / name, parallel=parallel, router_replay=replay)
        settings["batch"] = {"microbatch_tokens": 256}
        ranks(2 if parallel else 1).run(train_on_tokens_noise, settings)
        rows[name] = metrics_of(tmp_path / name)
    for one, two in zip(rows["one"], rows["two"], strict=True):
        for name in ("train/loss", "train/grad_norm", "train/kl_ref", "replay/differs"):
            assert two[name] == pytest.approx(one[name], rel=1e-8, abs=1e-12), name
    assert rows["one"][0]["train/kl_ref"] > 1e-4
    assert rows["reference, too"][0]["train/kl_ref"] == pytest.approx(0, abs=1e-12)


def train_on_tokens_noise(settings: Settings) -> None:
    """Noise that hangs on the tokens, so that it is the same for any number of generators."""

    def by_token(live: Tensor) -> Tensor:
        return torch.where((live.sum(1, keepdim=True) % 3) == 0, (live + 3) % 8, live)

    with mock.patch(f"{__name__}.other_experts", by_token):
        train_noisily(settings)


def of_turns(workspace: Path, mixture: Path, folder: Path, **rollout: Any) -> Settings:
    """A run of several turns on four ranks, with a model that often ends them."""
    copy_with_frequent_ends(mixture, folder / "ending")
    replay = {"enabled": True, "compare": True}
    settings = values(workspace, folder / "ending", folder / "run", router_replay=replay)
    settings["parallel"] = {"pp": 2, "ep": 2, "dp_shard": 2}
    settings["rollout"] |= {"max_tokens": 80, "max_prompt_tokens": 96, **rollout}
    return settings


def test_conversations_follow_the_experts_of_each_turn(
    ranks: RankPool, workspace: Path, mixture: Path, tmp_path: Path
) -> None:
    settings = of_turns(workspace, mixture, tmp_path, environment="tests.odd_environments:Greeting", max_turns=3)
    ranks(4).run(train_on_tokens_noise, settings)
    for row in metrics_of(tmp_path / "run"):
        assert row["train/logprob_error"] == pytest.approx(1, abs=1e-5)
        assert row["train/logprob_error_live"] > 1.01
        assert row["rollout/routes_missing"] == 0
        assert row["rollout/turns_mean"] > 1


def test_branches_of_agents_follow_the_experts_of_the_turns_that_they_share(
    ranks: RankPool, workspace: Path, mixture: Path, tmp_path: Path
) -> None:
    settings = of_turns(workspace, mixture, tmp_path, agent="tests.odd_agents:branching", max_turns=8)
    settings["rewards"] = [{"function": "environment"}]
    ranks(4).run(train_on_tokens_noise, settings)
    for row in metrics_of(tmp_path / "run"):
        assert row["train/logprob_error"] == pytest.approx(1, abs=1e-5)
        assert row["train/logprob_error_live"] > 1.01
        assert row["rollout/routes_missing"] == 0
        assert row["rollout/siblings"] > 0


def test_ranks_whose_generators_wrote_nothing_still_train(
    ranks: RankPool, workspace: Path, mixture: Path, tmp_path: Path
) -> None:
    settings = values(
        workspace, mixture, tmp_path / "run", parallel={"pp": 2, "cp": 2}, batch={"microbatch_tokens": 256}
    )
    settings |= {"rollout": {**settings["rollout"], "prompts": 1, "group_size": 2}, "filter": {"dynamic": True}}
    ranks(4).run(train, settings)
    for row in metrics_of(tmp_path / "run"):
        assert row["train/logprob_error"] == pytest.approx(1, abs=1e-5)


def test_routes_of_batches_that_generators_in_processes_wrote_ahead_are_followed(
    ranks: RankPool, workspace: Path, mixture: Path, tmp_path: Path
) -> None:
    settings = values(workspace, mixture, tmp_path / "run", parallel={"pp": 2}, length={"steps": 3})
    settings["rollout"] |= {"generator": {"kind": "transformers", "place": "shared"}, "max_staleness": 1}
    settings["loss"] = {"correction": {"kind": "truncate"}}
    ranks(2).run(train, settings)
    first, *others = metrics_of(tmp_path / "run")
    assert first["train/logprob_error"] == pytest.approx(1, abs=1e-5)
    assert max(row["rollout/staleness_max"] for row in others) == 1
    assert all(row["rollout/routes_missing"] == 0 and row["replay/differs"] > 0 for row in others)


class Damaging(TransformersGenerator):
    """Damages routes on ranks from `first` on, in the way that `damage` says."""

    damage: Callable[[Any], Any]
    first: int

    def generate(
        self, *arguments: Any, on_finished: Callable[[int, Completion], None], **more: Any
    ) -> list[Completion]:
        def damaged(place: int, completion: Completion) -> None:
            if torch.distributed.get_rank() >= type(self).first:
                completion = dataclasses.replace(completion, routes=type(self).damage(completion.routes))
            on_finished(place, completion)

        return super().generate(*arguments, on_finished=damaged, **more)


def run_damaged(settings: Settings, damage: Callable[[Any], Any], first: int = 0) -> str:
    """How training ends if the routes of generators from rank `first` on are damaged."""
    Damaging.damage, Damaging.first = staticmethod(damage), first
    try:
        with generators_of(Damaging):
            train(settings)
    except RolloutError as error:
        return str(error)
    return ""


def none(routes: Any) -> Any:
    return [None] * len(routes)


def one_row_less(routes: Any) -> Any:
    return routes[:-1]


def first_twice(routes: Any) -> Any:
    routes[2, 1, 1] = routes[2, 1, 0]
    return routes


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (none, "of its expert choices are missing .router_replay.on_missing=error"),
        (one_row_less, "one each, or one less"),
        (first_twice, r"routes of layer 2, row 2: experts \[(\d), \1\]; a token's experts must differ"),
    ],
)
def test_routes_that_cannot_be_followed_end_the_run_on_every_rank(
    ranks: RankPool, workspace: Path, mixture: Path, tmp_path: Path, damage: Callable[[Any], Any], message: str
) -> None:
    settings = values(workspace, mixture, tmp_path / "run", parallel={"pp": 2})
    ends = ranks(2).run(run_damaged, settings, damage)
    assert ends[0] == ends[1]
    assert ends[0].startswith("no group has two completions with rewards: others failed or got none; first error: ")
    assert re.search(message, ends[0])


def test_completions_whose_routes_cannot_be_followed_leave_their_groups(
    ranks: RankPool, workspace: Path, mixture: Path, tmp_path: Path
) -> None:
    settings = values(workspace, mixture, tmp_path / "run", parallel={"pp": 2})
    assert ranks(2).run(run_damaged, settings, one_row_less, 1) == ["", ""]
    for row in metrics_of(tmp_path / "run"):
        assert row["rollout/failed"] == 8
        assert row["train/logprob_error"] == pytest.approx(1, abs=1e-5)


def test_tokens_without_a_route_may_choose_by_themselves(
    ranks: RankPool, workspace: Path, mixture: Path, tmp_path: Path
) -> None:
    replay = {"enabled": True, "on_missing": "live"}
    settings = values(workspace, mixture, tmp_path / "run", parallel={"dp_shard": 2}, router_replay=replay)
    assert ranks(2).run(run_damaged, settings, none, 1) == ["", ""]
    for row in metrics_of(tmp_path / "run"):
        assert 0.3 < row["rollout/routes_missing"] < 0.7
        assert row["train/logprob_error"] == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"router_replay": {"enabled": True, "stages": ["old_logprobs"]}}, "lack train"),
        (
            {"router_replay": {"enabled": True, "stages": ["train"]}, "loss": {"on_policy": False}},
            "lack old_logprobs, so ratios would compare",
        ),
        ({"router_replay": {"compare": True}}, "has nothing to compare"),
        ({"router_replay": {"enabled": True, "compare": True}, "loss": {"on_policy": True}}, "no old log-prob"),
        ({"router_replay": {"enabled": True, "on_missing": "skip"}}, "router_replay.on_missing"),
        ({}, "a 'qwen3' model has no routers"),
    ],
    ids=str,
)
def test_what_cannot_be_replayed_is_refused(
    workspace: Path,
    mixture: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changes: dict,
    message: str,
) -> None:
    settings = values(workspace, mixture, tmp_path / "run", batch={"microbatch_tokens": 256}, **changes)
    if not changes:
        settings["model"]["path"] = str(workspace / "model")
    assert_refused("grpo", json.loads(json.dumps(settings)), message, tmp_path, capsys)
