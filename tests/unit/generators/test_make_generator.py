"""Which device a generator gets."""

import pytest

from automodel_rl.config import WeightSyncConfig
from automodel_rl.config.generator_spec import GeneratorSpec
from automodel_rl.config.generators import VllmGeneratorConfig
from automodel_rl.errors import InputError
from automodel_rl.generators import generator_ranks
from automodel_rl.generators.generator_ranks import GeneratorRanks
from automodel_rl.generators.make_generator import _check_devices, merge_stop_ids


@pytest.mark.parametrize(
    ("devices", "size", "leaders"), [((4,), 1, (0, 4)), ((4, 5), 1, (0, 1, 4, 5)), ((4, 5, 6, 7), 2, (0, 1, 4, 5))]
)
def test_the_first_ranks_of_each_machine_lead_a_vllm_on_devices_of_its_own(
    monkeypatch: pytest.MonkeyPatch, devices: tuple[int, ...], size: int, leaders: tuple[int, ...]
) -> None:
    monkeypatch.setattr(generator_ranks.dist, "get_world_size", lambda: 8)
    monkeypatch.setattr(generator_ranks.dist, "get_rank", lambda: 5)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    spec = GeneratorSpec(VllmGeneratorConfig(place=devices, tensor_parallel=size), 8, WeightSyncConfig())
    ranks = GeneratorRanks.join(spec)
    assert (ranks.leaders, ranks.size, ranks.group) == (leaders, size, None)
    assert ranks.is_leader == (5 in leaders)


@pytest.mark.parametrize(("devices", "size"), [((4, 5, 6, 7, 8, 9), 2), ((4, 5, 6), 1)])
def test_devices_that_no_rank_could_use_are_refused(
    monkeypatch: pytest.MonkeyPatch, devices: tuple[int, ...], size: int
) -> None:
    monkeypatch.setattr(generator_ranks.dist, "get_world_size", lambda: 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    spec = GeneratorSpec(VllmGeneratorConfig(place=devices, tensor_parallel=size), 8, WeightSyncConfig())
    with pytest.raises(InputError, match=f"one of the 2 ranks on a machine: list {size} for each of at most 2 vLLM"):
        GeneratorRanks.join(spec)


def test_fewer_devices_than_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(InputError, match="each of the 2 ranks on a machine needs one device: list 2"):
        _check_devices((6,))


def test_tokens_that_the_run_asks_for_join_those_of_the_model() -> None:
    assert merge_stop_ids({2, 7}, (3,), 8) == (2, 3, 7)
    with pytest.raises(InputError, match=r"rollout.stop_token_ids=\[1, 8\]: .* has 8 tokens, .* remove 8"):
        merge_stop_ids({2}, (1, 8), 8)
