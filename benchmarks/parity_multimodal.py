"""Multimodal models on placements of encoders and language model against one process: `make parity` runs it, too.

    python benchmarks/parity_multimodal.py                all pairs, on this machine's CPU; writes parity_multimodal.md
    python benchmarks/parity_multimodal.py --only gemma3  the pairs with this in their name

Three clipped AdamW steps in float64 against plain transformers, one sequence at a time, with other media and tokens on
every rank and media that sequences share. Norms that compute in fp32 whatever the dtype compute in float64 on both
sides.
"""

import argparse
import datetime
import math
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from automodel_rl.config.components import ComponentsConfig
from automodel_rl.families.known import MULTIMODAL_FAMILIES
from automodel_rl.tools.verify.command import judge
from automodel_rl.tools.verify.comparison import Case
from tests.rank_pool import RankPool
from tests.tiny import save_tiny_multimodal_model
from tests.vision import compare_exactly, tolerances_of

OUTPUT = Path(__file__).with_name("parity_multimodal.md")
MODELS = ("llava with SigLIP", *MULTIMODAL_FAMILIES)
SIGLIP = {"model_type": "siglip_vision_model"}


@dataclass(frozen=True)
class Placement:
    """Sizes of each encoder's mesh and of the language model's, on ranks of their own or all on the same."""

    encoder: dict[str, int]
    language: dict[str, int]
    together: bool = False

    def of(self, family: str) -> ComponentsConfig:
        """The components of a family, whose encoders leave out axes that they do not have."""
        found, start = {}, 0
        for name, kinds in MULTIMODAL_FAMILIES[family.split()[0]].encoders.items():
            sizes = {axis: size for axis, size in self.encoder.items() if axis != "tp" or kinds[0].tp_plan}
            if self.together:  # on as many ranks
                sizes |= {"dp_shard": math.prod(self.language.values())}
            stop = start + math.prod(sizes.values())
            found[name] = {"ranks": [*range(start, stop)], **sizes}
            start = 0 if self.together else stop
        ranks = [*range(start, start + math.prod(self.language.values()))]
        return ComponentsConfig.model_validate({**found, "language": {"ranks": ranks, **self.language}})


PLACEMENTS = {
    "encoder dp_shard 2 x tp 2, language pp 2 x dp_shard 2": Placement(
        {"dp_shard": 2, "tp": 2}, {"pp": 2, "dp_shard": 2}
    ),
    "encoder dp_shard 2, language dp_shard 4": Placement({"dp_shard": 2}, {"dp_shard": 4}),
    "encoder dp_shard 4, language on one rank": Placement({"dp_shard": 4}, {"dp_shard": 1}),
    "encoder tp 2, language cp 2": Placement({"tp": 2}, {"cp": 2}),
    "together, language tp 2": Placement({}, {"tp": 2}, together=True),
    "together, language pp 2": Placement({}, {"pp": 2}, together=True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="part of a pair's name")
    only = parser.parse_args().only
    pool, rows = RankPool(), []
    try:
        for family in MODELS:
            for name, placement in PLACEMENTS.items():
                if only in f"{family} {name}":
                    rows.append(row(pool, family, placement.of(family)))
                    print(rows[-1], flush=True)
    finally:
        pool.stop()
    if not only:
        OUTPUT.write_text(HEAD.format(torch=torch.__version__, date=datetime.date.today()) + "\n".join(rows) + "\n")
    sys.exit(any("| different |" in line for line in rows))


HEAD = """# Multimodal models against one process

`python benchmarks/parity_multimodal.py`, CPU and gloo, torch {torch}, {date}. Largest differences of gradients
(relative) and of weights after three clipped AdamW steps, in float64.

| model | placement | verdict | gradients | weights |
|---|---|---|---|---|
"""


def row(pool: RankPool, family: str, components: ComponentsConfig) -> str:
    """The table's line of one pair."""
    with tempfile.TemporaryDirectory() as folder:
        if family == "llava with SigLIP":
            ids = {"vision_feature_select_strategy": "full"}
            save_tiny_multimodal_model(Path(folder), "llava", encoders={"vision": SIGLIP}, ids=ids)
        else:
            save_tiny_multimodal_model(Path(folder), family)
        case = Case(microbatches=(3, 1, 4), components=components)
        found = judge(
            pool(components.world_size).run(compare_exactly, case, Path(folder))[0], tolerances_of(Path(folder))
        )
    verdict = "equal" if all(comparison.is_equal for comparison in found) else "different"
    gradients, weights = (
        max(comparison.difference for comparison in found if comparison.kind.startswith(kind))
        for kind in ("gradient of", "weight")
    )
    return f"| {family} | {components} | {verdict} | {gradients:.0e} | {weights:.0e} |"


if __name__ == "__main__":
    main()
