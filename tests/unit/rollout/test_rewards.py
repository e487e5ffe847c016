"""Built-in rewards, and what happens to those that fail, return nonsense or never return."""

import math
import time
from collections.abc import Iterator

import pytest

from automodel_rl.config import RewardConfig
from automodel_rl.errors import InputError
from automodel_rl.rollout.rewards.functions import BUILT_IN
from automodel_rl.rollout.rewards.scorer import Scorer


@pytest.mark.parametrize(
    ("name", "completion", "example", "options", "expected"),
    [
        ("exact_match", " 12\n", {"answer": 12}, {}, 1),
        ("exact_match", "12.", {"answer": "12"}, {}, 0),
        ("last_number", "3 + 4 = 7. The answer is 7.", {"answer": "7"}, {}, 1),
        ("last_number", "so 1,234", {"answer": "... #### 1234"}, {}, 1),
        ("last_number", "none", {"answer": "7"}, {}, 0),
        ("math", r"so it is \boxed{\frac{1}{2}}", {"answer": "0.5"}, {}, 1),
        ("math", r"so it is \boxed{2}", {"answer": "0.5"}, {}, 0),
        ("math", "", {"answer": "0.5"}, {}, 0),
        ("format", "<a>x\ny</a>", {}, {"pattern": "<a>.*</a>"}, 1),
        ("format", "b <a>x</a>", {}, {"pattern": "<a>.*</a>"}, 0),
        ("length", "a b c", {}, {"longest": 3}, 0),
        ("length", "a b c d e f", {}, {"longest": 3}, -1),
    ],
)
def test_built_in_rewards(name: str, completion: str, example: dict, options: dict, expected: float) -> None:
    assert BUILT_IN[name](completion, example, **options) == expected


def odd(completion: str, example: dict) -> object:
    """A reward of a user who has a bad day."""
    print("noise on stdout")
    if completion == "sleep":
        time.sleep(60)
    if completion == "raise":
        raise RuntimeError("no\nway")
    if completion == "exit":
        raise SystemExit(3)
    return {"nan": math.nan, "text": "1.0", "none": None, "true": True}.get(completion, 0.5)


@pytest.fixture(scope="module")
def scorer() -> Iterator[Scorer]:
    config = RewardConfig(function="tests.unit.rollout.test_rewards:odd", weight=2.0, time_limit=1.0, on_error=-1.0)
    scorer = Scorer([config, RewardConfig(function="length", options={"longest": 10})])
    yield scorer
    scorer.close()


@pytest.mark.parametrize(
    ("completion", "message"),
    [
        ("sleep", "took longer than time_limit=1.0 s"),
        ("raise", "RuntimeError: no way"),
        ("exit", "its process ended with code 3"),
        ("nan", "returned nan, which is no finite number"),
        ("text", "returned '1.0', which is no finite number"),
        ("none", "returned None"),
    ],
)
def test_what_fails_scores_as_configured_and_the_next_call_works(scorer: Scorer, completion: str, message: str) -> None:
    score = scorer(completion, {})
    assert score.total == -2.0
    assert score.parts == (-1.0, 0.0)
    (error,) = score.errors
    assert message in error
    assert "tests.unit.rollout.test_rewards:odd" in error
    good = scorer("fine", {})
    assert good.total == 1.0
    assert good.errors == ()


def test_weights_add_up(scorer: Scorer) -> None:
    assert scorer("true", {}).total == 2.0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nonsense", "rewards.function=nonsense: use one of exact_match, last_number, math, format, length"),
        ("no.such.module:reward", "rewards.function=no.such.module:reward: cannot import it"),
        ("math:no_such_function", "cannot import it"),
    ],
)
def test_functions_that_are_not_there_are_named(name: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Scorer([RewardConfig(function=name)])
