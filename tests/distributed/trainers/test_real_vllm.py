"""Whole runs with a real vLLM on the CPU: it samples from what is trained, in every way in which weights reach it."""

import asyncio
import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from automodel_rl.batch import Batch, TokenSequence
from automodel_rl.config.further_models import TeacherConfig
from automodel_rl.errors import InputError, RolloutError
from automodel_rl.generators.generator_process import GeneratorProcess
from automodel_rl.generators.vllm_http import VllmServer
from automodel_rl.launch.local import free_port
from automodel_rl.rollout.rewards.reward_model import PROMPT, RewardModel, served_reward_model
from automodel_rl.trainers.remote_teachers import open_remote_teacher
from tests.distributed.trainers.runs import (
    Settings,
    add_turns,
    copy_with_frequent_ends,
    metrics_of,
    num_lines,
    rollouts_of,
    settings_of,
    train,
)
from tests.fleet_chaos import generator_of, run_of
from tests.mtp_reference import accepted_drafts, save_model_with_mtp
from tests.processes import Job
from tests.rank_pool import RankPool
from tests.tiny import save_tiny_model
from tests.vision import make_vision_workspace
from tests.vllm_environment import PYTHON, ROOT, needs_vllm

pytestmark = needs_vllm

STEPS = 3


def values(workspace: Path, output: Path, generator: dict[str, Any] | None = None, **changes: Any) -> Settings:
    """A run in float32, in which sampling and training agree to rounding."""
    settings = settings_of("grpo", workspace, output, length={"steps": STEPS}, **changes)
    settings["model"]["dtype"] = "float32"
    settings["rollout"] |= {"generator": generator or {"kind": "vllm", "python": str(PYTHON)}}
    settings["checkpoint"] = {"every_steps": 1}
    settings["loss"] = {}
    return settings


