"""Reinforcement learning end to end: a run, a layout against one process, generators that fail, rewards that fail."""

import itertools
import json
import os
import re
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import AutoTokenizer

from automodel_rl.batch import Microbatch
from automodel_rl.errors import InputError, RolloutError
from automodel_rl.generator_messages import Request
from automodel_rl.rollout.make_generator import make_generator
from automodel_rl.rollout.protocol import Completion, Generator
from automodel_rl.rollout.transformers_generator import TransformersGenerator
from automodel_rl.weight_sync.receiver import Receiver
from automodel_rl.weight_sync.transport import Transport
from tests.distributed.trainers.runs import (
    Settings,
    assert_refused,
    assert_same_weights,
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
    assert {"val/reward_mean", "time/rollout_s", "time/sync_s"} <= last.keys()
    assert "val/pass@1" not in last  # no reward tells what passes


def test_adapters_are_trained_against_the_model_without_them(ranks: RankPool, workspace: Path, tmp_path: Path) -> None:
    model = {"path": str(workspace / "model"), "dtype": "float64", "lora": {"rank": 2}}
    settings = values(workspace, tmp_path / "run", model=model, length={"steps": 3}, parallel={"pp": 2})
    seen, _ = ranks(2).run(watch, settings)[0]
    first, *_, last = metrics_of(tmp_path / "run")
    assert first["train/logprob_error"] == pytest.approx(1, abs=1e-6)
    assert last["train/logprob_error"] == pytest.approx(1, abs=1e-6)  # the generator has the merged weights
    # At a step's first update the policy is what has sampled; the reference is what it was before all of them.
    divergence = {step: [s["kl"] for s in seen if s["update"] == 2 * step and "kl" in s] for step in range(3)}
    assert divergence[0] == pytest.approx([0.0] * len(divergence[0]), abs=1e-12)
    assert all(min(divergence[step]) > 1e-9 for step in (1, 2))
    final = tmp_path / "run" / "final"
    assert (final / "adapter_model.safetensors").is_file()
    assert (
        AutoTokenizer.from_pretrained(final).chat_template
        == AutoTokenizer.from_pretrained(workspace / "model").chat_template
    )


def test_adapters_may_reach_the_generator_alone(ranks: RankPool, workspace: Path, tmp_path: Path) -> None:
    model = {"path": str(workspace / "model"), "dtype": "float64", "lora": {"rank": 2}}
    settings = values(workspace, tmp_path / "run", model=model, length={"steps": 3}, parallel={"pp": 2})
    settings |= {"weight_sync": {"adapters": "alone", "checksum": True}}
    for output, own_process in (("same", False), ("own", True)):
        rollout = settings["rollout"] | {"own_process": own_process}
        ranks(2).run(train, settings | {"output": str(tmp_path / output), "rollout": rollout})
        for row in metrics_of(tmp_path / output):
            assert row["train/logprob_error"] == pytest.approx(1, abs=1e-6)
    assert_same_weights(tmp_path / "same" / "final", tmp_path / "own" / "final")


def watch(settings: Settings) -> tuple[list[dict[str, Any]], dict[str, float] | None]:
    """Every sequence that is trained on: step, update, place in it, advantage, and divergence from the reference; and
    what is known of the best checkpoint."""
    trainer = trainer_of(settings)
    seen: list[dict[str, Any]] = []
    train_step, num_updates = trainer.engine.train_step, 0

    def watching(rows: list[Microbatch], *arguments: Any) -> Any:
        nonlocal num_updates
        for row in rows:
            edges = list(itertools.pairwise([0, *itertools.accumulate(row.lengths)]))
            for place, (start, end) in zip(row.order, edges, strict=False):
                values = {name: value[start:end][row.loss_mask[start:end]] for name, value in row.values.items()}
                assert values["advantages"].unique().numel() <= 1
                log_ratio = (
                    values["ref_logprobs"] - values["old_logprobs"] if "ref_logprobs" in values else torch.zeros(1)
                )
                seen.append(
                    {
                        "update": num_updates,
                        "place": place,
                        "advantage": row.values["advantages"][start].item(),
                        "kl": (log_ratio.exp() - 1 - log_ratio).sum().item(),
                    }
                )
        output = train_step(rows, *arguments)
        if trainer.handle.layout.data_rank == 0:
            seen.append({"update": num_updates, "lr": output.lr, "ratio": output.metrics["train/ratio_mean"]})
        num_updates += 1
        return output

    trainer.engine.train_step = watching
    trainer.train()
    return seen, trainer.run.checkpoints.best


def expected_advantage(kind: str, group: list[float], reward: float) -> float:
    mean = sum(group) / len(group)
    if kind == "rloo":
        return reward - (sum(group) - reward) / (len(group) - 1)
    std = (sum((r - mean) ** 2 for r in group) / (len(group) - 1)) ** 0.5
    return (reward - mean) / (std + 1e-6) if kind == "grpo" else reward - mean


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("grpo", {"rollout": {"temperature": 0.7}}),
        ("dr_grpo", {"loss": {"kl": {"coefficient": 0.5, "where": "reward"}, "normalise": "constant"}}),
        (
            "rloo",
            {
                "loss": {"ratio": "sequence", "normalise": "sequence"},
                "filter": {"overlong_buffer": 4, "overlong_penalty": 0.5, "reward_scale": 2.0},
            },
        ),
    ],
    ids=["temperature", "Dr. GRPO, kl in the reward", "GSPO, penalty for length"],
)
def test_sequences_are_trained_with_the_advantages_of_their_rewards(
    ranks: RankPool, workspace: Path, tmp_path: Path, kind: str, changes: dict[str, dict]
) -> None:
    settings = values(workspace, tmp_path / "run", length={"steps": 2, "validate_every": 1}, parallel={"dp_shard": 2})
    settings |= {
        "advantage": {"kind": kind},
        "optimizer": {"lr": 1e-3, "decay": "linear"},
        "checkpoint": {"every_steps": 1},
    }
    for section, keys in changes.items():
        settings[section] = settings.get(section, {}) | keys
    (of_first, best), (of_second, _) = ranks(2).run(watch, settings)
    updates = [row for row in of_first if "lr" in row]
    assert [row["lr"] for row in updates] == pytest.approx([1e-3, 0.75e-3, 0.5e-3, 0.25e-3])
    assert [row["ratio"] == pytest.approx(1, abs=1e-9) for row in updates] == [True, False, True, False]
    sequences = [row for row in (*of_first, *of_second) if "place" in row]
    assert len(sequences) == 2 * 16
    for row in sequences:
        step, number = divmod(row["update"], 2)
        records = rollouts_of(tmp_path / "run", step + 1)
        groups = [records[start : start + 4] for start in range(0, 16, 4)][number::2]
        row["group"], row["record"] = row["place"] // 4, groups[row["place"] // 4][row["place"] % 4]
    penalty = settings.get("loss", {}).get("kl", {})
    weight = penalty["coefficient"] if penalty.get("where") == "reward" else 0.0
    for row in sequences:
        same = [other for other in sequences if (other["update"], other["group"]) == (row["update"], row["group"])]
        group = [other["record"]["reward"] - weight * other["kl"] for other in same]
        reward = row["record"]["reward"] - weight * row["kl"]
        assert row["advantage"] == pytest.approx(expected_advantage(kind, group, reward), rel=1e-6, abs=1e-9)
    if weight:
        assert max(row["kl"] for row in sequences) > 1e-6
    if kind == "rloo":
        for record in rollouts_of(tmp_path / "run", 1):
            over = min(max((record["tokens"] - 6) / 4, 0), 1)
            assert record["reward"] == pytest.approx(2 * sum(record["rewards"].values()) - 0.5 * over)
    rows = {row["step"]: row["val/reward_mean"] for row in metrics_of(tmp_path / "run")}
    best_step = max((1, 2), key=lambda step: rows[step])
    assert best == {"step": best_step, "metric": rows[best_step]}


