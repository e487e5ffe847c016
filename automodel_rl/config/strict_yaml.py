"""A YAML loader for configs: limits the size, rejects duplicate keys, and avoids the implicit types of YAML 1.1."""

import re
from pathlib import Path
from typing import Any

import yaml

from automodel_rl.errors import InputError

BYTES, VALUES, LEVELS = 1_000_000, 20_000, 50
"""Maximum bytes, maximum values and keys (with those that aliases repeat), and maximum nesting depth."""

TEXT, *NUMBERS = (f"tag:yaml.org,2002:{name}" for name in ("str", "int", "float"))
NOT_READ = [f"tag:yaml.org,2002:{name}" for name in ("timestamp", "value")]
SURPRISING = re.compile(r".*:.*|[-+]?0[0-7_]+")
"""Matches plain scalars that YAML 1.1 reads as base 60 or base 8."""


class StrictYAMLError(ValueError):
    """A text that is not valid YAML, or not allowed in a config.

    Attributes:
        line: line of the error, from 1; None if it concerns the whole text.
        problem: the error message.
    """

    def __init__(self, mark: yaml.Mark | None, problem: str):
        super().__init__(problem)
        self.line = mark.line + 1 if mark else None
        self.problem = problem


def read_yaml(path: Path) -> dict[str, Any]:
    """Reads the keys and values of a config file.

    Raises:
        InputError: the file cannot be read or is not a mapping.
    """
    try:
        with path.open("rb") as file:
            content = file.read(BYTES + 1)
        if len(content) > BYTES:
            raise StrictYAMLError(None, f"a config has at most {BYTES:,} bytes: is this the file you mean?")
        values = parse_yaml(content.decode())
    except OSError as error:
        raise InputError(f"{path}: cannot read the config file ({error.strerror})") from None
    except StrictYAMLError as error:
        line = f":{error.line}" if error.line else ""
        raise InputError(f"{path}{line}: {error.problem}") from None
    except ValueError as error:  # bytes that are not UTF-8
        raise InputError(f"{path}: not valid YAML: {error}") from None
    if not isinstance(values, dict):
        raise InputError(f"{path}: a config must be a mapping of keys to values, not {type(values).__name__}")
    return values


def parse_yaml(text: str) -> Any:
    """Parses a text.

    Raises:
        StrictYAMLError: the text is not YAML, exceeds a limit, or has a duplicate key, a tag or a recursive alias.
    """
    try:
        return _Loader(text).get_single_data()
    except StrictYAMLError:
        raise
    except yaml.MarkedYAMLError as error:
        raise StrictYAMLError(error.problem_mark, f"not valid YAML: {error.problem}") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a number of too many digits
        raise StrictYAMLError(None, f"not valid YAML: {error}") from None


class _Loader(yaml.SafeLoader):
    """Resolves plain scalars as in YAML 1.2 where YAML 1.1 surprises: 1:30 and 010 are strings, and there are no dates.
    yes, no, on and off stay booleans, since unchecked options may use them."""

    def __init__(self, text: str):
        super().__init__(text)
        self._values, self._level, self._deepest = 0, 0, 0
        self._sizes: dict[str, tuple[int, int]] = {}
        """Values and nesting depth of each complete anchored value."""

    def resolve(self, kind: type[yaml.Node], value: Any, implicit: tuple[bool, bool]) -> str:
        """Returns the implicit tag of a node."""
        tag = super().resolve(kind, value, implicit)
        return TEXT if tag in NOT_READ or (tag in NUMBERS and SURPRISING.fullmatch(value)) else tag

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Composes the next node. Counts aliases with all that they expand to."""
        event = self.peek_event()
        is_alias = isinstance(event, yaml.AliasEvent)
        if is_alias and event.anchor in self.anchors and event.anchor not in self._sizes:
            raise StrictYAMLError(
                event.start_mark, f"*{event.anchor} is inside the value that it refers to: write the value out"
            )
        values, levels = self._sizes.get(event.anchor, (1, 1)) if is_alias else (1, 1)
        before, level, deepest = self._values, self._level, self._deepest
        self._values, self._level, self._deepest = before + values, level + 1, level + levels
        if self._values > VALUES:
            raise StrictYAMLError(
                event.start_mark, f"a config has at most {VALUES:,} values, including those of aliases"
            )
        if self._deepest > LEVELS:
            raise StrictYAMLError(event.start_mark, f"a config has at most {LEVELS} levels: nest less deeply")
        node = super().compose_node(parent, index)
        if node is not None and not is_alias:
            self._check(node)
        if event.anchor and not is_alias:
            self._sizes[event.anchor] = self._values - before, self._deepest - level
        self._level, self._deepest = level, max(deepest, self._deepest)
        return node

    def _check(self, node: yaml.Node) -> None:
        """Rejects tags and duplicate keys."""
        if node.tag not in (TEXT, self.resolve(type(node), node.value, (True, False))):
            raise StrictYAMLError(node.start_mark, f"the tag {node.tag}: configs do not support tags: remove it")
        lines: dict[Any, int] = {}
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            name = (key.tag, key.value) if isinstance(key, yaml.ScalarNode) else id(key)
            if name in lines:
                raise StrictYAMLError(
                    key.start_mark, f"{key.value} occurs twice, first in line {lines[name]}: keep one of them"
                )
            lines[name] = key.start_mark.line + 1
