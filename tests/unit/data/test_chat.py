"""Loss masks of chats, with a template's marks and without."""

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from automodel_rl.batch import TokenSequence
from automodel_rl.data.chat import ChatTokenizer
from automodel_rl.data.messages import Chat
from automodel_rl.errors import InputError
from automodel_rl.quickstart.model import train_tokenizer
from tests.unit.data import templates

CHAT = Chat(
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one and one?"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "and one?"},
        {"role": "assistant", "content": "three"},
    ]
)


@pytest.fixture(scope="module")
def marked() -> PreTrainedTokenizerFast:
    return train_tokenizer([m["content"] for m in CHAT.messages], vocab_size=300)


def without_marks(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    template = tokenizer.chat_template.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, eos_token=tokenizer.eos_token, chat_template=template
    )


def trained_text(tokenizer: PreTrainedTokenizerFast, sequence: TokenSequence) -> str:
    return tokenizer.decode(sequence.input_ids[sequence.loss_mask])


def test_marks_decide_what_is_trained(marked: PreTrainedTokenizerFast) -> None:
    sequence = ChatTokenizer(marked, "all")(CHAT, "here")
    assert trained_text(marked, sequence) == "two<|im_end|>three<|im_end|>"
    assert trained_text(marked, ChatTokenizer(marked, "last")(CHAT, "here")) == "three<|im_end|>"


def test_turns_are_found_where_there_are_no_marks(marked: PreTrainedTokenizerFast) -> None:
    plain = without_marks(marked)
    sequence = ChatTokenizer(plain, "all")(CHAT, "here")
    assert torch.equal(sequence.input_ids, ChatTokenizer(marked, "all")(CHAT, "here").input_ids)
    assert trained_text(plain, sequence) == "two<|im_end|>three<|im_end|>"
    assert trained_text(plain, ChatTokenizer(plain, "last")(CHAT, "here")) == "three<|im_end|>"


def test_turns_are_found_in_a_template_that_writes_earlier_ones_differently(
    marked: PreTrainedTokenizerFast,
) -> None:
    plain = without_marks(marked)
    plain.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
        "{{ '' if loop.last or m['role'] != 'assistant' else '... ' }}{{ m['content'] + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    assert trained_text(plain, ChatTokenizer(plain, "all")(CHAT, "here")) == "... two<|im_end|>three<|im_end|>"
    assert trained_text(plain, ChatTokenizer(plain, "last")(CHAT, "here")) == "three<|im_end|>"


def test_marks_that_never_apply_are_refused(marked: PreTrainedTokenizerFast) -> None:
    tokenizer = without_marks(marked)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'model' %}{% generation %}{{ m['content'] }}{% endgeneration %}"
        "{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
    )
    with pytest.raises(InputError, match=r"here: the chat template marks no token"):
        ChatTokenizer(tokenizer, "all")(CHAT, "here")


@pytest.mark.parametrize("has_marks", [True, False])
def test_what_the_tokenizer_cannot_read_names_its_record(marked: PreTrainedTokenizerFast, has_marks: bool) -> None:
    chat = Chat([{"role": "user", "content": "caf\udce9?"}, {"role": "assistant", "content": "two"}])
    with pytest.raises(InputError, match=r"^here: "):
        ChatTokenizer(marked if has_marks else without_marks(marked), "all")(chat, "here")


def test_a_prompt_ends_where_the_assistant_would_write(marked: PreTrainedTokenizerFast) -> None:
    prompt = marked.decode(ChatTokenizer(marked, "all").prompt_sequence(CHAT, "here").input_ids)
    assert prompt.endswith("and one?<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(
    "template",
    ["{{ ''.__class__.__mro__ }}", "{{ messages.clear() }}", "{% for x in range(10**9) %}{% endfor %}"],
)
def test_a_template_can_do_nothing_but_write(marked: PreTrainedTokenizerFast, template: str) -> None:
    tokenizer = without_marks(marked)
    tokenizer.chat_template = template
    with pytest.raises(InputError, match="here: the chat template refuses these messages"):
        ChatTokenizer(tokenizer, "all")(CHAT, "here")


THINKING = (
    "{% for message in messages %}{{ message['role'] + ':' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think></think>' }}{% endif %}{% endif %}"
)


def test_variables_reach_the_template_in_prompts_and_examples(marked: PreTrainedTokenizerFast) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=marked.backend_tokenizer, chat_template=THINKING)
    prompt = CHAT.until(2)
    plain, quiet = (ChatTokenizer(tokenizer, "all", None, variables) for variables in ({}, {"enable_thinking": False}))
    assert tokenizer.decode(plain.generation_prompt(prompt, "x").input_ids).endswith("assistant:")
    assert tokenizer.decode(quiet.generation_prompt(prompt, "x").input_ids).endswith("assistant:<think></think>")
    marks = THINKING.replace("message['content'] +", "'' }}{% generation %}{{ message['content'] + mode +")
    marks = marks.replace("'\n' }}{% endfor", "'\n' }}{% endgeneration %}{% endfor")
    with_mode = PreTrainedTokenizerFast(tokenizer_object=marked.backend_tokenizer, chat_template=marks)
    sequence = ChatTokenizer(with_mode, "all", None, {"mode": "!"})(CHAT, "x")
    assert "two!" in with_mode.decode(sequence.input_ids)


