"""Training, plan and verify refuse the same runs in the same words, before weights are read: here there are none."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlavaConfig, PreTrainedTokenizerFast, Qwen3Config

from automodel_rl.config import ALGORITHMS
from automodel_rl.config.load import check_config
from automodel_rl.errors import InputError
from automodel_rl.tools.plan.command import plan
from automodel_rl.tools.plan.devices import find_device
from automodel_rl.tools.verify.command import verify
from automodel_rl.trainers.train import train
from tests.unit.support.combinations import RUN, RUNS, nested
from tests.unit.support.examples import Keys


def config_of(folder: Path, algorithm: str, keys: Keys) -> Any:
    paths = {"model.path": str(folder / "model"), "output": str(folder / "run")}
    return check_config(ALGORITHMS[algorithm], nested({**RUN, **RUNS[algorithm], **paths, **keys}))


def refusal(action: Callable[[], object]) -> str:
    with pytest.raises(InputError) as error:
        action()
    return str(error.value)


@pytest.mark.parametrize(
    ("model", "algorithm", "keys", "message"),
    [
        (
            LlavaConfig(),
            "dpo",
            {"model.lora": {}, "model.frozen": ["vision"]},
            "model.frozen with model.lora: everything but",
        ),
        (
            LlavaConfig(),
            "grpo",
            {"rollout.tools": ["math:sqrt"], "rollout.max_turns": 1},
            "with a 'llava' model: prompts have media",
        ),
        (Qwen3Config(max_position_embeddings=15), "grpo", {}, "= 16 is more than the model's context of 15 tokens"),
        (Qwen3Config(), "grpo", {"router_replay.enabled": True}, "a 'qwen3' model has no routers"),
        (Qwen3Config(), "sft", {"model.lora": {"targets": ["lm_head"]}}, "lm_head cannot have adapters"),
        (Qwen3Config(num_hidden_layers=1), "dpo", {"parallel.pp": 2}, "the model has 1 layers and a stage needs"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_all_commands_refuse_the_same(tmp_path: Path, model: Any, algorithm: str, keys: Keys, message: str) -> None:
    model.save_pretrained(tmp_path / "model")
    config = config_of(tmp_path, algorithm, keys)
    said = refusal(lambda: train(config))
    assert message in said
    assert refusal(lambda: plan(config, None, find_device("H200"), as_json=False)) == said
    assert refusal(lambda: verify(config, as_json=False)) == said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_missing_chat_template_is_found_before_weights_are_read(tmp_path: Path, algorithm: str) -> None:
    Qwen3Config().save_pretrained(tmp_path / "model")
    (tmp_path / "d.jsonl").write_text('{"prompt": "p", "completion": "c"}')
    config = config_of(tmp_path, algorithm, {"data.train": [{"path": str(tmp_path / "d.jsonl")}]})
    assert "has no tokenizer files, such as tokenizer.json" in refusal(lambda: train(config))
    words = Tokenizer(WordLevel({"p": 0, "c": 1}, unk_token="p"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / "model")
    assert "the tokenizer has no chat template" in refusal(lambda: train(config))
