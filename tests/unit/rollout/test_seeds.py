"""Seeds of samples, environments and ranks."""

from automodel_rl.rollout.seeds import mixed_seed


def test_consecutive_seeds_share_no_seed_of_a_number() -> None:
    seeds = [mixed_seed(seed, number) for seed in range(-50, 50) for number in range(50)]
    assert len({*seeds, *(mixed_seed(seed) for seed in range(50)), *(mixed_seed("x", s) for s in range(50))}) == 5100
    assert all(0 <= seed < 2**63 for seed in seeds)
