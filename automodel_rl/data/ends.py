"""The tokens that end what a model writes: the one place that knows them, for generators and exports.

A checkpoint names them in up to four places that often differ: config.json, generation_config.json, the tokenizer, and
the chat template, which ends the assistant's turns with a token of its own.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from automodel_rl.data.messages import Chat
from automodel_rl.data.template import PROBE, ChatTemplate
from automodel_rl.data.tool_formats import PROBE_TOOL
from automodel_rl.data.turn_suffix import QUESTION, probe_turn, turn_ends
from automodel_rl.hf.generation import GENERATION, config_ends, generation_ends

OPEN = (
    "warning: the chat template ends the assistant's turns with no token of the tokenizer, so what the model writes "
    "may not end: give data.chat_template another, or add the token to the tokenizer"
)
"""The line about a template without an end."""


def completion_ends(
    source: Path,
    config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    variables: Mapping[str, Any] | None = None,
) -> set[int]:
    """Ids of the tokens that end a completion.

    Args:
        source: the checkpoint's folder.
        config: the config of the whole model.
        tokenizer: the model's tokenizer.
        variables: further variables for the chat template.

    Raises:
        InputError: generation_config.json is damaged.
    """
    return {*config_ends(config), *generation_ends(source, config), *_taught(tokenizer, variables)}


@dataclass(frozen=True)
class NewEnds:
    """What training teaches about ends and the checkpoint's generation_config.json does not say.

    Attributes:
        ids: tokens that end what the trained model writes, at which generation with the checkpoint's settings does not
            stop.
        note: a line about them for the user; empty if there is nothing to say.
    """

    ids: tuple[int, ...]
    note: str


def new_ends(
    source: Path,
    config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    variables: Mapping[str, Any] | None = None,
    *,
    adapters: bool = False,
) -> NewEnds:
    """The ends that an export has to add to generation_config.json, with the arguments of `completion_ends`.

    Args:
        adapters: whether only adapters are exported, which have no generation_config.json of their own.
    """
    known = generation_ends(source, config)
    ids = tuple(end for end in _taught(tokenizer, variables) if end not in known)
    if not ids:
        is_open = tokenizer.chat_template is not None and not template_ends(
            ChatTemplate(tokenizer, variables=variables)
        )
        return NewEnds((), OPEN if is_open else "")
    named = ", ".join(f"{tokenizer.convert_ids_to_tokens(end)} ({end})" for end in ids)
    if not adapters:
        return NewEnds(ids, f"{GENERATION} also stops at {named}, which ends what was trained")
    note = (
        f"warning: {GENERATION} of {source} does not stop at {named}, which ends what was trained: let generation with "
        "these adapters stop there, or merge them (automodel-rl export --merge), which writes it"
    )
    return NewEnds(ids, note)


def _taught(tokenizer: PreTrainedTokenizerBase, variables: Mapping[str, Any] | None) -> list[int]:
    """The ends of what is trained: texts end with the tokenizer's end token, turns as the chat template ends them."""
    of_texts = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    if tokenizer.chat_template is None:
        return of_texts
    return [*dict.fromkeys([*of_texts, *template_ends(ChatTemplate(tokenizer, variables=variables))])]


def row_ends(tokenizer: PreTrainedTokenizerBase, variables: Mapping[str, Any] | None = None) -> set[int]:
    """Ids of the tokens that end what is trained: texts and turns.

    Args:
        tokenizer: the model's tokenizer.
        variables: further variables for the chat template.
    """
    return {*_taught(tokenizer, variables)}


def template_ends(template: ChatTemplate) -> list[int]:
    """Ids of the tokens with which a chat template ends the assistant's turns; empty if it ends them with no token.

    Some tokenizers do not call the token of a turn's end special. It counts if it is a token of its own.
    """
    plain, calling = turn_ends(template, [PROBE_TOOL])
    ends = [plain or _end_among(template, template.tokenizer.get_added_vocab()), calling]
    return [template.tokenizer.convert_tokens_to_ids(end) for end in dict.fromkeys(ends) if end]


def _end_among(template: ChatTemplate, tokens: Iterable[str]) -> str:
    """The token that follows the text of a turn, white space aside; empty if none does."""
    text = template.text(Chat([QUESTION, probe_turn(())])) or ""
    tail = text.rpartition(PROBE)[2].lstrip()
    return max((token for token in tokens if tail.startswith(token)), key=len, default="")
