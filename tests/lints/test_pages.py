"""The pages say what the code is: every place, link, key, config, command and generated part is looked up."""

import ast
import functools
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

import automodel_rl
from automodel_rl.config import ALGORITHMS, describe_keys, equivalents
from automodel_rl.config.load import check_config
from automodel_rl.tools.help import COMMANDS
from tests import pages
from tests.lints.problems import assert_none

TEXTS = {str(page.relative_to(pages.ROOT)): page.read_text() for page in pages.PAGES}

PLACE = re.compile(r"\(([\w/]+\.py):\s([\w.,\s]+)\)")
"""A place in the package: `(room/file.py: name, other name)`."""

LINK = re.compile(r"\]\(([^()\s#]*)(#[^()\s]*)?\)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)

KEYS = {re.sub(r"\.0(?=\.)", "", key) for kind in ALGORITHMS.values() for key, *_ in describe_keys(kind)}
"""Dotted keys of all algorithms."""

SECTIONS = {key[:end] for key in KEYS for end in range(len(key)) if key[end] == "."}


PLAIN = {"batch.values"} | {name for row in equivalents.rows() for name in row.names}
"""What looks like a key and is none, or is one of another trainer."""


def blocks(text: str, *languages: str) -> list[str]:
    """Of some languages."""
    return [code for language, code in FENCE.findall(text) if language in languages]


def spans(text: str) -> list[str]:
    """What stands in backticks, outside of blocks."""
    return [re.sub(r"\s+", " ", span) for span in re.findall(r"`([^`]+)`", FENCE.sub("", text))]


def found(pattern: re.Pattern[str]) -> list[Any]:
    """(page, groups...) of every match on any page."""
    return sorted({(page, *groups) for page, text in TEXTS.items() for groups in pattern.findall(text)})


def test_generated_parts_are_up_to_date() -> None:
    assert pages.with_generated_parts(list(TEXTS.values())) == list(TEXTS.values()), "run make pages"


def test_the_page_of_the_api_is_up_to_date() -> None:
    assert pages.api() == pages.API.read_text(), "run make pages"


def test_the_page_of_the_api_has_every_public_name_once() -> None:
    assert sorted(name for names in pages.GROUPS.values() for name in names) == sorted(automodel_rl.__all__)


@functools.cache
def names_in(file: Path) -> set[str]:
    """Functions, classes, methods and constants that a file defines."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
            names |= {f"{node.name}.{child.name}" for child in node.body if isinstance(child, ast.FunctionDef)}
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def test_what_a_page_names_is_where_it_says() -> None:
    assert_none(
        f"{page}: {file} has no {name.strip()}"
        for page, file, names in found(PLACE)
        for name in names.split(",")
        if name.strip() not in names_in(pages.PACKAGE / file)
    )


def test_pages_name_places() -> None:
    assert len(found(PLACE)) > 80


@functools.cache
def anchors(page: Path) -> set[str]:
    """Of the headings of a page, as GitHub makes them."""
    heads = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {"#" + re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def test_links_lead_somewhere() -> None:
    assert_none(
        f"{page}: {path}{anchor} leads nowhere"
        for page, path, anchor in found(LINK)
        if "://" not in path
        for target in [pages.ROOT / page if not path else (pages.ROOT / page).parent / path]
        if not target.exists() or (anchor and anchor not in anchors(target))
    )


def keys_of(values: Any, prefix: str = "") -> Iterator[str]:
    """Dotted keys of a part of a config, without the numbers of list items and the names of models."""
    if isinstance(values, dict) and prefix == "teachers.":
        values = list(values.values())
    if isinstance(values, list):
        for value in values:
            yield from keys_of(value, prefix)
    elif isinstance(values, dict) and (not prefix or prefix.rstrip(".") in SECTIONS):
        for key, value in values.items():
            yield f"{prefix}{key}"
            yield from keys_of(value, f"{prefix}{key}.")


def parts_of_configs() -> Iterator[tuple[str, str]]:
    """(page, YAML) of every block, and of every span such as `rollout: {prompts: 8}`."""
    for page, text in TEXTS.items():
        yield from ((page, code) for code in blocks(text, "yaml"))
        yield from ((page, span) for span in spans(text) if re.match(r"(\w+): [{\[]", span))


def test_examples_of_configs_have_keys_that_exist() -> None:
    last = {key.rpartition(".")[2] for key in KEYS | SECTIONS}
    assert_none(
        f"{page}: there is no key {key}"
        for page, code in parts_of_configs()
        for key in keys_of(yaml.safe_load(code))
        if (key.partition(".")[0] in SECTIONS and key not in KEYS | SECTIONS) or key.rpartition(".")[2] not in last
    )


def test_whole_configs_are_accepted() -> None:
    for _, code in parts_of_configs():
        if "output:" in code:
            values = yaml.safe_load(code)
            check_config(ALGORITHMS[values.get("algorithm", "sft")], values)


def named_keys() -> Iterator[tuple[str, str]]:
    """(page, what looks like a dotted key), in backticks or in a command."""
    for page, text in TEXTS.items():
        dotted = [span.partition(":")[0].partition("=")[0] for span in spans(text)]
        in_commands = re.findall(r"--([a-z_]+\.[\w.]+)", text)
        for key in dict.fromkeys([*dotted, *in_commands]):
            if re.fullmatch(r"[a-z_]+(\.\w+)+", key) and key.partition(".")[0] in SECTIONS and key not in PLAIN:
                yield page, re.sub(r"\.\d+(?=\.)", "", key)


def test_keys_that_pages_name_exist() -> None:
    files = (".py", ".yaml", ".json", ".jsonl", ".md")
    assert_none(
        f"{page}: there is no key {key}"
        for page, key in named_keys()
        if not key.endswith(files) and key not in KEYS | SECTIONS
    )


def commands() -> str:
    return "\n".join(code for text in TEXTS.values() for code in [*blocks(text, "sh", ""), *spans(text)])


def test_commands_exist() -> None:
    assert set(re.findall(r"(?:automodel-rl|-m automodel_rl) ([a-z][\w-]*)", commands())) <= COMMANDS.keys()
    targets = re.findall(r"^(\w+):", (pages.ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"^make (\w+)", commands(), re.MULTILINE)) <= {*targets}


def test_files_in_commands_exist() -> None:
    files = set(re.findall(r"(?:^|\s)((?:configs|benchmarks|tests)/[\w./]+\.(?:py|yaml))", commands()))
    assert files
    assert not [file for file in files if not (pages.ROOT / file).is_file()]


def test_the_version_is_one_number() -> None:
    version = tomllib.loads((pages.ROOT / "pyproject.toml").read_text())["project"]["version"]
    newest = re.search(r"^## (\S+)", (pages.ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest[1] == version
    assert f"version: {version}\n" in (pages.ROOT / "CITATION.cff").read_text()
    wheels = {found for text in TEXTS.values() for found in re.findall(r"automodel_rl-([\d.]+)-py3", text)}
    assert wheels <= {version}
