"""A process that runs a reward function, so that a function that never returns can be ended.

python -m automodel_rl.rollout.rewards.worker FUNCTION DESCRIPTOR

Everything goes over the connection with that file descriptor. The process first receives (options, time limit) and
sends (kind, error). Then it receives (number, completions, examples) and sends (number, results), again and again. A
result is (score, error, metrics), in which the metric `answer` is a text. Results are None for an async call that ran
out of time because another one blocked the process.
"""

import asyncio
import ctypes
import inspect
import math
import numbers
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

from automodel_rl.errors import InputError
from automodel_rl.rollout.rewards.functions import ANSWER, ANSWERS, OPENED, find_reward
from automodel_rl.rollout.rewards.options import check_options

PR_SET_PDEATHSIG = 1

PLAIN, ASYNC, BATCH = "plain", "async", "batch"
"""Kinds of reward functions: called one after the other, many at once, or with lists of completions."""

Scored = tuple[float | None, str, dict[str, Any]]
"""A score, an error text and metrics. If there is an error the score is None, or UNSCORED if the error tells nothing of
the completion."""

UNSCORED = math.nan

OF_THE_COMPLETION = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""Errors that come from what a function was given. Others, such as OSError or those of a client of a judge, come from
the world outside."""

LARGEST = 1e18
"""Largest score or metric. Squares of larger ones would overflow in deviations, and advantages in float32."""

BEAT_SECONDS = 0.1
"""Seconds between two looks of an async process at its clock, to know how long calls have blocked it."""


def main() -> None:
    if sys.platform == "linux":  # a reward that never returns must not outlive the job
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    connection = Connection(int(sys.argv[2]))
    name = sys.argv[1]
    try:
        options, time_limit = connection.recv()
        function = find_reward(name)
        check_options(name, function, options)
        if name in OPENED:
            OPENED[name](**options)
        function = _with_answer(name, function)
    except InputError as error:
        connection.send((None, str(error)))
        return
    kind = kind_of(function)
    connection.send((kind, ""))
    if kind == ASYNC:
        asyncio.run(_serve_together(connection, function, options, time_limit))
        return
    while True:
        try:
            number, completions, examples = connection.recv()
        except EOFError:
            return
        if kind == BATCH:
            connection.send((number, score_batch(function, completions, examples, options)))
        else:
            connection.send((number, [score(function, completions[0], examples[0], options)]))


def _with_answer(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A built-in reward that also tells the completion's answer, if it compares answers."""
    answer_of = ANSWERS.get(name)
    if answer_of is None:
        return function

    def told(completion: str, example: dict[str, Any], **options: Any) -> tuple[float, dict[str, str]]:
        answer = answer_of(completion)
        return function(completion, example, **options), {} if answer is None else {ANSWER: str(answer)}

    return told


def kind_of(function: Callable[..., Any]) -> str:
    """The kind of a reward function. One whose first parameter is called `completions` takes lists."""
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
        return ASYNC
    try:
        parameters = [*inspect.signature(function).parameters]
    except ValueError:  # functions written in C may not say what they take
        return PLAIN
    return BATCH if parameters[:1] == ["completions"] else PLAIN


async def _serve_together(
    connection: Connection, function: Callable[..., Any], options: dict[str, Any], time_limit: float
) -> None:
    """Answers calls of an async function, each as soon as it has finished."""

    clock = _Clock(asyncio.get_running_loop())

    async def answer(number: int, completion: str, example: dict[str, Any]) -> None:
        started, blocked = clock.now(), clock.blocked
        try:
            value = await asyncio.wait_for(function(completion, example, **options), time_limit)
        except SystemExit as error:
            os._exit(error.code if isinstance(error.code, int) else 1)  # asyncio's threads would hold up the end
        except Exception as error:
            seconds = clock.now() - started
            is_late = isinstance(error, TimeoutError) and seconds >= time_limit
            if is_late and seconds - (clock.blocked - blocked) < time_limit:
                connection.send((number, None))
                return
            text = f"took longer than time_limit={time_limit} s" if is_late else _explain(function, error)
            result: Scored = (UNSCORED, text, {})
        else:
            result = checked(value)
        connection.send((number, [result]))

    running: set[asyncio.Task] = set()
    while True:
        try:
            number, completions, examples = await asyncio.to_thread(connection.recv)
        except EOFError:
            return
        task = asyncio.create_task(answer(number, completions[0], examples[0]))
        running.add(task)  # asyncio itself keeps no strong reference
        task.add_done_callback(running.discard)