@pytest.mark.parametrize("name", ["enable_thinkin", "messages", "add_generation_prompt"])
def test_a_variable_that_the_template_does_not_read_is_refused(marked: PreTrainedTokenizerFast, name: str) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=marked.backend_tokenizer, chat_template=THINKING)
    with pytest.raises(
        InputError, match=f"chat_template_kwargs.{name}: the chat template does not read this variable, only"
    ):
        ChatTokenizer(tokenizer, "all", None, {name: False})


def test_a_text_is_trained_whole_with_the_end_token(marked: PreTrainedTokenizerFast) -> None:
    sequence = ChatTokenizer(marked, "all").text_sequence("one and one")
    assert sequence.loss_mask.all()
    assert marked.decode(sequence.input_ids) == f"one and one{marked.eos_token}"
    again = ChatTokenizer(marked, "all").text_sequence(f"one and one{marked.eos_token}")
    assert again.input_ids.equal(sequence.input_ids)


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m['role'] + ':' + m['content'] + '\n' }}{% endfor %}",  # asks for no answer
        "{% for m in messages %}{{ m['role'] + ':' + m['content'] + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'bot:' }}{% endif %}",  # asks in other words than it writes answers
    ],
)
def test_turns_that_cannot_be_found_are_refused(marked: PreTrainedTokenizerFast, template: str) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=marked.backend_tokenizer, chat_template=template)
    with pytest.raises(
        InputError, match="here: the tokens of assistant turn 2 cannot be determined .* {% generation %}"
    ):
        ChatTokenizer(tokenizer, "all")(CHAT, "here")


def test_a_turn_before_others_may_end_with_another_token(marked: PreTrainedTokenizerFast) -> None:
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}"
        "{{ eos_token if loop.last else '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    tokenizer = train_tokenizer([m["content"] for m in CHAT.messages], vocab_size=300)
    tokenizer.chat_template, tokenizer.eos_token = template, tokenizer.pad_token
    sequence = ChatTokenizer(tokenizer, "all")(CHAT, "here")
    assert trained_text(tokenizer, sequence) == f"two<|im_end|>three{tokenizer.pad_token}"


@pytest.mark.parametrize(
    "text", ["one", "<bos>one", "one<|im_end|>", "<bos>one<|im_end|>\n", "<bos><|im_start|>user\none<|im_end|> \n"]
)
@pytest.mark.parametrize("adds", ["<bos> $A", "<bos> $A <|im_end|>", "$A"])
def test_a_text_that_a_template_has_written_gets_no_second_token_at_either_end(
    marked: PreTrainedTokenizerFast, text: str, adds: str
) -> None:
    backend = Tokenizer.from_str(marked.backend_tokenizer.to_str())
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<bos>", eos_token="<|im_end|>")
    ids = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("<bos>", "<|im_end|>")]
    tokenizer._tokenizer.post_processor = TemplateProcessing(single=adds, special_tokens=ids)
    tokenizer.chat_template = marked.chat_template
    tokens = tokenizer.convert_ids_to_tokens(ChatTokenizer(tokenizer, "all").text_sequence(text).input_ids.tolist())
    starts = "<bos>" in adds or text.startswith("<bos>")
    assert tokens.count("<bos>") == tokens[:1].count("<bos>") == int(starts)
    assert tokens[-1] == "<|im_end|>"
    assert tokens.count("<|im_end|>") == 1


def test_a_tokenizer_that_is_not_fast_finds_the_same_turns() -> None:
    slow = ByT5Tokenizer()
    slow.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    slow.chat_template = templates.CHATML
    assert not slow.is_fast
    sequence = ChatTokenizer(slow, "all")(CHAT, "here")
    found = "".join(slow.convert_ids_to_tokens(sequence.input_ids[sequence.loss_mask].tolist()))
    assert found == "two<|im_end|>three<|im_end|>"


def test_of_named_templates_the_one_that_writes_the_chat_is_asked(marked: PreTrainedTokenizerFast) -> None:
    plain = without_marks(marked)
    shouting = templates.CHATML.replace("message['content'] +", "message['content'] + (mode or '') +")
    plain.chat_template = {"default": shouting, "tool_use": marked.chat_template}
    sequence = ChatTokenizer(plain, "all", None, {"mode": "!"})(CHAT, "here")
    assert trained_text(plain, sequence) == "two!<|im_end|>three!<|im_end|>"
    with pytest.raises(
        InputError, match="chat_template_kwargs.moode: the chat template does not read this variable, only mode"
    ):
        ChatTokenizer(plain, "all", None, {"moode": "!"})


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        (templates.CHATML, True),
        (
            "{% for m in messages %}{{ m.role + ':' }}{% generation %}{{ m.content }}{% endgeneration %}\n{% endfor %}",
            False,
        ),
        (
            "{% for m in messages %}<|im_start|>{{ m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}"
            "{{ m.content + '<|im_end|>\n' }}{% endgeneration %}{% else %}{{ m.content }}<|im_end|>\n{% endif %}"
            "{% endfor %}",
            True,
        ),
    ],
)
def test_whether_a_model_learns_to_stop_is_told(marked: PreTrainedTokenizerFast, template: str, ends: bool) -> None:
    tokenizer = without_marks(marked)
    tokenizer.chat_template = template
    chat = ChatTokenizer(tokenizer, "all")
    assert chat.ends_turns(chat(CHAT, "here")) is ends
