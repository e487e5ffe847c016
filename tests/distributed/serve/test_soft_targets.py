"""Several targets for a token, and scores of prompts, as the client asks for them: equal to plain transformers."""

import contextlib
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from peft import PeftModel
from tinker import types
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.services import VOCAB, Service, datum

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore::UserWarning"
)

LENGTHS = (7, 21, 3, 12, 1)
WIDTHS = (8, 6, 1, 0, 4)


@pytest.fixture(name="plain", scope="module")
def make_plain(model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)


def logprobs_of(plain: Any, tokens: list[int]) -> Tensor:
    """Of all tokens after each one, [n, V]."""
    return plain(torch.tensor([tokens])).logits[0].log_softmax(-1)


def soft(length: int, width: int, sparse: bool) -> types.Datum:
    """A datum with so many targets for each token; token 0 is among them, and some weights are 0."""
    random = np.random.default_rng([length, width])
    shape = (length, width) if width else (length,)
    targets = torch.from_numpy(random.integers(0, VOCAB, shape))
    targets[torch.from_numpy(random.random(shape)) < 0.75] = 0
    weights = torch.from_numpy(random.random(shape).astype(np.float32) * (random.random(shape) < 0.2))
    make = types.TensorData.from_torch_sparse if sparse else types.TensorData.from_torch
    return types.Datum(
        model_input=datum(length, length).model_input,
        loss_fn_inputs={"target_tokens": make(targets), "weights": make(weights)},
    )


@pytest.mark.parametrize("sparse", [False, True])
def test_soft_targets_train_as_plain_transformers_do(service: Service, model: Path, sparse: bool) -> None:
    run = service.run(rank=4, seed=3)
    run.forward_backward([soft(9, 0, False)], "cross_entropy").result()
    run.optim_step(types.AdamParams(learning_rate=1e-2)).result()  # so that lora_B is not 0
    folder = service.folder_of(run.save_state("begun").result().path)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    peft: Any = PeftModel.from_pretrained(base, folder, is_trainable=True)
    peft.to(torch.float64)
    data = [soft(length, width, sparse) for length, width in zip(LENGTHS, WIDTHS, strict=True)]
    if sparse:
        inputs = [tensor for one in data for tensor in one.loss_fn_inputs.values()]
        assert sum(tensor.sparse_crow_indices is not None for tensor in inputs) > 2
    result = run.forward_backward(data, "cross_entropy").result()
    total = torch.zeros((), dtype=torch.float64)
    for one, output in zip(data, result.loss_fn_outputs, strict=True):
        targets, weights = (one.loss_fn_inputs[name].to_torch() for name in ("target_tokens", "weights"))
        all_tokens = logprobs_of(peft, one.model_input.to_ints())
        chosen = all_tokens.gather(1, targets.view(len(targets), -1)).view(targets.shape)
        assert output["logprobs"].to_numpy() == pytest.approx(chosen.detach().float().numpy(), abs=1e-6)
        total = total - (weights.double() * chosen).sum()
    total.backward()
    assert result.metrics["loss:sum"] == pytest.approx(total.item(), rel=1e-9)
    parameters = [p for p in peft.parameters() if p.requires_grad]
    norm = torch.nn.utils.clip_grad_norm_(parameters, math.inf).item()
    step = run.optim_step(types.AdamParams(learning_rate=1e-3)).result()
    assert step.metrics["grad_norm:mean"] == pytest.approx(norm, rel=1e-9)


