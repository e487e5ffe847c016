"""What chat templates leave out of a chat is told in one line, and what they write is not held against them."""

from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from automodel_rl.batch import TokenSequence
from automodel_rl.config import SourceConfig
from automodel_rl.data.chat import ChatTokenizer
from automodel_rl.data.messages import Chat, checked_messages
from automodel_rl.data.records import chats_of, read_chat, read_pair
from automodel_rl.data.template import ChatTemplate
from automodel_rl.errors import InputError
from automodel_rl.quickstart.model import train_tokenizer
from tests.unit.data import templates

Message = dict[str, Any]

TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "Weather of a city.", "parameters": {"type": "object"}},
}
SYSTEM = {"role": "system", "content": "Be brief."}
QUESTION = {"role": "user", "content": "Is it cold in Oslo?"}
ANSWER = {"role": "assistant", "content": "yes"}
THANKS = {"role": "user", "content": "yes"}
RESULT = {"role": "tool", "name": "weather", "tool_call_id": "1", "content": "-5"}


def call(arguments: Any, content: Any = "") -> Message:
    function = {"name": "weather", "arguments": arguments}
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [{"id": "1", "type": "function", "function": function}],
    }


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


def tokenizer_of(template: str) -> PreTrainedTokenizerFast:
    tokenizer = train_tokenizer(["Is it cold in Oslo? yes"], vocab_size=300)
    tokenizer.chat_template = template
    return tokenizer


def written(template: str, *messages: Message, tools: tuple = ()) -> str:
    """The whole text of a chat."""
    tokenizer = tokenizer_of(template)
    return tokenizer.decode(ChatTokenizer(tokenizer, "all")(Chat([*messages], tools), "d.jsonl:1").input_ids)


def trained(template: str, *messages: Message, train_on: str = "all", start: int = 0) -> str:
    """The part of a chat that is trained."""
    tokenizer = tokenizer_of(template)
    sequence = ChatTokenizer(tokenizer, train_on)(Chat([*messages], start=start), "d.jsonl:1")
    return tokenizer.decode(sequence.input_ids[sequence.loss_mask])


@pytest.mark.parametrize("end", ["", "\n"])
@pytest.mark.parametrize("before", [(), (QUESTION,)])
def test_marks_do_not_reach_into_the_message_that_follows(before: tuple[Message, ...], end: str) -> None:
    words = ["<unk>", "user", "assistant", "Is", "it", "cold", "in", "Oslo?", "yes", "secret"]
    tokens = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokens.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, unk_token="<unk>", eos_token="<end>")
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content + ' <end>" + end + "' }}"
        "{% endgeneration %}{% else %}{{ ' user ' + m.content + ' ' }}{% endif %}{% endfor %}"
    )
    chat = Chat([*before, ANSWER, {"role": "user", "content": "secret"}])
    sequence = ChatTokenizer(tokenizer, "all")(chat, "d.jsonl:1")
    assert tokenizer.decode(sequence.input_ids[sequence.loss_mask]) == "yes <end>"


TOOLS_USED = (QUESTION, call({"city": "Oslo"}), RESULT, ANSWER)


@pytest.mark.parametrize(
    ("template", "messages"),
    [
        (templates.CHATML, (SYSTEM, QUESTION, ANSWER, THANKS, ANSWER)),
        (templates.QWEN2, (SYSTEM, *TOOLS_USED)),
        (templates.QWEN2, (QUESTION, call('{"city": "Oslo"}', content=None), RESULT, ANSWER)),
        (templates.QWEN2, (QUESTION, call({}), RESULT, ANSWER)),
        (templates.QWEN3, (QUESTION, {**ANSWER, "reasoning_content": "Oslo is north."})),
        (templates.QWEN3, (QUESTION, {**ANSWER, "content": "<think>\n\n</think>\n\nyes"})),
        (templates.QWEN3, (QUESTION, {**ANSWER, "content": "<think>\nOslo is north.\n</think>\n\nyes"})),
        (templates.MARKED_QWEN3, (SYSTEM, *TOOLS_USED)),
        (templates.LLAMA3, (SYSTEM, *TOOLS_USED)),
        (templates.LLAMA3, ({**QUESTION, "content": "  spaces \n"}, {**ANSWER, "content": " yes\n"})),
        (templates.CHATML, (QUESTION, {**ANSWER, "reasoning_content": None, "tool_calls": [], "refusal": None})),
    ],
)
def test_what_is_written_in_any_form_is_accepted(template: str, messages: tuple[Message, ...]) -> None:
    assert "yes" in written(template, *messages)


