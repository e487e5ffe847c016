"""Several runners on one model take turns: each computes what it computes alone."""

from pathlib import Path
from typing import Any

import pytest

from automodel_rl.batch import Microbatch, pack_microbatch
from automodel_rl.config import ModelConfig, ParallelConfig
from automodel_rl.config.components import ComponentsConfig
from automodel_rl.losses import Readout, sft_loss
from automodel_rl.model.handle import ModelHandle
from automodel_rl.step.runner import StepRunner
from automodel_rl.tools.verify.comparison import make_sequences
from automodel_rl.tools.verify.media import with_media
from tests.rank_pool import RankPool
from tests.tiny import save_tiny_model, save_tiny_multimodal_model

APART = {"vision": {"ranks": 0}, "language": {"ranks": "1-2", "pp": 2}}
TOGETHER = {"vision": {"ranks": "0-1", "dp_shard": 2}, "language": {"ranks": "0-1", "pp": 2}}
INTERLEAVED = {"pp": 2, "schedule": "Interleaved1F1B", "virtual_stages": 2}


def norms_of_steps(folder: Path, layout: dict[str, Any]) -> list[float]:
    """The squared gradient norms of this rank in steps of two runners, by turns."""
    model = ModelConfig(path=str(folder), dtype="float64")
    if "language" in layout:
        handle = ModelHandle.from_pretrained(model, components=ComponentsConfig.model_validate(layout))
    else:
        handle = ModelHandle.from_pretrained(model, ParallelConfig(**layout))
    runners = [StepRunner(handle), StepRunner(handle)]
    microbatches = _microbatches_of(handle)
    norms = []
    for number in (0, 1, 0):
        counts = runners[number].global_batch(microbatches).counts
        runners[1 - number].forward(microbatches, lambda hidden, head, _: hidden[:, 0])
        runners[number].forward_backward(microbatches, sft_loss, Readout(), counts)
        norms.append(runners[number].square_norm().item())
        handle.zero_grad()
    return norms


def _microbatches_of(handle: ModelHandle) -> list[Microbatch]:
    if handle.layout.is_outsider:
        return []
    sequences = make_sequences(3, 0, handle.config.vocab_size)
    if handle.has_encoder:
        sequences = [with_media(sequence, handle.whole_config, 1) for sequence in sequences]
    return [pack_microbatch([sequence]) for sequence in sequences]


@pytest.mark.parametrize(
    ("family", "layout", "num_ranks"),
    [
        ("qwen3_vl", APART, 3),
        ("qwen3_vl", TOGETHER, 2),
        ("qwen3_moe", INTERLEAVED, 2),
    ],
    ids=["an encoder apart", "an encoder beside the model", "a pipeline"],
)
def test_runners_take_turns_on_one_model(
    ranks: RankPool, tmp_path: Path, family: str, layout: dict[str, Any], num_ranks: int
) -> None:
    if "language" in layout:
        save_tiny_multimodal_model(tmp_path, family)
    else:
        save_tiny_model(tmp_path, family)
    for norms in ranks(num_ranks).run(norms_of_steps, tmp_path, layout):
        assert norms[0] > 0
        assert norms == [norms[0]] * 3
