"""The pages: a README.md in every folder that has something to tell, and API.md. Parts of them are made from code: the
tree, the import order, the table of what works together and the keys of other trainers.

python -m tests.pages writes these parts; tests/lints/test_pages.py says when they are out of date.
"""

import ast
import dataclasses
import inspect
import re
import textwrap
import tomllib
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

import automodel_rl
from automodel_rl.config import RunConfig, describe_keys, equivalents
from automodel_rl.support.table import table

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "automodel_rl"
API = PACKAGE / "API.md"
PAGES = (
    *(ROOT / name for name in ("README.md", "AGENTS.md", "CONTRIBUTING.md")),
    *sorted(path for path in PACKAGE.rglob("*.md") if path.name != "API.md"),
    *sorted(path for path in (ROOT / "benchmarks").glob("*.md") if not path.name.startswith("parity")),
    *(ROOT / folder / "README.md" for folder in ("configs", "tests")),
)

NAME_COLUMNS, TREE_COLUMNS = 32, 120
"""Of the tree: where descriptions begin, and where lines end."""

SECTIONS = ("Args", "Attributes", "Returns", "Raises")
GROUPS = {
    "Models and training": ("ModelHandle", "Engine", "TrainOutput", "AdamWSettings", "StepRunner", "GlobalBatch"),
    "Packed batches": (
        *("TokenSequence", "Microbatch", "pack", "DataShare", "unpack", "in_packed_order", "Image", "Video", "Audio"),
        *("Routes", "RouterShape", "read_routes"),
    ),
    "Losses": (
        "Readout",
        "TokenOutputs",
        "LinearLoss",
        "LossOutput",
        "sft_loss",
        "dft_loss",
        "dpo_loss",
        "kto_loss",
        "grpo_loss",
        "reward_loss",
        "value_loss",
        "distill_loss",
        "token_loss",
    ),
    "Whole runs": (
        *("load_config", "train", "SFTConfig", "DPOConfig", "KTOConfig", "RewardModelConfig", "DistillConfig"),
        *("GRPOConfig", "PPOConfig", "RunConfig", "RolloutRunConfig", "FurtherModel"),
    ),
    "Programs of your own": ("run_program", "Policy", "Batch", "Fleet", "Rollouts", "Run", "Goal"),
    "Looking at data": ("first_examples", "ShownExample"),
    "Configs of a model": (
        *("ModelConfig", "IndexerConfig", "LoraConfig", "MoEConfig", "MTPConfig", "MemoryConfig", "ParallelConfig"),
        *("ComponentsConfig", "EncoderComponent", "LanguageComponent"),
    ),
    "Configs of training": (
        *("OffloadConfig", "OptimizerConfig", "MuonConfig", "ParameterGroupConfig"),
        *("DPOLossConfig", "PolicyLossConfig", "KLConfig", "CorrectionConfig", "RejectConfig"),
        *("SFTLossConfig", "KTOLossConfig", "RewardLossConfig", "CriticConfig", "GAEConfig"),
        *("FrozenModelConfig", "TeacherConfig", "DistillLossConfig", "OnPolicyDistillationConfig"),
    ),
    "Errors": ("InputError", "MicrobatchError"),
}


def generated_parts() -> dict[str, str]:
    """What some page has between `<!-- NAME -->` and `<!-- end of NAME -->`."""
    return {
        "tree": f"```\n{tree()}\n```",
        "loop": f"```python\n{(ROOT / 'configs' / 'loops' / 'reinforce.py').read_text().strip()}\n```",
        "import order": import_order(),
        "table": table(),
        "keys of other trainers": equivalents.tables(),
    }


def with_generated_parts(texts: Sequence[str]) -> list[str]:
    """The pages with their generated parts as the code is now.

    Args:
        texts: of all pages.

    Raises:
        ValueError: a part is not on exactly one page, once.
    """
    texts = list(texts)
    for name, part in generated_parts().items():
        pattern = re.compile(f"(<!-- {name} -->\n).*?(<!-- end of {name} -->)", re.DOTALL)
        replaced = [pattern.subn(lambda match, part=part: f"{match[1]}{part}\n{match[2]}", text) for text in texts]
        texts, counts = [text for text, _ in replaced], [count for _, count in replaced]
        if sum(counts) != 1:
            raise ValueError(f"the pages have {sum(counts)} parts named {name!r}")
    return texts


def tree() -> str:
    """Every file of the package with the first sentence of its text."""
    return "\n".join(["automodel_rl/", *_tree(PACKAGE, "  ")])


