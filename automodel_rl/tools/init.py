"""`automodel-rl init`: writes a commented, validated config for a model and a data file."""

import itertools
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from automodel_rl.config import ALGORITHMS, ModelConfig, RunConfig, SourceConfig
from automodel_rl.config.load import check_config
from automodel_rl.config.run import Records
from automodel_rl.data.chat import check_chats, open_chat_tokenizer
from automodel_rl.data.checks import check_data
from automodel_rl.data.columns import MISSING, look_up
from automodel_rl.data.records import READERS, Text, chats_of
from automodel_rl.data.sources import RecordSource, open_source
from automodel_rl.errors import InputError
from automodel_rl.estimate.fit import GIB, fit_to_device
from automodel_rl.files import as_input_error, check_writable, write_atomic
from automodel_rl.hf.opened_model import OpenedModel
from automodel_rl.tools.plan.devices import find_device

MAX_SAMPLED_RECORDS = 200
"""Number of records measured."""

MIN_ON_CPU = 2048
"""Smallest microbatch on a CPU, in tokens."""

READS: dict[str, Records] = {
    "sft": "chats",
    "dpo": "pairs",
    "kto": "judged",
    "reward": "pairs",
    "distill": "chats",
    "grpo": "prompts",
    "ppo": "prompts",
}
"""Record type by algorithm."""

Columns = dict[str, str | list[str]]

COLUMNS: dict[Records, list[Columns]] = {
    "chats": [
        {"messages": "messages"},
        {"prompt": "prompt", "completion": "completion"},
        {"prompt": ["instruction", "input"], "completion": "output"},
        {"prompt": "instruction", "completion": "output"},
        {"prompt": "prompt", "completion": "response"},
        {"prompt": "instruction", "completion": "response"},
        {"prompt": "question", "completion": "answer"},
        {"prompt": "problem", "completion": "solution"},
        {"prompt": "input", "completion": "output"},
        {"text": "text"},
        {"text": "content"},
    ],
    "judged": [
        {"prompt": "prompt", "completion": "completion", "label": "label"},
        {"messages": "messages", "label": "label"},
    ],
    "pairs": [{"chosen": "chosen", "rejected": "rejected"}, {"chosen": "preferred", "rejected": "dispreferred"}],
    "prompts": [{"prompt": name} for name in ("prompt", "question", "problem", "query", "instruction", "messages")],
}
"""Column names to look for, by record type, best first."""

ANSWERS = ("answer", "solution", "ground_truth", "reward_model.ground_truth", "target", "final_answer")

LEARNING_RATES = dict.fromkeys(("sft", "reward", "distill"), 1e-5) | dict.fromkeys(("dpo", "kto", "grpo", "ppo"), 1e-6)
"""Peak learning rates for full training of a model whose hidden size is `WIDTH`."""

ADAPTER_LR_FACTOR = 10
"""Learning-rate factor for adapters (Schulman et al., "LoRA without regret", thinkingmachines.ai/blog/lora)."""

WIDTH = 2048
"""Hidden size that `LEARNING_RATES` refer to. Narrower models get proportionally larger rates (Yang et al.,
arXiv:2203.03466, table 3). Wider models keep these, which they are usually tuned to."""


ADAPTERS = {"rank": 16, "targets": "all-linear"}


