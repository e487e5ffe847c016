"""Configs are read as they are written: nothing occurs twice, nothing grows, no plain value becomes another."""

from pathlib import Path
from typing import Any

import pytest

from automodel_rl.config.strict_yaml import BYTES, LEVELS, VALUES, StrictYAMLError, parse_yaml, read_yaml
from automodel_rl.errors import InputError

BOMB = "a: &a [1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 8)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
MERGES = "a: &a {x: 1}\n" + "".join(
    f"{name}: &{name} {{<<: [{', '.join([f'*{before}'] * 8)}]}}\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
CHAIN = "- &a0 [1]\n" + "".join(f"- &a{n} [*a{n - 1}]\n" for n in range(1, LEVELS))

REFUSED = {
    "key_twice": ("lr: 1\nseed: 0\nlr: 2\n", 3, "lr occurs twice, first in line 1: keep one"),
    "key_twice_inside": ("a:\n- {b: 1, c: 2, 'b': 3}\n", 2, "b occurs twice, first in line 2: keep one"),
    "merge_twice": ("a: &a {x: 1}\nb:\n  <<: *a\n  <<: *a\n", 4, "<< occurs twice, first in line 3"),
    "list_in_itself": ("a: 1\nb: &b [*b]\n", 2, "*b is inside the value that it refers to"),
    "section_in_itself": ("a: &a\n  b: {c: *a}\n", 2, "*a is inside the value that it refers to"),
    "aliases_that_grow": (BOMB, 5, f"at most {VALUES:,} values, including those of aliases"),
    "merges_that_grow": (MERGES, 6, f"at most {VALUES:,} values, including those of aliases"),
    "deep": ("[" * 60 + "]" * 60, 1, f"at most {LEVELS} levels"),
    "deep_by_aliases": (CHAIN, LEVELS - 1, f"at most {LEVELS} levels"),
    "deeper_than_it_is_long": ("[" * 5_000, 1, f"at most {LEVELS} levels"),
    "long": ("a: " + "é" * (BYTES // 2), None, "at most 1,000,000 bytes"),
    "many": ("[" + "1," * (VALUES + 1) + "]", 1, f"at most {VALUES:,} values"),
    "digits": ("seed: " + "9" * 5000, None, "not valid YAML: Exceeds the limit"),
    "tag": ("a:\n  b: !!bool maybe\n", 2, "the tag tag:yaml.org,2002:bool: configs do not support tags"),
    "tag_of_a_date": ("a: !!timestamp x\n", 1, "the tag tag:yaml.org,2002:timestamp: configs do not support tags"),
    "two_documents": ("a: 1\n---\nb: 2\n", 2, "not valid YAML: but found another document"),
}


@pytest.mark.parametrize(("text", "line", "problem"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_config_is_refused_with_its_line(tmp_path: Path, text: str, line: int | None, problem: str) -> None:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(InputError) as caught:
        read_yaml(tmp_path / "c.yaml")
    assert str(caught.value).startswith(f"{tmp_path}/c.yaml{f':{line}' if line else ''}: ")
    assert problem in str(caught.value)


READ: list[tuple[str, Any]] = [
    ("1:30", "1:30"),
    ("-12:30:45", "-12:30:45"),
    ("1:30.5", "1:30.5"),
    ("010", "010"),
    ("2024-01-31", "2024-01-31"),
    ("2024-13-45", "2024-13-45"),
    ("2024-01-31 10:00:00", "2024-01-31 10:00:00"),
    ("=", "="),
    ("'10'", "10"),
    ("!!str 10", "10"),
    ("10", 10),
    ("0", 0),
    ("-1_000", -1000),
    ("0x1f", 31),
    ("1.5e-3", 0.0015),
    (".5", 0.5),
    ("00.5", 0.5),
    ("", None),
    ("null", None),
    ("no", False),
    ("{a: &a [1], b: *a, c: [*a, *a]}", {"a": [1], "b": [1], "c": [[1], [1]]}),
    ("{a: &a {x: 1, y: 2}, b: {<<: *a, x: 3}}", {"a": {"x": 1, "y": 2}, "b": {"x": 3, "y": 2}}),
]


@pytest.mark.parametrize(("text", "value"), READ)
def test_plain_values_are_read_as_they_are_written(text: str, value: Any) -> None:
    found = parse_yaml(text)
    assert (type(found), found) == (type(value), value)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_bytes(b"a: \xff\n")
    with pytest.raises(InputError, match=r"c.yaml: not valid YAML: 'utf-8' codec"):
        read_yaml(tmp_path / "c.yaml")


def test_a_mistake_knows_its_line() -> None:
    with pytest.raises(StrictYAMLError, match="a occurs twice") as caught:
        parse_yaml("\na: 1\na: 2")
    assert caught.value.line == 3