@pytest.mark.parametrize(
    ("template", "messages", "what"),
    [
        (templates.CHATML, TOOLS_USED, "tool_calls.0.function.name of turn 1 (role assistant)"),
        (templates.CHATML, (QUESTION, {**ANSWER, "reasoning_content": "a"}), "reasoning_content of turn 1"),
        (templates.CHATML, (QUESTION, {**ANSWER, "thinking": "yes"}), "thinking of turn 1"),
        (templates.CHATML, ({**QUESTION, "name": "Ola"}, ANSWER), "name of turn 0 (role user)"),
        (templates.CHATML, (QUESTION, {**ANSWER, "function_call": {"name": "f"}}), "function_call of turn 1"),
        (templates.CHATML, (QUESTION, {**ANSWER, "audio": ["x"]}), "audio of turn 1"),
        (templates.CHATML, (QUESTION, {**ANSWER, "toxic": False}), "toxic of turn 1"),
        (templates.CHATML, ({**QUESTION, "score": 0}, ANSWER), "score of turn 0"),
        (templates.LLAMA3, (QUESTION, call({"city": "Oslo"}, "I look."), RESULT, ANSWER), "content of turn 1"),
        (templates.R1, (QUESTION, {**ANSWER, "content": "<think>cold</think>yes"}), "what comes before </think>"),
        (templates.R1, (QUESTION, {**ANSWER, "content": "a</think>yes"}, THANKS, ANSWER), "what comes before </think>"),
        (
            "{% for m in messages if m.role != 'system' %}{{ m.role + m.content }}{% endfor %}",
            (SYSTEM, QUESTION, ANSWER),
            "content of turn 0 (role system)",
        ),
        (
            templates.QWEN3,
            (QUESTION, {"role": "assistant", "content": "", "reasoning_content": "a"}, THANKS, ANSWER),
            "reasoning_content of turn 1",
        ),
    ],
)  # fmt: skip
def test_what_the_template_leaves_out_is_named(template: str, messages: tuple[Message, ...], what: str) -> None:
    with pytest.raises(InputError) as caught:
        written(template, *messages)
    assert f"d.jsonl:1: the chat template omits {what}" in str(caught.value)
    assert "set data.chat_template to a template that writes it, or remove it" in str(caught.value)


@pytest.mark.parametrize(
    ("message", "tools", "remedy"),
    [
        ({**ANSWER, "id": 1}, (), "or skip it with ignore: [id] of the source"),
        (call({"city": "Oslo"}), (), "or skip it with ignore: [tool_calls] of the source"),
        (ANSWER, (TOOL,), "or skip it with ignore: [tools] of the source"),
    ],
)
def test_keys_that_are_left_out_may_be_ignored(message: Message, tools: tuple, remedy: str) -> None:
    with pytest.raises(InputError) as caught:
        written(templates.CHATML, QUESTION, message, tools=tools)
    assert remedy in str(caught.value)


def test_a_text_that_is_elsewhere_in_the_chat_does_not_hide_that_it_is_left_out() -> None:
    """The thought is a word that the answer has, too."""
    with pytest.raises(InputError, match="omits reasoning_content of turn 1"):
        written(templates.CHATML, QUESTION, {**ANSWER, "reasoning_content": "yes"})


THOUGHT = {**ANSWER, "reasoning_content": "Oslo is north."}


