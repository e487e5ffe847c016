"""Built-in rewards, and what happens to those that fail, return nonsense, never return or get unknown options."""

import inspect
import math
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from automodel_rl.config import RewardConfig
from automodel_rl.errors import InputError
from automodel_rl.rollout.groups import pass_rates
from automodel_rl.rollout.rewards.functions import BUILT_IN
from automodel_rl.rollout.rewards.scorer import Score, Scorer, check_rewards
from automodel_rl.rollout.rewards.worker import score


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
        ("math", "15 - 26 = -11", {"answer": "-11"}, {}, 1),
        ("math", "15 - 26 = <<15-26>>\n#### 15 - 26", {"answer": "-11"}, {}, 0),
        ("math", r"\boxed{15 - 26}", {"answer": "-11"}, {}, 0),
        ("math", "0.5 + 0.25", {"answer": "0.75"}, {}, 0),
        ("math", "5*3", {"answer": "15"}, {}, 0),
        ("math", "2*3.5", {"answer": "7"}, {}, 0),
        ("math", "15/3", {"answer": "5"}, {}, 0),
        ("math", r"$\frac{3+4}{2}$", {"answer": "7/2"}, {}, 0),
        *(
            ("math", written, {"answer": answer}, {}, 0)
            for answer, written in (
                ("-11", "$x=15-26$"),
                ("-11", r"\boxed{x = 15-26}"),
                ("-11", r"$\{15-26\}$"),
                ("24", "$48/2$"),
                ("24", r"\boxed{48/2}"),
                ("24", r"$\frac{48}{2}$"),
                ("24", r"$48 \div 2$"),
                ("1000000", r"$10^{3}\times10^{3}$"),
                ("72", r"$2^3\cdot3^2$"),
            )
        ),
        *(
            ("math", written, {"answer": answer}, {}, 1)
            for answer, written in (
                ("-11", "$x = -11$"),
                ("24", "$48/2 = 24$"),
                ("0.75", r"\boxed{\frac{3}{4}}"),
                ("0.00012", r"$1.2 \times 10^{-4}$"),
                ("1000", "$10^3$"),
                (r"\frac{\sqrt{2}}{2}", r"$\frac{1}{\sqrt{2}}$"),
                ("(1,2)", "$(1, 2)$"),
                ("72", "72"),
            )
        ),
        ("math", "-7/2", {"answer": "-3.5"}, {}, 1),
        ("math", r"\boxed{1\frac{1}{2}}", {"answer": "1.5"}, {}, 1),
        ("math", r"$2^{10}$", {"answer": "1024"}, {}, 1),
        ("math", r"$3 \times 10^5$", {"answer": "300000"}, {}, 1),
        ("math", r"$50\%$", {"answer": "0.5"}, {}, 1),
        ("math", r"$2\sqrt{2}$", {"answer": r"$\sqrt{8}$"}, {}, 1),
        ("math", r"$1+\sqrt{2}$", {"answer": r"1+\sqrt{2}"}, {}, 1),
        ("math", "3 + 4", {"answer": "3+4"}, {}, 1),
        ("math", "$x + 2$", {"answer": "2 + x"}, {}, 1),
        ("math", r"$\{1, 2\}$", {"answer": r"\{2, 1\}"}, {}, 1),
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


def score_of(scorer: Scorer, completion: str) -> Score:
    return scorer.take([scorer.submit(completion, {})])[0]


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
        ("exit", "its process exited with code 3"),
        ("nan", "returned nan, which is neither a finite number"),
        ("text", "returned '1.0', which is neither a finite number"),
        ("none", "returned None"),
    ],
)
def test_what_fails_scores_as_configured_and_the_next_call_works(scorer: Scorer, completion: str, message: str) -> None:
    score = score_of(scorer, completion)
    assert score.total == -2.0
    assert score.parts == (-1.0, 0.0)
    error, none = score.errors
    assert message in error
    assert "tests.unit.rollout.test_rewards:odd" in error
    assert none == ""
    good = score_of(scorer, "fine")
    assert good.total == 1.0
    assert good.errors == ("", "")


