"""What the table of `verify` says of differences: the first step, what counts as one, and the likeliest cause."""

import pytest

from automodel_rl.config import ParallelConfig
from automodel_rl.tools.verify.cause import likeliest_cause
from automodel_rl.tools.verify.command import FLOAT32, FLOAT64, Tolerances, format_table, judge
from automodel_rl.tools.verify.comparison import NO_STEP, Differences

NAMES = [
    f"model.layers.{layer}.{name}" for layer in range(4) for name in ("mlp.up_proj.weight", "input_layernorm.weight")
]
NAMES += ["model.embed_tokens.weight", "lm_head.weight", "model.layers.3.mlp.experts.down_proj"]


def equal() -> Differences:
    """Three steps without a difference."""
    found = Differences()
    for step in (1, 2, 3):
        for kind in ("log-probabilities", "evaluated loss", "loss", "gradient norm", "learning rate"):
            found.record(kind, 1e-15, step)
        for name in NAMES:
            found.record(f"gradient of {name.rpartition('.')[0][-9:]}", 1e-15, step, name)
            found.record("weights", 1e-15, step, name)
    found.record("exported tensors", 1e-15)
    found.record("learning rate", 0.0)
    return found


def cause(found: Differences, tolerances: Tolerances = FLOAT64) -> str:
    return likeliest_cause(found, tolerances.judge, ParallelConfig(pp=2))


def spoil(found: Differences, step: int, *names: str) -> Differences:
    """Gradients of these tensors differ, and so does all that comes after."""
    for name in names:
        found.record(f"gradient of {name.rpartition('.')[0][-9:]}", 0.1, step, name)
    for kind in ("gradient norm", "weights"):
        found.record(kind, 0.1, step, names[0] if kind == "weights" else "")
    for later in range(step + 1, 4):
        found.record("log-probabilities", 0.1, later)
    return found


@pytest.mark.parametrize(
    ("step", "names", "expected"),
    [
        (1, [name for name in NAMES if ".3." in name or ".2." in name], "step 1: gradients of stage 1: the backward"),
        (2, ["model.layers.3.mlp.experts.down_proj"], "step 2: gradients of experts alone"),
        (1, ["model.embed_tokens.weight", "lm_head.weight"], "step 1: gradients of the embedding and the head"),
        (1, [name for name in NAMES if "norm" in name], "step 1: gradients of norms and biases alone"),
        (3, NAMES, "step 3: all gradients: their sum over data ranks"),
    ],
)
def test_gradients_that_differ_point_to_what_they_have_in_common(step: int, names: list[str], expected: str) -> None:
    assert cause(spoil(equal(), step, *names)).startswith(expected)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("gradient norm", "step 2: the global norm alone"),
        ("learning rate", "step 2: the learning-rate schedule"),
        ("evaluated loss", "step 2: evaluation alone"),
        ("loss", "step 2: the loss alone"),
        ("log-probabilities", "step 2: the forward pass after an optimizer step: stale gathered weights"),
    ],
)
def test_the_first_step_counts_and_what_follows_from_it_does_not(kind: str, expected: str) -> None:
    found = equal()
    found.record(kind, 0.1, 2)
    for name in NAMES:
        found.record("weights", 0.1, 2, name)
        found.record("weights", 0.1, 3, name)
    assert cause(found).startswith(expected)
    microbatches = {microbatch.kind: microbatch for microbatch in judge(found, FLOAT64)}
    assert (microbatches[kind].is_equal, microbatches[kind].first_step) == (False, 2)
    assert "DIFFERENT from step 2 on" in format_table([microbatches[kind]])


def test_an_optimizer_step_that_differs_alone_points_to_the_optimizer_of_its_stage() -> None:
    found = equal()
    found.record("weights", 0.1, 1, "model.layers.0.mlp.up_proj.weight")
    assert cause(found).startswith("step 1: the optimizer step of stage 0: clipping, or the optimizer's settings")


def test_what_is_compared_once_points_to_itself() -> None:
    found = equal()
    found.record("exported tensors", 0.1)
    assert cause(found).startswith("the export")


def test_rounding_that_grows_is_no_difference_but_a_learning_rate_is() -> None:
    found = equal()
    found.record("log-probabilities", 1e-3, 2)
    assert all(microbatch.is_equal for microbatch in judge(found, FLOAT32))
    found.record("exported tensors", 0.1)
    assert cause(found, FLOAT32).startswith("the export")
    found.record("learning rate", 0.1, 3)
    assert [microbatch.kind for microbatch in judge(found, FLOAT32) if not microbatch.is_equal] == [
        "learning rate",
        "exported tensors",
    ]
    found = equal()
    found.record("learning rate", 0.1, NO_STEP)
    assert [microbatch.kind for microbatch in judge(found, FLOAT32) if not microbatch.is_equal] == ["learning rate"]
