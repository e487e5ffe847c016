"""Rooms have at most the lines that budget.toml gives them."""

from tests.lints.problems import assert_none
from tests.measures import budget, lines_of_rooms


def test_no_room_has_more_lines_than_its_budget() -> None:
    limits, rooms = budget(), lines_of_rooms()
    assert limits.keys() == rooms.keys()
    assert_none(
        f"{room} has {lines} lines, and tests/budget.toml gives it {limits[room]}: make it smaller, or raise the "
        "number and say why in the commit"
        for room, lines in rooms.items()
        if lines > limits[room]
    )
