"""Every layout that up to four ranks reach against one process, and some with eight: `make parity`.

    python benchmarks/parity.py                 all cells, on this machine's CPU; writes benchmarks/parity.md
    python benchmarks/parity.py --only cp=2     the cells whose layout has this in its name
    python benchmarks/parity.py --only replay   those with router replay
    python benchmarks/parity.py --only fsdp=    those whose gradients, or weights too, are sharded at each microbatch

Float64 where the model computes in it, against plain transformers one sequence at a time, with other token counts on
every rank. A cell shows the largest difference of loss, gradient norm, log-probabilities and gradients (relative) and
of weights after three clipped AdamW steps, or why the layout is refused. Every cell also exports its model, and what
transformers computes with the export must be equal. With router replay a cell is equal only if
every choice of experts, in every pass, is the route's.
"""

import argparse
import dataclasses
import datetime
import itertools
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from automodel_rl.config import ModelConfig, ParallelConfig
from automodel_rl.config.model import MemoryConfig
from automodel_rl.config.parallel import Fsdp
from automodel_rl.errors import InputError
from automodel_rl.families.known import FAMILIES
from automodel_rl.families.text import TEXT_FAMILIES
from automodel_rl.hf.read import read_config
from automodel_rl.parallel.pipeline.schedules import SCHEDULES
from automodel_rl.support.description import describe_model
from automodel_rl.support.rule import Combination
from automodel_rl.support.table import check_supported
from automodel_rl.tools.verify.command import FLOAT32, FLOAT64, judge
from automodel_rl.tools.verify.comparison import Case, compare
from tests.rank_pool import RankPool
from tests.tiny import save_tiny_model

MAX_RANKS = 4
OUTPUT = Path(__file__).with_name("parity.md")


@dataclass(frozen=True)
class Cell:
    family: str
    parallel: ParallelConfig
    tied: bool = False
    recomputed: Any = "none"
    replay: bool = False

    @property
    def memory(self) -> MemoryConfig:
        return MemoryConfig(activation_checkpointing=self.recomputed)

    @property
    def name(self) -> str:
        values = self.parallel.model_dump(exclude_defaults=True)
        if values["fsdp"] == "keep":
            del values["fsdp"]
        layout = ", ".join(f"{key}={value}" for key, value in values.items()) or "one rank"
        return f"{layout}, router replay, recomputed: {self.recomputed}" if self.replay else layout


def cells() -> Iterator[Cell]:
    """Every layout with weights kept gathered, then every one that shards them in the other two ways of FSDP."""
    kept = [dataclasses.replace(cell, parallel=_with_fsdp(cell.parallel, "keep")) for cell in _layouts()]
    yield from kept
    for fsdp in ("reduce", "reshard"):
        for cell in kept:
            if cell.parallel.fsdp_size > 1:
                yield dataclasses.replace(cell, parallel=_with_fsdp(cell.parallel, fsdp))


def _with_fsdp(parallel: ParallelConfig, fsdp: Fsdp) -> ParallelConfig:
    return parallel.model_copy(update={"fsdp": fsdp})


def _layouts() -> Iterator[Cell]:
    """{pp 1, 2, 4 x schedules} x {tp 1, 2} x {ep 1, 2} x {cp 1, 2, 4} x {dp 1, 2}, then families, then eight ranks."""
    for pp, tp, ep, cp, dp in itertools.product((1, 2, 4), (1, 2), (1, 2), (1, 2, 4), (1, 2)):
        if pp * tp * cp * dp > MAX_RANKS:
            continue
        for schedule, rule in SCHEDULES.items():
            if pp == 1 and schedule != "1F1B":
                continue
            sizes: dict[str, Any] = {"pp": pp, "tp": tp, "ep": ep, "cp": cp, "dp_shard": dp}
            virtual: dict[str, Any] = (
                {"schedule": schedule, "virtual_stages": rule.min_virtual_stages} if pp > 1 else {}
            )
            for family in ("qwen3_moe",) if ep > 1 else ("qwen3", "qwen3_moe"):
                if not (tp > 1 and ep > 1):
                    yield Cell(family, ParallelConfig(**sizes, **virtual), tied=family == "qwen3")
                if tp > 1:
                    yield Cell(family, ParallelConfig(**sizes, **virtual, sequence_parallel=True))
    for family, known in TEXT_FAMILIES.items():
        small: list[dict[str, Any]] = [{}, {"pp": 2}, {"cp": 2}, {"tp": 2}, {"pp": 2, "cp": 2}, {"cp": 2, "ep": 2}]
        for sizes in small:
            if ("ep" in sizes) <= known.is_moe:
                yield Cell(family, ParallelConfig(**sizes))
        yield Cell(family, ParallelConfig(tp=2, sequence_parallel=True))
        yield Cell(family, ParallelConfig(pp=2, dp_shard=2, ep=2) if known.is_moe else ParallelConfig(pp=2, tp=2))
        if known.is_moe:
            yield Cell(family, ParallelConfig(tp=2, sequence_parallel=True, ep=2))
    yield Cell("qwen3_moe", ParallelConfig(pp=2, cp=2, ep=2, dp_shard=2))
    yield Cell("qwen3_moe", ParallelConfig(pp=2, cp=2, tp=2, sequence_parallel=True, ep=4))
    yield Cell("gpt_oss", ParallelConfig(dp_shard=2, cp=2, tp=2, sequence_parallel=True, ep=4))
    yield Cell("deepseek_v3", ParallelConfig(pp=2, dp_shard=2, tp=2, sequence_parallel=True, ep=4))
    yield Cell("deepseek_v3", ParallelConfig(pp=2, cp=2, ep=4, dp_shard=2))
    yield from _replay_layouts()


