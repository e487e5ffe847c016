"""Generators of reinforcement learning: those that die, that are in their own process, that are ahead of training."""

import dataclasses
import os
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from automodel_rl.config.generator_spec import GeneratorSpec
from automodel_rl.config.generators import TransformersGeneratorConfig
from automodel_rl.errors import InputError, RolloutError
from automodel_rl.generator_messages import Request
from automodel_rl.generators.fleet_rank import FleetRank
from automodel_rl.generators.generator_ranks import GeneratorRanks, NoGenerator
from automodel_rl.generators.make_generator import make_generator
from automodel_rl.generators.protocol import Completion, RankGenerator
from automodel_rl.generators.transformers_generator import TransformersGenerator
from automodel_rl.rollout.rollouts import Rollouts
from automodel_rl.weight_sync.receiver import Receiver
from automodel_rl.weight_sync.transport import Transport
from tests.distributed.trainers.runs import (
    Settings,
    assert_same_weights,
    metrics_of,
    rollouts_of,
    settings_of,
    train,
)
from tests.rank_pool import RankPool


def values(workspace: Path, output: Path, **changes: Any) -> Settings:
    return settings_of("grpo", workspace, output, **changes)


class FlakyReceiver(Receiver):
    """Loses the weights it gets in a first sync after `loads`."""

    loads = -1

    def begin(self) -> None:
        super().begin()
        FlakyReceiver.loads -= 1

    def load(self, *bucket: Any) -> None:
        super().load(*bucket)
        if FlakyReceiver.loads == 0:
            raise ConnectionError("the generator is gone")


class Flaky(TransformersGenerator):
    """Works as often as `works` says, dies as often as `left` says, and then works. It counts what it has written."""

    works = left = 0
    written = 0

    def generate(self, requests: Sequence[Request], *hooks: Any, **more: Any) -> list[Completion]:
        if requests and Flaky.works:
            Flaky.works -= 1
        elif requests and Flaky.left:
            Flaky.left -= 1
            raise ConnectionError("the generator is gone")
        Flaky.written += len(requests)
        return super().generate(requests, *hooks, **more)


def run_flaky(settings: Settings, failures: int, loads: int = -1, works: int = 0) -> tuple[str, int]:
    """How training ends when the generator fails so often at its third batch, and how many were made anew. In that
    batch it works so often before it fails."""
    Flaky.written = Flaky.left = Flaky.works = made = calls = 0
    write = FleetRank.write

    def make(*arguments: Any) -> tuple[RankGenerator, Transport]:
        nonlocal made
        made += 1
        generator, transport = make_generator(*arguments)
        generator.__class__ = Flaky
        generator.receiver.__class__ = FlakyReceiver
        return generator, transport

    FlakyReceiver.loads = loads
    with mock.patch("automodel_rl.generators.supervisor.make_generator", make):

        def counting(*arguments: Any) -> None:
            nonlocal calls
            calls += 1
            if calls == 3:
                Flaky.left, Flaky.works = failures, works
            write(*arguments)

        try:
            with mock.patch.object(FleetRank, "write", counting):
                train(settings | {"weight_sync": {"check_every": 0}})
        except RolloutError as error:
            return str(error), made - 1
        return "", made - 1


def test_a_generator_that_dies_is_started_again(ranks: RankPool, workspace: Path, tmp_path: Path) -> None:
    settings = values(workspace, tmp_path / "steady", length={"steps": 4}, parallel={"dp_shard": 2})
    ranks(2).run(train, settings)
    for name, failures, loads, restarts in (("generating", 2, -1, 2), ("loading weights", 0, 3, 1)):
        # The trainer's weights wait on the host during rollouts, so they come back for the sync to the new one.
        flaky = settings | {"output": str(tmp_path / name), "memory": {"offload": {}}}
        assert ranks(2).run(run_flaky, flaky, failures, loads) == [("", restarts), ("", restarts)]
        for one, two in zip(metrics_of(tmp_path / name), metrics_of(tmp_path / "steady"), strict=True):
            assert one["train/loss"] == two["train/loss"]
            assert "time/wake_s" in one
            assert "time/wake_s" not in two
        assert_same_weights(tmp_path / name / "final", tmp_path / "steady" / "final")


