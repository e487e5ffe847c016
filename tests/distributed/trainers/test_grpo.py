"""Reinforcement learning end to end: a layout against one process, adapters, advantages, a loss of the config."""

import itertools
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from automodel_rl.batch import Microbatch
from automodel_rl.cli import main
from automodel_rl.engine import Engine
from automodel_rl.observe.metrics import read_lines
from automodel_rl.trainers.run_checkpoints import RunCheckpoints
from tests.distributed.trainers.runs import (
    Settings,
    assert_same_weights,
    metrics_of,
    rollouts_of,
    settings_of,
    train,
    train_noting,
    write,
)
from tests.rank_pool import RankPool


def values(workspace: Path, output: Path, **changes: Any) -> Settings:
    return settings_of("grpo", workspace, output, **changes)


def test_a_pipeline_follows_one_process(ranks: RankPool, workspace: Path, tmp_path: Path) -> None:
    length = {"steps": 3, "validate_every": 3}
    ranks(1).run(train, values(workspace, tmp_path / "one", length=length))
    parallel = {"pp": 2, "schedule": "Interleaved1F1B", "virtual_stages": 2}
    ranks(2).run(train, values(workspace, tmp_path / "two", length=length, parallel=parallel))
    (start, *ones), (other_start, *twos) = metrics_of(tmp_path / "one"), metrics_of(tmp_path / "two")
    assert start["step"] == 0
    assert start["val/reward_mean"] == other_start["val/reward_mean"]
    for one, two in zip(ones, twos, strict=True):
        for name in ("train/loss", "train/grad_norm", "train/kl_ref", "rollout/reward_mean", "train/entropy"):
            assert two[name] == pytest.approx(one[name], rel=1e-8, abs=1e-12), name
    for step in range(1, 4):
        of_one, of_two = (read_lines(tmp_path / run / "rollouts" / f"step_{step}.jsonl") for run in ("one", "two"))
        assert {row.pop("generator") for row in of_two} == {"generator of rank 0", "generator of rank 1"}
        assert {row.pop("generator") for row in of_one} == {"generator of rank 0"}
        assert of_one == of_two
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


@pytest.mark.parametrize("optimizer_steps", [1, 2])
def test_rollouts_tell_advantages_and_both_log_probabilities(
    ranks: RankPool, workspace: Path, tmp_path: Path, optimizer_steps: int
) -> None:
    settings = values(workspace, tmp_path / "run", length={"steps": 2}, parallel={"dp_shard": 2})
    settings["batch"]["optimizer_steps"] = optimizer_steps
    ranks(2).run(train, settings)
    tokenizer = AutoTokenizer.from_pretrained(workspace / "model")
    for step in (1, 2):
        records = rollouts_of(tmp_path / "run", step)
        lanes = {lane["lane"]: lane for lane in read_lines(tmp_path / "run" / "timelines" / f"step_{step}.jsonl")}
        rollout = dict(zip(lanes["trainer"]["names"], lanes["trainer"]["spans"], strict=True))["rollout"]
        spans = [span for rank in (0, 1) for span in lanes[f"generator of rank {rank}"]["spans"]]
        within = [1 for start, end in spans if rollout[0] <= start <= end <= rollout[1]]
        assert len(within) == len(records)  # and not those of held-out prompts
        assert {"rollout", "train", "sync"} <= set(lanes["trainer"]["names"])
        for group in (records[start : start + 4] for start in range(0, len(records), 4)):
            rewards = torch.tensor([record["reward"] for record in group], dtype=torch.float64)
            expected = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
            assert [record["advantage"] for record in group] == pytest.approx(expected.tolist(), abs=1e-4)
        told = [record for record in records if "pieces" in record]
        assert told
        for record in told:
            texts, theirs, ours = zip(*record["pieces"], strict=True)
            assert len(texts) == record["tokens"]
            assert {text for text in texts if text.isascii()} <= {*map(tokenizer.decode, range(len(tokenizer)))}
            assert ours == pytest.approx(theirs, abs=2e-4)
            assert min(ours) < -0.01