def test_weights_add_up(scorer: Scorer) -> None:
    assert score_of(scorer, "true").total == 2.0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nonsense", "rewards.function=nonsense: use one of exact_match, last_number, math, format, length"),
        ("no.such.module:reward", "rewards.function=no.such.module:reward: cannot import it"),
        ("math:no_such_function", "cannot import it"),
        ("my_rewards.py:score", "cannot import it .*: use my_rewards:score"),
        ("nowhere_here:score", "cannot import it .*; looked in /"),
    ],
)
def test_functions_that_are_not_there_are_named(name: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Scorer([RewardConfig(function=name)])


def deep(completion: str, example: dict) -> float:
    """A reward that fails in a library that it calls."""
    return torch.ones(2).reshape(int(completion)).item()


def test_an_error_names_the_innermost_line_of_the_users_own_file() -> None:
    line = inspect.getsourcelines(deep)[1] + 2
    for completion in ("3", "x"):
        _, error, _ = score(deep, completion, {}, {})
        assert error.endswith(f"(at {__file__}:{line})")


@pytest.mark.parametrize(
    "value",
    [np.float32(0.5), np.float64(0.5), np.array(0.5), torch.tensor(0.5), np.float16(0.5), 0.5],
    ids=lambda value: type(value).__name__,
)
def test_numbers_of_every_library_are_scores(value: Any) -> None:
    assert score(lambda *_: value, "", {}, {}) == (0.5, "", {})


@pytest.mark.parametrize("value", [np.bool_(True), np.int64(1), True, 1], ids=lambda value: type(value).__name__)
def test_truth_and_whole_numbers_are_scores(value: Any) -> None:
    assert score(lambda *_: value, "", {}, {}) == (1.0, "", {})


@pytest.mark.parametrize(
    "value",
    [np.float32("nan"), np.ones(2), torch.ones(2), 10**400, 1e308, -1e19, math.inf, "1.0", [1.0], 1j],
    ids=lambda v: repr(v)[:20],
)
def test_what_is_no_finite_number_is_no_score(value: Any) -> None:
    number, error, _ = score(lambda *_: value, "", {}, {})
    assert number is None
    assert "which is neither a finite number" in error


def scaled(completion: str, example: dict, scale: float, base: float = 0.0) -> float:
    return base + scale * len(completion)


def of_completion_alone(completion: str) -> float:
    return 1.0


HERE = "tests.unit.rollout.test_rewards"


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        ("length", {"limit": 5}, r"rewards.function=length: options {'limit': 5} .* use longest$"),
        ("length", {}, r"rewards.function=length: options {} .*missing a required argument: 'longest'.* use longest$"),
        ("length", {"longest": 0}, "options.longest=0 .*a number above 0"),
        ("length", {"longest": True}, "options.longest=True .*a number above 0"),
        ("length", {"longest": "5"}, "options.longest='5' .*a number above 0"),
        ("format", {"pattern": "(a"}, r"options.pattern='\(a' .*a valid regular expression"),
        ("format", {"pattern": 3}, "options.pattern=3 .*a valid regular expression"),
        ("format", {}, "missing a required argument: 'pattern'"),
        ("math", {"pattern": "a"}, "rewards.function=math: options .* it has none: remove options"),
        (f"{HERE}:scaled", {"factor": 2}, "use scale, base$"),
        (f"{HERE}:scaled", {"scale": 1, "completion": "x"}, "use scale, base$"),
        (f"{HERE}:of_completion_alone", {}, r"cannot be called as function\(completion, example\)"),
    ],
)
def test_options_that_a_reward_does_not_have_are_refused_at_the_start(
    function: str, options: dict, message: str
) -> None:
    with pytest.raises(InputError, match=message) as caught:
        check_rewards([RewardConfig(function=function, options=options)])
    assert "\n" not in str(caught.value)


def test_options_that_fit_are_accepted_and_used() -> None:
    scorer = Scorer([RewardConfig(function=f"{HERE}:scaled", options={"scale": 2})])
    assert score_of(scorer, "abc").total == 6.0
    scorer.close()


@pytest.mark.parametrize(
    ("function", "completion", "answer"),
    [
        ("last_number", "so 3, no, 1,042.0", "1042.0"),
        ("last_number", "no idea", None),
        ("exact_match", " yes ", "yes"),
        ("math", r"hence \boxed{\frac{1}{2}}", "1/2"),
        ("tests.unit.rollout.odd_rewards:voter", "B because", "B"),
    ],
)
def test_rewards_tell_the_answers_of_completions(function: str, completion: str, answer: str | None) -> None:
    scorer = Scorer([RewardConfig(function=function)])
    try:
        (score,) = scorer.take([scorer.submit(completion, {"answer": "1"})])
    finally:
        scorer.close()
    assert score.errors == ("",)
    assert score.answers == (answer,)
    assert score.metrics == ({},)


def vote(*answers: str | None) -> list[Score]:
    """Completions that pass if their answer is right."""
    return [Score(0.0, (float(answer == "right"),), ("",), ({},), (answer,)) for answer in answers]


def test_several_completions_of_a_prompt_pass_on_average_once_or_by_vote() -> None:
    groups = [vote("right", "right", "x"), vote("right", "x", "x"), vote("x", "y", None), vote(None, None, "right")]
    assert pass_rates(groups, 0, 1.0) == pytest.approx({"mean@3": 4 / 12, "pass@3": 3 / 4, "maj@3": 2 / 4})
    assert pass_rates([vote("right"), vote("x")], 0, 1.0) == {"pass@1": 0.5}
    untold = [[Score(0.0, (1.0,), ("",)), Score(0.0, (1.0,), ("it failed",))]]
    assert pass_rates(untold, 0, 1.0) == {"mean@2": 0.5, "pass@2": 1.0}