def test_thoughts_of_earlier_turns_may_be_forgotten_where_the_template_writes_those_of_the_last() -> None:
    chat = (QUESTION, THOUGHT, THANKS, THOUGHT)
    assert "Oslo is north" in trained(templates.QWEN3, *chat, train_on="last")
    assert trained(templates.MARKED_QWEN3, *chat).count("Oslo is north") == 1
    assert trained(templates.QWEN3, *chat).count("Oslo is north") == 1


def test_of_a_completion_with_several_turns_those_before_the_last_may_have_weight_0() -> None:
    """Where the template has no marks and writes them differently once the user speaks again."""
    config, chat = SourceConfig(path="x"), ChatTokenizer(tokenizer_of(templates.QWEN3), "all")

    def tokenised(first: Message) -> list[TokenSequence]:
        record = {"prompt": [QUESTION], "chosen": [first, THANKS, THOUGHT], "rejected": [first, THANKS, ANSWER]}
        pair = read_pair(record, config, "d.jsonl:1")
        return [chat(held, where) for held, where in chats_of(pair, "d.jsonl:1")]

    chosen, rejected = tokenised({**THOUGHT, "weight": 0})
    assert chat.tokenizer.decode(chosen.input_ids[chosen.loss_mask]).count("Oslo is north.") == 1
    assert chat.tokenizer.decode(rejected.input_ids[rejected.loss_mask]).count("yes") == 1


@pytest.mark.parametrize(
    "messages",
    [
        (QUESTION, ANSWER),
        (SYSTEM, QUESTION, ANSWER, THANKS, ANSWER, QUESTION, {**ANSWER, "content": "\n no\n"}),
        (QUESTION, THOUGHT),
        (QUESTION, THOUGHT, THANKS, THOUGHT),
        (QUESTION, ANSWER, THANKS, {**ANSWER, "content": "<think>\nHm.\n</think>\n\nyes"}),
        TOOLS_USED,
        (*TOOLS_USED, THANKS, ANSWER),
        (QUESTION, ANSWER, QUESTION, ANSWER, QUESTION, ANSWER),
    ],
)
def test_turns_that_are_found_are_those_that_marks_would_show(messages: tuple[Message, ...]) -> None:
    plain, marked = (
        ChatTokenizer(tokenizer_of(template), "all")(Chat([*messages]), "x")
        for template in (templates.QWEN3, templates.MARKED_QWEN3)
    )
    assert plain.input_ids.equal(marked.input_ids)
    assert plain.loss_mask.equal(marked.loss_mask)


SAID = {**ANSWER, "content": "<think>Oslo is north.</think>yes"}
LOUD = templates.CHATML.replace("message['role'] +", "message['role'] + ('!' if message.loud else '') +")
LOUD_USER = LOUD.replace("if message.loud", "if message.role == 'user' and message.loud")


def loud(message: Message) -> Message:
    return {**message, "loud": True}


def with_renders_counted(template: str) -> tuple[ChatTemplate, list[int]]:
    """A template that notes of every text that it writes how many messages are in it."""
    tokenizer = tokenizer_of(template)
    written, apply = [], tokenizer.apply_chat_template

    def counted(messages: list[Message], **options: Any) -> Any:
        written.append(len(messages))
        return apply(messages, **options)

    tokenizer.apply_chat_template = counted
    checked = ChatTemplate(tokenizer)
    written.clear()
    return checked, written


@pytest.mark.parametrize(
    ("template", "messages"),
    [
        (templates.MARKED_QWEN3, (QUESTION, SAID) * 60),
        (templates.MARKED_QWEN3, (QUESTION, THOUGHT) * 60),
        (
            templates.MARKED_QWEN3,
            (
                QUESTION,
                *(call({"city": "Oslo"}) | {"reasoning_content": "I look."}, RESULT) * 100,
                ANSWER,
                THANKS,
                ANSWER,
            ),
        ),
        (LOUD, (loud(QUESTION), loud(ANSWER)) * 60),
    ],
    ids=["thoughts in contents", "thoughts", "calls", "a key that is not a text"],
)
def test_the_cost_of_a_check_grows_with_the_chat_alone(template: str, messages: tuple[Message, ...]) -> None:
    checked, written = with_renders_counted(template)
    checked.check(Chat([*messages]), "d.jsonl:1")
    assert sum(written) <= 10 * len(messages)
    written.clear()
    checked.check(Chat([*messages]), "d.jsonl:2")
    assert written == [len(messages)]