class _Clock:
    """Measures how long calls have blocked an event loop.

    Attributes:
        blocked: seconds so far.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.loop, self.now, self.blocked = loop, loop.time, 0.0
        self._beat(self.now())

    def _beat(self, due: float) -> None:
        late = self.now() - due
        self.blocked += late if late >= BEAT_SECONDS else 0.0
        due = self.now() + BEAT_SECONDS
        self.loop.call_at(due, self._beat, due)


def score(function: Callable[..., Any], completion: str, example: dict[str, Any], options: dict[str, Any]) -> Scored:
    """The result of one call."""
    try:
        value = function(completion, example, **options)
    except Exception as error:
        return _blamed(error), _explain(function, error), {}
    return checked(value)


def score_batch(
    function: Callable[..., Any], completions: list[str], examples: list[dict[str, Any]], options: dict[str, Any]
) -> list[Scored]:
    """The results of one call for several completions. If it fails, it fails for all of them."""
    try:
        values = [*function(completions, examples, **options)]
    except Exception as error:
        return [(_blamed(error), _explain(function, error), {})] * len(completions)
    if len(values) != len(completions):
        return [(None, f"returned {len(values)} scores for {len(completions)} completions", {})] * len(completions)
    return [checked(value) for value in values]


def checked(value: Any) -> Scored:
    """A returned value as a result: a finite number, or a number and a mapping of metrics."""
    given, metrics = value if isinstance(value, tuple) and len(value) == 2 else (value, {})
    number = _number(given)
    if number is None or not isinstance(metrics, Mapping):
        return None, f"returned {value!r:.80}, which is no finite number, and no number with a dict of metrics", {}
    answer = {ANSWER: metrics[ANSWER]} if isinstance(metrics.get(ANSWER), str) else {}
    found = {str(name): _number(metric) for name, metric in metrics.items() if name not in answer}
    wrong = next((name for name, metric in found.items() if metric is None), None)
    if wrong is not None:
        return None, f"returned {metrics[wrong]!r:.80} for the metric {wrong}, which is no finite number", {}
    return number, "", answer | {name: metric for name, metric in found.items() if metric is not None}


def _number(value: Any) -> float | None:
    """A number of at most `LARGEST` as a float, else None. NumPy's and torch's count, without importing these."""
    try:
        number = float(value if isinstance(value, numbers.Real) else value.item())
    except Exception:  # not a number: no `item`, several items, or an item that is not a number
        return None
    return number if abs(number) <= LARGEST else None


def _blamed(error: Exception) -> float | None:
    """What a call scores that raised: None, or UNSCORED. An OSError is of the world outside, whatever else it is."""
    return None if isinstance(error, OF_THE_COMPLETION) and not isinstance(error, OSError) else UNSCORED


def _explain(function: Callable[..., Any], error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}{_place(function, error)}"


def _place(function: Callable[..., Any], error: Exception) -> str:
    """The place of an error: the innermost frame in the function's own file, since that is the user's code."""
    frames = traceback.extract_tb(error.__traceback__)[1:]
    try:
        file = inspect.getfile(inspect.unwrap(function))
    except TypeError:  # the function is written in C
        file = ""
    own = [frame for frame in frames if frame.filename == file] or frames
    return f" (at {own[-1].filename}:{own[-1].lineno})" if own else ""


if __name__ == "__main__":
    main()