def copy_tokenizer(source: Path, target: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (source / name).is_file():
            (target / name).write_bytes((source / name).read_bytes())


def losses_of(output: Path) -> list[float]:
    return [record["train/loss"] for record in metrics_of(output)]


def assert_agreement(output: Path, allowed: float = 1e-4) -> None:
    """What vLLM says of its tokens is what the model computes, in every step."""
    records = metrics_of(output)
    assert len(records) == STEPS
    for record in records:
        assert record["train/logprob_error"] == pytest.approx(1, abs=allowed)
        assert not record["rollout/invalid_logprobs"]
    assert len({record["train/loss"] for record in records}) == STEPS


@pytest.fixture(name="whole", scope="module")
def run_whole(ranks: RankPool, workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a model with a tied head, which nobody disturbs."""
    output = tmp_path_factory.mktemp("vllm") / "whole"
    ranks(1).run(train, values(workspace, output))
    return output


def test_a_tied_model_is_sampled_from_as_it_is_trained(whole: Path) -> None:
    assert_agreement(whole)
    completions = [record["completion"] for record in rollouts_of(whole, 1)]
    assert len(set(completions)) > 1


def test_several_replicas_write_what_one_writes(ranks: RankPool, workspace: Path, tmp_path: Path, whole: Path) -> None:
    generator = {"kind": "vllm", "python": str(PYTHON), "replicas": 2}
    ranks(1).run(train, values(workspace, tmp_path / "run", generator))
    assert_agreement(tmp_path / "run")
    for step in range(1, STEPS + 1):
        written = [[record["completion"] for record in rollouts_of(run, step)] for run in (tmp_path / "run", whole)]
        assert written[0] == written[1]


@pytest.mark.parametrize(
    ("family", "changed"),
    [
        ("qwen3_moe", {}),
        ("gemma4_text", {"global_head_dim": 64}),
        ("granitemoehybrid", {"hidden_size": 128, "head_dim": None, "mamba_n_heads": 32, "mamba_n_groups": 1}),
        ("nemotron_h", {"layers_block_type": ["linear_attention", "full_attention"]}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_families_of_every_kind_are_sampled_from_as_they_are_trained(
    ranks: RankPool, workspace: Path, tmp_path: Path, family: str, changed: dict[str, Any]
) -> None:
    model = tmp_path / "model"
    sizes = {"vocab_size": 300, "head_dim": 32, **changed}  # vLLM has no smaller heads on a CPU
    sizes = {key: size for key, size in sizes.items() if size is not None}
    save_tiny_model(model, family, num_layers=2, **sizes)
    copy_tokenizer(workspace / "model", model)
    settings = values(workspace, tmp_path / "run")
    settings["model"]["path"] = str(model)
    ranks(1).run(train, settings)
    assert_agreement(tmp_path / "run")


OF_QWEN3_5 = {  # vLLM's sizes on a CPU
    "head_dim": 64,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.75,
        "mrope_section": [8, 8, 8],
        "mrope_interleaved": True,
    },
}


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="no torchvision that needs no operators")
@pytest.mark.parametrize(
    ("family", "text", "dtype", "allowed"),
    [("internvl", {"head_dim": 32}, "float32", 1e-4), ("qwen3_5", OF_QWEN3_5, "bfloat16", 1e-2)],
    ids=["internvl", "qwen3_5"],
)
def test_pictures_are_seen_as_in_training(
    ranks: RankPool, tmp_path: Path, family: str, text: dict[str, Any], dtype: str, allowed: float
) -> None:
    """In bfloat16 where vLLM has no other dtype on a CPU."""
    workspace = make_vision_workspace(tmp_path, family, text=text)
    settings = values(workspace, tmp_path / "run")
    settings["model"]["dtype"] = dtype
    ranks(1).run(train, settings)
    assert_agreement(tmp_path / "run", allowed)
    assert any(record.get("images") for record in rollouts_of(tmp_path / "run", 1))


def test_the_exported_layer_drafts_as_it_was_trained(ranks: RankPool, workspace: Path, tmp_path: Path) -> None:
    """Draft by draft as by transformers' module, and more of them are right after the training."""
    save_model_with_mtp(tmp_path / "model", "glm4_moe", vocab_size=300, head_dim=32)
    copy_tokenizer(workspace / "model", tmp_path / "model")
    settings = settings_of("sft", workspace, tmp_path / "run", length={"steps": 60}, optimizer={"lr": 3e-3})
    settings["model"] |= {"path": str(tmp_path / "model"), "dtype": "float32", "mtp": {"weight": 0.1}}
    ranks(1).run(train, settings)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    lines = (workspace / "train_prompts.jsonl").read_text().splitlines()[:16]
    prompts = [
        tokenizer.apply_chat_template(json.loads(line)["prompt"], add_generation_prompt=True, return_dict=False)
        for line in lines
    ]
    (tmp_path / "prompts.json").write_text(json.dumps(prompts))
    trained = tmp_path / "run" / "final"
    command = [str(PYTHON), str(ROOT / "tests/vllm_drafts.py"), str(trained)]
    subprocess.run([*command, str(tmp_path / "prompts.json"), str(tmp_path / "written.json")], check=True)
    found = json.loads((tmp_path / "written.json").read_text())
    expected = accepted_drafts(trained, "glm4_moe", prompts, found["completions"])
    assert (found["drafts"], found["accepted"]) == expected
    assert found["accepted"] > found["drafts"] // 4
    assert accepted_drafts(tmp_path / "model", "glm4_moe", prompts, found["completions"])[1] < found["accepted"] // 4


@pytest.mark.parametrize("drafts", [1, 3])
def test_drafted_tokens_have_the_probabilities_of_the_model(
    ranks: RankPool, workspace: Path, tmp_path: Path, drafts: int
) -> None:
    """Also after weight syncs, which leave the layer that drafts as it is."""
    save_model_with_mtp(tmp_path / "model", "glm4_moe", vocab_size=300, head_dim=32)
    copy_tokenizer(workspace / "model", tmp_path / "model")
    generator = {"kind": "vllm", "python": str(PYTHON), "drafts": drafts}
    settings = values(workspace, tmp_path / "run", generator)
    settings["model"]["path"] = str(tmp_path / "model")
    ranks(1).run(train, settings)
    assert_agreement(tmp_path / "run")


def test_adapters_alone_are_applied_as_they_are_trained(ranks: RankPool, workspace: Path, tmp_path: Path) -> None:
    settings = values(workspace, tmp_path / "run", weight_sync={"adapters": "alone"})
    settings["model"]["lora"] = {"rank": 8}
    settings["optimizer"]["lr"] = 1e-2
    ranks(1).run(train, settings)
    assert_agreement(tmp_path / "run")


def test_conversations_go_on_with_answers_of_an_environment(ranks: RankPool, workspace: Path, tmp_path: Path) -> None:
    settings = values(workspace, tmp_path / "run")
    settings["model"]["path"] = str(tmp_path / "model")
    copy_with_frequent_ends(workspace / "model", tmp_path / "model")
    add_turns(settings)
    ranks(1).run(train, settings)
    assert_agreement(tmp_path / "run")
    assert max(record["rollout/turns_mean"] for record in metrics_of(tmp_path / "run")) > 1


def train_while_vllm_is_killed(settings: Settings) -> None:
    """A run that goes on, whose vLLM is killed in its first rollout."""
    submit, calls = GeneratorProcess.submit, iter(range(100))

    def submit_and_kill(self: GeneratorProcess, *arguments: Any) -> Any:
        wait = submit(self, *arguments)
        if next(calls) == 1:  # after the probe
            os.kill(self.child.process.pid, signal.SIGKILL)
        return wait

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GeneratorProcess, "submit", submit_and_kill)
        train(settings, "auto")


def test_a_run_that_stops_and_loses_its_vllm_goes_on_to_the_same_losses(
    ranks: RankPool, workspace: Path, tmp_path: Path, whole: Path
) -> None:
    settings = values(workspace, tmp_path / "run")
    ranks(1).run(train, settings | {"length": {"steps": 1}})
    ranks(1).run(train_while_vllm_is_killed, settings)
    assert losses_of(tmp_path / "run") == losses_of(whole)


@pytest.fixture(name="server")
def start_server(workspace: Path) -> Iterator[str]:
    """The address of a server that somebody has started by hand."""
    port = free_port()
    options = {
        "model": workspace / "model",
        "host": "127.0.0.1",
        "port": port,
        "dtype": "float32",
        "max-model-len": 128,
        "kv-cache-memory-bytes": 2**28,
        "logprobs-mode": "processed_logprobs",
        "worker-extension-cls": "vllm_split_worker.SplitWorker",
        "weight-transfer-config": '{"backend": "same_device"}',
    }
    command = [
        str(PYTHON),
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--enforce-eager",
        "--no-enable-chunked-prefill",
    ]
    command += [part for name, value in options.items() for part in (f"--{name}", str(value))]
    files = str(ROOT / "automodel_rl" / "generators")
    environment = os.environ | {"VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": files}
    server = VllmServer(f"http://127.0.0.1:{port}")

    def answers() -> bool:
        try:
            return not server.get("/is_paused")["is_paused"]
        except (OSError, ValueError):
            return False

    with Job(command, env=environment) as job:
        assert job.wait_until(answers, 0.2), job.stderr
        yield server.url


def test_servers_get_the_weights_too(
    ranks: RankPool, workspace: Path, tmp_path: Path, whole: Path, server: str
) -> None:
    ranks(1).run(train, values(workspace, tmp_path / "run", {"kind": "servers", "urls": [server]}))
    assert_agreement(tmp_path / "run")
    assert losses_of(tmp_path / "run") == losses_of(whole)


STALE_HEAD = """
import os, runpy, sys
sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
import vllm_versions
vllm_versions._pack_heads = lambda model: None
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs vLLM's worker, but a tied head keeps the weights that it was loaded with."""


def error_of(settings: Settings) -> str:
    with pytest.raises(RolloutError) as caught:
        train(settings)
    return str(caught.value)


def test_a_head_that_keeps_its_first_weights_stops_the_run(ranks: RankPool, workspace: Path, tmp_path: Path) -> None:
    (tmp_path / "stale.py").write_text(STALE_HEAD)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{PYTHON}" "{tmp_path / "stale.py"}" "$@"\n')
    python.chmod(0o755)
    (message,) = ranks(1).run(error_of, values(workspace, tmp_path / "run", {"kind": "vllm", "python": str(python)}))
    assert "does not compute with the weights that it received" in message
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.fixture(name="judge", scope="module")
def make_judge(
    ranks: RankPool, workspace: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Path]]:
    """The address of a server with a reward model, and the model's folder."""
    folder = tmp_path_factory.mktemp("judge") / "run"
    settings = settings_of("reward", workspace, folder)
    settings["model"]["dtype"] = "float32"
    ranks(1).run(train, settings)
    with serving(folder / "final", {"runner": "pooling", "served-model-name": "judge"}) as url:
        yield url, folder / "final"


