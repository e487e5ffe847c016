"""Verifies a config's layout on a small model of the same architecture, and prints a verdict."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import PretrainedConfig

from automodel_rl.config import ModelConfig, ParallelConfig, RunConfig, Section
from automodel_rl.config.model import Dtype
from automodel_rl.errors import VerificationError
from automodel_rl.families.known import is_exact
from automodel_rl.files import TemporaryFolder
from automodel_rl.hf.opened_model import OpenedModel
from automodel_rl.launch.process_group import join_process_group
from automodel_rl.support.attention import ATTENTION
from automodel_rl.support.description import describe_model
from automodel_rl.tools.verify.bf16 import compare_bf16
from automodel_rl.tools.verify.cause import likeliest_cause
from automodel_rl.tools.verify.comparison import NO_STEP, Case, Differences, compare
from automodel_rl.tools.verify.layout import layout_to_verify, ranks_to_verify
from automodel_rl.tools.verify.small_model import save_random_model, shrink, shrink_multimodal


@dataclass(frozen=True)
class Tolerances:
    """Largest differences that count as equal.

    Attributes:
        numbers: for everything but weights.
        weights: None if rounding grows too much over optimizer steps to judge them.
    """

    numbers: float
    weights: float | None

    def of(self, kind: str) -> float | None:
        return self.weights if kind == "weights" else self.numbers

    def judge(self, kind: str, step: int, difference: float) -> bool:
        """Whether a difference counts as equal. Where rounding grows over optimizer steps, all later steps do,
        except for the learning rate."""
        grows = self.weights is None and step > 1 and kind != "learning rate"
        tolerance = self.of(kind)
        return grows or tolerance is None or difference <= tolerance


FLOAT64 = Tolerances(numbers=1e-9, weights=1e-8)
FLOAT32 = Tolerances(numbers=1e-5, weights=None)
"""Tolerances for models that compute parts in fp32. Only the first step is judged."""

CAUSE_IN_BF16 = (
    "code that only runs in bf16: fused attention (model.attention=sdpa avoids it) or compiled layers "
    "(memory.compile=false disables them)"
)


def verify(config: RunConfig, as_json: bool) -> None:
    """Compares the config's layout with one process, and prints a verdict. A collective.

    Raises:
        InputError: the layout is not supported, or the model cannot be read.
        VerificationError: the results differ.
    """
    opened = OpenedModel.open(config.model)
    components = config.components
    parallel = layout_to_verify(config.parallel) if components is None else components.language.parallel
    config = opened.checked(config)
    full, description = opened.whole, opened.description
    join_process_group(ranks_to_verify(config))
    dtype, tolerances = precision(config.model, full, config.parallel.tp)
    is_first = dist.get_rank() == 0
    with TemporaryFolder() as own_folder:
        folder = Path(_from_first_rank(own_folder))
        if is_first:
            if not as_json:
                how = f"{description.num_layers} layers, {components or parallel}, {dtype}, {config.optimizer.name}"
                print(f"small {full.model_type}, {how}")
            if description.multimodal is None:
                small = shrink(full, parallel)
            else:
                vision = None if components is None else components.vision
                small = shrink_multimodal(full, parallel, 1 if vision is None else vision.tp)
            save_random_model(small, folder / "model", getattr(torch, dtype))
        dist.barrier()
        case, left_out = case_of(config, full, parallel, dtype)
        found = compare(case, folder / "model", folder)
        rows = judge(found, tolerances)
        if in_bf16(config, full):
            if is_first:
                save_random_model(shrink(full, parallel, whole_heads=True), folder / "bf16", torch.bfloat16)
            dist.barrier()
            errors = compare_bf16(case, config.memory, config.model, folder / "bf16")
            rows += [Row(f"{kind} in bf16", *both, both[0] <= both[1]) for kind, both in errors.items()]
        dist.barrier()
    if is_first:
        print(json.dumps(as_record(components or parallel, case, rows, left_out)) if as_json else format_table(rows))
    failed = [row.kind for row in rows if not row.is_equal]
    if failed:
        exact = any(not row.is_equal for row in rows[: len(found.found)])
        cause = likeliest_cause(found, tolerances.judge, parallel) if exact else CAUSE_IN_BF16
        raise VerificationError(f"verdict: DIFFERENT from one process in {', '.join(failed)}\nlikeliest cause: {cause}")
    if is_first and not as_json:
        if left_out:
            print(f"not compared: {', '.join(left_out)}")
        print("verdict: equal to one process")


def case_of(
    config: RunConfig, full: PretrainedConfig, parallel: ParallelConfig, dtype: Dtype
) -> tuple[Case, list[str]]:
    """Returns the comparison for a config, and the settings left out because plain transformers has no equivalent."""
    model, memory = config.model, config.memory
    left_out = ["weights of the checkpoint", *([] if in_bf16(config, full) else _of_bf16(config, full))]
    attention = model.attention
    if attention != "auto" and ATTENTION[attention].needs_cuda:
        attention = "auto"
    if model.fp8 is not None:
        left_out.append("model.fp8")
    if model.lora is not None:
        left_out.append("model.lora")
    if model.mtp is not None:
        left_out.append("model.mtp")
    if model.indexer is not None:
        left_out.append("model.indexer")
    if config.optimizer.groups:
        left_out.append("optimizer.groups")
    if model.moe.bias_update_rate:
        left_out.append("model.moe.bias_update_rate")
    if not config.has_likelihood_loss:
        left_out.append("loss (sft's is compared)")
    if model.num_labels is not None:
        left_out.append("model.num_labels (the vocabulary's head is compared)")
    case = Case(
        parallel,
        # The last step has enough microbatches for several in flight on every stage, all of one shape.
        microbatches=(3, 1, max(4, 2 * parallel.num_stages + 1)),
        dtype=dtype,
        implementation=model.implementation,
        attention=attention,
        memory=memory.model_copy(update={"compile": False}),
        replay=config.generation is not None and config.generation.router_replay.enabled,
        components=config.components,
        frozen=model.frozen,
        aux_loss=model.moe.aux_loss,
        optimizer=config.optimizer.name,
        muon=config.optimizer.muon,
        master_dtype=model.master_dtype,
    )
    return case, left_out


def in_bf16(config: RunConfig, full: PretrainedConfig) -> bool:
    """Whether a bf16 step is also compared: on CUDA, where runs use other kernels and compiled layers."""
    model = config.model
    plain = model.implementation == "transformers" and describe_model(full).multimodal is None
    return torch.cuda.is_available() and model.dtype == "bfloat16" and plain


def _of_bf16(config: RunConfig, full: PretrainedConfig) -> list[str]:
    model, memory = config.model, config.memory
    left_out = [f"model.dtype={model.dtype}"]
    if model.attention != "auto" and ATTENTION[model.attention].needs_cuda:
        left_out.append(f"model.attention={model.attention}")
    elif model.attention == "auto" and model.dtype == "bfloat16" and not describe_model(full).has_softcap:
        left_out.append("the fused attention of model.attention=auto on CUDA")
    if memory.compile is True or (memory.compile == "auto" and model.dtype == "bfloat16"):
        left_out.append(f"memory.compile={str(memory.compile).lower()}")
    return left_out


def precision(model: ModelConfig, whole: PretrainedConfig, tp: int) -> tuple[Dtype, Tolerances]:
    if model.implementation == "nemo_automodel":
        return "float32", FLOAT32
    return "float64", FLOAT64 if is_exact(whole, tp) else FLOAT32


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        kind: kind of difference.
        tolerance: None if the kind is not judged.
        first_step: first step in which the kind differs, from 1; None if there is none.
    """

    kind: str
    difference: float
    tolerance: float | None
    is_equal: bool
    first_step: int | None = None