@pytest.mark.parametrize(
    ("template", "accepted", "refused"),
    [
        (templates.MARKED_QWEN3, (THOUGHT, THANKS, ANSWER), ({**THOUGHT, "content": ""}, THANKS, ANSWER)),
        (templates.MARKED_QWEN3, (THOUGHT, THANKS, ANSWER), ({**ANSWER, "musing": "a"}, THANKS, ANSWER)),
        (templates.R1, ({**SAID, "weight": 0}, THANKS, ANSWER), (SAID, THANKS, ANSWER)),
        (templates.R1, ({**SAID, "weight": 0}, THANKS, ANSWER), (ANSWER, THANKS, SAID)),
        (LOUD_USER, (loud(THANKS), ANSWER), (loud(ANSWER),)),
    ],
)
def test_what_is_left_out_is_refused_after_something_like_it_was_accepted(
    template: str, accepted: tuple[Message, ...], refused: tuple[Message, ...]
) -> None:
    checked = ChatTemplate(tokenizer_of(template))
    checked.check(Chat([QUESTION, *accepted]), "d.jsonl:1")
    with pytest.raises(InputError, match="d.jsonl:2: the chat template omits"):
        checked.check(Chat([QUESTION, *refused]), "d.jsonl:2")


def test_thoughts_of_the_user_may_not_be_forgotten() -> None:
    with pytest.raises(InputError, match="omits thinking of turn 0"):
        written(templates.MARKED_QWEN3, {**QUESTION, "thinking": "a"}, ANSWER, THANKS, ANSWER)


def test_thoughts_between_calls_are_trained() -> None:
    thoughtful = {**call({"city": "Oslo"}), "reasoning_content": "I look."}
    assert trained(templates.QWEN3, QUESTION, thoughtful, RESULT, ANSWER).count("I look.") == 1


def test_a_prompt_may_have_thoughts_that_its_template_forgets() -> None:
    messages = [QUESTION, {**ANSWER, "content": "<think>cold</think>yes"}, THANKS]
    opening = ChatTokenizer(tokenizer_of(templates.R1), "all").generation_prompt(Chat(messages, start=3), "d.jsonl:1")
    assert tokenizer_of(templates.R1).decode(opening.input_ids).endswith("<|Assistant|><think>\n")


@pytest.mark.parametrize("form", [(TOOL,), (TOOL["function"],)], ids=["wrapped", "bare"])
def test_tools_are_written_or_refused(form: tuple) -> None:
    assert '"description": "Weather of a city."' in written(templates.QWEN2, *TOOLS_USED, tools=form)
    with pytest.raises(InputError, match="d.jsonl:1: the chat template omits tools, such as 'weather'"):
        written(templates.CHATML, QUESTION, ANSWER, tools=form)


def test_tools_are_part_of_a_prompt_and_of_what_comes_before_a_turn() -> None:
    tokenizer = tokenizer_of(templates.QWEN3)
    chat = Chat([QUESTION], (TOOL,), start=1)
    assert "Weather of a city" in tokenizer.decode(
        ChatTokenizer(tokenizer, "all").generation_prompt(chat, "d.jsonl:1").input_ids
    )
    sequence = ChatTokenizer(tokenizer, "all")(Chat([QUESTION, ANSWER], (TOOL,)), "d.jsonl:1")
    assert "Weather of a city" not in tokenizer.decode(sequence.input_ids[sequence.loss_mask])
    tokenizer.chat_template = templates.CHATML
    with pytest.raises(InputError, match="omits tools"):
        ChatTokenizer(tokenizer, "all").generation_prompt(chat, "d.jsonl:1")


PARTS = ({"role": "user", "content": [text("Is it "), text("cold?")]}, {"role": "assistant", "content": [text("yes")]})


