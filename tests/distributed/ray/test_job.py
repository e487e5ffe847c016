"""Runs on a Ray cluster of two nodes: the numbers of our own launcher, and what a node that dies leaves."""

import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tinker import types

from automodel_rl.cli import main
from automodel_rl.ray.job import _restart_arguments
from tests.distributed.trainers.runs import assert_same_weights, metrics_of, settings_of, write
from tests.fleet_chaos import alone_settings, check_undisturbed, joined_settings
from tests.processes import Job, run_command
from tests.ray_nodes import RayNodes
from tests.services import Service, datum, of_loss, write_model


@pytest.fixture(name="nodes", scope="module")
def make_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayNodes]:
    with RayNodes(tmp_path_factory.mktemp("nodes")) as nodes:
        yield nodes


def command(algorithm: str, config: str, *options: str) -> list[str]:
    return [sys.executable, "-m", "automodel_rl", algorithm, config, *options]


def on_ray(nodes: RayNodes) -> list[str]:
    return ["--launch.ray.address", nodes.address, "--launch.ray.ranks_per_node", "1"]


def numbers(output: Path) -> list[dict[str, float]]:
    """The metrics of a run that do not depend on time."""
    timed = ("time/", "perf/", "memory/", "rollout/environment_seconds")
    return [{key: value for key, value in one.items() if not key.startswith(timed)} for one in metrics_of(output)]


def test_grpo_on_two_nodes_has_the_numbers_of_our_own_launcher(
    nodes: RayNodes, workspace: Path, tmp_path: Path
) -> None:
    settings = settings_of("grpo", workspace, tmp_path / "run", parallel={"pp": 2})
    config = write(settings, tmp_path)
    assert run_command(command("grpo", config)).returncode == 0
    (tmp_path / "run").rename(tmp_path / "local")
    ran = run_command(command("grpo", config, *on_ray(nodes)))
    assert ran.returncode == 0, ran.stderr
    assert "starting 2 ranks, 1 on each of 2 nodes" in ran.stdout
    assert f"step {settings['length']['steps']}/" in ran.stdout, "the driver shows what rank 0 prints"
    assert numbers(tmp_path / "run") == numbers(tmp_path / "local")
    assert_same_weights(tmp_path / "local" / "final", tmp_path / "run" / "final")


def test_generators_that_the_cluster_starts_join_a_run(nodes: RayNodes, workspace: Path, tmp_path: Path) -> None:
    alone = alone_settings(workspace, tmp_path / "alone", steps=3)
    assert run_command(command("grpo", write(alone, tmp_path))).returncode == 0
    config = write(joined_settings(workspace, tmp_path / "run", steps=3), tmp_path)
    ran = run_command(command("grpo", config, *on_ray(nodes), "--launch.ray.generators", "2"))
    assert ran.returncode == 0, ran.stderr
    assert "joined generator 0 has joined" in ran.stdout
    check_undisturbed(tmp_path / "run", tmp_path / "alone")


