"""Tokenizer files in an exported folder.

transformers 5 writes a tokenizer's class and special tokens in a form that transformers 4 cannot read, and the chat
template in a separate file. Training changes nothing of a tokenizer but its template, so exports keep the files'
original form.
"""

import json
import shutil
import warnings
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

TOKENIZER_CONFIG = "tokenizer_config.json"

TEMPLATE = "chat_template"

COPIED = (
    "added_tokens.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
)
"""Files in which other programs look for a tokenizer."""


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Writes a tokenizer's files, in the form of those it was loaded from if these give the same tokenizer. The chat
    template may have been changed since."""
    tokenizer.save_pretrained(folder)
    source = Path(tokenizer.name_or_path)
    if not (source / TOKENIZER_CONFIG).is_file() or (folder / TOKENIZER_CONFIG).samefile(source / TOKENIZER_CONFIG):
        return
    written, values = (json.loads((of / TOKENIZER_CONFIG).read_text()) for of in (folder, source))
    if "auto_map" in values:  # it needs remote code
        return
    if TEMPLATE in values:
        values[TEMPLATE] = tokenizer.chat_template
    (folder / TOKENIZER_CONFIG).write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n")
    copied = [name for name in COPIED if (source / name).is_file() and not (folder / name).exists()]
    for name in copied:
        shutil.copy(source / name, folder / name)
    if not _is_same(tokenizer, folder):
        (folder / TOKENIZER_CONFIG).write_text(json.dumps(written, indent=2, ensure_ascii=False) + "\n")
        for name in copied:
            (folder / name).unlink()


def _is_same(tokenizer: PreTrainedTokenizerBase, folder: Path) -> bool:
    try:
        with warnings.catch_warnings(action="ignore"):
            other = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, AttributeError, TypeError):
        return False
    return (
        tokenizer.special_tokens_map == other.special_tokens_map
        and {*tokenizer.all_special_tokens} == {*other.all_special_tokens}
        and tokenizer.get_vocab() == other.get_vocab()
        and tokenizer.chat_template == other.chat_template
        and tokenizer.padding_side == other.padding_side
    )