def _tree(folder: Path, indent: str) -> Iterator[str]:
    entries = [path for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()]
    for path in sorted(entries, key=lambda path: (path.is_dir(), path.name)):
        if path.is_dir():
            yield from _lines(f"{indent}{path.name}/", path / "__init__.py")
            yield from _tree(path, indent + "  ")
        elif path.name not in ("__init__.py", "__main__.py"):
            yield from _lines(f"{indent}{path.name}", path)


def _lines(name: str, file: Path) -> Iterator[str]:
    """A file's name with the first sentence of its text, over as many lines as it needs."""
    text = " ".join((ast.get_docstring(ast.parse(file.read_text())) or "").split("\n\n")[0].split())
    sentence = re.split(r"[.:] (?=[A-Z])|\.$", text)[0]
    first, *rest = textwrap.wrap(sentence, TREE_COLUMNS - NAME_COLUMNS, break_on_hyphens=False)
    yield f"{name:<{NAME_COLUMNS}}{first}"
    yield from (" " * NAME_COLUMNS + line for line in rest)


def import_order() -> str:
    """The layers of import-linter's first contract, the highest first."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = [layer.replace("automodel_rl.", "").replace(" | ", ", ") for layer in settings["contracts"][0]["layers"]]
    return "\n".join(["```", *textwrap.wrap(" > ".join(layers), TREE_COLUMNS, break_on_hyphens=False), "```"])


def api() -> str:
    """Every public name with its text, the config sections with their keys."""
    parts = ["# API", "Everything here is imported from `automodel_rl`. Examples run as tests."]
    for group, names in GROUPS.items():
        parts.append(f"## {group}")
        parts += [part for name in names for part in _describe(getattr(automodel_rl, name), name)]
    return "\n\n".join(parts) + "\n"


def _describe(thing: Any, name: str) -> Iterator[str]:
    yield f"### `{name}{_signature(thing)}`"
    yield from _render(inspect.getdoc(thing) or "")
    if isinstance(thing, type) and issubclass(thing, RunConfig):
        return  # whose many keys --help lists
    if isinstance(thing, type) and issubclass(thing, BaseModel):
        yield "\n".join(
            f"- `{key}` ({default}): {' '.join(text.split())}" for key, default, text, *_ in describe_keys(thing)
        )
    elif isinstance(thing, type):
        for key, method in public_methods(thing):
            yield f"#### `{name}.{key}{_signature(method)}`"
            yield from _render(inspect.getdoc(method) or "")


def public_methods(thing: type) -> list[tuple[str, Any]]:
    """Methods and properties that a class defines itself, in the order in which it does."""
    kinds = (types.FunctionType, classmethod, staticmethod, property)
    own = [name for name, value in vars(thing).items() if not name.startswith("_") and isinstance(value, kinds)]
    return [(name, getattr(thing, name)) for name in own]


def _signature(thing: Any) -> str:
    if isinstance(thing, property) or (isinstance(thing, type) and issubclass(thing, BaseModel | Exception)):
        return ""
    if dataclasses.is_dataclass(thing) and isinstance(thing, type):
        return f"({', '.join(field.name for field in dataclasses.fields(thing))})"
    shown = []
    for parameter in inspect.signature(thing).parameters.values():
        default = "" if parameter.default is parameter.empty else f"={_plain(parameter.default)}"
        star = "*, " if parameter.kind is parameter.KEYWORD_ONLY and not any("*, " in s for s in shown) else ""
        if parameter.name != "self":
            shown.append(f"{star}{parameter.name}{default}")
    return f"({', '.join(shown)})"


def _plain(value: Any) -> str:
    return value.__name__ if isinstance(value, type | types.FunctionType) else repr(value)


def _render(text: str) -> Iterator[str]:
    """A docstring as Markdown: sections as lists, examples as code."""
    head, *rest = re.split(r"^(Args|Attributes|Returns|Raises|Example):$", text, flags=re.MULTILINE)
    yield head.strip()
    for title, body in zip(rest[::2], rest[1::2], strict=True):
        body = inspect.cleandoc(body)
        if title == "Example":
            yield f"```python\n{body}\n```"
        elif title == "Returns":
            yield f"Returns: {' '.join(body.split())}"
        else:
            entries = re.split(r"\n(?=\S)", body)
            yield "\n".join([f"{title}:", "", *(f"- {' '.join(entry.split())}" for entry in entries)])


if __name__ == "__main__":
    for page, text in zip(PAGES, with_generated_parts([page.read_text() for page in PAGES]), strict=True):
        page.write_text(text)
    API.write_text(api())
