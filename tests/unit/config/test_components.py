"""`components`: what is refused before anything starts, and what a run's config says of it."""

from pathlib import Path

import pytest
import yaml

from automodel_rl.config import dump_config, load_config
from automodel_rl.errors import InputError

RUN = {
    "output": "runs/x",
    "model": {"path": "model"},
    "data": {"train": [{"path": "chats.jsonl"}]},
    "batch": {"sequences": 8, "microbatch_tokens": 64},
    "length": {"steps": 1},
}


def load(folder: Path, components: dict, *overrides: str, **changes: dict):
    (folder / "run.yaml").write_text(yaml.safe_dump({**RUN, **changes, "components": components}))
    return load_config(folder / "run.yaml", overrides)


@pytest.mark.parametrize(
    ("vision", "language", "message"),
    [
        ({"ranks": 0}, {"ranks": "2-3", "dp_shard": 2}, "components: ranks [1] hold no component"),
        (
            {"ranks": "0-1", "dp_shard": 2},
            {"ranks": "1-2", "pp": 2},
            "components: ranks [1] hold both vision and language, others",
        ),
        ({"ranks": "0-2", "dp_shard": 3}, {"ranks": "3-4", "dp_shard": 2}, "one must divide the other"),
        ({"ranks": "0-2"}, {"ranks": 3}, "components: vision.ranks=[0, 1, 2] are 3 ranks but its layout has 1"),
        ({"ranks": [1, 0], "dp_shard": 2}, {"ranks": 2}, "list each rank once, in ascending order"),
        ({"ranks": "a-b"}, {"ranks": 1}, "components.vision.ranks: 'a-b' is not a range of ranks"),
        ({"rank": 0}, {"ranks": 1}, "components.vision.rank: unknown key; did you mean ranks?"),
        (
            {"ranks": "0-1", "pp": 2},
            {"ranks": 2},
            "components.vision: pp=2: encoders have no pipeline stages: use dp_shard, or tp",
        ),
    ],
)
def test_placements_that_cannot_be_are_refused(tmp_path: Path, vision: dict, language: dict, message: str) -> None:
    with pytest.raises(InputError) as error:
        load(tmp_path, {"vision": vision, "language": language})
    assert message in str(error.value)


MODULES = {"vision": {"ranks": "0-1", "dp_shard": 2}, "language": {"ranks": "2-5", "pp": 2, "dp_shard": 2}}


def test_rows_are_dealt_by_the_layout_of_the_language_model(tmp_path: Path) -> None:
    config = load(tmp_path, MODULES)
    assert (config.world_size, config.parallel.pp, config.parallel.num_data_ranks) == (6, 2, 2)
    with pytest.raises(InputError, match="parallel and components.language differ"):
        load(tmp_path, MODULES, parallel={"pp": 4})


def test_a_runs_own_config_takes_overrides_of_modules(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(dump_config(load(tmp_path, MODULES)))
    changed = load_config(
        tmp_path / "config.yaml", ["--components.language.pp", "4", "--components.language.dp_shard=1"]
    )
    assert (changed.parallel.pp, changed.world_size) == (4, 6)
