"""One optimizer for the components of a vision-language model, with settings of their own."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from automodel_rl.config import ModelConfig, OptimizerConfig
from automodel_rl.engine import Engine
from automodel_rl.engine.parameter_groups import of_components
from automodel_rl.errors import InputError
from automodel_rl.hf.read import read_config
from automodel_rl.losses import sft_loss
from automodel_rl.model.handle import ModelHandle
from automodel_rl.parallel.sharding import gather_whole
from automodel_rl.tools.verify.comparison import make_sequences
from automodel_rl.tools.verify.media import with_media
from automodel_rl.tools.verify.one_process import OneProcess, Training
from tests.distributed.model.test_vision import ONE_TO_PIPELINE, ONE_TO_TWO, QWEN, microbatches_of
from tests.rank_pool import RankPool
from tests.tiny import save_tiny_multimodal_model
from tests.tiny_families import VOCAB


def train_with_settings_of_components(folder: Path) -> tuple[float, dict[str, Tensor]]:
    handle = ModelHandle.from_pretrained(ModelConfig(path=str(folder), dtype="float64"), components=ONE_TO_PIPELINE)
    shared: dict[str, Any] = {"max_grad_norm": 0.5, "decay": "linear", "warmup_steps": 2}
    language = OptimizerConfig(lr=1e-3, weight_decay=0.1, **shared)
    vision = OptimizerConfig(lr=5e-3, betas=(0.8, 0.9), groups=({"names": ["merger"], "lr": 2e-3},), **shared)
    engine = Engine(handle, {"vision": vision, "language": language}, total_steps=6)
    for step in range(3):
        norm = engine.train_step(microbatches_of(engine, (2,), step), sft_loss).grad_norm
    parameters = [(module, pair) for module in handle.components for pair in module.every_parameter()]
    return norm, {name: gather_whole(parameter, module.layout).clone() for module, (name, parameter) in parameters}


def test_components_have_settings_of_their_own_and_one_norm(ranks: RankPool, tmp_path: Path) -> None:
    save_tiny_multimodal_model(tmp_path, QWEN)
    of_ranks = ranks(3).run(train_with_settings_of_components, tmp_path)
    reference = OneProcess(tmp_path, torch.float64, Training(max_grad_norm=0.5), torch.device("cpu"))
    groups: dict[tuple[bool, bool, bool], list[Tensor]] = {}
    for name, parameter in reference.parameters():
        kind = ("visual" in name, "merger" in name, parameter.ndim > 1 and "visual" not in name)
        groups.setdefault(kind, []).append(parameter)
    optimizer = torch.optim.AdamW(
        [
            {
                "params": parameters,
                "peak": 2e-3 if is_merger else 5e-3 if is_vision else 1e-3,
                "betas": (0.8, 0.9) if is_vision else (0.9, 0.95),
                "weight_decay": 0.1 if decays else 0.0,
            }
            for (is_vision, is_merger, decays), parameters in groups.items()
        ]
    )
    for step, factor in enumerate((0.5, 1.0, 1.0)):
        (sequence,) = make_sequences(1, 10 * step, VOCAB)
        reference.backward([[with_media(sequence, read_config(tmp_path), 2)]])
        norm = torch.nn.utils.clip_grad_norm_(reference.model.parameters(), 0.5).item()
        for group in optimizer.param_groups:
            group["lr"] = factor * group["peak"]
        optimizer.step()
        optimizer.zero_grad()
    assert all(found == pytest.approx(norm, rel=1e-9) for found, _ in of_ranks)
    weights = reference.weights()
    for _, of_rank in of_ranks:
        for name, tensor in of_rank.items():
            torch.testing.assert_close(tensor, weights[name], rtol=0, atol=1e-8, msg=name)


def test_components_share_schedule_and_norm() -> None:
    configs = {"language": OptimizerConfig(decay="constant"), "vision": OptimizerConfig(decay="linear")}
    with pytest.raises(InputError, match="decay is linear for vision and constant for language: all components share"):
        of_components(configs, ["vision"])
    with pytest.raises(InputError, match=r"settings for \['audio'\]: set them for language"):
        of_components({"audio": OptimizerConfig()}, ["vision"])
    with pytest.raises(InputError, match="set them for language and, optionally, for vision or audio"):
        of_components({}, ["vision", "audio"])


def settings_refused(folder: Path, vision: OptimizerConfig, language: OptimizerConfig) -> str:
    handle = ModelHandle.from_pretrained(ModelConfig(path=str(folder), dtype="float64"), components=ONE_TO_TWO)
    try:
        Engine(handle, {"vision": vision, "language": language})
    except InputError as error:
        return str(error)
    return "made"


@pytest.mark.parametrize("misnamed", ["vision", "language"])
def test_a_group_of_a_component_names_its_own_parameters(ranks: RankPool, tmp_path: Path, misnamed: str) -> None:
    """One of the language model that names the encoder would do nothing, for the encoder has settings of its own."""
    save_tiny_multimodal_model(tmp_path)
    whole = OptimizerConfig(decay="constant")
    named = {"vision": "lm_head", "language": "vision_tower"}[misnamed]
    groups = OptimizerConfig(decay="constant", groups=({"names": [named], "lr": 1e-6},))
    both = (groups, whole) if misnamed == "vision" else (whole.model_copy(update={"lr": 2e-5}), groups)
    (message,) = set(ranks(3).run(settings_refused, tmp_path, *both))
    assert f"names=['{named}'] of {misnamed}: no trained parameter has one of these names" in message
