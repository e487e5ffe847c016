"""Bugs of optimizers, of their settings and of the learning rate."""

from typing import Any

import torch
from torch import Tensor, nn

from automodel_rl.config import MuonConfig
from automodel_rl.parallel.sharding import local_tensor
from tests.faults.fault import Fault, Verified, everywhere, patch


def _setting_ignored(**settings: Any) -> Any:
    """The optimizer is made without regard to what the config says of something."""
    from automodel_rl.optimizers import ModelOptimizer

    def make(parts: Any, descriptions: Any, peak: float) -> Any:
        changed = [(part, group_of, config.model_copy(update=settings)) for part, group_of, config in parts]
        return ModelOptimizer(changed, descriptions, peak)

    return patch("engine.engine.ModelOptimizer", make)


def _decay_of_everything() -> Any:
    from automodel_rl.optimizers import ModelOptimizer

    def make(parts: Any, descriptions: Any, peak: float) -> Any:
        optimizer = ModelOptimizer(parts, descriptions, peak)
        for group in optimizer.groups:
            group["weight_decay"] = parts[0][2].weight_decay
        return optimizer

    return patch("engine.engine.ModelOptimizer", make)


def _muon_of_shards() -> Any:
    """Every rank orthogonalises its own shard."""

    def of_shards(work: Any, shard_of: Any, parameters: Any, _: Any) -> Any:
        return [(parameter, work(shard_of(parameter))) for parameter in parameters]

    return patch("optimizers.muon.on_whole_matrices", of_shards)


def _muon_of_a_stack() -> Any:
    """All experts of a stack are one matrix."""
    from automodel_rl.optimizers.muon import orthogonal

    def of_one(matrix: Tensor, num_steps: int) -> Tensor:
        return orthogonal(matrix.flatten(0, -2), num_steps).view_as(matrix)

    return patch("optimizers.muon.orthogonal", of_one)


def _schedule_ignored(**settings: Any) -> Any:
    from automodel_rl.optimizers import learning_rate

    def rate(config: Any, *place: Any) -> float:
        return learning_rate(config.model_copy(update=settings), *place)

    return everywhere(rate, "engine.engine.learning_rate", "tools.verify.comparison.learning_rate")


def _no_master_weights() -> Any:
    from automodel_rl.model.parallelise import Dtypes

    def compute_alone(model: Any) -> Any:
        return Dtypes(*[getattr(torch, model.dtype)] * 3)

    return everywhere(compute_alone, "model.handle.dtypes_of", "model.parallelise.dtypes_of")


def _roles_by_dims() -> Any:
    """Whatever has two dims is a matrix, and every linear layer is one of a hidden layer."""
    from automodel_rl.optimizers.roles import Role, roles_of

    def roles(part: Any) -> Any:
        dims = {name: p.ndim for name, p in part.named_parameters(remove_duplicate=False)}
        rows = {name: Role.ROWS for name, number in dims.items() if number > 1}
        linear = {f"{path}.weight" for path, module in part.named_modules() if isinstance(module, nn.Linear)}
        matrices = dict.fromkeys(linear - {"lm_head.weight"}, Role.MATRIX)
        return {**rows, **roles_of(part), **matrices}

    return everywhere(roles, "optimizers.adamw.roles_of", "optimizers.muon.roles_of")


def _scales_of_another_row() -> Any:
    from automodel_rl.quantized.dynamic_codes import encode

    def of_another(values: Tensor, is_signed: bool, above: Tensor) -> tuple[Tensor, Tensor]:
        codes, scales = encode(values, is_signed, above)
        return codes, scales.roll(1, 0)

    return patch("optimizers.adamw_8bit.encode", of_another)


def _second_moment_for_its_root() -> Any:
    """What is kept as the root is the second moment, and the other way round."""
    from automodel_rl.quantized.dynamic_codes import encode

    def squared(values: Tensor, is_signed: bool, above: Tensor) -> tuple[Tensor, Tensor]:
        return encode(values if is_signed else values.square(), is_signed, above)

    return patch("optimizers.adamw_8bit.encode", squared)


def _rows_from_0() -> Any:
    """Every shard is rounded as if it were the first."""

    def at_0(tensor: Tensor) -> tuple[slice, ...]:
        return tuple(slice(0, size) for size in local_tensor(tensor).shape)

    return patch("optimizers.own_steps.local_box", at_0)


def _nearest() -> Any:
    return patch("optimizers.own_steps.round_to_bfloat16", lambda values, bits: values.to(torch.bfloat16))


WITH_MUON = {"optimizer": "muon"}
IN_8_BITS = {"optimizer": "adamw_8bit"}
NARROW = {"master_dtype": "bfloat16"}
PRECISION = "distributed/model/test_precision.py"

FAULTS: dict[str, Fault] = {
    "eps hard-coded": Fault(lambda: _setting_ignored(eps=1e-8), Verified("qwen3")),
    "betas hard-coded": Fault(lambda: _setting_ignored(betas=(0.9, 0.95)), Verified("qwen3")),
    "weight decay left out": Fault(lambda: _setting_ignored(weight_decay=0.0), Verified("qwen3")),
    "weight decay of norms": Fault(_decay_of_everything, Verified("qwen3")),
    "weight decay of norms with two dims": Fault(_roles_by_dims, Verified("cohere")),
    "Muon trains routers that are linear layers": Fault(_roles_by_dims, Verified("hunyuan_v1_moe", case=WITH_MUON)),
    "Muon orthogonalises shards of dp": Fault(_muon_of_shards, Verified("qwen3", {"dp_shard": 2}, case=WITH_MUON)),
    "Muon orthogonalises shards of tp": Fault(_muon_of_shards, Verified("qwen3", {"tp": 2}, case=WITH_MUON)),
    "Muon takes a stack of experts for one matrix": Fault(_muon_of_a_stack, Verified("qwen3_moe", case=WITH_MUON)),
    "Muon's settings hard-coded": Fault(
        lambda: _setting_ignored(muon=MuonConfig()),
        Verified("qwen3", case={**WITH_MUON, "muon": MuonConfig(momentum=0.8)}),
    ),
    "8-bit moments get the scale of another row": Fault(
        _scales_of_another_row, Verified("qwen3", {"dp_shard": 2}, case=IN_8_BITS)
    ),
    "8-bit second moment taken for its root": Fault(_second_moment_for_its_root, Verified("qwen3", case=IN_8_BITS)),
    "new weights rounded by places in a shard": Fault(_rows_from_0, Verified("qwen3", {"dp_shard": 2}, case=NARROW)),
    "new weights rounded to the nearest": Fault(_nearest, Verified("qwen3", case=NARROW)),
    "gradients as narrow as master weights": Fault(
        lambda: patch("model.handle.keep_gradients", lambda root, dtype: None), Verified("qwen3", case=NARROW)
    ),
    "warm-up ignored": Fault(lambda: _schedule_ignored(warmup_steps=0), Verified("qwen3")),
    "decay of the learning rate ignored": Fault(lambda: _schedule_ignored(decay="constant"), Verified("qwen3")),
    "master weights in bfloat16": Fault(
        _no_master_weights, f"{PRECISION}::test_updates_that_bfloat16_would_lose_are_kept_in_float32"
    ),
}
