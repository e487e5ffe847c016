"""Vision-language models on placements of encoder and language model against one process: `make parity` runs it, too.

    python benchmarks/parity_vision.py                all pairs, on this machine's CPU; writes parity_vision.md
    python benchmarks/parity_vision.py --only gemma3  the pairs with this in their name

Three clipped AdamW steps in float64 against plain transformers, one sequence at a time, with other images and tokens on
every rank and images that sequences share. Norms that compute in fp32 whatever the dtype compute in float64 on both
sides.
"""

import argparse
import datetime
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from automodel_rl.config.components import ComponentsConfig
from automodel_rl.tools.verify.command import FLOAT64, judge
from automodel_rl.tools.verify.comparison import Case
from tests.rank_pool import RankPool
from tests.tiny import save_tiny_multimodal_model
from tests.vision import compare_exactly, components_of

OUTPUT = Path(__file__).with_name("parity_vision.md")
FAMILIES = ("llava", "llava with SigLIP", "gemma3", "mistral3", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
SIGLIP = {"model_type": "siglip_vision_model"}
PLACEMENTS = {
    "encoder pp 2 x tp 2, language pp 2": ({"ranks": "0-3", "pp": 2, "tp": 2}, {"ranks": "4-5", "pp": 2}),
    "encoder dp_shard 2, language dp_shard 4": ({"ranks": "0-1", "dp_shard": 2}, {"ranks": "2-5", "dp_shard": 4}),
    "encoder dp_shard 4, language on one rank": ({"ranks": "0-3", "dp_shard": 4}, {"ranks": 4}),
    "encoder tp 2, language cp 2": ({"ranks": "0-1", "tp": 2}, {"ranks": "2-3", "cp": 2}),
    "together, language tp 2": ({"ranks": "0-1", "dp_shard": 2}, {"ranks": "0-1", "tp": 2}),
    "together, both pp 2": ({"ranks": "0-1", "pp": 2}, {"ranks": "0-1", "pp": 2}),
}
WITHOUT_TP = {  # Pixtral's encoder is not split over tp
    "encoder pp 2 x tp 2, language pp 2": ({"ranks": "0-1", "pp": 2}, {"ranks": "2-3", "pp": 2}),
    "encoder tp 2, language cp 2": ({"ranks": 0}, {"ranks": "1-2", "cp": 2}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="part of a pair's name")
    only = parser.parse_args().only
    pool, rows = RankPool(), []
    try:
        for family in FAMILIES:
            for name, parts in PLACEMENTS.items():
                vision, language = WITHOUT_TP.get(name, parts) if family == "mistral3" else parts
                if only in f"{family} {name}":
                    rows.append(row(pool, family, components_of(vision, language)))
                    print(rows[-1], flush=True)
    finally:
        pool.stop()
    if not only:
        OUTPUT.write_text(HEAD.format(torch=torch.__version__, date=datetime.date.today()) + "\n".join(rows) + "\n")
    sys.exit(any("| different |" in line for line in rows))


HEAD = """# Vision-language models against one process

`python benchmarks/parity_vision.py`, CPU and gloo, torch {torch}, {date}. Largest differences of gradients
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
        found = judge(pool(components.world_size).run(compare_exactly, case, Path(folder))[0], FLOAT64)
    verdict = "equal" if all(comparison.is_equal for comparison in found) else "different"
    gradients, weights = (
        max(comparison.difference for comparison in found if comparison.kind.startswith(kind))
        for kind in ("gradient of", "weight")
    )
    return f"| {family} | {components} | {verdict} | {gradients:.0e} | {weights:.0e} |"


if __name__ == "__main__":
    main()
