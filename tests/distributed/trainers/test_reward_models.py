"""A trained reward model as a reward: learned from, and what can be wrong with it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from automodel_rl.rollout.rewards.reward_model import PROMPT, RewardModel
from tests.distributed.trainers.runs import Settings, assert_refused, metrics_of, rollouts_of, settings_of, train
from tests.rank_pool import RankPool


@pytest.fixture(name="judge", scope="module")
def make_judge(ranks: RankPool, workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that prefers right answers, with the same tokenizer."""
    folder = tmp_path_factory.mktemp("judge")
    ranks(1).run(train, settings_of("reward", workspace, folder / "run"))
    return folder / "run" / "final"


def values(workspace: Path, output: Path, judge: Path, **changes: Any) -> Settings:
    rewards = [{"model": str(judge)}]
    settings = settings_of("grpo", workspace, output, rewards=rewards, loss={}, length={"steps": 12})
    settings["optimizer"]["lr"] = 1e-2
    settings["rollout"] |= {"prompts": 16, "group_size": 4}
    settings["batch"] = {"microbatch_tokens": 512}
    return settings | changes


def test_a_policy_learns_what_a_reward_model_prefers(
    ranks: RankPool, workspace: Path, tmp_path: Path, judge: Path
) -> None:
    ranks(1).run(train, values(workspace, tmp_path / "run", judge))
    rows = [row for row in metrics_of(tmp_path / "run") if row["step"]]
    rewards = [row["rollout/reward_reward_model"] for row in rows]
    assert sum(rewards[-2:]) > sum(rewards[:2]) + 0.3
    assert not any(row["rollout/reward_errors"] for row in rows)
    model = AutoModelForSequenceClassification.from_pretrained(judge, dtype=torch.float64)
    tokenizer = AutoTokenizer.from_pretrained(judge)
    for record in rollouts_of(tmp_path / "run", 1)[:4]:
        question = record["prompt"].split("user\n")[1].split("<|im_end|>")[0]
        chat = [{"role": "user", "content": question}, {"role": "assistant", "content": record["completion"]}]
        ids = tokenizer.apply_chat_template(chat, return_tensors="pt", return_dict=False)
        assert record["reward"] == pytest.approx(model(ids).logits.item(), rel=1e-5)


def test_a_chat_is_scored_alone_and_among_others_alike(judge: Path) -> None:
    """Also where the model's config pads with the token that ends rows."""
    model = RewardModel(str(judge), dtype="float64")
    model.model.config.pad_token_id = model.tokenizer.eos_token_id
    said = ["1", "I do not know how many of them there are.", "2 3"]
    examples = [{PROMPT: [{"role": "user", "content": "How many?"}]}] * 3
    together = model(said, examples)
    alone = [model([one], examples[:1])[0] for one in said]
    assert together == pytest.approx(alone, rel=1e-6)
    assert len({round(score, 6) for score in together}) == 3


BAD: list[tuple[dict[str, Any], str]] = [
    ({"model": "nowhere/at/all"}, "rewards.model=nowhere/at/all: cannot be opened as a reward model"),
    ({"model": "MODEL", "options": {"place": "cuda"}}, "rewards.function=reward_model: options"),
    ({"function": "served_reward_model"}, "rewards.function=served_reward_model: options {} do not fit"),
]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("reward", "message"), BAD, ids=[message[:40] for _, message in BAD])
def test_bad_input_is_one_line_and_writes_nothing(
    workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], reward: dict[str, Any], message: str
) -> None:
    settings = values(workspace, tmp_path / "run", workspace / "model", rewards=[reward])
    assert_refused("grpo", settings, message, tmp_path, capsys)