@contextlib.contextmanager
def serving(folder: Path, options: dict[str, Any]) -> Iterator[str]:
    """`vllm serve` with a model. Gives its address."""
    port = free_port()
    options = {"model": folder, "host": "127.0.0.1", "port": port, "dtype": "float32"} | options
    options |= {"max-model-len": 128, "kv-cache-memory-bytes": 2**28}
    command = [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
    command += [part for name, value in options.items() for part in (f"--{name}", str(value))]
    url = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        try:
            return urllib.request.urlopen(f"{url}/health").status == 200
        except OSError:
            return False

    with Job(command, env=dict(os.environ)) as job:
        assert job.wait_until(answers, 0.2), job.stderr
        yield url


@pytest.mark.longer  # test_joined_generators.py has generators of transformers come and go
def test_vllm_joins_a_run_and_is_killed_and_another_one_goes_on(workspace: Path, tmp_path: Path, whole: Path) -> None:
    settings = values(workspace, tmp_path / "run", {"kind": "joined"})
    settings["weight_sync"] = {"publish": str(tmp_path / "weights"), "check_every": 1}
    metrics = tmp_path / "run" / "metrics.jsonl"
    with run_of(settings, tmp_path) as run:
        for steps in (1, 2):
            with generator_of(settings, "--vllm", str(PYTHON)) as vllm:
                has_come = functools.partial(lambda steps: num_lines(metrics) >= steps, steps)
                assert vllm.wait_until(has_come), vllm.stdout + vllm.stderr
        with generator_of(settings, "--vllm", str(PYTHON)) as vllm:
            assert run.finish() == 0, run.stdout + run.stderr
            assert vllm.finish() == 0, vllm.stdout + vllm.stderr
    assert_agreement(tmp_path / "run")
    assert losses_of(tmp_path / "run") == pytest.approx(losses_of(whole), rel=1e-4)


@pytest.mark.longer  # others of this file start a real vLLM, and test_reward_models.py scores without one
def test_a_served_reward_model_scores_as_transformers_does(judge: tuple[str, Path]) -> None:
    url, folder = judge
    said, examples = ["1", "I do not know how many.", "2 3"], [{PROMPT: [{"role": "user", "content": "How many?"}]}] * 3
    expected = RewardModel(str(folder), dtype="float32")(said, examples)
    options = {"url": url, "name": "judge", "path": str(folder)}
    pairs = zip(said, examples, strict=True)
    found = [asyncio.run(served_reward_model(*pair, **options)) for pair in pairs]
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-4)