def judge(found: Differences, tolerances: Tolerances) -> list[Row]:
    rows = []
    for kind, by_step in found.found.items():
        judged = [step for step in by_step if not tolerances.judge(kind, step, math.inf)] or [*by_step]
        wrong = [step for step in judged if not tolerances.judge(kind, step, found.largest(kind, step))]
        largest = max(found.largest(kind, step) for step in judged)
        first_step = min((step for step in wrong if step != NO_STEP), default=None)
        rows.append(Row(kind, largest, tolerances.of(kind), not wrong, first_step))
    return rows


def format_table(rows: list[Row]) -> str:
    width = max(len(row.kind) for row in rows)
    lines = [f"{'':<{width}}  largest difference  tolerance"]
    for row in rows:
        tolerance = "not judged" if row.tolerance is None else f"{row.tolerance:.0e}"
        since = "" if row.first_step is None else f" from step {row.first_step} on"
        verdict = "" if row.is_equal else f"  DIFFERENT{since}"
        lines.append(f"{row.kind:<{width}}  {row.difference:18.1e}  {tolerance}{verdict}")
    return "\n".join(lines)


def as_record(layout: Section, case: Case, rows: list[Row], left_out: list[str]) -> dict:
    return {
        "layout": layout.model_dump(),
        "dtype": case.dtype,
        "optimizer": case.optimizer,
        "master_dtype": case.master_dtype,
        "equal": all(row.is_equal for row in rows),
        "differences": {row.kind: row.difference for row in rows},
        "first_steps": {row.kind: row.first_step for row in rows if row.first_step is not None},
        "tolerances": {row.kind: row.tolerance for row in rows},
        "not_compared": left_out,
    }


def _from_first_rank(value: str) -> str:
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]
