"""Data files of every kind train exactly the tokens that transformers shows as the assistant's, or are refused.

What is expected is made without the package: messages written here by hand, and the mask that transformers gives for a
template with {% generation %} marks. The package reads the same files with those marks, and without them.
"""

import bz2
import csv
import functools
import gzip
import io
import itertools
import json
import lzma
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import zstandard
from datasets import Dataset, DatasetDict
from pyarrow import Table, ipc, parquet
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from automodel_rl.config.data import CommonBatchConfig, DataConfig
from automodel_rl.data.chat import ChatTokenizer
from automodel_rl.data.checks import check_records
from automodel_rl.data.examples import ChatDataset, PairDataset, checked
from automodel_rl.data.records import read_chat, read_pair
from automodel_rl.errors import InputError
from automodel_rl.quickstart.model import train_tokenizer
from tests.unit.data import templates

Message = dict[str, Any]
Trained = tuple[list[int], list[int]]
"""Token ids, and 1 for each that is trained, else 0."""

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ZEPHYR = CHATML.replace("'<|im_start|>' + m.role", "'<|' + m.role + '|>'").replace("<|im_end|>", "</s>")
ZEPHYR = ZEPHYR.replace("<|im_start|>assistant", "<|assistant|>")
"""Ends turns with a special token, and begins them with plain text."""

LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + ('ipython' if m.role == 'tool' else m.role) + '<|end_header_id|>\n\n' }}"
    "{% if m.tool_calls %}{% set call = m.tool_calls[0].function %}{% generation %}"
    "{{ '{\"name\": \"' + call.name + '\", \"parameters\": ' + call.arguments | tojson + '}<|eot_id|>' }}"
    "{% endgeneration %}{% elif m.role == 'assistant' %}"
    "{% generation %}{{ m.content | trim + '<|eot_id|>' }}{% endgeneration %}"
    "{% else %}{{ m.content | trim + '<|eot_id|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
COMMAND = (
    "{{ bos_token }}{% for m in messages %}{{ '<|TURN|>' + m.role + ':' }}{% if m.tool_calls %}"
    "{% generation %}{{ '<|ACTION|>' + m.tool_calls | tojson + '<|END_ACTION|><|END_TURN|>' }}{% endgeneration %}"
    "{% elif m.role == 'assistant' %}"
    "{% generation %}{{ '<|RESPONSE|>' + m.content + '<|END_RESPONSE|><|END_TURN|>' }}{% endgeneration %}"
    "{% else %}{{ m.content + '<|END_TURN|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|TURN|>assistant:' }}{% endif %}"
)
"""Has special tokens inside of turns, as Command R7B and A have."""

_SYSTEM_IN_QUESTION = (
    "{{ bos_token }}{% set system = messages[0].content + '\n\n' if messages[0].role == 'system' else '' %}"
    "{% for m in (messages[1:] if system else messages) %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
)
GEMMA = _SYSTEM_IN_QUESTION + (
    "{% if m.role == 'assistant' %}{{ '<start_of_turn>model\n' }}{% generation %}"
    "{{ m.content | trim + '<end_of_turn>' }}{% endgeneration %}{{ '\n' }}{% else %}"
    "{{ '<start_of_turn>user\n' + (system if loop.first else '') + m.content | trim + '<end_of_turn>\n' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
MISTRAL = _SYSTEM_IN_QUESTION + (
    "{% if m.role == 'assistant' %}{% generation %}{{ ' ' + m.content + eos_token }}{% endgeneration %}"
    "{% else %}{{ '[INST] ' + (system if loop.first else '') + m.content + ' [/INST]' }}{% endif %}{% endfor %}"
)
"""Asks for an answer with the end of the question. So without marks, no turn can be found."""

FAMILIES: dict[str, tuple[str, str | None, str]] = {
    "chatml": (CHATML, None, "<|im_end|>"),
    "zephyr": (ZEPHYR, None, "</s>"),
    "llama3": (LLAMA3, "<s>", "<|eot_id|>"),
    "command": (COMMAND, "<s>", "<|END_TURN|>"),
    "gemma": (GEMMA, "<s>", "<end_of_turn>"),
    "mistral": (MISTRAL, "<s>", "</s>"),
    "qwen3": (templates.MARKED_QWEN3, None, "<|im_end|>"),
}
"""Templates with marks, the token that begins texts, and the end token."""

SPECIAL = sorted({"</s>", *re.findall(r"<\|[A-Z_]+\|>|<\|\w+_id\|>|<\w+_of_turn>", COMMAND + LLAMA3 + GEMMA)})
PACK: dict[str, Any] = {".gz": gzip.compress, ".zst": zstandard.compress, ".bz2": bz2.compress, ".xz": lzma.compress}
REMEDY = re.compile(r"\b(must|needs?|add|change|convert|fill|give|leave|name|put|remove|save|use|write)\b")


@functools.cache
def tokenizer_of(family: str, has_marks: bool) -> PreTrainedTokenizerFast:
    template, begin, end = FAMILIES[family]
    backend = train_tokenizer(["Is it cold in Oslo? yes\n\nno\n\nIt is cold."], vocab_size=330).backend_tokenizer
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=begin, eos_token=end)
    tokenizer.chat_template = template if has_marks else re.sub("{% (end)?generation %}", "", template)
    tokenizer.add_tokens(SPECIAL, special_tokens=True)
    if begin:
        number = tokenizer.convert_tokens_to_ids(begin)
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(f"{begin} $A", special_tokens=[(begin, number)])
    return tokenizer


