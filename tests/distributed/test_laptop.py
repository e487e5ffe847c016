"""The commands of the page with first steps, as they stand there, learn; the demo before them is a cheaper one."""

import random
import re
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from automodel_rl.quickstart.model import train_tokenizer, write_model
from automodel_rl.quickstart.problems import write_jsonl
from tests.distributed.trainers.runs import metrics_of, train
from tests.pages import PACKAGE
from tests.processes import Job, run_command
from tests.rank_pool import RankPool

HEADING = "## From chats to rewards, on a laptop"
MIN_RISE = 0.2


def make_demo(ranks: RankPool, folder: Path) -> None:
    """Writes sums, and a model that knows them and seldom says so, where the demo would be."""
    random_ = random.Random(0)
    sums = [(f"{x}+{y}?", str(x + y)) for x in range(1, 4) for y in range(1, 4)]
    chats = [
        {"messages": [{"role": "user", "content": sum_}, {"role": "assistant", "content": said}]}
        for sum_, answer in 20 * sums
        for said in [answer if random_.random() < 0.35 else "?"]
    ]
    random_.shuffle(chats)
    write_jsonl(folder / "chats.jsonl", chats)
    write_jsonl(folder / "prompts.jsonl", [{"prompt": sum_, "answer": answer} for sum_, answer in sums])
    demo = folder / "runs" / "demo-1"
    write_model(demo / "model", train_tokenizer([m["content"] for c in chats for m in c["messages"]], 300), seed=0)
    warm_up = {
        "algorithm": "sft",
        "output": str(demo / "sft"),
        "model": {"path": str(demo / "model"), "dtype": "float32"},
        "data": {"train": [{"path": str(folder / "chats.jsonl")}]},
        "batch": {"sequences": 24, "microbatch_tokens": 1024},
        "length": {"steps": 40},
        "optimizer": {"lr": 3e-3, "warmup_steps": 10},
        "observe": {"samples": 0},
        "checkpoint": {"every_steps": None},
    }
    ranks(1).run(train, warm_up)


def typed(folder: Path, script: str) -> list[list[str]]:
    """The arguments of every automodel-rl of a script, as the shell makes them."""
    (folder / ".venv" / "bin").mkdir(parents=True)
    # Each line in one write: two commands may run at once.
    lines = "local line; printf -v line '%s\\x1f' \"$@\"; printf '%s\\n' \"$line\";"
    (folder / ".venv" / "bin" / "activate").write_text(f"automodel-rl() {{ {lines} }}\n")
    done = run_command(["bash", "-ec", f"{script}\nwait"], cwd=folder)
    assert done.returncode == 0, done.stderr
    return [line.split("\x1f")[:-1] for line in done.stdout.splitlines()]


def test_from_chats_to_rewards(ranks: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section = (PACKAGE / "quickstart" / "README.md").read_text().partition(HEADING)[2]
    (rewards,) = re.findall(r"```python\n(.*?)```", section.partition("\n## ")[0], re.DOTALL)
    (script,) = re.findall(r"```sh\n(.*?)```", section.partition("\n## ")[0], re.DOTALL)
    make_demo(ranks, tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_rewards.py").write_text(rewards)
    commands = typed(tmp_path, script)
    assert [arguments[0] for arguments in commands if arguments[0] != "watch"] == [
        "init",
        "sft",
        "init",
        "grpo",
        "export",
    ]
    (watch,) = [arguments for arguments in commands if arguments[0] == "watch"]
    with Job([sys.executable, "-m", "automodel_rl", *watch]) as page:
        assert page.wait_until(lambda: "shows the runs as they progress" in page.stdout), page.stderr
        for arguments in commands:
            if arguments != watch:
                done = run_command([sys.executable, "-m", "automodel_rl", *arguments])
                assert done.returncode == 0, done.stderr
    means = [metrics["rollout/reward_mean"] for metrics in metrics_of(tmp_path / "runs" / "rl")]
    assert sum(means[-3:]) / 3 > means[0] + MIN_RISE, means
    AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