@pytest.mark.parametrize("template", [templates.CHATML, templates.PRINTS_PARTS, templates.QWEN3, templates.PARTS_ONLY])
def test_parts_of_text_are_written_as_the_texts_they_stand_for(template: str) -> None:
    texts = ({"role": "user", "content": "Is it cold?"}, ANSWER)
    assert written(template, *PARTS) == written(template, *texts)
    assert "Is it cold?" in written(template, *PARTS)
    assert "yes" in trained(template, *PARTS)


@pytest.mark.parametrize("template", [templates.LLAMA3, templates.QWEN2])
def test_arguments_in_json_are_written_as_the_objects_they_stand_for(template: str) -> None:
    text = written(template, QUESTION, call('{"city": "Oslo"}'), RESULT, ANSWER)
    assert text == written(template, QUESTION, call({"city": "Oslo"}), RESULT, ANSWER)
    assert '{"city": "Oslo"}' in text


def test_an_unknown_key_that_the_template_reads_is_accepted() -> None:
    assert "user!" in written(LOUD, {**QUESTION, "loud": True}, ANSWER)
    with pytest.raises(InputError, match="omits loud of turn 0"):
        written(templates.CHATML, {**QUESTION, "loud": True}, ANSWER)


@pytest.mark.parametrize("template", [templates.QWEN2, templates.MARKED_QWEN3], ids=["plain", "marked"])
def test_turns_of_weight_0_and_turns_of_the_prompt_are_not_trained(template: str) -> None:
    first, second, third = ({**ANSWER, "content": word} for word in ("one", "two", "three"))
    chat = (QUESTION, first, THANKS, second, THANKS, third)

    def words(*messages: Message, **options: Any) -> list[str]:
        found = trained(template, *messages, **options)
        return [word for word in ("one", "two", "three") if word in found]

    assert words(*chat) == ["one", "two", "three"]
    assert words(QUESTION, {**first, "weight": 0}, THANKS, {**second, "weight": 1}, THANKS, third) == ["two", "three"]
    assert words(*chat[:-1], {**third, "weight": 0}) == ["one", "two"]
    assert words(*chat, start=2) == ["two", "three"]
    assert words(*chat, train_on="last") == ["three"]


def test_a_marked_turn_without_a_marked_token_is_refused() -> None:
    """Its tool call is written outside of the marks, and it says nothing else."""
    template = (
        "{% for m in messages %}{{ m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}"
        "{% else %}{{ m.content }}{% endif %};{% endfor %}"
    )
    assert trained(template, QUESTION, call({"city": "Oslo"}, "I look."), RESULT, ANSWER) == "I look.yes"
    with pytest.raises(InputError, match="d.jsonl:1: the chat template marks no token of turn 1 as the assistant's"):
        trained(template, *TOOLS_USED)


@pytest.mark.parametrize("key", ["train", "training", "trainable", "loss", "loss_mask"])
@pytest.mark.parametrize("value", [False, 0, True, 1])
def test_what_other_tools_read_of_a_turn_is_refused_with_the_key_that_does_it_here(key: str, value: object) -> None:
    record = {"messages": [QUESTION, {**ANSWER, key: value}]}
    with pytest.raises(InputError, match=rf"x:1: turn 1 has {key}: .* set weight: 0 .* or .* ignore: \[{key}\]"):
        read_chat(record, SourceConfig(path="x"), "x:1")
    assert read_chat(record, SourceConfig(path="x", ignore=(key,)), "x:1") == Chat([QUESTION, ANSWER])


@pytest.mark.parametrize("arguments", ['{"city": "Os', "", "[1]", '"Oslo"', ["Oslo"], "null", 3])
def test_arguments_that_are_no_json_object_are_refused(arguments: object) -> None:
    with pytest.raises(InputError, match="x:1: arguments of the call of 'weather' in turn 1 are not a JSON object"):
        checked_messages([QUESTION, call(arguments)], "messages", "x:1")


