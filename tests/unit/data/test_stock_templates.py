"""Published templates and forms of messages: which tokens are trained in each.

TRL ships many templates twice: as published, and with marks around what the assistant writes. Turns that are found in
the first must be those that transformers masks in the second. Templates without such a twin are held against rollouts:
a turn begins where a prompt ends, and ends with a token at which a generator stops.
"""

import re
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from automodel_rl.data.chat import ChatTokenizer
from automodel_rl.data.messages import Chat, checked_messages
from automodel_rl.data.show import stretches_of
from automodel_rl.data.template import ChatTemplate
from automodel_rl.data.tool_formats import PROBE_TOOL
from automodel_rl.data.turn_suffix import TurnSuffix
from automodel_rl.errors import InputError
from tests.unit.data.stock_templates import PUBLISHED, TEMPLATES, TWINS, stock_tokenizer, twin_tokenizers

Message = dict[str, Any]
NOTHING: Any = object()


def user(text: str = "How many?") -> Message:
    return {"role": "user", "content": text}


def answer(content: Any = "Three.", **more: Any) -> Message:
    return {"role": "assistant", **({} if content is NOTHING else {"content": content}), **more}


def call(arguments: Any, number: int = 1) -> Message:
    function = {"name": "look_up", "arguments": arguments}
    return {"id": f"{number}23456789", "type": "function", "function": function}


def result(number: int = 1) -> Message:
    return {"role": "tool", "name": "look_up", "tool_call_id": f"{number}23456789", "content": "12 coins"}


ARGUMENTS = {"text": "Ben", "count": 3}
THOUGHT = {"reasoning_content": "Hm."}
LATER = [user("Thanks."), answer("Bye.")]

PLAIN = {
    "one turn": [user(), answer()],
    "several turns": [{"role": "system", "content": "Be brief."}, user(), answer(), *LATER],
    "parts of text": [user(), answer([{"type": "text", "text": "Three."}]), *LATER],
    "a thought": [user(), answer(**THOUGHT)],
    "thoughts": [user(), answer(**THOUGHT), user("And?"), answer("Four.", reasoning_content="Ho.")],
}
CALLS = {
    "a call": [user(), answer("", tool_calls=[call(ARGUMENTS)]), result(), answer(), *LATER],
    "a call without content": [user(), answer(NOTHING, tool_calls=[call(ARGUMENTS)]), result(), answer()],
    "a call with null": [user(), answer(None, tool_calls=[call(ARGUMENTS)]), result(), answer()],
    "a call in json": [user(), answer(None, tool_calls=[call('{"text": "Ben", "count": 3}')]), result(), answer()],
    "a call of nothing": [user(), answer("", tool_calls=[call({})]), result(), answer()],
    "a call at the end": [user(), answer("", tool_calls=[call(ARGUMENTS)])],
    "a call after a text": [user(), answer("I look.", tool_calls=[call(ARGUMENTS)]), result(), answer()],
    "a call after a thought": [user(), answer("", **THOUGHT, tool_calls=[call(ARGUMENTS)]), result(), answer()],
    "two calls": [
        *(user(), answer("", tool_calls=[call(ARGUMENTS), call({"text": "Ann", "count": 4}, 2)])),
        *(result(), result(2), answer()),
    ],
    "one call after another": [
        *(user(), answer("", tool_calls=[call(ARGUMENTS)]), result()),
        *(answer("", tool_calls=[call({"text": "Ann", "count": 4}, 2)]), result(2), answer()),
    ],
}
FORMS = {**PLAIN, **CALLS}

REFUSALS = re.compile(r"d:1: the chat template (refuses these messages|omits)")
"""What a template cannot write, in the words of a message that names the place."""


def chat_of(form: str) -> Chat:
    return Chat(checked_messages(FORMS[form], "messages", "d:1"), (PROBE_TOOL,) if form in CALLS else ())


def spans(tokenizer: PreTrainedTokenizerFast, form: str) -> tuple[str, list[str]] | None:
    """The text of a form, and its trained stretches; None if the template cannot write it."""
    try:
        sequence = ChatTokenizer(tokenizer, "all")(chat_of(form), "d:1")
    except InputError as error:
        refusal = str(error)
    else:
        return tokenizer.decode(sequence.input_ids), [
            text for text, is_trained in stretches_of(tokenizer, sequence) if is_trained
        ]
    # Gemma 4 writes the text of a turn that calls a tool behind the tool's result.
    is_behind = form == "a call after a text" and "the tokens of assistant turn 1 cannot be determined" in refusal
    assert is_behind or REFUSALS.match(refusal), refusal
    return None


