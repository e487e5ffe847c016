"""Process of a reward function, so that a function that never returns can be ended.

    python -m automodel_rl.rollout.rewards.worker FUNCTION DESCRIPTOR

On the connection with that file descriptor, the process receives (options, time limit) and sends (kind, error). Then
it repeatedly receives (number, completions, examples) and sends (number, results). A result is (score, error,
metrics), where the metric `answer` is a text. Results are None for an async call that timed out because another one
blocked the process.
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
from automodel_rl.rollout.rewards.trl_signature import from_trl, has_trl_signature

PR_SET_PDEATHSIG = 1

PLAIN, ASYNC, BATCH = "plain", "async", "batch"
"""Kinds of reward functions: called one at a time, many concurrently, or with lists of completions."""

Scored = tuple[float | None, str, dict[str, Any]]
"""Score, error and metrics. With an error the score is None, or UNSCORED if the completion did not cause it."""

UNSCORED = math.nan

COMPLETION_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""Errors that a function's input causes. Others, such as OSError or those of a judge's client, have external causes."""

LARGEST = 1e18
"""Largest score or metric. Squares of larger ones would overflow in standard deviations, and advantages in float32."""

BEAT_SECONDS = 0.1
"""Period of the timer that measures how long calls block an async process."""


def main() -> None:
    if sys.platform == "linux":  # a reward that hangs must not outlive the job
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    connection = Connection(int(sys.argv[2]))
    name = sys.argv[1]
    try:
        options, time_limit = connection.recv()
        function = find_reward(name)
        function = from_trl(function) if has_trl_signature(function) else function
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
    """Makes a built-in reward that compares answers also return the completion's answer."""
    answer_of = ANSWERS.get(name)
    if answer_of is None:
        return function

    def told(completion: str, example: dict[str, Any], **options: Any) -> tuple[float, dict[str, str]]:
        answer = answer_of(completion)
        return function(completion, example, **options), {} if answer is None else {ANSWER: str(answer)}

    return told


def kind_of(function: Callable[..., Any]) -> str:
    """Returns the kind of a reward function. It is BATCH if the first parameter is called `completions`."""
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
        return ASYNC
    try:
        parameters = [*inspect.signature(function).parameters]
    except ValueError:  # functions written in C may have no signature
        return PLAIN
    return BATCH if parameters[:1] == ["completions"] else PLAIN


async def _serve_together(
    connection: Connection, function: Callable[..., Any], options: dict[str, Any], time_limit: float
) -> None:
    """Runs calls of an async function concurrently."""

    clock = _Clock(asyncio.get_running_loop())

    async def answer(number: int, completion: str, example: dict[str, Any]) -> None:
        started, blocked = clock.now(), clock.blocked
        try:
            value = await asyncio.wait_for(function(completion, example, **options), time_limit)
        except SystemExit as error:
            os._exit(error.code if isinstance(error.code, int) else 1)  # asyncio's threads would delay the exit
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
        running.add(task)  # asyncio keeps no strong reference
        task.add_done_callback(running.discard)


class _Clock:
    """Measures how many seconds calls have blocked an event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.loop, self.now, self.blocked = loop, loop.time, 0.0
        self._beat(self.now())

    def _beat(self, due: float) -> None:
        late = self.now() - due
        self.blocked += late if late >= BEAT_SECONDS else 0.0
        due = self.now() + BEAT_SECONDS
        self.loop.call_at(due, self._beat, due)


def score(function: Callable[..., Any], completion: str, example: dict[str, Any], options: dict[str, Any]) -> Scored:
    try:
        value = function(completion, example, **options)
    except Exception as error:
        return _score_of_exception(error), _explain(function, error), {}
    return checked(value)


def score_batch(
    function: Callable[..., Any], completions: list[str], examples: list[dict[str, Any]], options: dict[str, Any]
) -> list[Scored]:
    """Returns the results of one call for several completions, which fail together."""
    try:
        values = [*function(completions, examples, **options)]
    except Exception as error:
        return [(_score_of_exception(error), _explain(function, error), {})] * len(completions)
    if len(values) != len(completions):
        return [(None, f"returned {len(values)} scores for {len(completions)} completions", {})] * len(completions)
    return [checked(value) for value in values]


def checked(value: Any) -> Scored:
    """Converts a returned value: a finite number, or a number and a mapping of metrics."""
    if value is None:
        return None, "returned None: return a number on every path", {}
    given, metrics = value if isinstance(value, tuple) and len(value) == 2 else (value, {})
    number = _number(given)
    if number is None or not isinstance(metrics, Mapping):
        return None, f"returned {value!r:.80}, which is neither a finite number nor a number with a dict of metrics", {}
    answer = {ANSWER: metrics[ANSWER]} if isinstance(metrics.get(ANSWER), str) else {}
    found = {str(name): _number(metric) for name, metric in metrics.items() if name not in answer}
    wrong = next((name for name, metric in found.items() if metric is None), None)
    if wrong is not None:
        return None, f"returned {metrics[wrong]!r:.80} for the metric {wrong}, which is not a finite number", {}
    return number, "", answer | {name: metric for name, metric in found.items() if metric is not None}


def _number(value: Any) -> float | None:
    """Converts a number of at most `LARGEST`, also NumPy's or torch's, to float, else returns None."""
    try:
        number = float(value if isinstance(value, numbers.Real) else value.item())
    except Exception:  # not a number: no `item`, several items, or an item that is not a number
        return None
    return number if abs(number) <= LARGEST else None


def _score_of_exception(error: Exception) -> float | None:
    """Returns the score of a call that raised. An OSError always has an external cause."""
    return None if isinstance(error, COMPLETION_ERRORS) and not isinstance(error, OSError) else UNSCORED


def _explain(function: Callable[..., Any], error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}{_place(function, error)}"


def _place(function: Callable[..., Any], error: Exception) -> str:
    """Returns the location of an error: the innermost frame in the function's own file."""
    frames = traceback.extract_tb(error.__traceback__)[1:]
    try:
        file = inspect.getfile(inspect.unwrap(function))
    except TypeError:  # the function is written in C
        file = ""
    own = [frame for frame in frames if frame.filename == file] or frames
    return f" (at {own[-1].filename}:{own[-1].lineno})" if own else ""


if __name__ == "__main__":
    main()