def test_on_policy_needs_no_logprobs_from_before(ranks: RankPool, workspace: Path, tmp_path: Path) -> None:
    settings = values(workspace, tmp_path / "run", length={"steps": 2}, loss={"on_policy": True}, parallel={"pp": 2})
    ranks(2).run(train, settings | {"batch": {"microbatch_tokens": 128}})
    for row in metrics_of(tmp_path / "run"):
        assert row["train/ratio_mean"] == 1
        assert row["train/clip_fraction"] == 0
        assert row["train/grad_norm"] > 0
        assert row["train/logprob_error"] == pytest.approx(1, abs=1e-6)


def test_groups_without_signal_are_replaced(ranks: RankPool, workspace: Path, tmp_path: Path) -> None:
    settings = values(workspace, tmp_path / "run", length={"steps": 2}, filter={"dynamic": True}, parallel={"pp": 2})
    settings["rewards"] = [{"function": "tests.light_rewards:vowels_of_some"}]
    ranks(2).run(train, settings)
    replaced = 0
    for row in metrics_of(tmp_path / "run"):
        records = rollouts_of(tmp_path / "run", row["step"])
        groups = [{record["reward"] for record in records[start : start + 4]} for start in range(0, len(records), 4)]
        assert row["rollout/num_groups"] == len(groups)
        assert row["rollout/groups_without_signal"] == sum(len(group) == 1 for group in groups)
        learned = [record["tokens"] for i, record in enumerate(records) if len(groups[i // 4]) > 1]
        assert row["train/num_tokens"] == sum(learned[:16])
        replaced += len(groups) - 4
    assert replaced > 0


def test_completions_that_were_cut_off_may_count_nothing(ranks: RankPool, workspace: Path, tmp_path: Path) -> None:
    settings = values(workspace, tmp_path / "run", length={"steps": 1}, filter={"mask_overlong": True})
    settings["rollout"] |= {"stop": ["e", "o"]}
    ranks(1).run(train, settings)
    (row,) = metrics_of(tmp_path / "run")
    assert 0 < row["rollout/truncated"] < 1
    rollouts = rollouts_of(tmp_path / "run", 1)
    assert row["train/num_tokens"] == sum(rollout["tokens"] for rollout in rollouts if rollout["finish"] == "stop") > 0


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
    """Dies as often as `left` says, and then works."""

    left = 0

    def generate(self, requests: Sequence[Request], *hooks: Any) -> list[Completion]:
        if Flaky.left:
            Flaky.left -= 1
            raise ConnectionError("the generator is gone")
        return super().generate(requests, *hooks)


def run_flaky(settings: Settings, failures: int, loads: int = -1) -> tuple[str, int]:
    """How training ends when the generator fails so often at its third batch, and how many were made anew."""
    made = 0

    def make(*arguments: Any) -> tuple[Generator, Transport]:
        nonlocal made
        made += 1
        generator, transport = make_generator(*arguments)
        generator.__class__ = Flaky
        generator.receiver.__class__ = FlakyReceiver
        return generator, transport

    FlakyReceiver.loads = loads
    with mock.patch("automodel_rl.rollout.supervisor.make_generator", make):
        trainer = trainer_of(settings)
        collector = trainer.rollouts
        wait, calls = collector._wait, 0

        def counting(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            Flaky.left = failures if calls == 3 else 0
            return wait(*arguments, **options)

        collector._wait = counting  # type: ignore[method-assign]
        try:
            trainer.train()
        except RolloutError as error:
            return str(error), made - 1
        return "", made - 1


def test_a_generator_that_dies_is_started_again(ranks: RankPool, workspace: Path, tmp_path: Path) -> None:
    settings = values(workspace, tmp_path / "steady", length={"steps": 4}, parallel={"dp_shard": 2})
    ranks(2).run(train, settings)
    for name, failures, loads, restarts in (("generating", 2, -1, 2), ("loading weights", 0, 3, 1)):
        flaky = settings | {"output": str(tmp_path / name)}
        assert ranks(2).run(run_flaky, flaky, failures, loads) == [("", restarts), ("", restarts)]
        for one, two in zip(metrics_of(tmp_path / name), metrics_of(tmp_path / "steady"), strict=True):
            assert one["train/loss"] == two["train/loss"]
        assert_same_weights(tmp_path / name / "final", tmp_path / "steady" / "final")


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


class Silent(TransformersGenerator):
    """Writes nothing for every other request."""

    def generate(self, requests: Sequence[Request], *hooks: Any) -> list[Completion]:
        written = super().generate(requests, *hooks)
        return [Completion([], [], "stop") if i % 2 else completion for i, completion in enumerate(written)]


def run_silent(settings: Settings) -> None:
    trainer = trainer_of(settings)
    trainer.supervisor.generator.__class__ = Silent
    trainer.train()


def test_empty_completions_are_rewarded_and_count_no_tokens(ranks: RankPool, workspace: Path, tmp_path: Path) -> None:
    ranks(1).run(run_silent, values(workspace, tmp_path / "run", length={"steps": 2}))
    for row in metrics_of(tmp_path / "run"):
        records = rollouts_of(tmp_path / "run", row["step"])
        assert [record["tokens"] == 0 for record in records] == [False, True] * 8
        assert row["train/num_tokens"] == sum(record["tokens"] for record in records)
        assert row["train/grad_norm"] > 0


def run_without_signal(settings: Settings) -> str:
    """How training ends."""
    with mock.patch("automodel_rl.trainers.reward_watch.MOST_STEPS", 3):
        try:
            train(settings)
        except (InputError, RolloutError) as error:
            return str(error)
    return ""


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
    (ended,) = ranks(1).run(run_without_signal, values(workspace, tmp_path / "run", rewards=rewards))
    assert re.search(message, ended)


def run_and_listen(settings: Settings) -> list[str]:
    """The warnings of a run."""
    trainer = trainer_of(settings)
    with mock.patch.object(trainer.run, "say") as say:
        trainer.train()
    return [call.args[0] for call in say.call_args_list if "rewards.function" in call.args[0]]


def test_a_reward_that_fails_beside_one_that_works_is_counted_and_named(
    ranks: RankPool, workspace: Path, tmp_path: Path
) -> None:
    names = ("vowels", "failing", "vowels_or_error")
    rewards = [{"function": f"tests.light_rewards:{name}"} for name in names]
    rewards[0]["passes_at"] = 0.3
    settings = values(workspace, tmp_path / "run", length={"steps": 2, "validate_every": 2}, rewards=rewards)
    (said,) = ranks(1).run(run_and_listen, settings)
    assert sum("tests.light_rewards:failing failed in 100% of its calls" in line for line in said) == 1
    assert sum("tests.light_rewards:vowels_or_error failed in" in line for line in said) >= 1
    assert all(re.search(r"KeyError: 'no such thing' \(at .*light_rewards.py:\d+\)$", line) for line in said)
    baseline, *rows = metrics_of(tmp_path / "run")
    for row in rows:
        records = rollouts_of(tmp_path / "run", row["step"])
        failed = sum("e" in record["completion"] for record in records)
        rates = [row[f"rollout/error_rate_{name}"] for name in names]
        assert rates == [0, 1, failed / len(records)]
        assert row["rollout/reward_errors"] == len(records) + failed
    assert 0 < rows[0]["rollout/error_rate_vowels_or_error"] < 1
    assert baseline["val/error_rate_failing"] == 1
    assert 0 <= baseline["val/pass@1"] <= 1


def drop_answers(settings: Settings, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "How many?"}) + "\n")
    settings["data"] = {"train": [{"path": str(path)}]}
    settings["rewards"] = [{"function": "last_number"}]


BAD: list[tuple[Callable[[Settings, Path], None], str]] = [
    (drop_answers, "prompts.jsonl:1: no answer, which rewards.function=last_number compares with"),
    (lambda s, _: s["rollout"].update(max_prompt_tokens=4), "all 96 prompts are longer than rollout.max_prompt_tokens"),
    (
        lambda s, _: s["batch"].update(microbatch_tokens=20),
        "batch.microbatch_tokens=20 must hold the longest prompt and completion",
    ),
    (
        lambda s, _: (s["rollout"].update(max_new_tokens=600), s["batch"].update(microbatch_tokens=2048)),
        "is more than the model's context of 512 tokens",
    ),
    (lambda s, _: s["rollout"].update(group_size=1), "rollout.group_size=1: completions are compared within their"),
    (lambda s, _: s["batch"].update(optimizer_steps=3), "batch.optimizer_steps=3 must divide rollout.prompts=4"),
    (lambda s, _: s["loss"].update(on_policy=True), "loss.on_policy=true with batch.optimizer_steps=2"),
    (
        lambda s, _: (
            s["batch"].update(optimizer_steps=1),
            s.update(loss={"on_policy": True, "kl": {"coefficient": 0.1, "where": "reward"}}),
        ),
        "loss.kl.where=reward with loss.on_policy=true",
    ),
    (lambda s, _: s.update(rewards=[{"function": "nonsense"}]), "rewards.function=nonsense: use one of"),
    (
        lambda s, _: s.update(rewards=[{"function": "length", "options": {"limit": 5}}]),
        "rewards.function=length: options {'limit': 5} do not fit",
    ),
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

    total: torch.Tensor = torch.where(batch.loss_mask, outputs.logprobs, 0.0).sum()
    return LossOutput(sums={"tokens": -total}, metrics={"train/own": (total.detach(), batch.loss_mask.sum())})


def test_a_loss_of_the_config_takes_the_place_of_grpos(ranks: RankPool, workspace: Path, tmp_path: Path) -> None:
    settings = values(workspace, tmp_path / "run", length={"steps": 1})
    ranks(1).run(train, settings | {"loss_function": "tests.distributed.trainers.test_grpo:constant"})
    (row,) = metrics_of(tmp_path / "run")  # means of two updates, of a loss and of its negative
    assert row["train/own"] == pytest.approx(-row["train/loss"], rel=1e-9)


PLACES: dict[str, dict[str, Any]] = {
    "own process, shared memory": {"weight_sync": {"checksum": True}},
    "own process, gloo": {"weight_sync": {"transport": "collective", "checksum": True, "buffer_mib": 0.02}},
}


def test_it_does_not_matter_in_which_process_the_generator_is(ranks: RankPool, workspace: Path, tmp_path: Path) -> None:
    settings = values(workspace, tmp_path / "same", length={"steps": 3}, parallel={"pp": 2})
    ranks(2).run(train, settings)
    for place, changes in PLACES.items():
        own = settings | {"output": str(tmp_path / place), **changes}
        ranks(2).run(train, own | {"rollout": {**settings["rollout"], "own_process": True}})
        assert_same_weights(tmp_path / place / "final", tmp_path / "same" / "final")
        for row in metrics_of(tmp_path / place):
            assert row["rollout/staleness_max"] == 0


def let_generators_be_ahead(settings: Settings, max_staleness: int) -> None:
    settings["rollout"] |= {"own_process": True, "max_staleness": max_staleness}
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
    made = 0

    def make(*arguments: Any) -> tuple[Generator, Transport]:
        nonlocal made
        made += 1
        return make_generator(*arguments)

    with mock.patch("automodel_rl.rollout.supervisor.make_generator", make):
        trainer = trainer_of(settings)
        take, calls = trainer.rollouts.take, 0

        def killing(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == 3 and trainer.handle.layout.data_rank == 0:
                os.kill(trainer.supervisor.generator.child.process.pid, signal.SIGKILL)
            return take(*arguments)

        trainer.rollouts.take = killing
        trainer.train()
    return made


def test_a_generator_that_dies_ahead_of_training_does_not_make_the_others_completions_older(
    ranks: RankPool, workspace: Path, tmp_path: Path
) -> None:
    settings = values(workspace, tmp_path / "run", length={"steps": 5}, parallel={"dp_shard": 2})
    let_generators_be_ahead(settings, 1)
    settings["weight_sync"] = {"checksum": True}
    assert ranks(2).run(run_with_a_death, settings) == [2, 1]
    ages = [row["rollout/staleness_max"] for row in metrics_of(tmp_path / "run")]
    assert max(ages) <= 1