def test_verify_runs_on_the_nodes(nodes: RayNodes, workspace: Path, tmp_path: Path) -> None:
    config = write(settings_of("sft", workspace, tmp_path / "run", parallel={"pp": 2}), tmp_path)
    ran = run_command(command("verify", config, "--launcher", "ray", *on_ray(nodes)))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "starting 2 ranks, 1 on each of 2 nodes" in ran.stdout
    assert "small qwen3, 4 layers, pp 2, float64" in ran.stdout


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # of the client's connections
def test_a_service_on_two_nodes_goes_on_from_saved_weights_when_a_node_is_gone(nodes: RayNodes, tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    cluster = {"ray": {"address": nodes.address, "ranks_per_node": 1}}
    with Service(tmp_path, tmp_path / "model", launch=cluster) as service:
        assert "starting 2 ranks, 1 on each of 2 nodes" in service.job.stdout
        run = service.run()
        data = [of_loss(datum(8, seed), "weights") for seed in range(2)]
        run.forward_backward(data, "cross_entropy").result()
        run.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        state = run.save_state("one").result().path
        (before,) = losses_of(run, data)
        nodes.order("remove")
        assert service.job.wait_until(lambda: "the ranks have exited; restarting them" in service.job.stdout)
        nodes.order("add")
        assert service.job.wait_until(lambda: service.job.stdout.count("starting 2 ranks") == 2)
        again = service.client().create_training_client_from_state(state).result()
        assert losses_of(again, data) == pytest.approx([before], rel=1e-9)


def losses_of(run: Any, data: list[types.Datum]) -> list[float]:
    return [run.forward(data, "cross_entropy").result().metrics["loss:sum"]]


def test_sft_that_loses_a_node_has_the_numbers_of_an_undisturbed_run_of_our_own_launcher(
    nodes: RayNodes, workspace: Path, tmp_path: Path
) -> None:
    settings = settings_of("sft", workspace, tmp_path / "run", parallel={"pp": 2})
    settings |= {"length": {"steps": 40, "validate_every": None}, "checkpoint": {"every_steps": 2}}
    config = write(settings, tmp_path)
    assert run_command(command("sft", config)).returncode == 0
    (tmp_path / "run").rename(tmp_path / "undisturbed")
    with Job(command("sft", config, *on_ray(nodes))) as job:
        assert job.wait_until((tmp_path / "run" / "checkpoints" / "step_4").is_dir), job.stderr
        nodes.order("remove")
        assert job.wait_until(lambda: "restarting from step_" in job.stdout), job.stdout + job.stderr
        nodes.order("add")
        assert job.finish() == 0, job.stderr
        assert "was lost: Ray cannot reach the node or its agent" in job.stderr
    assert numbers(tmp_path / "run") == numbers(tmp_path / "undisturbed")
    assert_same_weights(tmp_path / "undisturbed" / "final", tmp_path / "run" / "final")


def test_ctrl_c_saves_and_stops(nodes: RayNodes, workspace: Path, tmp_path: Path) -> None:
    settings = settings_of("sft", workspace, tmp_path / "run", parallel={"pp": 2})
    settings |= {"length": {"steps": 400, "validate_every": None}, "checkpoint": {"every_steps": None}}
    with Job(command("sft", write(settings, tmp_path), *on_ray(nodes))) as job:
        assert job.wait_until(lambda: "step 2/400" in job.stdout), job.stderr
        job.process.send_signal(signal.SIGINT)
        assert job.finish() == 1, job.stderr
        assert "restarting" not in job.stdout
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()]


def test_a_run_that_is_started_again_goes_on_in_its_own_way() -> None:
    given = ["sft", "a.yaml", "--resume", "old/step_5", "--max-minutes=30", "--length.steps", "9"]
    rest = ["sft", "a.yaml", "--length.steps", "9"]
    assert _restart_arguments(given, False, 10) == [*rest, "--resume", "old/step_5", "--max-minutes", "20.00"]
    assert _restart_arguments(given, True, 40) == [*rest, "--resume", "auto", "--max-minutes", "0.10"]
    assert _restart_arguments(rest, False, 1) == [*rest, "--resume", "auto"]


@pytest.mark.longer
def test_a_failure_that_comes_again_ends_the_run(nodes: RayNodes, workspace: Path, tmp_path: Path) -> None:
    settings = settings_of("sft", workspace, tmp_path / "run", parallel={"pp": 2})
    settings |= {"loss_function": "tests.distributed.ray.failing_loss:fail"}
    options = [*on_ray(nodes), "--launch.ray.restarts", "1"]
    ran = run_command(command("sft", write(settings, tmp_path), *options))
    assert ran.returncode == 1
    assert ran.stdout.count("restarting from the beginning, 1 of at most 1 times") == 1
    assert "loss of microbatch 0 on stage 1 failed: ValueError: planted (" in ran.stderr.splitlines()[-1]


def test_what_cannot_be_placed_is_refused(
    nodes: RayNodes, workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write(settings_of("sft", workspace, tmp_path / "run", parallel={"pp": 2, "dp_shard": 4}), tmp_path)
    cases = {
        ("--launch.ray.address", nodes.address): "the layout has 8 ranks, but the nodes of the Ray cluster have 4 proc",
        ("--launch.ray.address", nodes.address, "--launch.ray.ranks_per_node", "3"): "does not divide the 8 ranks",
    }
    for options, message in cases.items():
        ran = run_command(command("sft", config, *options, "--launch.ray.wait_minutes", "0"))
        assert ran.returncode == 2
        assert message in ran.stderr.splitlines()[-1]
    assert main(["sft", config, "--launch.ray.address", "ray://head:10001"]) == 2
    assert main(["sft", config, "--launcher", "mpi"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert "is a Ray client address" in first
    assert second == "error: --launcher mpi: use ray or local"
    assert not (tmp_path / "run").exists()


def test_a_policy_trains_from_a_program_without_a_rank(nodes: RayNodes, workspace: Path, tmp_path: Path) -> None:
    ran = run_command([sys.executable, "-c", POLICY, nodes.address, str(workspace), str(tmp_path)])
    assert ran.returncode == 0, ran.stderr
    shutil.rmtree(tmp_path)


POLICY = "from tests.distributed.ray.policy import main; main()"
