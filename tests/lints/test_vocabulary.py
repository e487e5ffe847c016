"""One word for one thing: words that were retired stay away, and docstrings begin with what they are about."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lints.problems import assert_none, place
from tests.pages import ROOT

FILES = sorted((ROOT / "automodel_rl").rglob("*.py"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "automodel_rl").rglob("*.md")), *sorted(ROOT.glob("[btc]*/**/*.md"))]
PROSE = [*FILES, *PAGES, *sorted((ROOT / "configs").rglob("*.yaml"))]

RETIRED = {
    r"rollout engines?|\bengines\b(?! of vLLM)": "generator",
    r"\b[Pp]acked rows?\b|\b[Ee]mpty rows?\b|PackedBatch|row_tokens": "microbatch",
    r"\b(?:optimizer|weight|an|each|every|next|one) updates?\b": "optimizer step, or weight sync",
    r"ModulesConfig|\bhandle\.modules\b|\bmodule meshes\b|\bboth modules\b": "component",
    r"\bspeakers?\b": "leader",
    r"\b[Bb]ystanders?\b|\blane leaders?\b": "rank that leads no generator, leader",
    r"\b[Gg]uests?\b": "outsider",
    r"\bhas_mathematics\b|\bneeds_mathematics\b": "soft caps and sinks",
}
"""Patterns of words for things that have another name, and that name. The glossary has all names."""

FRAGMENTS = re.compile(
    r"(And|Args|Around|As|At|Before|Between|By|For|From|In|Not|Of|On|Than|That|To|Until|Where|Which|With)\b"
)
"""First words of texts that do not say what they are about."""


def test_retired_words_stay_away() -> None:
    assert_none(
        f"{place(file)}, line {number}: {found[0]!r} is called {word}"
        for file in PROSE
        for number, line in enumerate(file.read_text().splitlines(), start=1)
        for pattern, word in RETIRED.items()
        if (found := re.search(pattern, line))
    )


def docstrings(file: Path) -> Iterator[tuple[int, str]]:
    """Texts of files, classes and functions, and those below constants and fields, with their lines."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value.strip()


def test_docstrings_begin_with_what_they_are_about() -> None:
    assert_none(
        f"{place(file)}, line {number}: {text.splitlines()[0]}"
        for file in FILES
        for number, text in docstrings(file)
        if FRAGMENTS.match(text)
    )


@pytest.mark.parametrize(("text", "is_retired"), [("the engines get them", True), ("a row of the table", False)])
def test_a_retired_word_is_noticed(text: str, is_retired: bool) -> None:
    assert any(re.search(pattern, text) for pattern in RETIRED) is is_retired