@pytest.mark.usefixtures("one_rank")
def test_validation_samples_several_times_and_prompts_that_are_long_or_held_out_are_mentioned(
    workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = values(workspace, tmp_path / "run", length={"steps": 1, "validate_every": 1})
    settings["rewards"] = [{"function": "last_number"}]
    settings["rollout"] |= {"validation_samples": 3, "validation_temperature": 1.0, "max_prompt_tokens": 56}
    settings["rollout"] |= {"validation_top_p": 0.9}
    settings["data"]["validation"] += settings["data"]["train"]
    assert main(["grpo", write(settings, tmp_path)]) in (0, 1)  # random weights may give no reward that differs
    baseline = metrics_of(tmp_path / "run")[0]
    assert {"val/mean@3", "val/pass@3"} <= baseline.keys()
    assert "val/pass@1" not in baseline
    assert baseline["val/mean@3"] <= baseline["val/pass@3"] <= 1
    said = capsys.readouterr().out
    assert "are longer than rollout.max_prompt_tokens=56 and were dropped" in said
    assert "warning: 4 of the step's 4 prompts are also held-out prompts, so val/ measures what was" in said
    settings["rollout"]["validation_temperature"] = 0.0
    assert main(["grpo", write(settings, tmp_path), "--output", str(tmp_path / "other")]) == 2
    assert "validation_samples=3 with validation_temperature=0" in capsys.readouterr().err
    settings["rollout"] |= {"validation_samples": 1}
    assert main(["grpo", write(settings, tmp_path), "--output", str(tmp_path / "other")]) == 2
    assert "validation_top_p=0.9 with validation_temperature=0, which takes" in capsys.readouterr().err


@pytest.mark.parametrize("lora", [{"rank": 2}, {"rank": 2, "dora": True}], ids=str)
def test_adapters_may_reach_the_generator_alone(ranks: RankPool, workspace: Path, tmp_path: Path, lora: dict) -> None:
    model = {"path": str(workspace / "model"), "dtype": "float64", "lora": lora}
    settings = values(workspace, tmp_path / "run", model=model, length={"steps": 3}, parallel={"pp": 2})
    settings |= {"weight_sync": {"adapters": "alone", "checksum": True}}
    for output, place in (("same", "in_process"), ("own", "shared")):
        rollout = settings["rollout"] | {"generator": {"kind": "transformers", "place": place}}
        ranks(2).run(train, settings | {"output": str(tmp_path / output), "rollout": rollout})
        for row in metrics_of(tmp_path / output):
            assert row["train/logprob_error"] == pytest.approx(1, abs=1e-6)
    assert_same_weights(tmp_path / "same" / "final", tmp_path / "own" / "final")


def watch(settings: Settings) -> tuple[list[dict[str, Any]], dict[str, float] | None]:
    """Every sequence that is trained on: step, update, place in it, advantage, and divergence from the reference; and
    what is known of the best checkpoint."""
    seen: list[dict[str, Any]] = []
    train_step, finish, num_updates = Engine.train_step, RunCheckpoints.finish, 0
    best: list[dict[str, float] | None] = [None]

    def watching(engine: Engine, rows: list[Microbatch], *arguments: Any) -> Any:
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
        output = train_step(engine, rows, *arguments)
        if engine.handle.layout.data_rank == 0:
            seen.append({"update": num_updates, "lr": output.lr, "ratio": output.metrics["train/ratio_mean"]})
        num_updates += 1
        return output

    def finished(checkpoints: RunCheckpoints) -> Any:
        error, best[0] = finish(checkpoints), checkpoints.best
        return error

    with mock.patch.object(Engine, "train_step", watching), mock.patch.object(RunCheckpoints, "finish", finished):
        train(settings)
    return seen, best[0]


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


@pytest.mark.parametrize("sizes", [{"pp": 2}, {"tp": 2}, {"dp_shard": 2}], ids=str)
def test_rewards_teach_the_tokens_where_the_policy_is_most_uncertain(
    ranks: RankPool, workspace: Path, tmp_path: Path, sizes: dict[str, int]
) -> None:
    settings = values(workspace, tmp_path / "run", length={"steps": 1}, loss={"uncertain": 0.3}, parallel=sizes)
    settings["batch"] = {"microbatch_tokens": 128}
    ranks(2).run(train_noting, settings, tmp_path / "rows")
    rows = torch.load(tmp_path / "rows", weights_only=False)
    model = AutoModelForCausalLM.from_pretrained(settings["model"]["path"], dtype=torch.float64)
    entropies, chosen = [], []
    for row in rows:
        logprobs = model(row.input_ids[None]).logits[0, :-1].detach().log_softmax(1)
        entropies.append(-(logprobs.exp() * logprobs).sum(1)[row.loss_mask[1:]])
        chosen.append(row.values["uncertain"][1:][row.loss_mask[1:]])
        assert not row.values["uncertain"][~row.loss_mask].any()
    of_all = torch.cat(entropies)
    assert torch.equal(torch.cat(chosen), (of_all >= of_all.quantile(0.7)).double())
    assert metrics_of(tmp_path / "run")[-1]["train/grad_norm"] > 0


def test_old_logprobs_are_left_out_where_they_are_those_of_the_step(
    ranks: RankPool, workspace: Path, tmp_path: Path
) -> None:
    correction = {"kind": "sequence_mask", "low": 0.5, "high": 2.0}
    rows = []
    for on_policy in (False, "auto"):
        loss = {"on_policy": on_policy, "ratio": "sequence", "correction": correction, "kl": {"coefficient": 0.1}}
        settings = values(workspace, tmp_path / str(on_policy), length={"steps": 2}, loss=loss)
        ranks(1).run(train, settings | {"batch": {"microbatch_tokens": 128}})
        rows.append(metrics_of(tmp_path / str(on_policy)))
    for computed, left_out in zip(*rows, strict=True):
        same = [key for key in computed if key.startswith("train/")]
        assert len(same) > 8
        for key in same:
            assert left_out[key] == pytest.approx(computed[key], rel=1e-5, abs=1e-7), key


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