def bare(tokenizer: PreTrainedTokenizerFast, span: str) -> str:
    """A span of TRL's without the header, the white space and the end of text that some of its marks take in."""
    header = ChatTemplate(tokenizer).header
    span = re.sub(r"^<｜Assistant｜>", "", span.removeprefix(header))
    return span.rstrip().removesuffix("<eos>").strip()


def of_tools(name: str, form: str) -> bool:
    """Whether TRL's marks leave out the token with which a turn hands over to a tool."""
    return name == "diffusion_gemma" and form in CALLS


@pytest.mark.parametrize("name", TWINS)
def test_turns_are_those_that_marks_of_the_same_template_name(name: str) -> None:
    published, marked = twin_tokenizers(name)
    num_compared = 0
    for form in FORMS:
        found, expected = spans(published, form), spans(marked, form)
        if found is None or expected is None:
            continue
        # Twins may keep thoughts that the published template leaves out; then they write other texts.
        if found[0] != expected[0]:
            assert re.sub(r"<think>.*?</think>\s*", "", found[0], flags=re.S).replace("\n", "") == re.sub(
                r"<think>.*?</think>\s*", "", expected[0], flags=re.S
            ).replace("\n", ""), form
            continue
        num_compared += 1
        trained = [span.strip() for span in found[1]]
        if of_tools(name, form):
            trained = [span.removesuffix("<|tool_response>") for span in trained]
        assert trained == [bare(published, span) for span in expected[1]], form
    assert num_compared >= 1


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_turn_begins_where_a_prompt_ends_and_ends_where_a_generator_stops(name: str) -> None:
    tokenizer = stock_tokenizer(name)
    template = ChatTemplate(tokenizer)
    for form in FORMS:
        written = spans(tokenizer, form)
        if written is None:
            continue
        chat, (text, found) = chat_of(form), written
        assert len(found) == len(chat.turns), form
        place = 0
        for turn, span in zip(chat.turns, found, strict=True):
            begin = text.index(span, place)
            place = begin + len(span)
            before = chat.until(turn)
            asked = template.text(before) or ""
            opening = template.text_with_generation_prompt(before)
            # A template may begin the answer itself, with thoughts or with none.
            opening = asked + opening[len(asked) :].partition("<think>")[0] if opening.startswith(asked) else opening
            if text.startswith(opening):
                # Behind a tool's message a prompt may lack the header that the whole chat has.
                assert text[:begin] in (opening, opening + template.header), form
            assert "12 coins" not in span, form
            assert "How many?" not in span, form
        if not name.startswith(("idefics3", "smolvlm", "lfm2_2_5")):
            ends = {tokenizer.convert_ids_to_tokens(stop) for stop in TurnSuffix(template, chat.tools).stop_ids()}
            ends |= {"<eos>", "<|end|>"}  # gpt-oss ends a turn before others by <|end|>
            assert all(any(span.rstrip().endswith(end) for end in ends) for span in found), (form, found, ends)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_content_that_is_null_or_missing_is_an_empty_one(name: str) -> None:
    tokenizer = stock_tokenizer(name)
    same = ("a call", "a call with null", "a call without content")
    short = [spans(tokenizer, form) for form in same]
    texts = [None if found is None else found[0].partition("Thanks.")[0] for found in short]
    assert (texts[1] is None) == (texts[0] is None) == (texts[2] is None)
    assert texts[1] == texts[2]
    assert all(text is None or "None" not in text for text in texts)


BETWEEN = ("<think>\nHm.\n</think>\n\nOne </think> two.", "One <think>\nHm.\n</think>\n\ntwo.")
BETWEEN_CHANNELS = ("One <|channel>Hm.<channel|> two.", "<|channel>Hm.<channel|>One <channel|>two.")


@pytest.mark.parametrize("later", [[], LATER], ids=["last", "earlier"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_no_text_of_an_answer_is_left_out_without_a_word(name: str, later: list[Message]) -> None:
    tokenizer = stock_tokenizer(name)
    for content in BETWEEN + BETWEEN_CHANNELS:
        for given in (content, [{"type": "text", "text": content}]):
            chat = Chat(checked_messages([user(), answer(given), *later], "messages", "d:1"))
            try:
                sequence = ChatTokenizer(tokenizer, "all")(chat, "d:1")
            except InputError as error:
                refusal = str(error)
            else:
                text, refusal = tokenizer.decode(sequence.input_ids), ""
                assert "One" in text, content
                assert "two." in text, content
            assert re.match(r"$|d:1: the chat template (refuses|omits .* of turn 1)", refusal), refusal
