"""Vision-language models: encoder and language model on meshes of their own compute the numbers of one process."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from automodel_rl.batch import Image, TokenSequence, pack_microbatch
from automodel_rl.checkpoint.load import load_checkpoint
from automodel_rl.compat.versions import TORCH
from automodel_rl.config import ModelConfig, OptimizerConfig, ParallelConfig
from automodel_rl.config.components import ComponentsConfig
from automodel_rl.config.model import MemoryConfig
from automodel_rl.encoder.bridge import Bridge
from automodel_rl.engine import Engine
from automodel_rl.errors import InputError
from automodel_rl.losses import sft_loss
from automodel_rl.model.handle import ModelHandle
from automodel_rl.parallel.sharding import gather_whole
from automodel_rl.tools.verify.comparison import Case
from tests.checkpoints import save_checkpoint
from tests.rank_pool import RankPool
from tests.tiny import MULTIMODAL_CONFIGS, save_tiny_multimodal_model
from tests.tiny_families import GROUPED, LATENT, WIDE, YARN
from tests.vision import assert_equal, components_of, microbatches_of

LLAVA, QWEN, QWEN3, QWEN3_MOE, GLM = "llava", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v"
SPLIT = pytest.mark.skipif(TORCH < (2, 13), reason="this torch cannot split the backward")


ONE_TO_TWO = components_of({"ranks": 0}, {"ranks": "1-2", "dp_shard": 2})
TWO_TO_ONE = components_of({"ranks": "0-1", "dp_shard": 2}, {"ranks": 2})
ONE_TO_PIPELINE = components_of({"ranks": 0}, {"ranks": "1-2", "pp": 2})
SHARED = components_of({"ranks": "0-1", "dp_shard": 2}, {"ranks": "0-1", "tp": 2})
ONE_TO_FOUR = components_of({"ranks": 0}, {"ranks": "1-4", "dp_shard": 4})


@pytest.mark.parametrize(
    ("family", "components", "microbatches"),
    [
        (LLAVA, ONE_TO_TWO, (3, 1)),
        (QWEN, ONE_TO_TWO, (3, 1)),
        (LLAVA, TWO_TO_ONE, (3, 1)),
        (QWEN, SHARED, (3, 1)),
        (LLAVA, ONE_TO_PIPELINE, (1, 1)),
        (QWEN, ONE_TO_PIPELINE, (4, 4)),
        (QWEN, ONE_TO_FOUR, (3, 1)),
    ],
    ids=str,
)
def test_modules_on_meshes_of_their_own_equal_one_process(
    ranks: RankPool, tmp_path: Path, family: str, components: ComponentsConfig, microbatches: tuple[int, ...]
) -> None:
    save_tiny_multimodal_model(tmp_path, family)
    assert_equal(ranks, tmp_path, Case(microbatches=microbatches, components=components))


SPLIT_ENCODER = components_of({"ranks": "0-1", "tp": 2}, {"ranks": "2-3", "dp_shard": 2})
EVERYTHING = components_of(
    {"ranks": "0-3", "dp_shard": 2, "tp": 2}, {"ranks": "0-3", "cp": 2, "tp": 2, "sequence_parallel": True}
)
REPLICATED = components_of({"ranks": "0-3", "dp_replicate": 2, "tp": 2}, {"ranks": "4-5", "pp": 2})
GLM_LAYOUT = components_of({"ranks": "0-1", "tp": 2}, {"ranks": "2-5", "pp": 2, "tp": 2})
CUT_PIPELINE = components_of({"ranks": 0}, {"ranks": "1-4", "pp": 2, "cp": 2})
TWO_TO_FOUR = components_of({"ranks": "0-1", "dp_shard": 2}, {"ranks": "2-5", "dp_shard": 4})
FOUR_TO_ONE = components_of({"ranks": "0-3", "dp_shard": 4}, {"ranks": 4})
ONE_TO_CUT = components_of({"ranks": 0}, {"ranks": "1-2", "cp": 2})
ONE_TO_EXPERTS = components_of({"ranks": 0}, {"ranks": "1-2", "dp_shard": 2, "ep": 2})
TP_TO_CUT = components_of({"ranks": "0-1", "tp": 2}, {"ranks": "2-3", "cp": 2})
V_PLACED = components_of({"ranks": 0}, {"ranks": "1-2", "pp": 2, "schedule": "ZBVZeroBubble", "virtual_stages": 2})


@pytest.mark.parametrize(
    ("family", "components"),
    [
        (QWEN, SPLIT_ENCODER),
        (LLAVA, EVERYTHING),
        (QWEN3, REPLICATED),
        (GLM, GLM_LAYOUT),
        pytest.param(QWEN, V_PLACED, marks=SPLIT),
    ],
    ids=[
        "encoder over tp",
        "cp, tp and sequence parallel",
        "replicas of an encoder over tp",
        "fused MLP over tp",
        "V placement",
    ],
)
def test_any_layout_of_either_module_equals_one_process(
    ranks: RankPool, tmp_path: Path, family: str, components: ComponentsConfig
) -> None:
    save_tiny_multimodal_model(tmp_path, family)
    assert_equal(ranks, tmp_path, Case(microbatches=(3, 2), components=components))


@pytest.mark.parametrize(
    ("family", "tied", "case"),
    [
        (QWEN, True, Case(ParallelConfig(pp=2), microbatches=(3, 2))),
        (QWEN, False, Case(ParallelConfig(cp=2), microbatches=(3, 2))),
        (
            LLAVA,
            False,
            Case(microbatches=(3, 2), memory=MemoryConfig(activation_checkpointing="full", offload_optimizer=True)),
        ),
        (LLAVA, False, Case(microbatches=(3, 2), memory=MemoryConfig(activation_checkpointing="selective"))),
        ("qwen3_5", False, Case(microbatches=(3, 2), components=CUT_PIPELINE)),
        ("qwen3_5_moe", False, Case(microbatches=(3, 1), components=ONE_TO_EXPERTS, replay=True)),
        ("glm4v_moe", False, Case(microbatches=(3, 1), components=ONE_TO_EXPERTS, replay=True)),
        ("internvl", True, Case(microbatches=(3, 2), components=SPLIT_ENCODER)),
        ("gemma4", True, Case(microbatches=(3, 2), components=TP_TO_CUT, replay=True)),
        ("gemma4_unified", False, Case(ParallelConfig(pp=2), microbatches=(3, 2))),
    ],
    ids=[
        "tied, pp",
        "cp",
        "recomputed and offloaded",
        "selective",
        "Gated DeltaNet over pp and cp",
        "Gated DeltaNet with ep and routes",
        "M-RoPE with ep and routes",
        "tiles, encoder over tp",
        "windows see both ways, encoder over tp, cp, and routes",
        "no encoder, pp",
    ],
)
def test_both_modules_on_all_ranks_equal_one_process(
    ranks: RankPool, tmp_path: Path, family: str, tied: bool, case: Case
) -> None:
    save_tiny_multimodal_model(tmp_path, family, tied=tied)
    assert_equal(ranks, tmp_path, case)


@pytest.mark.parametrize(
    ("family", "case"),
    [
        (QWEN3, Case(ParallelConfig(pp=4), microbatches=(3, 2))),
        (QWEN3, Case(ParallelConfig(pp=2, tp=2, sequence_parallel=True), microbatches=(3, 2))),
        (QWEN3, Case(microbatches=(3, 2), components=CUT_PIPELINE)),
        pytest.param(QWEN3, Case(microbatches=(3, 2), components=V_PLACED), marks=SPLIT),
        (QWEN3_MOE, Case(microbatches=(3, 1), components=ONE_TO_EXPERTS, replay=True)),
        (QWEN3_MOE, Case(ParallelConfig(pp=2), microbatches=(3, 2), aux_loss=0.1)),
        (QWEN3, Case(microbatches=(3, 1), components=TWO_TO_FOUR)),
        (QWEN3_MOE, Case(microbatches=(3, 1), components=FOUR_TO_ONE)),
    ],
    ids=[
        "pp 4",
        "pp, tp and sequence parallel",
        "pp and cp",
        "V placement",
        "ep and routes",
        "mixture over pp",
        "2 to 4",
        "4 to 1",
    ],
)
def test_features_that_enter_several_layers_equal_one_process(
    ranks: RankPool, tmp_path: Path, family: str, case: Case
) -> None:
    save_tiny_multimodal_model(tmp_path, family)
    assert_equal(ranks, tmp_path, case)


@pytest.mark.parametrize("encoders", [1, 2])
@pytest.mark.parametrize("family", ["mistral3", LLAVA])
def test_rows_of_images_with_breaks_equal_one_process(
    ranks: RankPool, tmp_path: Path, family: str, encoders: int
) -> None:
    pixtral = MULTIMODAL_CONFIGS["mistral3"][2]["vision"]
    ids = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
    save_tiny_multimodal_model(tmp_path, family, encoders={"vision": pixtral}, ids=ids if family == LLAVA else {})
    two_to_cut = components_of({"ranks": "0-1", "dp_shard": 2}, {"ranks": "2-3", "cp": 2})
    components = ONE_TO_CUT if encoders == 1 else two_to_cut
    assert_equal(ranks, tmp_path, Case(microbatches=(3, 2), components=components))


MISTRAL4 = {
    **WIDE,
    **LATENT,
    **GROUPED,
    "model_type": "mistral4",
    "head_dim": 12,
    "max_position_embeddings": 16,
    "rope_parameters": {
        **YARN,
        "max_position_embeddings": 16,
        "llama_4_scaling_beta": 0.3,
        "partial_rotary_factor": 1 / 3,
    },
}


@pytest.mark.parametrize("sizes", [{"cp": 2}, {"tp": 2, "sequence_parallel": True}], ids=str)
def test_a_language_model_with_latent_attention_equals_one_process(
    ranks: RankPool, tmp_path: Path, sizes: dict
) -> None:
    save_tiny_multimodal_model(tmp_path, "mistral3", text=MISTRAL4)
    assert_equal(ranks, tmp_path, Case(ParallelConfig(**sizes), microbatches=(3, 1)))


def test_encoder_ranks_with_unequal_images_of_any_size_wait_for_nobody(ranks: RankPool, tmp_path: Path) -> None:
    """Pixtral takes images one by one, other numbers of them on every rank."""
    save_tiny_multimodal_model(tmp_path, "mistral3")
    components = components_of({"ranks": "0-1", "dp_shard": 2}, {"ranks": "2-5", "dp_shard": 4})
    assert_equal(ranks, tmp_path, Case(microbatches=(3, 1, 4), components=components))


@pytest.mark.parametrize(
    "case",
    [
        Case(microbatches=(3, 2), components=ONE_TO_CUT),
        Case(ParallelConfig(cp=2), microbatches=(3, 1)),
        Case(ParallelConfig(pp=2, tp=2), microbatches=(3, 2), attention="eager"),
        Case(microbatches=(3, 1), components=SPLIT_ENCODER),
    ],
    ids=str,
)
def test_images_that_are_seen_both_ways_equal_one_process(ranks: RankPool, tmp_path: Path, case: Case) -> None:
    save_tiny_multimodal_model(tmp_path, "gemma3", tied=True)
    assert_equal(ranks, tmp_path, case)


@pytest.mark.parametrize("strategy", ["full", "default"])
def test_another_encoder_equals_one_process(ranks: RankPool, tmp_path: Path, strategy: str) -> None:
    save_tiny_multimodal_model(
        tmp_path,
        LLAVA,
        encoders={"vision": {"model_type": "siglip_vision_model"}},
        ids={"vision_feature_select_strategy": strategy},
    )
    assert_equal(ranks, tmp_path, Case(microbatches=(3, 2), components=SPLIT_ENCODER))


@pytest.mark.parametrize("frozen", [("vision", "projector"), ("language",), ("vision", "language")], ids=" and ".join)
def test_frozen_parts_leave_the_others_right(ranks: RankPool, tmp_path: Path, frozen: tuple[str, ...]) -> None:
    save_tiny_multimodal_model(tmp_path, QWEN)
    assert_equal(ranks, tmp_path, Case(microbatches=(3, 2), components=ONE_TO_PIPELINE, frozen=frozen))


def make_engine(folder: Path, components: ComponentsConfig, frozen: tuple[Any, ...] = ()) -> Engine:
    model = ModelConfig(path=str(folder), dtype="float64", frozen=frozen)
    handle = ModelHandle.from_pretrained(model, components=components)
    return Engine(handle, OptimizerConfig(lr=1e-2, decay="constant"))


def weights_of(engine: Engine) -> dict[str, Tensor]:
    handle = engine.handle
    return {
        f"{module.name} {name} {kind}": gather_whole(tensor, module.layout).clone()
        for module in handle.components
        for name, parameter in handle.named_parameters(module)
        for kind, tensor in [("weight", parameter), *engine.optimizer.state_of(parameter).items()]
    }


def train_with_few_images(
    folder: Path, components: ComponentsConfig, images_of: tuple[int, ...]
) -> tuple[float, float]:
    engine = make_engine(folder, components)
    output = engine.train_step(microbatches_of(engine, images_of), sft_loss)
    return output.loss, output.grad_norm


@pytest.mark.parametrize("images_of", [(0, 1), (0, 0)])
def test_encoder_ranks_without_images_wait_for_nobody_and_change_no_scale(
    ranks: RankPool, tmp_path: Path, images_of: tuple[int, int]
) -> None:
    save_tiny_multimodal_model(tmp_path)
    side_by_side = components_of({"ranks": "0-1", "dp_shard": 2}, {"ranks": "2-3", "dp_shard": 2})
    together = components_of({"ranks": 0}, {"ranks": "1-2", "dp_shard": 2})
    found = ranks(4).run(train_with_few_images, tmp_path, side_by_side, images_of)
    expected = ranks(3).run(train_with_few_images, tmp_path, together, images_of)
    assert len(set(found)) == 1  # outsiders and all
    assert found[0] == pytest.approx(expected[0], rel=1e-12)


def train_with_an_infinite_gradient(folder: Path, components: ComponentsConfig) -> tuple[bool, bool]:
    engine = make_engine(folder, components)
    microbatches, before = microbatches_of(engine, (1, 1)), weights_of(engine)
    to_encoder = Bridge.to_encoder

    def infinite(bridge: Bridge, *arguments: Any) -> Any:
        gradients, crossing = to_encoder(bridge, *arguments)
        return {lane: gradient * torch.inf for lane, gradient in gradients.items()}, crossing

    with mock.patch.object(Bridge, "to_encoder", infinite):  # the language model knows nothing of it
        skipped = engine.train_step(microbatches, sft_loss).skipped
    after = weights_of(engine)
    return skipped, all(torch.equal(before[name], after[name]) for name in before)


def test_an_infinite_gradient_of_the_encoder_skips_the_step_on_every_rank(ranks: RankPool, tmp_path: Path) -> None:
    save_tiny_multimodal_model(tmp_path)
    assert ranks(3).run(train_with_an_infinite_gradient, tmp_path, ONE_TO_TWO) == [(True, True)] * 3


def save_after_two_steps(folder: Path) -> dict[str, Tensor]:
    engine = make_engine(folder, ONE_TO_TWO)
    for step in range(2):
        engine.train_step(microbatches_of(engine, (1, 2), step), sft_loss)
    save_checkpoint(engine, folder / "step_2", {}, {})
    return weights_of(engine)


def load(folder: Path, components: ComponentsConfig) -> tuple[dict[str, Tensor], int]:
    engine = make_engine(folder, components)
    load_checkpoint(engine, folder / "step_2")
    return weights_of(engine), engine.step


SPLIT_TO_ONE = components_of({"ranks": "0-1", "tp": 2}, {"ranks": 2})


@pytest.mark.parametrize("components", [TWO_TO_ONE, SPLIT_TO_ONE], ids=str)
def test_a_checkpoint_moves_between_placements_bit_for_bit(
    ranks: RankPool, tmp_path: Path, components: ComponentsConfig
) -> None:
    save_tiny_multimodal_model(tmp_path, QWEN)
    written = {k: tensor for of_rank in ranks(3).run(save_after_two_steps, tmp_path) for k, tensor in of_rank.items()}
    loaded = ranks(3).run(load, tmp_path, components)
    assert {step for _, step in loaded} == {2}
    found = {name: tensor for of_rank, _ in loaded for name, tensor in of_rank.items()}
    assert found.keys() == written.keys()
    assert any(name.startswith("vision") and name.endswith("exp_avg") for name in found)
    assert all(torch.equal(found[name], written[name]) for name in written)


def save_without_encoder(folder: Path) -> None:
    engine = make_engine(folder, ONE_TO_TWO, frozen=("vision", "projector"))
    save_checkpoint(engine, folder / "step_2", {}, {})


def load_refused(folder: Path) -> str:
    engine = make_engine(folder, TWO_TO_ONE)
    try:
        load_checkpoint(engine, folder / "step_2")
    except InputError as error:
        return str(error)
    return "loaded"


def test_a_checkpoint_without_a_component_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    save_tiny_multimodal_model(tmp_path)
    ranks(3).run(save_without_encoder, tmp_path)
    messages = set(ranks(3).run(load_refused, tmp_path))
    (message,) = messages
    assert "for the vision component the checkpoint has no vision.model.model." in message


def train_on_a_wrong_count(folder: Path) -> str:
    engine = make_engine(folder, components_of({"ranks": 0}, {"ranks": 0}))
    image = Image(1, 3, (1, 3, 3), torch.zeros(3, 12, 12))
    sequence = TokenSequence(torch.zeros(6, dtype=torch.int64), torch.ones(6, dtype=torch.bool), media=(image,))
    try:
        engine.train_step([pack_microbatch([sequence])], sft_loss)
    except ValueError as error:
        return str(error)
    return "trained"


def test_an_image_with_another_number_of_tokens_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    save_tiny_multimodal_model(tmp_path)
    (message,) = ranks(1).run(train_on_a_wrong_count, tmp_path)
    assert "need 3 embeddings in their sequences, but the encoder makes 9 embeddings" in message


def train_and_export(folder: Path) -> float:
    engine = make_engine(folder, components_of({"ranks": 0}, {"ranks": 0}))
    loss = engine.train_step(microbatches_of(engine, (1,)), sft_loss).loss
    engine.handle.save_pretrained(folder / "exported")
    return loss


def test_files_that_name_the_encoder_as_the_hub_does_are_read_and_written(ranks: RankPool, tmp_path: Path) -> None:
    save_tiny_multimodal_model(tmp_path / "new")
    save_tiny_multimodal_model(tmp_path / "hub")
    tensors = load_file(tmp_path / "new" / "model.safetensors")
    start = "vision_tower."
    renamed = {
        f"{start}vision_model.{name.removeprefix(start)}" if name.startswith(start) else name: tensor
        for name, tensor in tensors.items()
    }
    save_file(renamed, tmp_path / "hub" / "model.safetensors", {"format": "pt"})
    assert ranks(1).run(train_and_export, tmp_path / "hub") == ranks(1).run(train_and_export, tmp_path / "new")
    for name, expected in (("hub", renamed), ("new", tensors)):
        files = (tmp_path / name / "exported").glob("*.safetensors")
        assert {key for file in files for key in load_file(file)} == expected.keys()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text": {"model_type": "gemma2", "num_hidden_layers": 2}}, "with a 'gemma2' language model is not supported"),
        ({"encoders": {"vision": {"attention_dropout": 0.1}}}, "attention_dropout=0.1"),
        ({"encoders": {"vision": {"model_type": "dinov2"}}}, "with a 'dinov2' encoder is not supported"),
    ],
)
def test_what_would_be_another_model_is_refused(tmp_path: Path, changes: dict, message: str) -> None:
    save_tiny_multimodal_model(tmp_path, **changes)
    with pytest.raises(InputError, match=message):
        ModelHandle.from_pretrained(str(tmp_path))
