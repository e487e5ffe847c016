"""The tokenizer of a checkpoint, with its own chat template or the user's."""

import json
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from automodel_rl.errors import InputError

OF_PROCESSOR = "chat_template.json"
"""File in which transformers 4 stored the chat template of a model with images."""


def load_tokenizer(
    folder: Path, vocab_size: int, template: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Loads the checkpoint's tokenizer.

    Args:
        vocab_size: size of the model's vocabulary, which the tokenizer must not exceed.
        template: file of a chat template that replaces the tokenizer's own.

    Raises:
        InputError: the tokenizer cannot be opened or does not fit the model.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"model.path={folder}: no tokenizer that transformers can open ({reason})") from None
    if len(tokenizer) > vocab_size:
        raise InputError(
            f"model.path={folder}: the tokenizer has {len(tokenizer)} tokens but the model's vocabulary is "
            f"{vocab_size}: use the tokenizer that belongs to the model"
        )
    if template is not None:
        try:
            tokenizer.chat_template = Path(template).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"data.chat_template={template}: cannot read it ({error})") from None
    elif tokenizer.chat_template is None and (folder / OF_PROCESSOR).is_file():
        tokenizer.chat_template = json.loads((folder / OF_PROCESSOR).read_text())["chat_template"]
    return tokenizer


def check_same_tokens(tokenizer: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> None:
    """Raises InputError unless the tokenizers of the trained model and of another one map the same tokens to the same
    ids."""
    own, theirs = tokenizer.get_vocab(), other.get_vocab()
    if own == theirs:
        return
    token = min((own.keys() ^ theirs.keys()) or [one for one in own if own[one] != theirs[one]])
    said = [f"{place} {vocab.get(token, 'no id')}" for place, vocab in (("here", own), ("there", theirs))]
    raise InputError(
        f"its tokenizer differs from the trained model's ({len(theirs)} and {len(own)} tokens; {token!r} has "
        f"{', '.join(said)}), so that their token ids mean different texts: use a model with the same tokenizer"
    )
