"""What stays in each commit: families that together have every fact of a family, templates that exist, and a record
of CPU seconds."""

from dataclasses import fields

import pytest

from automodel_rl.families.family import Family
from automodel_rl.families.text import TEXT_FAMILIES
from tests.cpu_seconds import MAX_UNRECORDED, unrecorded
from tests.longer import COVERING, TEMPLATES, is_longer
from tests.unit.data import stock_templates

KINDS = ("token_mixer", "index_rotary", "mtp_files", "rotary_axes")
"""Facts of which every value counts."""


def facts(family: Family) -> set[tuple[str, object]]:
    """What is unlike a plain family: facts, values of some, and each way to split a module."""
    found: set[tuple[str, object]] = {("tp_plan", way) for _, way in family.tp_plan}
    for field in fields(Family):
        if (value := getattr(family, field.name)) != field.default and field.name != "tp_plan":
            found.add((field.name, value if field.name in KINDS else True))
    return found


def test_families_of_each_commit_have_every_fact_of_all() -> None:
    of_all = set[tuple[str, object]]().union(*map(facts, TEXT_FAMILIES.values()))
    assert of_all == set().union(*(facts(TEXT_FAMILIES[name]) for name in COVERING))


def test_templates_of_each_commit_exist() -> None:
    assert {*stock_templates.TEMPLATES} >= TEMPLATES


def test_a_set_keeps_those_whose_ids_name_a_member() -> None:
    parity = "distributed/parallel/test_parity.py::test_every_other_family_equals_one_process"
    assert not is_longer(f"{parity}[gpt_oss]")
    assert is_longer(f"{parity}[mixtral]")
    assert is_longer(f"{parity}[qwen3_vl_text]"), "whole names count"


@pytest.mark.parametrize("seconds", [0.9 * MAX_UNRECORDED, 1.1 * MAX_UNRECORDED])
def test_tests_without_a_record_may_take_few_cpu_seconds(seconds: float) -> None:
    problems = unrecorded({"new": seconds, "old": 100.0}, {"old": 1.0})
    assert bool(problems) == (seconds > MAX_UNRECORDED)
    assert all("old" not in line for line in problems)
