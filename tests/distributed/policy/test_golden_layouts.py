"""Losses against numbers of other packages' own functions, on every layout.

The model says what a case says: each token of all rows has an id of its own, and the head's column for it makes the
next one as likely as the case has it. Layers add nothing. So the head's gradient tells that of every log-probability.
"""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from automodel_rl.batch import Batch, Packing
from automodel_rl.engine import Engine
from automodel_rl.policy.shares import Share
from tests.distributed.policy.programs import load
from tests.rank_pool import RankPool
from tests.unit.losses.test_golden import KTO, POLICY, PREFERENCES, Golden, judged, of_policy, preference

CASES = dict.fromkeys(PREFERENCES, preference) | dict.fromkeys(POLICY, of_policy) | dict.fromkeys(KTO, judged)
FIRST_IDS = {preference: 0, of_policy: 30, judged: 60}
"""The first id of the rows of each kind of case, whose log-probabilities are all the same."""

NUM_IDS, WIDTH = 92, 256
"""The norm makes the 1 of an embedding the root of the width, which is a power of 2."""

ROOT = math.sqrt(WIDTH)
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "pp": {"pp": 2},
    "tp": {"tp": 2},
    "cp": {"cp": 2},
    "three data ranks": {"dp_shard": 3},
    "four data ranks, one without a pair": {"dp_shard": 4},
}


def golden(name: str) -> Golden:
    """A case whose rows have ids of their own."""
    case, next_id, rows = CASES[name](name), FIRST_IDS[CASES[name]], []
    for row in case.rows:
        rows.append(dataclasses.replace(row, input_ids=torch.arange(next_id, next_id + len(row))))
        next_id += len(row)
    return dataclasses.replace(case, rows=rows)


@pytest.fixture(name="model", scope="module")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": WIDTH, "intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2}
    sizes |= {"vocab_size": NUM_IDS, "num_hidden_layers": 2, "head_dim": 8}
    config = AutoConfig.for_model("qwen3", rms_norm_eps=1e-24, tie_word_embeddings=False, **sizes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(NUM_IDS, WIDTH))
        model.lm_head.weight.zero_()
        for of_kind in FIRST_IDS:
            name = next(name for name, kind in CASES.items() if kind is of_kind)
            for row in golden(name).rows:
                for place, logprob in enumerate(row.values["logprobs"][1:].tolist()):
                    before, token = row.input_ids[place], row.input_ids[place + 1]
                    model.lm_head.weight[:, before] = math.log(-math.expm1(logprob) / (NUM_IDS - 1)) / ROOT
                    model.lm_head.weight[token, before] = logprob / ROOT
    folder = tmp_path_factory.mktemp("golden") / "model"
    model.save_pretrained(folder)
    return folder


def on_this_rank(folder: Path, sizes: dict[str, Any]) -> dict[str, tuple[float, list[list[float]]]]:
    """The loss of every case, and its gradient by the log-probabilities of each completion, on ranks with the head."""
    handle = load(folder, sizes)
    engine, parallel = Engine(handle), handle.layout.parallel
    found = {}
    for name in CASES:
        case = golden(name)
        rows = Batch(case.rows, sequences_per_example=case.sequences_per_example)
        packing = Packing(16, parallel.num_data_ranks, fewest=parallel.pp)
        dealt = packing.deal(rows.lengths, rows.sequences_per_example)
        total, _ = engine.forward_backward(Share.of(rows, dealt[handle.layout.data_rank]).pack(), case.loss)
        gradients = dict(handle.named_hf_gradients())
        engine.zero_grad()
        if "lm_head.weight" in gradients:
            head = gradients["lm_head.weight"] / ROOT
            places = [(row.input_ids[1:], row.input_ids[:-1]) for row in case.rows]
            certain = [-torch.expm1(row.values["logprobs"][1:]) for row in case.rows]
            found[name] = total, [(head[at] / part).tolist() for at, part in zip(places, certain, strict=True)]
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_have_the_numbers_of_other_packages_on_every_layout(ranks: RankPool, model: Path, layout: str) -> None:
    sizes = LAYOUTS[layout]
    of_ranks = [found for found in ranks(math.prod(sizes.values())).run(on_this_rank, model, sizes) if found]
    assert of_ranks
    for found in of_ranks:
        assert found.keys() == CASES.keys()
        for name, (total, gradients) in found.items():
            golden(name).check(total, gradients)
