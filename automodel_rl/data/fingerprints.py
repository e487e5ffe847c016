"""Fingerprints of a run's inputs besides weights: data, tokenizer, chat template, and code that the config names.

They are stored with checkpoints, so that a resumed run detects changes. Files above `WHOLE` bytes are sampled. Media
files that records refer to are not read.
"""

import dataclasses
import glob
import importlib.util
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from automodel_rl.config import RunConfig, SourceConfig
from automodel_rl.data.sources import RecordSource, open_source

WHOLE = 2**30
"""Maximum bytes of a file that is hashed completely."""

NUM_PARTS, PART_BYTES = 1024, 2**18
"""Number and bytes of the evenly spaced chunks hashed of a larger file, including its first and last bytes."""

NUM_RECORDS = 100
"""Approximate number of records hashed of a dataset without local files, such as one from the hub."""

TOKENIZER_FILES = re.compile(
    r"tokenizer.*\.(json|model)|.*\.tiktoken|vocab.*|merges\.txt|added_tokens\.json|special_tokens_map\.json|spiece\.model"
)
"""Pattern of tokenizer file names."""

TEMPLATE_FILES = re.compile(r"chat_template\.(jinja|json)")
IMPORT_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


@dataclass(frozen=True)
class Input:
    """An input of a run.

    Attributes:
        what: description for messages.
        hash: content hash.
        follows: consequence of a change for a resumed run; empty if a change is allowed.
    """

    what: str
    hash: str
    follows: str = ""


Inputs = Mapping[str, Input]
"""Inputs of a run, by their config keys."""


@dataclass(frozen=True)
class Change:
    """A changed input.

    Attributes:
        key: its config key.
    """

    key: str
    before: Input
    after: Input

    def __str__(self) -> str:
        same = self.before.what == self.after.what
        return f"{self.key}: {self.before.what} -> {'different content' if same else self.after.what}"


def inputs_of(config: RunConfig, tokenizer_folder: Path) -> dict[str, Input]:
    """Returns the inputs of a run. `tokenizer_folder` is the folder with the model's tokenizer."""
    found = {}
    follows_of = {"train": "its position in the data would refer to other records", "validation": ""}
    for split, sources in (("train", config.data.train), ("validation", config.data.validation)):
        for number, source in enumerate(sources):
            opened = open_source(source)
            what = f"{source.path}, {len(opened)} records"
            found[f"data.{split}.{number}"] = Input(what, _hash_of_source(source, opened), follows_of[split])
    own = _template_of(tokenizer_folder)
    template = own if config.data.chat_template is None else Path(config.data.chat_template).read_text()
    where = config.data.chat_template or "the tokenizer's own"
    found["tokenizer"] = Input(
        f"of {config.model.path}", _hash_of_tokenizer(tokenizer_folder), "token ids would have other meanings"
    )
    found["data.chat_template"] = Input(where, _hash([template]), "chats would be rendered differently")
    for key, path in _import_paths(config.model_dump(mode="json")):
        file = _file_of(path.partition(":")[0])
        if file is not None:
            found[key] = Input(f"{path} in {file}", _hash(_content(file)))
    return found


def as_json(inputs: Inputs) -> str:
    """Serialises inputs for a file."""
    return json.dumps({key: dataclasses.asdict(one) for key, one in inputs.items()}, indent=1)


def changes(before: Mapping[str, Any], inputs: Inputs) -> list[Change]:
    """Returns the changes from earlier inputs, as parsed from `as_json`, among keys that both have."""
    pairs = [(key, Input(**before[key]), one) for key, one in inputs.items() if key in before]
    return [Change(key, then, now) for key, then, now in pairs if then.hash != now.hash]


def _hash_of_source(config: SourceConfig, source: RecordSource) -> str:
    files = [*_files_of(config.path)]
    if not files:
        step = max(1, len(source) // NUM_RECORDS)
        records = (json.dumps(source[n], sort_keys=True, default=repr) for n in range(0, len(source), step))
        return _hash([str(len(source)), *records])
    return _hash(piece for file in files for piece in _content(file))


def _files_of(path: str) -> Iterator[Path]:
    """Yields the files of a source; none for a hub dataset."""
    if glob.has_magic(path) and not os.path.exists(path):
        yield from sorted(Path(name) for name in glob.glob(path, recursive=True) if os.path.isfile(name))
    elif os.path.isfile(path):
        yield Path(path)
    else:
        for folder, folders, names in os.walk(path):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            # `datasets` writes cache files next to those of a dataset.
            yield from (Path(folder, name) for name in sorted(names) if not name.startswith((".", "cache-", "tmp")))


def _hash_of_tokenizer(folder: Path) -> str:
    pieces: list[str | bytes] = []
    for file in sorted(folder.iterdir()):
        if not TOKENIZER_FILES.fullmatch(file.name):
            continue
        if file.name == "tokenizer_config.json":
            values = json.loads(file.read_text())
            values.pop("chat_template", None)
            pieces += [file.name, json.dumps(values, sort_keys=True)]
        else:
            pieces += [file.name, *_content(file)]
    return _hash(pieces)


def _template_of(folder: Path) -> str:
    texts = [file.read_text() for file in sorted(folder.iterdir()) if TEMPLATE_FILES.fullmatch(file.name)]
    config = folder / "tokenizer_config.json"
    if config.is_file():
        texts.append(json.dumps(json.loads(config.read_text()).get("chat_template")))
    return "\n".join(texts)


def _import_paths(values: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yields all import paths in a config with their dotted keys."""
    if isinstance(values, str) and IMPORT_PATH.fullmatch(values):
        yield key, values
    pairs = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    for name, value in pairs:
        yield from _import_paths(value, f"{key}.{name}" if key else str(name))


def _file_of(module: str) -> Path | None:
    """Returns the file of a module; None if there is none."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError, AttributeError):
        return None
    return None if spec is None or spec.origin is None or not os.path.isfile(spec.origin) else Path(spec.origin)


def _content(file: Path) -> Iterator[str | bytes]:
    """Yields a file's size, and its bytes or samples of them."""
    size = file.stat().st_size
    yield str(size)
    is_whole = size <= WHOLE
    count = -(-size // PART_BYTES) if is_whole else NUM_PARTS
    with file.open("rb") as opened:
        for number in range(count):
            if not is_whole:
                opened.seek((size - PART_BYTES) * number // (count - 1))
            yield opened.read(PART_BYTES)


def _hash(pieces: Any) -> str:
    state = xxhash.xxh3_128()
    for piece in pieces:
        content = piece.encode() if isinstance(piece, str) else piece
        state.update(len(content).to_bytes(8, "little"))
        state.update(content)
    return state.hexdigest()