def init(
    algorithm: str,
    model: str,
    data: str,
    out: Path,
    devices: tuple[int | None, str | None],
    *,
    lora: bool = False,
    teacher: str | None = None,
) -> None:
    """Writes a config and prints what it is based on.

    Args:
        algorithm: one of `READS`.
        model: the model's folder or hub id.
        data: the data file or dataset.
        out: the config file, which must not exist.
        devices: number and name of the GPUs; None for those of this machine.
        lora: whether to train adapters even if all weights fit.
        teacher: the teacher's folder or hub id, for distill.

    Raises:
        InputError: the model or data cannot be read, `out` exists, or no layout fits.
    """
    if (algorithm == "distill") != (teacher is not None):
        raise InputError(
            "init distill needs --teacher MODEL" if teacher is None else f"--teacher is not for {algorithm}"
        )
    if os.path.lexists(out):
        raise InputError(f"{out}: already exists: pass another file to --out")
    check_writable(out.parent, f"--out {out}")
    opened_model = OpenedModel.open(ModelConfig(path=model))
    if lora and opened_model.files.lora is not None:
        raise InputError(f"{model}: has adapters, which are trained further: remove --lora")
    source = SourceConfig(path=data)
    opened = open_source(source)
    columns = guess_columns(algorithm, opened[0], opened.where(0))
    values = _first_values(algorithm, opened, columns)
    values |= {"output": f"runs/{out.stem}", "model": {"path": model, **({"lora": ADAPTERS} if lora else {})}}
    values |= {"teachers": {"teacher": {"path": teacher}}} if teacher else {}
    values["data"] = {"train": [{"path": data, **({"columns": columns} if columns else {})}]}
    lengths = _add_lengths(algorithm, values, opened_model)
    notes = [*lengths.notes, *_add_layout(values, opened_model, devices, lengths.needed)]
    notes += ["the teacher's memory is not counted here: automodel-rl plan shows it"] if teacher else []
    has_adapters = opened_model.files.lora is not None or "lora" in values["model"]
    values["optimizer"]["lr"] = peak_learning_rate(algorithm, opened_model.language.hidden_size, has_adapters)
    config: RunConfig = check_config(ALGORITHMS[algorithm], values)
    notes += [f"warning: {warning}" for warning in check_chats(config, opened_model, check_data(config))]
    with as_input_error(f"--out {out}"):
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(out, _text(values, [f"{len(opened):,} records, {lengths.said}", *notes]))
    print(f"{out}: a config for {algorithm} of {model} on {data}")
    for note in notes:
        print(note)
    print(f"next: automodel-rl plan {out}; automodel-rl {algorithm} {out}")


