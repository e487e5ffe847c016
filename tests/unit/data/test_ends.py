"""Ends of completions: from a checkpoint's files, its tokenizer and its chat template."""

import json
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase, Qwen3Config

from automodel_rl.data.stop_tokens import completion_stop_ids, new_stop_tokens, template_stop_ids
from automodel_rl.data.template import ChatTemplate
from automodel_rl.errors import InputError
from automodel_rl.hf.generation import write_generation
from automodel_rl.quickstart.model import train_tokenizer
from tests.unit.data.stock_templates import stock_tokenizer

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.mark.parametrize(
    ("name", "ends"),
    [
        ("qwen3", ["<|im_end|>"]),
        ("phi3_5", ["<|end|>"]),  # ends a chat with the tokenizer's end token besides
        ("llama3_1", ["<|eot_id|>"]),
        ("gemma3", ["<end_of_turn>"]),
        ("cohere2", ["<|END_OF_TURN_TOKEN|>"]),  # after a mark that ends the response
        ("deepseekv3_training", ["<｜end▁of▁sentence｜>"]),  # calls have marks of their own
        ("gemma4", ["<turn|>", "<|tool_response>"]),
        ("gptoss", ["<|return|>", "<|call|>"]),  # <|end|> also ends thoughts
        ("glm4moe", ["<|user|>", "<|observation|>"]),  # the next role's mark
        ("glm4moe_training", ["<|user|>", "<|observation|>"]),
    ],
)
def test_a_template_tells_the_tokens_that_end_turns(name: str, ends: list[str]) -> None:
    tokenizer = stock_tokenizer(name)
    assert tokenizer.convert_ids_to_tokens(template_stop_ids(ChatTemplate(tokenizer))) == ends


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    """A base model's: <|pad|> (0) ends texts, and <|im_end|> (2) ends turns."""
    tokenizer = train_tokenizer(["a b c"], 300)
    tokenizer.eos_token, tokenizer.chat_template = "<|pad|>", CHATML
    return tokenizer


def settings(folder: Path) -> dict[str, object]:
    values: dict[str, object] = json.loads((folder / "generation_config.json").read_text())
    return values


@pytest.mark.parametrize("named", [5, [5, 6]])
def test_a_completion_ends_at_the_tokens_of_all_places(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, named: object
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": named}))
    config = Qwen3Config(eos_token_id=[3, 4])
    assert completion_stop_ids(tmp_path, config, tokenizer) == {
        0,
        2,
        3,
        4,
        5,
        *(named if isinstance(named, list) else []),
    }
    tokenizer.chat_template = None
    assert 2 not in completion_stop_ids(tmp_path, config, tokenizer)


def test_a_template_with_an_end_that_is_not_special_or_no_token(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    config = Qwen3Config(eos_token_id=0)
    tokenizer.chat_template = CHATML.replace("<|im_end|>", "<end>")
    assert new_stop_tokens(tmp_path, config, tokenizer).note.startswith(
        "warning: the chat template ends the assistant's turns"
    )
    tokenizer.add_tokens("<end>")
    assert new_stop_tokens(tmp_path, config, tokenizer).ids == (tokenizer.convert_tokens_to_ids("<end>"),)


def test_an_export_stops_where_training_ended_turns(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir(), out.mkdir()
    config = Qwen3Config(eos_token_id=0, pad_token_id=1)
    ends = new_stop_tokens(source, config, tokenizer)
    assert ends.note == "generation_config.json also stops at <|im_end|> (2), which ends what was trained"
    write_generation(out, source, config, ends.ids)
    assert settings(out) == {"pad_token_id": 1, "eos_token_id": [0, 2]}
    (source / "generation_config.json").write_text(
        json.dumps({"_from_model_config": True, "eos_token_id": 0, "temperature": 0.6})
    )
    write_generation(out, source, config, new_stop_tokens(source, config, tokenizer).ids)
    assert settings(out) == {"eos_token_id": [0, 2], "temperature": 0.6}
    assert "export --merge" in new_stop_tokens(source, config, tokenizer, adapters=True).note


def test_an_export_keeps_settings_that_know_all_ends(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir(), out.mkdir()
    text = '{"eos_token_id":[2,  0]}'
    (source / "generation_config.json").write_text(text)
    ends = new_stop_tokens(source, Qwen3Config(), tokenizer)
    assert (ends.ids, ends.note) == ((), "")
    write_generation(out, source, Qwen3Config(), ends.ids)
    assert (out / "generation_config.json").read_text() == text


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "cannot be read"),
        ("[1]", "is not a JSON object"),
        ('{"eos_token_id": "x"}', "a token id or a list of them"),
    ],
)
def test_damaged_settings_are_one_clear_error(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, text: str, problem: str
) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(InputError, match=problem):
        completion_stop_ids(tmp_path, Qwen3Config(), tokenizer)