def run_flaky_on(settings: Settings, failures: Sequence[int], works: Sequence[int]) -> tuple[str, int, int]:
    """Trains with generators that fail so often on each rank, as `run_flaky`. Also says how many completions were
    written."""
    rank = int(os.environ["RANK"])
    message, made = run_flaky(settings, failures[rank], works=works[rank])
    return message, made, Flaky.written


def test_the_others_write_what_a_dead_generator_was_to_write(ranks: RankPool, workspace: Path, tmp_path: Path) -> None:
    settings = values(workspace, tmp_path / "steady", length={"steps": 4}, parallel={"dp_shard": 2})
    (*_, first), (*_, second) = ranks(2).run(run_flaky_on, settings, (0, 0), (0, 0))
    settings |= {"output": str(tmp_path / "flaky")}
    share = settings["rollout"]["prompts"] * settings["rollout"]["group_size"] // 2
    of_ranks = ranks(2).run(run_flaky_on, settings, (0, 1), (0, 0))
    assert of_ranks == [("", 0, first + share), ("", 1, second - share)]
    assert_same_weights(tmp_path / "flaky" / "final", tmp_path / "steady" / "final")
    # The other one writes its own share, and dies twice at the lost one. That is dealt back, and nothing else.
    settings |= {"output": str(tmp_path / "both")}
    assert ranks(2).run(run_flaky_on, settings, (2, 1), (1, 0)) == [("", 2, first), ("", 1, second)]
    assert_same_weights(tmp_path / "both" / "final", tmp_path / "steady" / "final")


def run_with_one_that_does_not_come_back(settings: Settings) -> int:
    """Trains; the generator of rank 1 dies at its third batch, and no other one starts. How often one was to."""
    made = calls = 0
    write = FleetRank.write

    def make(*arguments: Any) -> tuple[RankGenerator, Transport]:
        nonlocal made
        made += 1
        if made > 1:
            raise InputError("its device is broken")
        generator, transport = make_generator(*arguments)
        generator.__class__ = Flaky
        return generator, transport

    def counting(*arguments: Any) -> None:
        nonlocal calls
        calls += 1
        Flaky.left = int(calls == 3 and os.environ["RANK"] == "1")
        write(*arguments)

    Flaky.works = 0
    with (
        mock.patch("automodel_rl.generators.supervisor.make_generator", make),
        mock.patch.object(FleetRank, "write", counting),
    ):
        train(settings | {"weight_sync": {"check_every": 0}})
    return made - 1


def test_a_generator_that_does_not_come_back_is_left_out_while_others_write(
    ranks: RankPool, workspace: Path, tmp_path: Path
) -> None:
    settings = values(workspace, tmp_path / "steady", length={"steps": 4}, parallel={"dp_shard": 2})
    ranks(2).run(train, settings)
    settings |= {"output": str(tmp_path / "left out")}
    restarts = ranks(2).run(run_with_one_that_does_not_come_back, settings)
    assert restarts[0] == 0
    assert restarts[1] >= 4  # retries of the last two steps
    assert_same_weights(tmp_path / "left out" / "final", tmp_path / "steady" / "final")
    assert [row.get("rollout/lost_generators", 0) for row in metrics_of(tmp_path / "left out")] == [0, 0, 1, 1]


def run_split(settings: Settings) -> int:
    """Trains with a generator that two ranks share, which fails at first. The completions that this rank wrote."""

    def make(
        spec: GeneratorSpec, handle: Any, tokenizer: Any, ranks: GeneratorRanks, *others: Any
    ) -> tuple[RankGenerator, Transport]:
        within = dataclasses.replace(spec, choice=TransformersGeneratorConfig())
        generator, transport = make_generator(within, handle, tokenizer, ranks, *others)
        generator.__class__ = Flaky
        return (generator if ranks.is_leader else NoGenerator()), transport

    Flaky.left, Flaky.written = 1, 0
    with mock.patch("automodel_rl.generators.supervisor.make_generator", make):
        train(settings)
    return Flaky.written