@pytest.mark.longer  # test_remote_teachers.py has a server that answers as this one does
def test_a_teacher_behind_vllm_says_what_transformers_does(workspace: Path) -> None:
    folder = workspace / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rows = [torch.tensor(ids) for ids in ([5, 9, 3, 7, 7], [4], list(range(10, 70)))]
    batch = Batch([TokenSequence(row, torch.ones(len(row), dtype=torch.bool)) for row in rows])
    with serving(folder, {"served-model-name": "large", "max-logprobs": 12}) as url:
        config = TeacherConfig(path=str(folder), url=url, name="large")
        teacher = open_remote_teacher("teachers.large", config, tokenizer)
        tops, own = teacher.top_logprobs(batch, 12), teacher.logprobs(batch)
        with pytest.raises(InputError, match="13"):
            teacher.top_logprobs(batch, 13)
    for row, (values, ids), logprobs in zip(rows, tops, own, strict=True):
        expected = plain(row[None]).logits[0, :-1].detach().log_softmax(-1)
        assert ids[0].tolist() == [0] * 12
        torch.testing.assert_close(values[1:], expected.topk(12).values, atol=1e-4, rtol=0)
        torch.testing.assert_close(expected.gather(1, ids[1:]), values[1:], atol=1e-4, rtol=0)
        torch.testing.assert_close(logprobs[1:], expected.gather(1, row[1:, None])[:, 0], atol=1e-4, rtol=0)