@dataclass(frozen=True)
class Turns:
    """One sequence that a file should give: messages as the template should get them, or a text that it does not write.

    `kept` says which of the assistant's turns are trained; None for all.
    """

    messages: list[Message] | str
    kept: Sequence[int] | None = None
    tools: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class Case:
    """Files, by name records or bytes, with what they should give; nothing where they are refused.

    Attributes:
        path: what the config names as the path; by default the only file.
        source, data: further keys of the source, and of `data`.
        is_pairs: whether the files are for dpo.
    """

    files: dict[str, Any]
    expected: list[Turns] = field(default_factory=list)
    family: str = "chatml"
    path: str | None = None
    source: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    is_pairs: bool = False


def say(role: str, content: Any, **more: Any) -> Message:
    return {"role": role, "content": content, **more}


user, answer = functools.partial(say, "user"), functools.partial(say, "assistant")


def call(arguments: Any, content: Any = "", **more: Any) -> Message:
    return answer(content, tool_calls=[{"type": "function", "function": {"name": "f", "arguments": arguments}}], **more)


def lines(*records: Any) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def chats(*talks: list[Message], family: str = "chatml") -> Case:
    """Chats in a file of JSON lines, which the template should get as they are."""
    return Case({"d.jsonl": [{"messages": talk} for talk in talks]}, [Turns(talk) for talk in talks], family)


def content_of(ending: str, records: Any) -> bytes:
    if isinstance(records, bytes):
        return records
    if ending in (".csv", ".tsv"):
        table = io.StringIO()
        writer = csv.DictWriter(table, list(records[0]), delimiter="," if ending == ".csv" else "\t")
        writer.writeheader()
        writer.writerows(records)
        return table.getvalue().encode()
    return json.dumps(records, indent=1).encode() if ending == ".json" else lines(*records)