@pytest.mark.parametrize(
    "changes",
    [
        {
            "rollout": {"generator": {"kind": "vllm", "tensor_parallel": 2}},
            "memory": {"offload": {}},
        },  # one on the devices of both
        {"rollout": {"generator": {"kind": "vllm", "place": [1, 2], "tensor_parallel": 2}}},  # on its own
    ],
    ids=str,
)
def test_ranks_that_share_a_generator_leave_the_writing_to_the_first(
    ranks: RankPool, workspace: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    settings = values(workspace, tmp_path / "own", length={"steps": 2, "validate_every": 2}, parallel={"dp_shard": 2})
    ranks(2).run(train, settings)
    rollout = settings["rollout"] | changes["rollout"]
    shared = settings | changes | {"output": str(tmp_path / "shared"), "rollout": rollout}
    written, none = ranks(2).run(run_split, shared)
    assert written >= 2 * settings["rollout"]["prompts"] * settings["rollout"]["group_size"]
    assert none == 0
    assert_same_weights(tmp_path / "shared" / "final", tmp_path / "own" / "final")
    assert [row["val/reward_mean"] for row in metrics_of(tmp_path / "shared") if "val/reward_mean" in row] == [
        row["val/reward_mean"] for row in metrics_of(tmp_path / "own") if "val/reward_mean" in row
    ]


def test_a_generator_that_stays_dead_ends_the_run_with_nothing_lost(
    ranks: RankPool, workspace: Path, tmp_path: Path
) -> None:
    settings = values(workspace, tmp_path / "run", length={"steps": 4})
    ((message, _),) = ranks(1).run(run_flaky, settings, 99)
    assert message == "the generator of rank 0 failed 3 times: ConnectionError: the generator is gone"
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_2"]
    ranks(1).run(train, settings, "auto")
    ranks(1).run(train, settings | {"output": str(tmp_path / "steady")})
    resumed, steady = metrics_of(tmp_path / "run"), metrics_of(tmp_path / "steady")
    assert [row["train/loss"] for row in resumed] == [row["train/loss"] for row in steady]


def test_a_generator_that_dies_in_validation_loses_no_step(ranks: RankPool, workspace: Path, tmp_path: Path) -> None:
    length = {"steps": 2, "validate_every": 1}  # asked for a baseline, for the first step, and to validate it
    ((message, _),) = ranks(1).run(run_flaky, values(workspace, tmp_path / "run", length=length), 99)
    assert "failed 3 times" in message
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_1"]
    ranks(1).run(train, values(workspace, tmp_path / "run", length=length), "auto")
    rows = metrics_of(tmp_path / "run")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all("train/loss" in row for row in rows[1:])


PLACES: dict[str, dict[str, Any]] = {
    "shared memory": {"place": "shared"},
    "gloo": {"place": [0, 1]},
}


def test_it_does_not_matter_in_which_process_the_generator_is(ranks: RankPool, workspace: Path, tmp_path: Path) -> None:
    settings = values(workspace, tmp_path / "same", length={"steps": 3}, parallel={"pp": 2})
    ranks(2).run(train, settings)
    for place, on in PLACES.items():
        own = settings | {"output": str(tmp_path / place), "weight_sync": {"checksum": True, "buffer_mib": 0.02}}
        own["rollout"] = {**settings["rollout"], "generator": {"kind": "transformers", **on}}
        ranks(2).run(train, own)
        assert_same_weights(tmp_path / place / "final", tmp_path / "same" / "final")
        for row in metrics_of(tmp_path / place):
            assert row["rollout/staleness_max"] == 0


def let_generators_be_ahead(settings: Settings, max_staleness: int) -> None:
    settings["rollout"] |= {"generator": {"kind": "transformers", "place": "shared"}, "max_staleness": max_staleness}
    settings["loss"] |= {"correction": {"kind": "truncate"}}


def test_generators_ahead_of_training_write_with_weights_of_limited_age(
    ranks: RankPool, workspace: Path, tmp_path: Path
) -> None:
    settings = values(workspace, tmp_path / "run", length={"steps": 5}, parallel={"dp_shard": 2})
    let_generators_be_ahead(settings, 2)
    ranks(2).run(train, settings)
    rows = metrics_of(tmp_path / "run")
    ages = [row["rollout/staleness_max"] for row in rows]
    assert ages[0] == 0
    assert 1 <= max(ages) <= 2
    assert max(row["train/logprob_error"] for row in rows) > 1.01 > rows[0]["train/logprob_error"]
    prompts = [record["prompt"] for step in range(1, 6) for record in rollouts_of(tmp_path / "run", step)]
    assert len(set(prompts)) > 16


def test_a_run_with_generators_ahead_goes_on_with_the_prompts_it_had_not_trained_on(
    ranks: RankPool, workspace: Path, tmp_path: Path
) -> None:
    settings = values(workspace, tmp_path / "run", length={"steps": 4}, checkpoint={"every_steps": 1, "keep_last": 9})
    let_generators_be_ahead(settings, 1)
    ranks(1).run(train, settings)
    before = [[record["prompt"] for record in rollouts_of(tmp_path / "run", step)] for step in (3, 4)]
    shutil.rmtree(tmp_path / "run" / "final")
    for step in (3, 4):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step_{step}")
        (tmp_path / "run" / "rollouts" / f"step_{step}.jsonl").unlink()
    ranks(1).run(train, settings, "auto")
    assert [[record["prompt"] for record in rollouts_of(tmp_path / "run", step)] for step in (3, 4)] == before
    assert [row["step"] for row in metrics_of(tmp_path / "run")] == [1, 2, 3, 4]


def run_with_a_death(settings: Settings) -> int:
    """Kills the first rank's generator while it is ahead; how many generators this rank has started."""
    generators: list[Any] = []

    def make(*arguments: Any) -> tuple[RankGenerator, Transport]:
        generator, transport = make_generator(*arguments)
        generators.append(generator)
        return generator, transport

    with mock.patch("automodel_rl.generators.supervisor.make_generator", make):
        take, calls = Rollouts.take, 0

        def killing(self: Any, *arguments: Any) -> Any:  # called on the first rank alone
            nonlocal calls
            calls += 1
            if calls == 3:
                os.kill(generators[-1].child.process.pid, signal.SIGKILL)
            return take(self, *arguments)

        with mock.patch.object(Rollouts, "take", killing):
            train(settings)
    return len(generators)


def test_a_generator_that_dies_ahead_of_training_does_not_make_the_others_completions_older(
    ranks: RankPool, workspace: Path, tmp_path: Path
) -> None:
    settings = values(workspace, tmp_path / "run", length={"steps": 5}, parallel={"dp_shard": 2})
    let_generators_be_ahead(settings, 1)
    settings["weight_sync"] = {"checksum": True}
    assert ranks(2).run(run_with_a_death, settings) == [2, 1]
    ages = [row["rollout/staleness_max"] for row in metrics_of(tmp_path / "run")]
    assert max(ages) <= 1


def run_with_one_that_does_not_start(settings: Settings) -> str:
    def make(*arguments: Any) -> tuple[RankGenerator, Transport]:
        if os.environ["RANK"] == "1":
            raise InputError("rollout.generator: not on this machine")
        return make_generator(*arguments)

    with mock.patch("automodel_rl.generators.supervisor.make_generator", make), pytest.raises(InputError) as error:
        train(settings)
    return str(error.value)


def test_a_generator_that_does_not_start_on_one_rank_ends_all_with_its_cause(
    ranks: RankPool, workspace: Path, tmp_path: Path
) -> None:
    settings = values(workspace, tmp_path / "run", parallel={"dp_shard": 2})
    said = ranks(2).run(run_with_one_that_does_not_start, settings)
    assert said == ["rollout.generator: not on this machine"] * 2
    assert not (tmp_path / "run").exists()
