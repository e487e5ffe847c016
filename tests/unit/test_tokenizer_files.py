"""A tokenizer's files in an export: as transformers 4 reads them, where the source's are."""

import json
from pathlib import Path

from transformers import AutoTokenizer

from automodel_rl.quickstart.model import CHAT_TEMPLATE, train_tokenizer
from automodel_rl.tokenizer_files import save_tokenizer


def test_a_tokenizer_keeps_the_form_of_its_files(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    tokenizer = train_tokenizer(["a b c"], 300)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<x>"]})
    tokenizer.save_pretrained(source)
    (source / "chat_template.jinja").unlink()
    older = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "additional_special_tokens": ["<x>"],
        "eos_token": "<|im_end|>",
        "pad_token": "<|pad|>",
        "chat_template": "old",
        "padding_side": "left",
    }
    (source / "tokenizer_config.json").write_text(json.dumps(older))
    (source / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    opened = AutoTokenizer.from_pretrained(source)
    opened.chat_template = CHAT_TEMPLATE
    save_tokenizer(opened, out)
    assert json.loads((out / "tokenizer_config.json").read_text()) == older | {"chat_template": CHAT_TEMPLATE}
    assert (out / "special_tokens_map.json").is_file()
    again = AutoTokenizer.from_pretrained(out)
    assert (again.chat_template, again.all_special_tokens) == (CHAT_TEMPLATE, opened.all_special_tokens)
    opened.eos_token = "<x>"  # it differs from its files now
    save_tokenizer(opened, tmp_path / "changed")
    assert AutoTokenizer.from_pretrained(tmp_path / "changed").eos_token == "<x>"
