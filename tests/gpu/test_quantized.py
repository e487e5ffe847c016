"""Few bits on CUDA: bases as they are stored, adapters on fp8 layers, and optimizers that step as on a CPU."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from automodel_rl import Engine, ModelHandle, OptimizerConfig, sft_loss
from automodel_rl.batch import pack_microbatch
from automodel_rl.config import ModelConfig
from automodel_rl.config.model import Base, Float8, LoraConfig
from automodel_rl.config.optimizer import OptimizerName
from automodel_rl.quantized.base import quantized_weights
from tests.distributed.lora.test_stored_base import save
from tests.needs import need_gpus
from tests.rank_pool import RankPool
from tests.tiny import make_sequences
from tests.unit.optimizers.test_own_steps import linear, optimizer_of

pytestmark = pytest.mark.gpu


def losses_of(folder: Path, base: Base, dtype: str, fp8: Float8 | None = None) -> tuple[list[float], int]:
    """Losses of three steps, and the number of quantized weights."""
    torch.manual_seed(0)
    targets = ("all-linear", "experts") if folder.name in ("fp8 moe", "mxfp4") else ("all-linear",)
    lora = LoraConfig(rank=4, targets=targets, base=base)
    handle = ModelHandle.from_pretrained(ModelConfig(path=str(folder), dtype=dtype, lora=lora, fp8=fp8))
    engine = Engine(handle, OptimizerConfig(lr=1e-2, decay="constant"))
    steps = [[pack_microbatch(make_sequences(3, 10 * step + m)) for m in range(2)] for step in range(3)]
    losses = [engine.train_step(microbatches, sft_loss).loss for microbatches in steps]
    return losses, len([*quantized_weights(handle.parts[0])])


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 2e-2)])
@pytest.mark.parametrize("kind", ["fp8", "fp8 rows", "fp8 moe", "mxfp4", "nf4"])
def test_stored_bases_compute_as_plain_ones(
    ranks: RankPool, tmp_path: Path, kind: str, dtype: str, tolerance: float
) -> None:
    need_gpus(1)
    save(kind, tmp_path / kind)
    (stored, held), (plain, none) = (
        ranks(1).run(losses_of, tmp_path / kind, base, dtype)[0] for base in ("stored", "plain")
    )
    assert held > 0
    assert none == 0
    assert stored == pytest.approx(plain, rel=tolerance)


def test_adapters_train_on_fp8_layers(ranks: RankPool, tmp_path: Path) -> None:
    need_gpus(1)
    save("nf4", tmp_path / "nf4")
    run = ranks(1).run
    found, expected = (run(losses_of, tmp_path / "nf4", "plain", "bfloat16", fp8)[0][0] for fp8 in ("rowwise", None))
    assert found != expected
    assert found == pytest.approx(expected, rel=3e-2)


def weights_after_steps(name: OptimizerName, dtype: torch.dtype, device: str) -> Tensor:
    model, config = linear(4096, 300, dtype).to(device), OptimizerConfig(name=name, lr=1e-2)
    for parameter in model.parameters():
        parameter.grad_dtype = torch.float32
    optimizer = optimizer_of(model, config)
    for step in range(5):
        torch.manual_seed(step)
        model.weight.grad, model.bias.grad = torch.randn(300, 4096).to(device), torch.randn(300).to(device)
        optimizer.step(config.lr)
    return torch.cat([model.weight.detach().flatten(), model.bias.detach()]).cpu()


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("adamw", torch.bfloat16), ("adamw_8bit", torch.bfloat16), ("adamw_8bit", torch.float32)],
    ids=str,
)
def test_compiled_steps_are_those_of_a_cpu(name: OptimizerName, dtype: torch.dtype) -> None:
    """A last bit of float32 may turn the rounding of a few values, and the code of a few moments."""
    need_gpus(1)
    found, expected = (weights_after_steps(name, dtype, device) for device in ("cuda", "cpu"))
    assert (found - expected).abs().gt(1e-5).float().mean() < 1e-3