def _first_values(algorithm: str, opened: RecordSource, columns: Columns) -> dict[str, Any]:
    """Returns the sections of a config in their order, those of model and data still empty."""
    teachers: dict[str, Any] = {"teachers": {}} if algorithm == "distill" else {}
    values: dict[str, Any] = {"algorithm": algorithm, "output": "", "model": {}, **teachers, "data": {}}
    values |= {"optimizer": {"lr": 1.0, "warmup_ratio": 0.03}, "checkpoint": {"every_steps": 100}}
    if READS[algorithm] == "prompts":
        has_answer = "answer" in columns or look_up(opened[0], "answer") is not MISSING
        values |= {"rewards": [{"function": "math"}]} if has_answer else {"rewards": [{"function": "my_rewards:score"}]}
        values |= {"rollout": {"prompts": min(32, len(opened)), "group_size": 8}, "length": {"steps": 200}}
        values["batch"] = {"microbatch_tokens": "auto"}
    else:
        values["batch"] = {_size_of_batch(algorithm): max(1, min(64, len(opened) // 4))}
        values["length"] = {"epochs": 3 if len(opened) < 5000 else 1}
    return values


def _size_of_batch(algorithm: str) -> str:
    return "pairs" if READS[algorithm] == "pairs" else "sequences"


def peak_learning_rate(algorithm: str, width: int, has_adapters: bool) -> float:
    """Returns the default peak learning rate for a model of hidden size `width`, rounded to one digit."""
    rate = LEARNING_RATES[algorithm] * (ADAPTER_LR_FACTOR if has_adapters else 1) * max(1.0, WIDTH / width)
    return float(f"{rate:.0e}")


def guess_columns(algorithm: str, record: dict[str, Any], where: str) -> dict[str, Any]:
    """Returns the `columns` setting for data with such records; empty if the columns have standard names.

    Raises:
        InputError: no column looks like what the algorithm needs.
    """
    reads = READS[algorithm]
    own: list[Columns] = [
        {"prompt" if reads == "prompts" else "messages": name}
        for name, value in record.items()
        if _are_messages(value) and reads in ("chats", "prompts")
    ]
    own.sort(key=lambda columns: columns.get("messages") != "messages")
    known = [*own, *COLUMNS[reads]] if reads == "chats" else [*COLUMNS[reads], *own]
    for columns in known:
        names = itertools.chain.from_iterable([n] if isinstance(n, str) else n for n in columns.values())
        if all(look_up(record, name) not in (MISSING, None) for name in names):
            found: dict[str, Any] = {column: name for column, name in columns.items() if column != name}
            answer = next((name for name in ANSWERS if look_up(record, name) is not MISSING), None)
            if reads == "prompts" and answer not in (None, "answer"):
                found["answer"] = answer
            return found
    raise InputError(
        f"{where}: no columns for {algorithm}, only {', '.join(record)}: write the config by hand, with "
        "data.train.0.columns"
    )


def _are_messages(value: Any) -> bool:
    keys = value[0].keys() if isinstance(value, list) and value and isinstance(value[0], dict) else set()
    return {"role", "content"} <= keys or {"from", "value"} <= keys


@dataclass(frozen=True)
class Lengths:
    """Lengths found in the data.

    Attributes:
        needed: tokens that a microbatch must hold.
        said: text on the longest record.
        notes: lines about records that are too long.
    """

    needed: int
    said: str
    notes: tuple[str, ...] = ()


def _add_lengths(algorithm: str, values: dict[str, Any], model: OpenedModel) -> Lengths:
    records = _lengths_of_records(algorithm, values, model)
    longest, limit = max(itertools.chain.from_iterable(records)), model.description.context or 32_768
    if READS[algorithm] != "prompts":
        needed = max(sum(min(length, limit) for length in record) for record in records)
        too_long = sum(max(record) > limit for record in records)
        cut = "not used" if algorithm == "reward" else "cut; data.overlong: drop drops them"
        remedy = f"are longer than the model's context of {limit:,} tokens and are {cut}"
        what = "completion with its prompt" if READS[algorithm] == "pairs" else "one"
        said = f"the longest {what} of some {longest:,} tokens"
        return Lengths(needed, said, _of_records(too_long, len(records), remedy))
    prompt = _rounded(longest, limit // 2)
    completion = min(1024, limit - prompt)
    values["rollout"] |= {"max_prompt_tokens": prompt, "max_new_tokens": completion}
    too_long = sum(max(record) > prompt for record in records)
    remedy = f"are longer than {prompt:,} tokens, half of the model's context, and are dropped"
    said = f"the longest prompt of some {longest:,} tokens"
    return Lengths(prompt + completion, said, _of_records(too_long, len(records), remedy))


def _of_records(count: int, seen: int, remedy: str) -> tuple[str, ...]:
    return (f"{count} of the {seen} records examined {remedy}",) if count else ()


def _lengths_of_records(algorithm: str, values: dict[str, Any], model: OpenedModel) -> list[list[int]]:
    """Returns the token counts of each sequence of the first records; for prompt records, of the prompt."""
    trial = {**values, "length": {"steps": 1}}
    if READS[algorithm] == "prompts":
        trial["rollout"] = {**values["rollout"], "max_prompt_tokens": 1, "max_new_tokens": 1}
    config = check_config(ALGORITHMS[algorithm], trial)
    (source,) = config.data.train
    chat, opened = open_chat_tokenizer(config, model), open_source(source)
    write = chat.generation_prompt if READS[algorithm] == "prompts" else chat
    records = []
    for number in range(min(MAX_SAMPLED_RECORDS, len(opened))):
        where = opened.where(number)
        held = READERS[READS[algorithm]](opened[number], source, where)
        if isinstance(held, Text):
            records.append([len(chat.text_sequence(held.text))])
        else:
            records.append([len(write(one, place)) for one, place in chats_of(held, where)])
    return records


def _rounded(length: int, most: int) -> int:
    """The next power of two with room for 20% longer records, at most `most`."""
    return min(most, 2 ** math.ceil(math.log2(max(16, 1.2 * length))))


def _add_layout(
    values: dict[str, Any], model: OpenedModel, devices: tuple[int | None, str | None], needed: int
) -> list[str]:
    """Adds a layout that fits to a config. Returns lines that explain it."""
    count, name = devices
    if count is None and name is None and not torch.cuda.is_available():
        values["model"]["dtype"] = "float32"
        values["batch"]["microbatch_tokens"] = max(MIN_ON_CPU, needed)
        return ["no GPU here: one rank on the CPU, in float32; --gpus and --device plan for another machine"]
    count = count or torch.cuda.device_count() or 1
    if READS[values["algorithm"]] != "prompts":
        examples = _size_of_batch(values["algorithm"])
        values["batch"][examples] = max(values["batch"][examples], count)
    if name is None and torch.cuda.is_available():
        device, memory = torch.cuda.get_device_name(), float(torch.cuda.get_device_properties(0).total_memory)
    else:
        card = find_device(name)
        device, memory = card.name, card.num_bytes
    encoders = model.description.encoders
    for parallel in _layouts(count, model.description.num_layers):
        trial = {**values, "parallel": parallel}
        try:
            config: RunConfig = check_config(ALGORITHMS[values["algorithm"]], trial)
            config = config.model_copy(update={"model": model.files.described(config.model)})
            fit = fit_to_device(config, model.whole, memory)
        except InputError:
            continue
        if fit.num_tokens >= max(fit.needed, needed, 4096):
            values["parallel"] = parallel
            if encoders:  # memory of media is not estimated, so the largest microbatch is unknown
                values["batch"]["microbatch_tokens"] = max(fit.needed, needed, 4096)
            layout = ", ".join(f"{axis} {number}" for axis, number in parallel.items())
            return [f"{count} x {device}: {layout or 'one rank'}, {fit.planned / GIB:.0f} of {memory / GIB:.0f} GiB"]
    values["parallel"] = {"dp_shard": count} if count > 1 else {}
    if encoders:
        raise InputError(
            f"{count} x {device}: training all weights does not fit: write the config by hand, with components, frozen "
            "parts or model.lora, and check it with automodel-rl plan"
        )
    if model.files.lora is not None:
        raise InputError(
            f"{count} x {device}: training the adapters of {values['model']['path']} does not fit: set more GPUs in "
            "--gpus, or larger ones in --device"
        )
    if "lora" in values["model"]:
        raise InputError(f"{count} x {device}: training adapters does not fit: set more GPUs in --gpus, or larger ones")
    values["model"]["lora"] = ADAPTERS
    return [f"{count} x {device}: training all weights does not fit, so adapters are trained (model.lora)"]


def _layouts(count: int, num_layers: int) -> list[dict[str, int]]:
    stages = [pp for pp in (1, 2, 4, 8) if count % pp == 0 and pp <= num_layers]
    axes = [{"pp": pp, "dp_shard": count // pp} for pp in stages]
    return [{axis: number for axis, number in sizes.items() if number > 1} for sizes in axes]


COMMENTS = {
    "output": "run directory: config.yaml, metrics.jsonl, report.html, checkpoints/, final/",
    "model": "further keys: lora: {rank: 16, targets: all-linear} trains adapters",
    "teachers": "further keys: url for a teacher behind a server; between: host frees the GPU between steps",
    "data": "validation: [held_out.jsonl] beside train adds val/ metrics",
    "rollout": "further keys: generator: vllm; validation_samples",
    "rewards": "math, last_number, exact_match, format, length, or package.module:function of your own",
    "batch": "examples of an optimizer step, over all data ranks; microbatch_tokens: auto fills the GPU",
    "length": "steps or epochs; validate_every: 50 validates in between",
    "optimizer": "lr is the peak learning rate, about ten times as large for adapters; decay: cosine is the default",
    "checkpoint": "--resume auto resumes from the newest one",
    "parallel": "pp: pipeline stages, tp: tensor parallel, cp: context parallel, dp_shard: FSDP2",
    "memory": "activation_checkpointing trades time for memory",
}


def _text(values: dict[str, Any], notes: list[str]) -> str:
    hint = f"automodel-rl {values['algorithm']} --help WORD explains the keys with that word"
    lines = [*(f"# {note}" for note in (*notes, hint)), ""]
    for key, value in values.items():
        if not value:
            continue
        if key in COMMENTS:
            lines.append(f"# {COMMENTS[key]}")
        lines.append(yaml.safe_dump({key: value}, sort_keys=False, allow_unicode=True).rstrip())
    return "\n".join(lines) + "\n"
