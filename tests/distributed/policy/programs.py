"""Programs that use a policy of a small model, on this rank and others."""

from pathlib import Path
from typing import Any

from automodel_rl.batch import Packing
from automodel_rl.config import MemoryConfig, ModelConfig, ParallelConfig
from automodel_rl.hf.opened_model import OpenedModel
from automodel_rl.model.handle import ModelHandle
from automodel_rl.policy.crew import POLICY, TreeCrew
from automodel_rl.policy.policy import Policy
from automodel_rl.policy.policy_rank import PolicyRank


def load(folder: Path, sizes: dict[str, Any], num_labels: int | None = None) -> ModelHandle:
    opened = OpenedModel.open(ModelConfig(path=str(folder), dtype="float64", num_labels=num_labels))
    return ModelHandle.load(opened, ParallelConfig(**sizes), MemoryConfig(), None)


def use(
    folder: Path,
    sizes: dict[str, Any],
    program: Any,
    tokenizer: Any = Any,
    microbatch_tokens: int = 24,
    num_labels: int | None = None,
) -> Any:
    """Lets a program use a policy on this rank and others."""
    handle = load(folder, sizes, num_labels)
    crew = TreeCrew(handle.layout, {POLICY: PolicyRank(handle, tokenizer)})
    if crew.rank:
        return crew.follow()
    parallel = handle.layout.parallel
    packing = Packing(microbatch_tokens, parallel.num_data_ranks, fewest=parallel.pp, cost=handle.flops)
    try:
        found = program(Policy(crew, packing, handle.config.vocab_size))
    except BaseException as error:
        crew.end(error)
        raise
    crew.end(value="ended")
    return found