def write(path: Path, records: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet" and not isinstance(records, bytes):
        parquet.write_table(Table.from_pylist(records), path)
    elif path.suffix == ".arrow":
        table = Table.from_pylist(records)
        with ipc.new_stream(path, table.schema) as stream:
            stream.write_table(table)
    elif path.suffix == ".saved":
        Dataset.from_list(records).save_to_disk(str(path))
    elif path.suffix == ".splits":
        DatasetDict({name: Dataset.from_list(part) for name, part in records.items()}).save_to_disk(str(path))
    elif path.suffix in PACK:
        path.write_bytes(PACK[path.suffix](content_of(path.with_suffix("").suffix, records)))
    else:
        path.write_bytes(content_of(path.suffix, records))


def expected_of(turns: Turns, family: str) -> Trained:
    """Tokens and mask by transformers alone."""
    plain, marked = tokenizer_of(family, False), tokenizer_of(family, True)
    if isinstance(turns.messages, str):
        ids = [*plain(turns.messages)["input_ids"], plain.eos_token_id]
        return ids, [1] * len(ids)
    given = {"conversation": turns.messages, "tools": turns.tools}
    assert plain.apply_chat_template(**given, tokenize=False) == marked.apply_chat_template(**given, tokenize=False)
    encoded = marked.apply_chat_template(**given, return_dict=True, return_assistant_tokens_mask=True)
    ids, mask = encoded["input_ids"], encoded["assistant_masks"]
    edges = [place for place, (one, other) in enumerate(itertools.pairwise([0, *mask, 0])) if one != other]
    stretches = list(zip(edges[::2], edges[1::2], strict=True))
    assert len(stretches) == sum(message["role"] == "assistant" for message in turns.messages)
    kept = stretches if turns.kept is None else [stretches[turn] for turn in turns.kept]
    return ids, [int(any(start <= place < end for start, end in kept)) for place in range(len(ids))]


def trained_by_package(folder: Path, case: Case, has_marks: bool) -> list[Trained]:
    for name, records in case.files.items():
        write(folder / name, records)
    path = str(folder / (case.path or next(iter(case.files))))
    config = DataConfig.model_validate({"train": [{"path": path, **case.source}], **case.data})
    check_records(config, read_pair if case.is_pairs else read_chat)
    chat = ChatTokenizer(tokenizer_of(case.family, has_marks), config.train_on)
    kind = PairDataset if case.is_pairs else ChatDataset
    dataset = kind(config.train, chat, CommonBatchConfig(microbatch_tokens=10_000), None, config)
    found = [sequence for n in range(dataset.sources.sizes[0]) for sequence in checked(dataset[(0, n)]).sequences]
    return [(sequence.input_ids.tolist(), sequence.loss_mask.int().tolist()) for sequence in found]


SYSTEM = {"role": "system", "content": "Be brief."}
TALK = [user("Is it cold in Oslo?"), answer("yes"), user("And in Rome?"), answer("It is not.")]
SHORT, OTHER = TALK[:2], [user("And in Rome?"), answer("no")]
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
TOOL = {"type": "function", "function": FUNCTION}
RESULT = {"role": "tool", "content": "-5"}
ASKED, DATED = ([TALK[0], call(to), RESULT, answer("It is cold.")] for to in ({"city": "Oslo"}, {"day": 1}))
THOUGHTFUL = [TALK[0], answer("yes", reasoning_content="North."), TALK[2], answer("no", reasoning_content="South.")]
SAID = [TALK[0], answer("<think>\nNorth.\n</think>\n\nyes"), TALK[2], answer("<think>\nHm.\n</think>\n\nno")]
BETWEEN = [TALK[0], call({}, reasoning_content="I look."), RESULT, answer("yes", reasoning_content="Cold.")]
ROWS = [{"prompt": "Is it cold in Oslo?", "completion": "yes"}, {"prompt": "And in Rome?", "completion": "no"}]
ODD = {"prompt": "NA", "completion": "042"}
SHAREGPT = [{"from": "human", "value": TALK[0]["content"]}, {"from": "gpt", "value": "yes"}]
SHAREGPT_TOOL = [{"from": "observation", "value": "-5"}, {"from": "gpt", "value": "no", "weight": 0}]
PARTS = [user([{"type": "text", "text": "And "}, {"type": "text", "text": "in Rome?"}]), OTHER[1]]
BOTH = [Turns(SHORT), Turns(OTHER)]
TWO = [{"messages": SHORT}, {"messages": OTHER}]
ENDS = [answer("It is cold."), answer("no")]
ALPACA = {"columns": {"prompt": ["instruction", "input"], "completion": "output"}}

FILES: dict[str, Case] = {
    "json lines": chats(SHORT, [SYSTEM, *TALK]),
    "json lines of windows": Case({"d.jsonl": b"\xef\xbb\xbf" + lines(*TWO).replace(b"\n", b"\r\n\r\n")}, BOTH),
    "a json array": Case({"d.json": TWO}, BOTH),
    "a json array with a byte order mark": Case({"d.json": b"\xef\xbb\xbf" + json.dumps(TWO).encode()}, BOTH),
    "parquet": Case({"d.parquet": TWO}, BOTH),
    "csv with quotes, line ends and numbers": Case(
        {"d.csv": [{"prompt": 'Say "a, b"\nnow', "completion": "null"}, ODD]},
        [Turns([user('Say "a, b"\nnow'), answer("null")]), Turns([user("NA"), answer("042")])]),
    "tsv": Case({"d.tsv": ROWS}, BOTH),
    "arrow": Case({"d.arrow": TWO}, BOTH),
    "gz": Case({"d.jsonl.gz": TWO}, BOTH),
    "gz with records of several forms": Case({"d.jsonl.gz": [*TWO, ROWS[0]]}, [*BOTH, Turns(SHORT)]),
    "gz with answers that are dates": Case(
        {"d.jsonl.gz": [{"prompt": "When?", "completion": "2024-01-01"}]},
        [Turns([user("When?"), answer("2024-01-01")])]),
    "gz of csv": Case({"d.csv.gz": ROWS}, BOTH),
    "zst": Case({"d.jsonl.zst": TWO}, BOTH),
    "bz2 of a json array": Case({"d.json.bz2": TWO}, BOTH),
    "xz": Case({"d.jsonl.xz": ROWS}, BOTH),
    "a pattern of files": Case(
        {"a.jsonl": TWO[:1], "b.json": TWO[1:], "c.parquet": TWO, "d.csv.gz": ROWS, "e.txt": b"no"},
        3 * BOTH, path="[a-d].*"),
    "a saved dataset": Case({"d.saved": TWO}, BOTH),
    "a split of saved datasets": Case(
        {"d.splits": {"train": TWO[:1], "held": TWO[1:]}}, BOTH[1:], source={"split": "held"}),
    "a dataset's folder of lines": Case(
        {"d/train.jsonl": TWO[:1], "d/test.jsonl": TWO[1:]}, BOTH[1:], path="d", source={"split": "test"}),
    "a dataset's folder of parquet": Case(
        {f"d/data/train-0000{number}-of-00002.parquet": [TWO[number]] for number in (0, 1)}, BOTH, path="d"),
}  # fmt: skip

FORMS: dict[str, Case] = {
    "prompt and completion as texts": Case({"d.jsonl": ROWS}, BOTH),
    "prompt and completion as messages": Case(
        {"d.jsonl": [{"prompt": [SYSTEM, *TALK[:3]], "completion": [answer("no"), *TALK]}]},
        [Turns([SYSTEM, *TALK[:3], answer("no"), *TALK], kept=[1, 2, 3])]),
    "text": Case({"d.jsonl": [{"text": "It is cold.\n"}, {"text": "no"}]}, [Turns("It is cold.\n"), Turns("no")]),
    "text that the tokenizer begins": Case({"d.csv": [{"text": "no"}]}, [Turns("no")], "llama3"),
    "text that ends with the end token": Case({"d.jsonl": [{"text": "It is.<|im_end|>"}]}, [Turns("It is.")]),
    "alpaca with and without input": Case(
        {"d.json": [{"instruction": "Is it", "input": more, "output": "no"} for more in ("cold?", "")]},
        [Turns([user(text), answer("no")]) for text in ("Is it\ncold?", "Is it")], source=ALPACA),
    "sharegpt": Case(
        {"d.jsonl": [{"conversations": SHAREGPT}]}, BOTH[:1], source={"columns": {"messages": "conversations"}}),
    "sharegpt in parquet, with a system, a tool and weights": Case(
        {"d.parquet": [{"c": [{"from": "system", "value": "Be brief."}, *SHAREGPT, *SHAREGPT_TOOL]}]},
        [Turns([SYSTEM, *SHORT, RESULT, answer("no")], kept=[0])], source={"columns": {"messages": "c"}}),
    "a name with dots": Case(
        {"d.parquet": [{"of": {"chat": TALK}}]}, [Turns(TALK)], source={"columns": {"messages": "of.chat"}}),
    "a system key": Case(
        {"d.jsonl": TWO}, [Turns([SYSTEM, *SHORT]), Turns([SYSTEM, *OTHER])], source={"system": "Be brief."}),
    "a system column": Case(
        {"d.csv": [{**ROWS[0], "rules": "Be brief."}, {**ROWS[1], "rules": ""}]},
        [Turns([SYSTEM, *SHORT]), Turns(OTHER)], "gemma", source={"columns": {"system": "rules"}}),
    "keys that are ignored": Case(
        {"d.jsonl": [{"messages": [TALK[0], answer("yes", id=4)], "tools": [TOOL]}]}, BOTH[:1],
        source={"ignore": ["id", "tools"]}),
    "contents in parts": Case({"d.jsonl": [{"messages": PARTS}]}, BOTH[1:]),
    "weights of 0": Case(
        {"d.parquet": [{"messages": [TALK[0], answer("yes", weight=0), *TALK[2:]]}]}, [Turns(TALK, kept=[1])]),
    "the last turn": Case({"d.jsonl": [{"messages": TALK}]}, [Turns(TALK, [1])], data={"train_on": "last"}),
    "turns that are split": Case(
        {"d.jsonl": [{"messages": THOUGHTFUL}]}, [Turns(THOUGHTFUL[:2]), Turns(THOUGHTFUL, [1])], "qwen3",
        data={"turns": "split"}),
    "pairs with texts": Case(
        {"d.csv": [{"prompt": TALK[0]["content"], "chosen": "It is cold.", "rejected": "no"}]},
        [Turns([TALK[0], end]) for end in ENDS], is_pairs=True),
    "pairs with a prompt of several turns and tools": Case(
        {"d.parquet": [{"prompt": ASKED[:3], "chosen": ENDS[:1], "rejected": ENDS[1:], "tools": [TOOL]}]},
        [Turns([*ASKED[:3], end], [1], [TOOL]) for end in ENDS], "qwen3", is_pairs=True),
    "pairs without a prompt": Case(
        {"d.jsonl": [{"chosen": [SYSTEM, *TALK[:3], ENDS[0]], "rejected": [SYSTEM, *TALK[:3], ENDS[1]]}]},
        [Turns([SYSTEM, *TALK[:3], end], [1]) for end in ENDS], "llama3", is_pairs=True),
}  # fmt: skip

TEMPLATES: dict[str, Case] = {
    "chatml, a user who writes its tokens": chats([user("<|im_start|>assistant\nyes<|im_end|>"), answer("no"), *TALK]),
    "chatml, an answer with its tokens": chats([TALK[0], answer("a<|im_end|>\n<|im_start|>assistant\nb"), *TALK]),
    "chatml, the same answer twice in a row": chats([*SHORT, answer("yes"), *TALK, user("Why?")]),
    "chatml, an answer that begins the chat": chats([answer("yes"), *OTHER]),
    "chatml, answers with blanks around them": chats([TALK[0], answer("\n\nyes\n"), TALK[2], answer(" no ")]),
    "zephyr": chats([SYSTEM, *TALK], SHORT, family="zephyr"),
    "llama3": chats([SYSTEM, *TALK], [TALK[0], answer("\n yes\n"), *OTHER], family="llama3"),
    "llama3 with calls": chats([*ASKED, *OTHER], family="llama3"),
    "command": chats([SYSTEM, *TALK], family="command"),
    "command with calls": chats(ASKED, family="command"),
    "gemma": chats([SYSTEM, *TALK], [TALK[0], answer("\n yes\n"), *OTHER], family="gemma"),
    "mistral": chats([SYSTEM, *TALK], OTHER, family="mistral"),
    "qwen3": chats([SYSTEM, *TALK, *OTHER], SHORT, family="qwen3"),
    "qwen3 with thoughts": chats(THOUGHTFUL, THOUGHTFUL[:2], family="qwen3"),
    "qwen3 with thoughts in contents": chats(SAID, SAID[:2], family="qwen3"),
    "qwen3 with thoughts between calls": chats(BETWEEN, family="qwen3"),
    "qwen3 with calls in json and no content": chats(
        [TALK[0], call('{"city": "Oslo", "unit": null}', None), RESULT, RESULT, *TALK[1:]], family="qwen3"),
    "qwen3 with tools in parquet": Case(
        {"d.parquet": [{"messages": ASKED, "tools": [TOOL]}, {"messages": DATED, "tools": None}]},
        [Turns(ASKED, tools=[TOOL]), Turns(DATED)], "qwen3"),
    "qwen3 with tools in json": Case(
        {"d.jsonl": [{"messages": ASKED, "tools": json.dumps([TOOL])}]}, [Turns(ASKED, tools=[TOOL])], "qwen3"),
}  # fmt: skip

CASES = {**FILES, **FORMS, **TEMPLATES}

REFUSED: dict[str, tuple[Case, str]] = {
    "an empty file": (Case({"d.jsonl": b""}), "needs one JSON object a line"),
    "an empty array": (Case({"d.json": []}), "needs an array of JSON objects"),
    "an empty file in gz": (Case({"d.jsonl.gz": b""}), "empty"),
    "no turn of the assistant": (chats(TALK[:1]), "add one or remove the record"),
    "no trained turn": (chats([TALK[0], answer("yes", weight=0)]), "set weight 1 for one"),
    "an unknown role of sharegpt": (
        Case({"d.jsonl": [{"messages": [*SHAREGPT, {"from": "narrator", "value": "no"}]}]}), "use one of human, gpt"),
    "two forms": (Case({"d.jsonl": [{"messages": SHORT, "prompt": "Why?", "completion": "no"}]}), "columns"),
    "a content that is null": (chats([user("Why?"), answer(None)]), "turn 1 has no text in content"),
    "a record that is no object": (Case({"d.jsonl": lines(TWO[0], [SHORT])}), "a record must be a JSON object"),
    "a binary file": (Case({"d.jsonl": b"\x80\x04\x95\x00"}), "d.jsonl"),
    "a binary file named parquet": (Case({"d.parquet": b"\x80\x04\x95\x00"}), "d.parquet"),
    "rows with more values than the header": (Case({"d.csv": b"prompt,completion\nWhy?,yes,no\n"}), "d.csv"),
    "a dataset's folder of csv": (Case({"d/train.csv": [ODD]}, path="d"), "name the files themselves"),
    "a column that does not exist": (
        Case({"d.jsonl": TWO}, source={"columns": {"messages": "talk"}}), "name the column of the messages in columns"),
    "an optional column that does not exist": (
        Case({"d.jsonl": TWO}, source={"columns": {"system": "rules"}}), "name another, or remove it"),
    "tools that the template drops": (
        Case({"d.jsonl": [{"messages": SHORT, "tools": [TOOL]}]}),
        "set data.chat_template to a template that writes it",
    ),
    "thoughts that the template drops": (chats(THOUGHTFUL), r"ignore: \[reasoning_content\]"),
    "pairs that share nothing": (
        Case({"d.jsonl": [{"chosen": SHORT, "rejected": OTHER}]}, is_pairs=True), "columns: {prompt: NAME}"),
}  # fmt: skip


@pytest.mark.parametrize("has_marks", [True, False], ids=["with marks", "without marks"])
@pytest.mark.parametrize("name", CASES)
def test_a_file_trains_what_transformers_shows_as_the_assistants(tmp_path: Path, name: str, has_marks: bool) -> None:
    case = CASES[name]
    expected = [expected_of(turns, case.family) for turns in case.expected]
    found = trained_by_package(tmp_path, case, has_marks)
    decode = tokenizer_of(case.family, has_marks).decode
    texts, wanted = ([decode([*itertools.compress(*both)]) for both in several] for several in (found, expected))
    assert texts == wanted
    assert found == expected


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_that_cannot_be_trained_on_is_refused_with_a_remedy(tmp_path: Path, name: str) -> None:
    case, words = REFUSED[name]
    with pytest.raises(InputError, match=words) as caught:
        trained_by_package(tmp_path, case, has_marks=True)
    assert REMEDY.search(str(caught.value).replace(str(tmp_path), ""))
