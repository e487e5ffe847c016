"""Evaluations by harnesses in a run: what they get of the model is what the model computes, on its own generators."""

import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from pydantic import ValidationError
from transformers import AutoModelForCausalLM, AutoTokenizer

from automodel_rl.config.algorithms import GRPOConfig
from automodel_rl.errors import InputError
from automodel_rl.trainers.run import Run
from tests.distributed.trainers.runs import Settings, metrics_of, settings_of, train
from tests.rank_pool import RankPool

STAND_INS = Path(__file__).parents[2] / "harness_stand_ins"

IDS = [[5, 6, 7, 8, 9], [20, 30, 4], [7, 7]]


def values(workspace: Path, output: Path, **changes: Any) -> Settings:
    return settings_of("grpo", workspace, output, length={"steps": 2, "validate_every": 1}, **changes)


def train_with_stand_ins(settings: Settings) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(STAND_INS))
        train(settings)


@pytest.mark.parametrize("parallel", [{"pp": 2}, {"dp_shard": 2}], ids=str)
def test_evaluations_measure_the_model_that_generators_have(
    ranks: RankPool, workspace: Path, tmp_path: Path, parallel: dict[str, int]
) -> None:
    lm_eval = {"tasks": ["sums"], "python": sys.executable, "options": {"ids": str(IDS).replace(" ", "")}}
    validation = {"lm_eval": lm_eval, "inspect": {"tasks": ["chat"], "python": sys.executable}}
    settings = values(workspace, tmp_path / "run", parallel=parallel, validation=validation)
    settings["data"]["validation"] *= 2
    ranks(2).run(train_with_stand_ins, settings)
    first, *_, last = [row for row in metrics_of(tmp_path / "run") if "val/sums/sum" in row]
    for row, folder in ((first, workspace / "model"), (last, tmp_path / "run" / "final")):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
        logits = [model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1) for ids in IDS]
        own = [of.gather(1, torch.tensor(ids[1:])[:, None]).sum().item() for of, ids in zip(logits, IDS, strict=True)]
        greedy = [of.argmax(1).tolist() == ids[1:] for of, ids in zip(logits, IDS, strict=True)]
        assert row["val/sums/sum"] == pytest.approx(sum(own), abs=1e-5)
        assert row["val/sums/acc_strict"] == pytest.approx(sum(greedy) / 3)
        assert "val/sums/sum_stderr" not in row
        tokenizer = AutoTokenizer.from_pretrained(folder)
        ids = tokenizer.apply_chat_template([{"role": "user", "content": "1 + 2 is"}], add_generation_prompt=True)
        written = model.generate(torch.tensor([ids["input_ids"]]), max_new_tokens=4, do_sample=False)
        text = tokenizer.decode(written[0, len(ids["input_ids"]) :], skip_special_tokens=True)
        assert row["val/chat/length_mean"] == len(text.strip())  # as the content of a message
    for source in (0, 1):
        assert first[f"val/held_out_prompts_{source}/reward_mean"] == pytest.approx(first["val/reward_mean"])


HARNESSES_THAT_FAIL = {
    "no such task": {"tasks": ["broken"]},
    "it sent no request for 0.01 minutes": {"tasks": ["hanging"], "quiet_minutes": 0.01},
}


def said_in(settings: Settings) -> str:
    """What a run says while it trains with stand-ins."""
    with mock.patch.object(Run, "say", autospec=True) as say:
        train_with_stand_ins(settings)
    return "\n".join(call.args[1] for call in say.call_args_list)


@pytest.mark.parametrize("why", HARNESSES_THAT_FAIL)
def test_a_harness_that_fails_or_hangs_costs_its_metrics_alone(
    ranks: RankPool, workspace: Path, tmp_path: Path, why: str
) -> None:
    lm_eval = {"python": sys.executable, **HARNESSES_THAT_FAIL[why]}
    (said,) = ranks(1).run(said_in, values(workspace, tmp_path / "run", validation={"lm_eval": lm_eval}))
    assert "warning: validation.lm_eval failed: " in said
    assert why in said
    assert all("val/reward_mean" in row for row in metrics_of(tmp_path / "run") if row["step"])


def test_a_run_is_more_patient_than_its_evaluations(workspace: Path, tmp_path: Path) -> None:
    lm_eval = {"tasks": ["sums"], "python": sys.executable, "quiet_minutes": 60}
    settings = values(workspace, tmp_path / "run", validation={"lm_eval": lm_eval})
    with pytest.raises(ValidationError, match="the run would end first"):
        GRPOConfig.model_validate(settings)


def refused(settings: Settings) -> str:
    with pytest.raises(InputError) as error:
        train(settings)
    return str(error.value)


def test_a_harness_that_is_not_there_is_refused_at_the_start(ranks: RankPool, workspace: Path, tmp_path: Path) -> None:
    lm_eval = {"tasks": ["sums"], "python": sys.executable}
    (text,) = ranks(1).run(refused, values(workspace, tmp_path / "run", validation={"lm_eval": lm_eval}))
    assert "lacks a package (ModuleNotFoundError: No module named 'lm_eval'): " in text
    assert "-m pip install 'lm-eval[api]' transformers" in text
