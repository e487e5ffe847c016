"""Folders of runs as runs leave them, made by hand."""

import json
import math
from pathlib import Path

from automodel_rl.config.algorithms import GRPOConfig, SFTConfig
from automodel_rl.observe.metrics import MetricsFile, write_lines
from automodel_rl.observe.run_directory import RunDirectory

COMMON = {"model": {"path": "m"}, "data": {"train": [{"path": "a.jsonl"}]}, "length": {"steps": 40}}


def make_sft_run(folder: Path, steps: int = 40) -> Path:
    config = SFTConfig.model_validate({**COMMON, "output": str(folder), "batch": {"sequences": 8}})
    directory = RunDirectory(config, str(folder), resume="never")
    directory.create(40)
    metrics = MetricsFile(directory.metrics, 0)
    for step in range(1, steps + 1):
        metrics.write(
            {
                "step": step,
                "train/loss": 3.0 / step if step != 5 else math.nan,
                "train/grad_norm": 1.0 + math.sin(step),
                "perf/tokens_per_second": 1000.0 + step,
                "time/data_s": 0.1,
                "time/train_s": 0.4,
                "time/step_s": 0.5,
                "mine/own metric": step,
            }
        )
    return folder


def make_grpo_run(folder: Path) -> Path:
    values = {
        **COMMON,
        "output": str(folder),
        "rollout": {"prompts": 2, "group_size": 2, "max_prompt_tokens": 8, "max_new_tokens": 8},
        "rewards": [{"function": "math"}],
        "batch": {},
    }
    directory = RunDirectory(GRPOConfig.model_validate(values), str(folder), resume="never")
    directory.create(40)
    metrics = MetricsFile(directory.metrics, 0)
    for step in range(1, 13):
        metrics.write({"step": step, "rollout/reward_mean": step / 12, "train/loss": 0.1, "time/step_s": 1.0})
        write_lines(directory.rollouts / f"step_{step}.jsonl", rollouts_of(step))
        write_lines(directory.timelines / f"step_{step}.jsonl", lanes_of(step))
    stretches = [["What is <b>this</b>?", False], ["four", True]]
    write_lines(directory.examples / "step_0.jsonl", [{"where": "d.jsonl:1", "num_tokens": 9, "stretches": stretches}])
    write_lines(directory.samples / "step_12.jsonl", [{"prompt": "<b>2+2</b>", "completion": "4", "expected": "four"}])
    return folder


def lanes_of(step: int) -> list[dict]:
    """A step that waits for a generator, which began before it."""
    phases = [[0.0, 2.0], [2.0, 2.1], [2.1, 3.0 + step]]
    return [
        {"lane": "trainer", "spans": phases, "names": ["rollout", "pack", "train"]},
        {"lane": "generator of rank 0", "spans": [[-0.5, 1.0], [-0.5, 1.5], [0.2, 2.0]]},
        {"lane": "rewards", "spans": [[1.0, 1.1], [1.5, 1.6], [2.0, 2.0]]},
    ]


def rollouts_of(step: int) -> list[dict]:
    """Two groups: rewards differ in the second one alone."""
    texts = ["x = 1\n\n\n\n\nso 1", "</script><script>alert(1)</script>", "line\n" * 200, "<i>no</i>"]
    return [
        {
            "prompt": f"question {number // 2} of step {step}",
            "completion": text,
            "reward": float(number > 2),
            "rewards": {"math": float(number > 2), "short": 0.5},
            "metrics": {},
            "errors": ["the reward failed"] if number == 3 else [],
            "tokens": 4,
            "finish": "length" if number == 1 else "stop",
            "advantage": 0.7,
            **({"pieces": [["<i>", -0.5, -0.1], ["no</i>", -1.0, -1.9]]} if number == 3 else {}),
        }
        for number, text in enumerate(texts)
    ]


def episode() -> dict:
    """An agent's episode of two histories, of which the first was gone on with in two ways."""

    def turn(parent: int | None, kind: str, reason: str, text: str, trained: bool = True) -> dict:
        messages: list[dict] = [{"role": "user", "content": "And now?"}, {"role": "assistant", "content": text}]
        counts = {"tokens": 5, "context": 9, "trained": trained}
        return {"parent": parent, "kind": kind, "reason": reason, "messages": messages, **counts}

    tree = [
        turn(None, "first", "", ""),
        turn(0, "extension", "", "left out", trained=False),
        turn(0, "sibling", "one history continued in two ways", "other"),
        turn(None, "root", "tools changed", "new"),
    ]
    call = {"function": {"name": "look_up", "arguments": '{"who": "Ben"}'}}
    tree[0]["messages"][1]["tool_calls"] = [call]
    turns = {"turns": 4, "calls": 1, "rows": 3}
    known = {"prompt": "q", "completion": "new", "reward": 1.0, "rewards": {"math": 1.0}, "tokens": 9, "finish": "stop"}
    return {**known, "messages": tree[3]["messages"], "end": "done", "turns": turns, "tree": tree}


def conversation() -> dict:
    """A record of a conversation with a call."""
    call = {"type": "function", "function": {"name": "look_up", "arguments": {"word": "<b>"}}}
    return rollouts_of(12)[0] | {
        "messages": [
            {"role": "user", "content": "Is this an example?"},
            {"role": "assistant", "content": "Yes, in the prompt."},
            {"role": "user", "content": "Is it there?"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "name": "look_up", "content": "found <b>"},
            {"role": "assistant", "content": "It is there."},
        ],
        "end": "tokens",
        "sampled": 2,
        "turns": {"turns": 2.0, "calls": 1.0},
        "pieces": [["look", -0.5, -0.4], ["found", None, None], ["there", -0.1, -0.1]],
    }


def set_finished(folder: Path, step: int) -> None:
    (folder / "final").mkdir()
    (folder / ".finished_after").write_text(json.dumps(step))
