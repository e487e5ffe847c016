"""A step in bf16 is as near to the exact numbers as plain transformers, unless a bug is planted."""

import contextlib
import io
from pathlib import Path
from unittest import mock

import pytest

from automodel_rl.config.model import MemoryConfig
from automodel_rl.errors import VerificationError
from automodel_rl.tools.verify.command import verify
from automodel_rl.tools.verify.comparison import Differences
from tests.bf16_step import errors_in_bf16, wrong
from tests.distributed.tools.test_verify import config_of
from tests.faults import planted
from tests.rank_pool import RankPool
from tests.tiny import save_tiny_model


@pytest.mark.parametrize(
    ("fault", "family", "sizes"),
    [
        (None, "qwen3", {"tp": 2, "sequence_parallel": True}),
        (None, "qwen3_moe", {"dp_shard": 2, "ep": 2}),
        ("partial gradients of tp left alone", "qwen3", {"tp": 2}),
        ("documents see each other", "qwen3", {"pp": 2}),
    ],
)
def test_errors_of_bf16_are_those_of_rounding(
    ranks: RankPool, tmp_path: Path, fault: str | None, family: str, sizes: dict
) -> None:
    (found, *others) = errors_in_bf16(ranks, tmp_path, fault, (family, 16), sizes, MemoryConfig(compile=False))
    assert others == [found]
    assert bool(wrong(found)) == (fault is not None), found


def verdict(folder: Path, fault: str | None) -> str:
    config = config_of(folder, {"tp": 2}, dtype="bfloat16")
    on_cpu_too = mock.patch("automodel_rl.tools.verify.command.in_bf16", return_value=True)
    only_in_bf16 = mock.patch("automodel_rl.tools.verify.command.compare", return_value=Differences())
    with planted(fault), on_cpu_too, only_in_bf16, contextlib.redirect_stdout(io.StringIO()) as text:
        try:
            verify(config, as_json=False)
        except VerificationError as error:
            return f"{text.getvalue()}{error}"
    return text.getvalue()


def test_the_verdict_is_also_about_the_step_in_bf16(ranks: RankPool, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "qwen3", num_layers=2)
    sound, _ = ranks(2).run(verdict, tmp_path, None)
    assert sound.endswith("not compared: weights of the checkpoint\nverdict: equal to one process\n")
    different, _ = ranks(2).run(verdict, tmp_path, "partial gradients of tp left alone")
    assert "verdict: DIFFERENT from one process in worst gradient in bf16" in different
    assert different.endswith("(memory.compile=false disables them)")
