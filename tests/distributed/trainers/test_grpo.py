"""Reinforcement learning end to end: a run, a layout against one process, engines that fail, rewards that fail."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from automodel_rl.errors import RolloutError
from automodel_rl.rollout.protocol import Completion, Request
from automodel_rl.rollout.transformers_engine import TransformersEngine
from automodel_rl.trainers import grpo
from tests.distributed.trainers.runs import (
    Settings,
    assert_refused,
    metrics_of,
    rollouts_of,
    settings_of,
    train,
    trainer_of,
)
from tests.rank_pool import RankPool


def values(workspace: Path, output: Path, **changes: Any) -> Settings:
    return settings_of("grpo", workspace, output, **changes)


def test_a_pipeline_follows_one_process(ranks: RankPool, workspace: Path, tmp_path: Path) -> None:
    length = {"steps": 5, "validate_every": 5}
    ranks(1).run(train, values(workspace, tmp_path / "one", length=length))
    parallel = {"pp": 2, "schedule": "Interleaved1F1B", "virtual_stages": 2}
    ranks(2).run(train, values(workspace, tmp_path / "two", length=length, parallel=parallel))
    (start, *ones), (other_start, *twos) = metrics_of(tmp_path / "one"), metrics_of(tmp_path / "two")
    assert start["step"] == 0
    assert start["val/reward_mean"] == other_start["val/reward_mean"]
    for one, two in zip(ones, twos, strict=True):
        for name in ("train/loss", "train/grad_norm", "train/kl_ref", "rollout/reward_mean", "train/entropy"):
            assert two[name] == pytest.approx(one[name], rel=1e-8, abs=1e-12), name
    for step in range(1, 6):
        name = f"rollouts/step_{step}.jsonl"
        assert (tmp_path / "one" / name).read_text() == (tmp_path / "two" / name).read_text()
    last = metrics_of(tmp_path / "one")[-1]
    assert last["train/kl_ref"] > 0
    assert last["train/logprob_error"] == pytest.approx(1, abs=1e-6)
    assert {"val/reward_mean", "val/pass@1", "time/rollout_s", "time/sync_s"} <= last.keys()


def test_adapters_are_trained_against_the_model_without_them(ranks: RankPool, workspace: Path, tmp_path: Path) -> None:
    model = {"path": str(workspace / "model"), "dtype": "float64", "lora": {"rank": 2}}
    settings = values(workspace, tmp_path / "run", model=model, length={"steps": 3}, parallel={"pp": 2})
    ranks(2).run(train, settings)
    first, *_, last = metrics_of(tmp_path / "run")
    assert first["train/logprob_error"] == pytest.approx(1, abs=1e-6)
    assert last["train/logprob_error"] == pytest.approx(1, abs=1e-6)  # the engine has the merged weights
    assert last["train/kl_ref"] > 0
    assert (tmp_path / "run" / "final" / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize(
    "changes",
    [
        {"loss": {"kl": {"coefficient": 0.1, "where": "reward"}, "clip_high": 0.3}, "filter": {"dynamic": True}},
        {"loss": {"on_policy": True}, "batch": {"row_tokens": 128}},
        {"loss": {"ratio": "sequence", "normalise": "sequence"}, "advantage": {"kind": "rloo"}},
        {"loss": {"normalise": "constant"}, "filter": {"overlong_buffer": 4}, "parallel": {"dp_shard": 2}},
    ],
    ids=["kl in reward, dynamic", "on-policy", "gspo", "dr grpo"],
)
def test_variants_run_over_two_ranks(ranks: RankPool, workspace: Path, tmp_path: Path, changes: dict) -> None:
    settings = values(workspace, tmp_path / "run", length={"steps": 2}, parallel={"pp": 2}) | changes
    ranks(2).run(train, settings)
    rows = metrics_of(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["train/grad_norm"] > 0 for row in rows)


def test_completions_that_were_cut_off_may_count_nothing(ranks: RankPool, workspace: Path, tmp_path: Path) -> None:
    settings = values(workspace, tmp_path / "run", length={"steps": 1}, filter={"mask_overlong": True})
    ranks(1).run(train, settings)
    (row,) = metrics_of(tmp_path / "run")
    assert row["rollout/truncated"] > 0.8
    rollouts = rollouts_of(tmp_path / "run", 1)
    assert row["train/num_tokens"] == sum(rollout["tokens"] for rollout in rollouts if rollout["finish"] == "stop")


class Flaky(TransformersEngine):
    """Dies as often as `left` says, and then works; or loses the weights it gets in a first sync after `loads`."""

    left = 0
    loads = -1

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        Flaky.loads -= 1
        if Flaky.loads == 0:
            next(iter(tensors))
            raise ConnectionError("the engine is gone")
        super().load_weights(tensors)

    def generate(self, requests: list[Request]) -> list[Completion]:
        if Flaky.left:
            Flaky.left -= 1
            raise ConnectionError("the engine is gone")
        return super().generate(requests)


def run_flaky(settings: Settings, failures: int, loads: int = -1) -> str:
    """How training ends when the engine fails so often in its third step, and what the weights were then."""
    trainer = trainer_of(settings)
    collector = trainer.rollouts
    original = collector.engine

    def make() -> TransformersEngine:
        engine = Flaky.__new__(Flaky)
        engine.__dict__.update(original.__dict__)
        return engine

    collector.make_engine, collector.engine, Flaky.loads = make, make(), loads
    collect, calls = collector.collect, 0

    def counting(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        Flaky.left = failures if calls == 3 else 0
        return collect(*arguments, **options)

    collector.collect = counting  # type: ignore[method-assign]
    try:
        trainer.train()
    except RolloutError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("failures", "loads"), [(2, -1), (0, 3)], ids=["generating", "loading weights"])
def test_an_engine_that_dies_is_started_again(
    ranks: RankPool, workspace: Path, tmp_path: Path, failures: int, loads: int
) -> None:
    settings = values(workspace, tmp_path / "flaky", length={"steps": 4}, parallel={"dp_shard": 2})
    assert ranks(2).run(run_flaky, settings, failures, loads) == ["", ""]
    ranks(2).run(train, settings | {"output": str(tmp_path / "steady")})
    for one, two in zip(metrics_of(tmp_path / "flaky"), metrics_of(tmp_path / "steady"), strict=True):
        assert one["train/loss"] == two["train/loss"]


def test_an_engine_that_stays_dead_ends_the_run_with_nothing_lost(
    ranks: RankPool, workspace: Path, tmp_path: Path
) -> None:
    settings = values(workspace, tmp_path / "run", length={"steps": 4})
    (message,) = ranks(1).run(run_flaky, settings, 99)
    assert message == "the rollout engine of rank 0 failed 3 times: ConnectionError: the engine is gone"
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_2"]
    ranks(1).run(train, settings, True)
    ranks(1).run(train, settings | {"output": str(tmp_path / "steady")})
    resumed, steady = metrics_of(tmp_path / "run"), metrics_of(tmp_path / "steady")
    assert [row["train/loss"] for row in resumed] == [row["train/loss"] for row in steady]


class Silent(TransformersEngine):
    """Writes nothing for every other request."""

    def generate(self, requests: list[Request]) -> list[Completion]:
        written = super().generate(requests)
        return [Completion([], [], "stop") if i % 2 else completion for i, completion in enumerate(written)]


def run_silent(settings: Settings) -> None:
    trainer = trainer_of(settings)
    trainer.rollouts.engine.__class__ = Silent
    trainer.train()


def test_empty_completions_are_rewarded_and_count_no_tokens(ranks: RankPool, workspace: Path, tmp_path: Path) -> None:
    ranks(1).run(run_silent, values(workspace, tmp_path / "run", length={"steps": 2}))
    for row in metrics_of(tmp_path / "run"):
        assert row["rollout/completion_tokens_mean"] == pytest.approx(5, abs=0.6)
        assert row["train/grad_norm"] > 0


def run_without_signal(settings: Settings) -> None:
    grpo.STEPS_WITHOUT_SIGNAL = 3
    try:
        train(settings)
    finally:
        grpo.STEPS_WITHOUT_SIGNAL = 10


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("failing", "every call of a reward failed in this step, the first: rewards.function=.*no such thing"),
        ("same", "in 3 steps in a row no prompt had completions with different rewards"),
    ],
)
def test_rewards_that_teach_nothing_end_the_run(
    ranks: RankPool, workspace: Path, tmp_path: Path, function: str, message: str
) -> None:
    rewards = [{"function": f"tests.light_rewards:{function}"}]
    with pytest.raises(AssertionError, match=message):
        ranks(1).run(run_without_signal, values(workspace, tmp_path / "run", rewards=rewards))


def drop_answers(settings: Settings, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "How many?"}) + "\n")
    settings["data"] = {"train": [{"path": str(path)}]}
    settings["rewards"] = [{"function": "last_number"}]


BAD: list[tuple[Callable[[Settings, Path], None], str]] = [
    (drop_answers, "prompts.jsonl:1: no answer, which rewards.function=last_number compares with"),
    (lambda s, _: s["rollout"].update(max_prompt_tokens=4), "all 96 prompts are longer than rollout.max_prompt_tokens"),
    (lambda s, _: s["batch"].update(row_tokens=20), "batch.row_tokens=20 must hold the longest prompt and completion"),
    (
        lambda s, _: (s["rollout"].update(max_new_tokens=600), s["batch"].update(row_tokens=2048)),
        "is more than the model's context of 512 tokens",
    ),
    (lambda s, _: s["rollout"].update(group_size=1), "rollout.group_size=1: completions are compared within their"),
    (lambda s, _: s["batch"].update(updates=3), "batch.updates=3 must divide rollout.prompts=4"),
    (lambda s, _: s["loss"].update(on_policy=True), "loss.on_policy=true with batch.updates=2"),
    (
        lambda s, _: (
            s["batch"].update(updates=1),
            s.update(loss={"on_policy": True, "kl": {"coefficient": 0.1, "where": "reward"}}),
        ),
        "loss.kl.where=reward with loss.on_policy=true",
    ),
    (lambda s, _: s.update(rewards=[{"function": "nonsense"}]), "rewards.function=nonsense: use one of"),
    (lambda s, _: s.update(loss_function="nowhere:loss"), "loss_function=nowhere:loss: cannot import it"),
    (lambda s, _: s.update(algorithm="sft"), "is a config for sft, not grpo: run automodel-rl sft"),
]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("change", "message"), BAD, ids=[message[:40] for _, message in BAD])
def test_bad_input_is_one_line_and_writes_nothing(
    workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Callable, message: str
) -> None:
    settings = values(workspace, tmp_path / "run")
    change(settings, tmp_path)
    assert_refused("grpo", settings, message, tmp_path, capsys)


def constant(outputs: Any, batch: Any) -> Any:
    """A user's own loss."""
    from automodel_rl import LossOutput

    total: Tensor = torch.where(batch.loss_mask, outputs.logprobs, 0.0).sum()
    return LossOutput(sums={"tokens": -total}, metrics={"train/own": (total.detach(), batch.loss_mask.sum())})


def test_a_loss_of_ones_own(ranks: RankPool, workspace: Path, tmp_path: Path) -> None:
    settings = values(workspace, tmp_path / "run", length={"steps": 1})
    ranks(1).run(train, settings | {"loss_function": "tests.distributed.trainers.test_grpo:constant"})
    (row,) = metrics_of(tmp_path / "run")
    assert row["train/own"] == pytest.approx(-row["train/loss"], rel=0.1)
