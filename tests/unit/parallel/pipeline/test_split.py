"""Which layers a stage holds."""

import pytest

from automodel_rl.config import ParallelConfig
from automodel_rl.errors import InputError
from automodel_rl.parallel.pipeline.split import layers_per_stage, modules_of_stages


def test_layers_are_spread_evenly_with_the_last_stage_shortest() -> None:
    assert layers_per_stage(27, ParallelConfig(pp=2)) == (14, 13)
    assert layers_per_stage(27, ParallelConfig(pp=4)) == (7, 7, 7, 6)


def test_a_list_of_layers_is_taken_as_it_is() -> None:
    assert layers_per_stage(27, ParallelConfig(pp=2, layers_per_stage=(13, 14))) == (13, 14)


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        (ParallelConfig(pp=28), "parallel.pp=28: the model has 27 layers .*use no more than 27 stages"),
        (ParallelConfig(pp=2, layers_per_stage=(13, 13)), "adds up to 26 but the model has 27 layers"),
        (ParallelConfig(pp=3, layers_per_stage=(13, 14)), "lists 2 stages but parallel.pp=3 makes 3"),
    ],
)
def test_splits_that_do_not_fit_are_refused(parallel: ParallelConfig, message: str) -> None:
    with pytest.raises(InputError, match=message):
        layers_per_stage(27, parallel)


def test_first_stage_embeds_and_last_has_the_head() -> None:
    first, last = modules_of_stages((1, 2))
    assert set(first) == {"model.embed_tokens", "model.rotary_emb", "model.layers.0"}
    assert set(last) == {"model.layers.1", "model.layers.2", "model.rotary_emb", "model.norm", "lm_head"}
