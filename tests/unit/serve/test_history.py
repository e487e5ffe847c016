"""Curves of the service's page divide by the tokens that are trained, not by all of the sequences."""

import numpy as np
import pytest

from automodel_rl.serve.history import RunCurve
from automodel_rl.serve.messages import Datum


def test_the_loss_of_a_step_is_divided_by_trained_tokens() -> None:
    curve = RunCurve()
    answers = Datum(np.arange(4), {"weights": np.array([0, 0, 1, 1], np.float32)})
    soft = Datum(np.arange(3), {"weights": np.array([[0, 0], [0, 0.5], [0, 0]], np.float32)})
    curve.add_pass(2.0, [answers])
    curve.add_pass(4.0, [soft])
    curve.add_step()
    assert curve.steps[-1] == (1, pytest.approx(6.0 / 3), None)


def test_advantages_are_those_of_trained_tokens() -> None:
    curve = RunCurve()
    curve.add_pass(1.0, [Datum(np.arange(4), {"advantages": np.array([0, 0, 3, 1], np.float32)})])
    curve.add_step()
    assert curve.steps[-1] == (1, 0.5, 2.0)
    curve.add_pass(0.0, [Datum(np.arange(2), {"advantages": np.zeros(2, np.float32)})])
    curve.add_step()
    assert curve.steps[-1] == (2, None, None)
