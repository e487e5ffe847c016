"""Which jobs run as one, and that none comes before another of its run."""

from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from automodel_rl.generator_messages import Sampling
from automodel_rl.rollout.sampled import PromptScoring, Refused, SamplePrompt
from automodel_rl.serve.history import orders_of
from automodel_rl.serve.joining import answers_of, joined, take_batch
from automodel_rl.serve.messages import (
    CombinedPass,
    Datum,
    Forget,
    RunMethodCall,
    RunPass,
    RunShape,
    SampleJob,
    ServiceJob,
    TeacherJob,
)
from automodel_rl.serve.tables import ServedRun, choose_rows


def forward(run: str, first: int = 0, tokens: int = 5, only: bool = False) -> RunPass:
    data = [Datum(np.zeros(tokens, np.int64), {})]
    return RunPass(run, "cross_entropy", {}, data, only, RunShape(2, first=first))


def sample(kept: str, count: int = 1) -> SampleJob:
    return SampleJob(kept, None, None, [SamplePrompt([1], count, 0, Sampling(3))])


def scoring(tokens: int, num_top: int) -> TeacherJob:
    asked = PromptScoring(num_top=num_top)
    return TeacherJob("large", [SamplePrompt([1] * tokens, 1, 0, Sampling(1), asked)])


def soft(run: str, first: int, tokens: int, width: int) -> RunPass:
    data = [Datum(np.zeros(tokens, np.int64), {"target_tokens": np.zeros((tokens, width), np.int64)})]
    return RunPass(run, "cross_entropy", {}, data, False, RunShape(2, first=first))


def step(run: str) -> RunMethodCall:
    return RunMethodCall(run, "optimizer_step", ({},))


def taken(*jobs: ServiceJob, pass_tokens: int = 20) -> list[list[int]]:
    """The places of the jobs that run as one, until none is left."""
    waiting: deque[Any] = deque(SimpleNamespace(job=job, place=place) for place, job in enumerate(jobs))
    groups = []
    while waiting:
        groups.append([order.place for order in take_batch(waiting, pass_tokens)])
    return groups


@pytest.mark.parametrize(
    ("jobs", "groups"),
    [
        ([forward("a"), forward("b", 2), forward("c", 4)], [[0, 1, 2]]),
        (
            [forward("a"), step("a"), forward("b", 2), step("b")],
            [[0, 2], [1], [3]],
        ),
        ([forward("a"), step("b"), forward("b", 2)], [[0], [1], [2]]),
        ([forward("a"), Forget(("b",)), forward("b", 2), forward("c", 4)], [[0, 3], [1], [2]]),
        ([forward("a"), forward("a"), forward("b", 2)], [[0, 2], [1]]),
        ([forward("a"), forward("b", 1), forward("c", 2)], [[0, 2], [1]]),
        ([forward("a"), forward("b", 2, only=True), forward("c", 4)], [[0, 2], [1]]),
        ([forward("a", tokens=12), forward("b", 2, tokens=9), forward("c", 4, tokens=8)], [[0, 2], [1]]),
        ([forward("a", tokens=99), forward("b", 2)], [[0], [1]]),
        ([sample("x"), forward("a"), sample("y"), sample("x"), forward("b", 2)], [[0, 3], [1, 4], [2]]),
        ([sample("x", 1000), sample("x", 30), sample("x", 24)], [[0, 2], [1]]),
        ([sample("x", 1000), sample("x", 20), sample("x", 20), sample("x", 4)], [[0, 1, 3], [2]]),
        ([forward("a", tokens=8), forward("b", 2, tokens=8), forward("c", 4, tokens=8)], [[0, 1], [2]]),
        ([forward("a"), forward("b", 2), forward("c", 2), forward("d", 4)], [[0, 1, 3], [2]]),
        ([scoring(50, 150_000), scoring(8000, 20), scoring(8000, 20), sample("x")], [[0], [1, 2], [3]]),
        ([soft("a", 0, 10, 2**20), forward("b", 2), soft("c", 4, 9, 5), forward("d", 6)], [[0], [1, 2, 3]]),
    ],
)
def test_jobs_meet_without_coming_before_another_of_their_run(jobs: list[ServiceJob], groups: list[list[int]]) -> None:
    assert taken(*jobs) == groups


def test_runs_that_cannot_share_the_model_take_turns() -> None:
    assert taken(forward("a"), forward("b", 2), pass_tokens=0) == [[0], [1]]


def test_each_job_gets_its_part_of_the_answer() -> None:
    passes = [forward("a"), forward("b", 2)]
    assert joined(passes) == CombinedPass(passes)
    assert [*answers_of(passes, ["of a", Refused("gone")])] == ["of a", Refused("gone")]
    samples = [sample("x"), SampleJob("x", None, None, [SamplePrompt([1], 1, 0, Sampling(3))] * 2)]
    job = joined(samples)
    assert isinstance(job, SampleJob)
    assert len(job.prompts) == 3
    assert [*answers_of(samples, [1, 2, 3])] == [[1], [2, 3]]
    assert joined(samples[:1]) is samples[0]
    assert [*answers_of(samples[1:], [2, 3])] == [[2, 3]]


def test_a_run_gets_rows_of_its_own_or_those_that_were_used_longest_ago() -> None:
    def run(rank: int, first: int, used: float) -> ServedRun:
        return ServedRun("session", RunShape(rank, first=first), None, used=used)

    assert choose_rows([], 8, 8) == 0
    assert choose_rows([run(8, 0, 5.0)], 4, 32) == 8
    assert choose_rows([run(8, 0, 5.0), run(4, 12, 5.0)], 4, 32) == 8
    assert choose_rows([run(8, 0, 5.0), run(4, 12, 5.0)], 8, 32) == 16
    assert choose_rows([run(4, 0, 5.0), run(4, 4, 3.0)], 4, 8) == 4
    assert choose_rows([run(4, 0, 5.0), run(4, 4, 3.0)], 8, 8) == 0


def test_a_call_for_a_run_has_the_name_of_its_method_on_the_page() -> None:
    (call, forwards) = orders_of([(step("a"), 1.0, True), (forward("b"), 2.0, False)])
    assert (call["job"], call["run"]) == ("optimizer_step", "a")
    assert (forwards["job"], forwards["run"]) == ("RunPass", "b")