def _replay_layouts() -> Iterator[Cell]:
    """Router replay under every kind of recomputation, then over families, eight ranks last."""
    virtual: dict[str, Any] = {"pp": 2, "schedule": "Interleaved1F1B", "virtual_stages": 2}
    v_shaped: dict[str, Any] = {"pp": 2, "schedule": "ZBVZeroBubble", "virtual_stages": 2}
    ways: tuple[dict[str, Any], ...] = (
        {"pp": 2},
        virtual,
        v_shaped,
        {"cp": 2},
        {"dp_shard": 2, "ep": 2},
        {**virtual, "cp": 2, "dp_shard": 2, "ep": 2},
        {**virtual, "cp": 2, "tp": 2, "sequence_parallel": True, "ep": 2},
    )
    for sizes, recomputed in itertools.product(ways, ("none", "selective", "full")):
        yield Cell("qwen3_moe", ParallelConfig(**sizes), recomputed=recomputed, replay=True)
    for family in (name for name, known in TEXT_FAMILIES.items() if known.is_moe and name != "qwen3_moe"):
        yield Cell(family, ParallelConfig(**virtual, cp=2, dp_shard=2, ep=4), recomputed="full", replay=True)


def run(cell: Cell, ranks: RankPool) -> str:
    """Compares a cell's layout, and returns the rest of its line in the table."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_tiny_model(folder, cell.family, tied=cell.tied, num_layers=max(4, cell.parallel.num_stages))
        try:
            model = ModelConfig(path=name, dtype="float64")
            description = describe_model(read_config(folder))
            check_supported(Combination(description, model, cell.parallel, cell.memory))
        except InputError as error:
            return f"| refused | {error} |"
        case = Case(cell.parallel, microbatches=(3, 1, 2), memory=cell.memory, replay=cell.replay)
        found = ranks(cell.parallel.world_size).run(compare, case, folder, folder)[0]
    in_fp32 = not FAMILIES[cell.family].is_exact(cell.parallel.tp)
    rows = judge(found, FLOAT32 if in_fp32 else FLOAT64)
    verdict = "equal" if all(row.is_equal for row in rows) else "DIFFERENT"
    judged = found.first if in_fp32 else found.all
    gradient = max(value for kind, value in judged.items() if kind.startswith("gradient of"))
    numbers = [judged["loss"], judged["gradient norm"], judged["log-probabilities"], gradient, found.all["weights"]]
    return f"| {verdict}{' (fp32 inside)' if in_fp32 else ''} | " + " / ".join(f"{n:.0e}" for n in numbers) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="part of a cell's name")
    options = parser.parse_args()
    chosen = [cell for cell in cells() if options.only in f"{cell.family}: {cell.name}"]
    ranks = RankPool()
    lines, started = [], time.monotonic()
    for number, cell in enumerate(sorted(chosen, key=lambda c: c.parallel.world_size), start=1):
        row = run(cell, ranks)
        lines.append(f"| {cell.family} | {cell.name} {row}")
        print(f"{number}/{len(chosen)} {time.monotonic() - started:.0f} s {lines[-1]}", flush=True)
    ranks.stop()
    different = sum("DIFFERENT" in line for line in lines)
    if not options.only:
        head = (
            "# Layouts against one process\n\n"
            f"`make parity`, CPU and gloo, torch {version('torch')}, {datetime.date.today()}. Largest differences of\n"
            "loss / gradient norm / log-probabilities / gradients, relative, and of weights after three clipped AdamW\n"
            "steps; float64, for models with fp32 inside those of the first step, and weights for information. Equal\n"
            "also means that transformers computes the same with the exported model.\n\n"
            "| model | layout | verdict | differences |\n|---|---|---|---|\n"
        )
        OUTPUT.write_text(head + "\n".join(lines) + "\n")
    print(f"{len(lines) - different} of {len(lines)} cells equal or refused")
    sys.exit(different > 0)


if __name__ == "__main__":
    main()