NONE_WRITTEN = templates.CHATML.replace("message['content'] +", "(message['content'] or 'None') +")


def test_a_template_that_writes_something_for_an_empty_content_is_refused() -> None:
    with pytest.raises(InputError, match="d.jsonl:1: the chat template writes 'None' for the empty content of turn 0"):
        written(NONE_WRITTEN, {"role": "system", "content": ""}, QUESTION, ANSWER)
    assert "yes" in written(NONE_WRITTEN, QUESTION, ANSWER)
    assert "yes" in written(templates.CHATML, {"role": "system", "content": ""}, QUESTION, ANSWER)


@pytest.mark.parametrize("content", ["", [{"type": "text", "text": ""}]])
def test_an_empty_turn_of_the_assistant_is_refused_with_a_remedy_unless_it_is_not_trained(content: object) -> None:
    empty = {"role": "assistant", "content": content}
    for template in (templates.QWEN3, templates.MARKED_QWEN3):
        with pytest.raises(InputError, match="d.jsonl:1: turn 1 of the assistant is empty: add a text, or weight: 0"):
            trained(template, QUESTION, empty, THANKS, ANSWER)
        assert "yes" in trained(template, QUESTION, {**empty, "weight": 0}, THANKS, ANSWER)


NEEDS_JSON = templates.QWEN3.replace("tool_call.arguments is string", "true")


def test_objects_become_json_for_a_template_that_raises_for_them() -> None:
    raises = NEEDS_JSON.replace("{{- tool_call.arguments }}", "{{- '' + tool_call.arguments }}")
    assert '"arguments": {"city": "Oslo"}' in written(raises, QUESTION, call({"city": "Oslo"}), RESULT, ANSWER)


CALL = "m.tool_calls[0].function.name + (m.tool_calls[0].function.arguments | tojson)"
REPEATS = (
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{{ '<|im_start|>' + messages[loop.index0 - 1].tool_calls[0].function.name + '\n' + m.content + '<|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{{ " + CALL + " if m.tool_calls else '' }}{{ '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
BEHIND = REPEATS.replace(" + m.content }}", " + ('' if m.tool_calls else m.content) }}").replace(
    "m.content + '<|im_end|>\n' }}{% else %}",
    "m.content + messages[loop.index0 - 1].content + '<|im_end|>\n' }}{% else %}",
)


def test_a_turn_ends_before_a_later_message_that_repeats_its_call() -> None:
    said = trained(REPEATS, QUESTION, {**call({"city": "Oslo"}), "content": "I look."}, RESULT, ANSWER)
    assert said == 'I look.weather{"city": "Oslo"}<|im_end|>yes<|im_end|>'


def test_a_turn_that_a_template_writes_behind_the_result_of_its_call_is_refused() -> None:
    with pytest.raises(InputError, match="d.jsonl:1: the tokens of assistant turn 1 cannot be determined"):
        trained(BEHIND, QUESTION, {**call({"city": "Oslo"}), "content": "I look."}, RESULT, ANSWER)


ROLES_ONLY = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Ends no turn itself: the next role's mark does."""


def test_where_only_the_next_mark_ends_a_turn_it_is_trained_at_the_end_of_the_chat_as_well() -> None:
    assert written(ROLES_ONLY, QUESTION, ANSWER).endswith("assistant\nyes<|im_start|>")
    assert trained(ROLES_ONLY, QUESTION, ANSWER, THANKS, {**ANSWER, "content": "no"}) == "yes<|im_start|>no<|im_start|>"
    # A second turn of the assistant is no one else's.
    assert trained(ROLES_ONLY, QUESTION, ANSWER, {**ANSWER, "content": "no"}) == "yesno<|im_start|>"


def test_a_template_that_ends_turns_with_a_text_trains_no_mark_of_the_next() -> None:
    """Some tokenizers do not call the token of an end special."""
    plain = templates.CHATML.replace("<|im_end|>", "<end>")
    assert trained(plain, QUESTION, ANSWER, THANKS, {**ANSWER, "content": "no"}) == "yes<end>\nno<end>\n"
