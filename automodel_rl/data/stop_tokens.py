"""End tokens of a model, for generators and exports.

A checkpoint has them in up to four places that often disagree: config.json, generation_config.json, the tokenizer, and
the chat template.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from automodel_rl.data.messages import Chat
from automodel_rl.data.template import PROBE, ChatTemplate
from automodel_rl.data.tool_formats import PROBE_TOOL
from automodel_rl.data.turn_suffix import QUESTION, probe_turn, turn_stop_tokens
from automodel_rl.hf.generation import GENERATION, config_stop_ids, generation_stop_ids

OPEN = (
    "warning: the chat template ends the assistant's turns with no token of the tokenizer, so completions may not end: "
    "set data.chat_template to another, or add the token to the tokenizer"
)
"""Warning for a template that ends turns with no token."""


def completion_stop_ids(
    source: Path,
    config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    variables: Mapping[str, Any] | None = None,
) -> set[int]:
    """Returns the ids of all tokens that end a completion. `source` is the checkpoint's folder, `config` that of the
    whole model, and `variables` are additional variables of the chat template."""
    return {*config_stop_ids(config), *generation_stop_ids(source, config), *_taught(tokenizer, variables)}


@dataclass(frozen=True)
class NewStopTokens:
    """End tokens learned in training that the checkpoint's generation_config.json lacks.

    Attributes:
        ids: tokens at which generation with the checkpoint's settings would not stop.
        note: a message about them for the user; empty if there is none.
    """

    ids: tuple[int, ...]
    note: str


def new_stop_tokens(
    source: Path,
    config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    variables: Mapping[str, Any] | None = None,
    *,
    adapters: bool = False,
) -> NewStopTokens:
    """Returns the end tokens that an export must add to generation_config.json. `adapters`: only adapters are exported,
    which have no such file. Other arguments as for `completion_stop_ids`."""
    known = generation_stop_ids(source, config)
    ids = tuple(end for end in _taught(tokenizer, variables) if end not in known)
    if not ids:
        is_open = tokenizer.chat_template is not None and not template_stop_ids(
            ChatTemplate(tokenizer, variables=variables)
        )
        return NewStopTokens((), OPEN if is_open else "")
    named = ", ".join(f"{tokenizer.convert_ids_to_tokens(end)} ({end})" for end in ids)
    if not adapters:
        return NewStopTokens(ids, f"{GENERATION} also stops at {named}, which ends what was trained")
    note = (
        f"warning: {GENERATION} of {source} does not stop at {named}, which ends what was trained: make generation "
        "with these adapters stop there, or merge them (automodel-rl export --merge), which writes it"
    )
    return NewStopTokens(ids, note)


def _taught(tokenizer: PreTrainedTokenizerBase, variables: Mapping[str, Any] | None) -> list[int]:
    """Returns the end tokens of training data: the tokenizer's for texts, the chat template's for turns."""
    of_texts = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    if tokenizer.chat_template is None:
        return of_texts
    return [*dict.fromkeys([*of_texts, *template_stop_ids(ChatTemplate(tokenizer, variables=variables))])]


def row_stop_ids(tokenizer: PreTrainedTokenizerBase, variables: Mapping[str, Any] | None = None) -> set[int]:
    """Returns the ids of the tokens that end training data, texts and turns. `variables` are additional variables of
    the chat template."""
    return {*_taught(tokenizer, variables)}


def template_stop_ids(template: ChatTemplate) -> list[int]:
    """Returns the ids of the tokens with which a chat template ends the assistant's turns; empty if there are none.

    Some tokenizers do not mark the end-of-turn token as special. It counts if it is an added token.
    """
    plain, calling = turn_stop_tokens(template, [PROBE_TOOL])
    ends = [plain or _end_among(template, template.tokenizer.get_added_vocab()), calling]
    return [template.tokenizer.convert_tokens_to_ids(end) for end in dict.fromkeys(ends) if end]


def _end_among(template: ChatTemplate, tokens: Iterable[str]) -> str:
    """Returns the longest of some tokens that directly follows the text of a turn, ignoring white space; empty if none
    does."""
    text = template.text(Chat([QUESTION, probe_turn(())])) or ""
    tail = text.rpartition(PROBE)[2].lstrip()
    return max((token for token in tokens if tail.startswith(token)), key=len, default="")
