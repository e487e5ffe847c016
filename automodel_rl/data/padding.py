"""The token that pads rows for a sequence classifier, for exports of reward models.

transformers reads a classifier's scores at the last token that is not the config's padding token. If rows end with that
token, as they do where a tokenizer pads with its end token, the scores are read one token too early.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from automodel_rl.data.ends import row_ends


@dataclass(frozen=True)
class Padding:
    """How rows of a classifier are padded.

    Attributes:
        tokenizer: the tokenizer, which pads with this token.
        token: the id of the token; None if the tokenizer has none that ends no row.
        note: a line about it for the user; empty if there is nothing to say.
    """

    tokenizer: PreTrainedTokenizerBase
    token: int | None
    note: str


def padding_of(
    config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, variables: Mapping[str, Any] | None = None
) -> Padding:
    """The padding of a classifier: the tokenizer's or the config's own token, else another special one, that ends no
    row.

    Args:
        config: the model's config.
        tokenizer: the model's tokenizer.
        variables: further variables for the chat template.
    """
    ends = row_ends(tokenizer, variables)
    known = [tokenizer.pad_token_id, config.pad_token_id, *sorted(tokenizer.all_special_ids)]
    token = next((one for one in known if one is not None and one not in ends), None)
    if token is None:
        return Padding(
            tokenizer,
            None,
            "warning: the tokenizer has no special token that could pad rows and ends none: score rows with this model "
            "one by one, for transformers reads a padded row at its last token that is no padding",
        )
    if token == tokenizer.pad_token_id:
        return Padding(tokenizer, token, "")
    before, changed = tokenizer.pad_token, copy.deepcopy(tokenizer)
    changed.pad_token = changed.convert_ids_to_tokens(token)
    note = f"rows are padded with {changed.pad_token}, for transformers reads scores at the last token that is no "
    return Padding(changed, token, f"{note}padding, and {before or 'no token'} {'ends rows' if before else 'was set'}")
