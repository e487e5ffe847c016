"""A folder with a tiny checkpoint's config and tokenizer, and one chat, as runs read them."""

import json
from pathlib import Path

from automodel_rl.config.algorithms import SFTConfig
from automodel_rl.quickstart.model import train_tokenizer
from tests import tiny


def sft_config(folder: Path, template: str | None) -> SFTConfig:
    """A config of a run that trains on one chat; its weights are not there.

    Args:
        folder: gets the files.
        template: the chat template, or None for the quickstart's own.
    """
    config = tiny.tiny_config("qwen3", vocab_size=320)
    (folder / "model").mkdir(exist_ok=True)
    config.save_pretrained(folder / "model")
    tokenizer = train_tokenizer(["one two"], vocab_size=300)
    if template is not None:
        tokenizer.chat_template = template
    tokenizer.save_pretrained(folder / "model")
    chat = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    (folder / "d.jsonl").write_text(json.dumps({"messages": chat}) + "\n" + json.dumps({"text": "one"}) + "\n")
    return SFTConfig.model_validate(
        {
            "output": str(folder / "run"),
            "model": {"path": str(folder / "model")},
            "data": {"train": [{"path": str(folder / "d.jsonl")}]},
            "batch": {"sequences": 1},
            "length": {"steps": 1},
        }
    )
