"""A tokenizer's files in an exported folder.

transformers 5 names a tokenizer's class and its special tokens as transformers 4 cannot read them, and has the chat
template in a file of its own. Training changes no tokenizer but for its template, so exports keep the files' own form.
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
"""Files in which other readers look for a tokenizer."""


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Writes a tokenizer's files, in the form of those that it was opened from if they make the same tokenizer.

    Args:
        tokenizer: the tokenizer, perhaps with another chat template than its files have.
        folder: the folder to write to.
    """
    tokenizer.save_pretrained(folder)
    source = Path(tokenizer.name_or_path)
    if not (source / TOKENIZER_CONFIG).is_file() or (folder / TOKENIZER_CONFIG).samefile(source / TOKENIZER_CONFIG):
        return
    written, values = (json.loads((of / TOKENIZER_CONFIG).read_text()) for of in (folder, source))
    if "auto_map" in values:  # it needs code
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
    """Whether a folder has the same tokenizer."""
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