def test_a_loss_of_the_clients_own_gets_all_targets(service: Service) -> None:
    """The reverse Kullback-Leibler divergence over some tokens, whose derivative only the client knows."""
    run, again = service.run(rank=4, seed=3), service.run(rank=4, seed=3)
    data = [soft(length, 4, False) for length in LENGTHS]

    def reverse(_: list[types.Datum], logprobs: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
        assert [one.shape for one in logprobs] == [(length, 4) for length in LENGTHS]
        return torch.stack([(one.exp() * (one + 3.0)).sum() for one in logprobs]).sum(), {}

    run.forward_backward_custom(data, reverse).result()
    scored = again.forward(data, "cross_entropy").result().loss_fn_outputs
    given = []
    for one, output in zip(data, scored, strict=True):
        values = output["logprobs"].to_torch().double().requires_grad_()
        (values.exp() * (values + 3.0)).sum().backward()
        weights = types.TensorData.from_torch(-values.grad.float())
        inputs = {"target_tokens": one.loss_fn_inputs["target_tokens"], "weights": weights}
        given.append(types.Datum(model_input=one.model_input, loss_fn_inputs=inputs))
    again.forward_backward(given, "cross_entropy").result()
    norms = [one.optim_step(types.AdamParams()).result().metrics["grad_norm:mean"] for one in (run, again)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)


def test_targets_that_do_not_fit_fail_their_request_alone(service: Service) -> None:
    run = service.run()

    def with_inputs(**inputs: Tensor) -> types.Datum:
        tensors = {name: types.TensorData.from_torch(tensor) for name, tensor in inputs.items()}
        return types.Datum(model_input=datum(3, 0).model_input, loss_fn_inputs=tensors)

    ids, ones = torch.ones(3, 2, dtype=torch.int64), torch.ones(3, 2)
    bad = [
        ([with_inputs(target_tokens=ids, weights=ones[:, :1])], "cross_entropy", r"weights of shape \[3, 1\]"),
        ([with_inputs(target_tokens=ids[:2], weights=ones[:2])], "cross_entropy", "4 target_tokens for 3 tokens"),
        ([with_inputs(target_tokens=ids * VOCAB, weights=ones)], "cross_entropy", "a token outside 0 to 287"),
        ([with_inputs(target_tokens=ids - 2, weights=ones)], "cross_entropy", "a token outside 0 to 287"),
        ([with_inputs(target_tokens=ids, logprobs=ones, advantages=ones)], "ppo", "ppo has one value for each token"),
        ([with_inputs(target_tokens=ids[:, :0], weights=ones[:, :0])], "cross_entropy", "at least one target"),
        ([with_inputs(target_tokens=ids[None], weights=ones[None])], "cross_entropy", "one or two dimensions"),
    ]
    for data, loss, text in bad:
        with pytest.raises(tinker.TinkerError, match=text):
            run.forward_backward(data, loss).result()
    alone = run.forward([with_inputs(target_tokens=ids, weights=ones)], "cross_entropy").result()
    assert alone.loss_fn_outputs[0]["logprobs"].shape == [3, 2]


PROMPT = [5, 0, 17, 250, 17, 3, 99, 0]


def asked_of(sampler: Any, **asked: Any) -> Any:
    prompt, params = types.ModelInput.from_ints(PROMPT), types.SamplingParams(max_tokens=2, seed=3)
    return sampler.sample(prompt, 1, params, **asked).result()


def test_the_likeliest_tokens_of_a_prompt_and_of_samples(service: Service, plain: Any) -> None:
    sampler = service.client().create_sampling_client(base_model=service.model).result()
    found = asked_of(sampler, include_prompt_logprobs=True, topk_prompt_logprobs=3, topk_sample_logprobs=2)
    (sample,) = found.sequences
    values, ids = logprobs_of(plain, [*PROMPT, *sample.tokens]).detach().topk(3)
    assert found.topk_prompt_logprobs[0] is None
    for place, top in enumerate(found.topk_prompt_logprobs[1:]):
        assert [token for token, _ in top] == ids[place].tolist()
        assert [value for _, value in top] == pytest.approx(values[place].tolist(), abs=1e-5)
    for place, top in enumerate(sample.topk_logprobs, start=len(PROMPT) - 1):
        assert [token for token, _ in top] == ids[place, :2].tolist()
        assert [value for _, value in top] == pytest.approx(values[place, :2].tolist(), abs=1e-5)
    wide = asked_of(sampler, topk_prompt_logprobs=VOCAB + 5).topk_prompt_logprobs
    assert [None if top is None else len(top) for top in wide] == [None, *[VOCAB] * (len(PROMPT) - 1)]


def test_only_the_last_tokens_of_a_prompt(service: Service) -> None:
    sampler = service.client().create_sampling_client(base_model=service.model).result()
    whole = asked_of(sampler, include_prompt_logprobs=True, topk_prompt_logprobs=2)
    last = asked_of(sampler, include_prompt_logprobs=True, topk_prompt_logprobs=2, prompt_logprobs_last_n=3)
    assert last.prompt_logprobs == [None] * 5 + whole.prompt_logprobs[5:]
    assert last.topk_prompt_logprobs == [None] * 5 + whole.topk_prompt_logprobs[5:]
    with pytest.raises(tinker.TinkerError, match="prompt_logprobs_last_n=8 for a prompt of 8 tokens: set 1 to 7"):
        asked_of(sampler, include_prompt_logprobs=True, prompt_logprobs_last_n=8)


@pytest.mark.parametrize("sparse", [False, True])
def test_tokens_that_a_client_names(service: Service, plain: Any, sparse: bool) -> None:
    sampler = service.client().create_sampling_client(base_model=service.model).result()
    ids = torch.full((len(PROMPT) - 1, 6), -1)
    ids[1, 2], ids[3, 0], ids[6, 5], ids[2, 2] = 0, 17, 287, 0
    make = types.TensorData.from_torch_sparse if sparse else types.TensorData.from_torch
    asked = make(ids, -1) if sparse else make(ids)
    found = asked_of(sampler, target_prompt_logprobs=asked).target_prompt_logprobs
    assert (found.sparse_crow_indices is None) == (not sparse)
    expected = logprobs_of(plain, PROMPT)[:-1].detach().gather(1, ids.clamp(0))
    expected = torch.where(ids >= 0, expected, 0.0)
    assert found.to_torch().numpy() == pytest.approx(expected.float().numpy(), abs=1e-5)
    with pytest.raises(tinker.TinkerError, match=r"shape \[3, 6\] for a prompt of 8 tokens: pass \[7, K\]"):
        asked_of(sampler, target_prompt_logprobs=types.TensorData.from_torch(ids[:3]))


def test_a_copy_of_a_sampling_client_in_another_process_samples(service: Service) -> None:
    """It counts its requests from a number above a billion."""
    sampler = service.client().create_sampling_client(base_model=service.model).result()
    copy = pickle.loads(pickle.dumps(sampler))
    with contextlib.closing(copy.holder):  # else it complains of its server, which is gone, in another test
        assert asked_of(copy).sequences[0].tokens == asked_of(sampler).sequences[0].tokens
