"""Choice of the padding token of a sequence classifier, for exports of reward models.

transformers reads a classifier's score at the last token that is not the config's padding token. If sequences end with
that token, as when a tokenizer pads with its end token, the score is read one token too early.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from automodel_rl.data.stop_tokens import row_stop_ids


@dataclass(frozen=True)
class Padding:
    """The padding of a classifier.

    Attributes:
        tokenizer: the tokenizer, set to pad with this token.
        token: id of the token; None if every candidate ends sequences.
        note: a message for the user; empty if there is none.
    """

    tokenizer: PreTrainedTokenizerBase
    token: int | None
    note: str


def padding_of(
    config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, variables: Mapping[str, Any] | None = None
) -> Padding:
    """Returns the first of the tokenizer's padding token, the config's, and other special tokens that never ends a
    sequence. `variables` are additional variables of the chat template."""
    ends = row_stop_ids(tokenizer, variables)
    known = [tokenizer.pad_token_id, config.pad_token_id, *sorted(tokenizer.all_special_ids)]
    token = next((one for one in known if one is not None and one not in ends), None)
    if token is None:
        return Padding(
            tokenizer,
            None,
            "warning: the tokenizer has no special token that can pad rows and ends none: score rows one by one, "
            "because transformers reads a padded row at its last token that is not padding",
        )
    if token == tokenizer.pad_token_id:
        return Padding(tokenizer, token, "")
    before, changed = tokenizer.pad_token, copy.deepcopy(tokenizer)
    changed.pad_token = changed.convert_ids_to_tokens(token)
    note = f"rows are padded with {changed.pad_token}, because transformers reads scores at the last token that is not "
    return Padding(changed, token, f"{note}padding, and {before or 'no token'} {'ends rows' if before else 'was set'}")
