"""The service with its real client: one step of every loss, several clients, sampling, and what survives a kill."""

import json
import math
import os
import signal
import urllib.request
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

from tests.processes import children_of
from tests.services import Service, datum, of_loss

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::ResourceWarning"
)

RATIO = ("logprobs", "advantages")
STEPS: list[tuple[str, tuple[str, ...], dict[str, float], types.AdamParams]] = [
    ("cross_entropy", ("weights",), {}, types.AdamParams(learning_rate=3e-3, grad_clip_norm=1.0)),
    ("importance_sampling", RATIO, {}, types.AdamParams(learning_rate=1e-3, beta1=0.8, eps=1e-8)),
    ("ppo", RATIO, {"clip_low_threshold": 0.9}, types.AdamParams(learning_rate=2e-3, weight_decay=0.1)),
    ("cispo", RATIO, {"clip_high_threshold": 1.5}, types.AdamParams(learning_rate=2e-3)),
    ("dro", RATIO, {"beta": 0.2}, types.AdamParams(learning_rate=2e-3)),
]
"""Loss, its inputs and settings, and optimizer settings of every step."""

LENGTHS = (7, 21, 3, 12, 30, 1)


def plain_loss(name: str, settings: dict[str, float], logprobs: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    """The formulas, written a second time."""
    if name == "cross_entropy":
        return -(inputs["weights"] * logprobs).sum()
    advantages, ratio = inputs["advantages"], torch.exp(logprobs - inputs["logprobs"])
    match name:
        case "importance_sampling":
            return -(ratio * advantages).sum()
        case "ppo":
            bounded = torch.clip(ratio, settings["clip_low_threshold"], 1.2)
            return torch.maximum(-ratio * advantages, -bounded * advantages).sum()
        case "cispo":
            return -(torch.clip(ratio, 0, settings["clip_high_threshold"]).detach() * logprobs * advantages).sum()
    gap = logprobs - inputs["logprobs"]
    return (0.5 * settings["beta"] * gap * gap - logprobs * advantages).sum()


def train_both(run: Any, plain: Any) -> None:
    """Trains a run and a plain model by every loss, and compares losses, log-probabilities and norms."""
    parameters = [p for p in plain.parameters() if p.requires_grad]
    matrices, norms = ([p for p in parameters if (p.ndim > 1) == is_matrix] for is_matrix in (True, False))
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": norms}])
    data = [datum(length, seed) for seed, length in enumerate(LENGTHS)]
    for name, inputs, settings, adam in STEPS:
        of_calls = [[of_loss(d, *inputs) for d in part] for part in (data[:4], data[4:])]
        sent = [run.forward_backward(part, name, settings or None) for part in of_calls]
        step = run.optim_step(adam)
        found = [future.result() for future in sent]
        total = 0.0
        outputs = [output["logprobs"] for result in found for output in result.loss_fn_outputs]
        for one, output in zip(data, outputs, strict=True):
            values = {key: torch.tensor(value.to_numpy()) for key, value in one.loss_fn_inputs.items()}
            tokens = torch.tensor(one.model_input.to_ints())
            logits = plain(tokens[None]).logits[0]
            logprobs = logits.log_softmax(-1).gather(-1, values.pop("target_tokens")[:, None])[:, 0]
            loss = plain_loss(name, settings, logprobs, {key: value.double() for key, value in values.items()})
            loss.backward()
            total += loss.item()
            assert np.abs(output.to_numpy() - logprobs.detach().float().numpy()).max() < 1e-6
        norm = torch.nn.utils.clip_grad_norm_(parameters, adam.grad_clip_norm or math.inf).item()
        for group, decay in zip(optimizer.param_groups, (adam.weight_decay, 0.0), strict=True):  # norms do not decay
            betas = (adam.beta1, adam.beta2)
            group.update(lr=adam.learning_rate, betas=betas, eps=adam.eps, weight_decay=decay)
        optimizer.step()
        optimizer.zero_grad()
        assert sum(result.metrics["loss:sum"] for result in found) == pytest.approx(total, rel=1e-9)
        assert step.result().metrics == {"grad_norm:mean": pytest.approx(norm, rel=1e-9), "skipped:max": 0.0}


def test_every_loss_trains_as_peft_and_torch_do(service: Service, model: Path) -> None:
    run = service.run(rank=4, seed=3)
    begun = service.folder_of(run.save_state("begun").result().path)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    peft: Any = PeftModel.from_pretrained(base, begun, is_trainable=True)
    peft.to(torch.float64)
    train_both(run, peft)
    ended = service.folder_of(run.save_state("ended").result().path)
    again = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    theirs = dict(PeftModel.from_pretrained(again, ended).to(torch.float64).named_parameters())
    moved = 0.0
    for name, parameter in peft.named_parameters():
        assert (parameter - theirs[name]).abs().max() < 1e-9, name
        moved = max(moved, (parameter.detach()).abs().max().item() if "lora_B" in name else 0.0)
    assert moved > 1e-3


def numbers(run: Any, seed: int, num_steps: int) -> list[Any]:
    """What a client gets to know in some steps, one after the other."""
    found: list[Any] = []
    for step in range(num_steps):
        data = [of_loss(datum(length, seed + 10 * step + i), *RATIO) for i, length in enumerate(LENGTHS[:3])]
        futures = [
            run.forward_backward(data, "importance_sampling"),
            run.optim_step(types.AdamParams(learning_rate=1e-2)),
        ]
        results = [future.result() for future in futures]
        found.append((results[0].metrics, results[1].metrics))
        found += [output["logprobs"].to_numpy().tolist() for output in results[0].loss_fn_outputs]
    return found


def test_two_clients_at_once_get_what_they_get_alone(service: Service) -> None:
    kinds = [{"rank": 3, "seed": 1}, {"rank": 8, "seed": 2, "train_mlp": False}]
    alone = [numbers(service.run(**kind), 100 * i, 3) for i, kind in enumerate(kinds)]
    runs = [service.run(**kind) for kind in kinds]
    together: list[list[Any]] = [[], []]
    for step in range(3):
        futures = []
        for i, run in enumerate(runs):
            data = [of_loss(datum(n, 100 * i + 10 * step + j), *RATIO) for j, n in enumerate(LENGTHS[:3])]
            futures.append(run.forward_backward(data, "importance_sampling"))
        steps = [run.optim_step(types.AdamParams(learning_rate=1e-2)) for run in runs]
        for i in (0, 1):
            result = futures[i].result()
            together[i].append((result.metrics, steps[i].result().metrics))
            together[i] += [output["logprobs"].to_numpy().tolist() for output in result.loss_fn_outputs]
    assert together == alone


def test_clients_that_wait_meet_in_one_pass_and_get_what_they_get_alone(service: Service) -> None:
    asked = {"a": ("cross_entropy", ("weights",), (7, 21)), "b": ("ppo", RATIO, (30, 4, 9))}
    data = {
        name: [of_loss(datum(n, 300 + n), *inputs) for n in lengths] for name, (_, inputs, lengths) in asked.items()
    }

    def two_runs() -> dict[str, Any]:
        return {name: service.run(rank=rank, seed=rank) for name, rank in (("a", 2), ("b", 4))}

    def trained(runs: dict[str, Any], busy: Any) -> list[Any]:
        if busy is not None:
            # Both wait behind five more passes, which are there when the first ends.
            rows = [of_loss(datum(60, n), "weights") for n in range(100)]
            passes = [busy.forward(rows, "cross_entropy") for _ in range(6)]
            passes[0].result()
        sent = {name: run.forward_backward(data[name], asked[name][0]) for name, run in runs.items()}
        steps = [run.optim_step(types.AdamParams(learning_rate=1e-2)) for run in runs.values()]
        return [(sent[name].result(), step.result().metrics) for name, step in zip(runs, steps, strict=True)]

    alone = [trained({name: run}, None)[0] for name, run in two_runs().items()]
    before = num_joint(service)
    together = trained(two_runs(), service.run(rank=8))
    assert num_joint(service) > before
    for (expected, of_step), (result, metrics) in zip(alone, together, strict=True):
        assert result.metrics["loss:sum"] == pytest.approx(expected.metrics["loss:sum"], rel=1e-9)
        assert metrics["grad_norm:mean"] == pytest.approx(of_step["grad_norm:mean"], rel=1e-9)


def num_joint(service: Service) -> int:
    """Passes of several runs, as the page says."""
    with urllib.request.urlopen(f"{service.url}/state?key={service.key}") as state:
        found: int = json.load(state)["numbers"]["passes of several runs"]
    return found


def test_a_sampler_keeps_its_weights_and_its_log_probabilities_are_those_of_training(service: Service) -> None:
    run = service.run(rank=4, seed=5)
    numbers(run, 7, 2)
    sampler = run.save_weights_and_get_sampling_client().result()
    prompt = list(range(20, 31))
    asked = {"prompt": types.ModelInput.from_ints(prompt), "num_samples": 3}
    params = types.SamplingParams(max_tokens=9, seed=11, temperature=1.0)
    before = sampler.sample(sampling_params=params, **asked).result().sequences
    next_seed = types.SamplingParams(max_tokens=9, seed=12, temperature=1.0)
    others = sampler.sample(sampling_params=next_seed, **asked).result().sequences
    assert {tuple(s.tokens) for s in before}.isdisjoint(tuple(s.tokens) for s in others)
    for sequence in before:
        whole = prompt + sequence.tokens
        scored = sampler.compute_logprobs(types.ModelInput.from_ints(whole)).result()
        assert scored[0] is None
        assert scored[len(prompt) :] == pytest.approx(sequence.logprobs, abs=1e-5)
        targets = types.Datum(
            model_input=types.ModelInput.from_ints(whole[:-1]),
            loss_fn_inputs={"target_tokens": whole[1:], "weights": [1.0] * (len(whole) - 1)},
        )
        output = run.forward([targets], "cross_entropy").result().loss_fn_outputs[0]["logprobs"]
        assert output.to_numpy() == pytest.approx(scored[1:], abs=1e-5)
        assert (sequence.stop_reason == "stop") == (len(sequence.tokens) < 9 or sequence.tokens[-1] == 2)
    numbers(run, 8, 2)
    assert [s.tokens for s in sampler.sample(sampling_params=params, **asked).result().sequences] == [
        s.tokens for s in before
    ]
    newer = run.save_weights_and_get_sampling_client().result()
    after = newer.sample(sampling_params=params, **asked).result().sequences
    assert [s.logprobs for s in after] != [s.logprobs for s in before]
    named = run.save_weights_for_sampler("named").result().path
    of_path = service.client().create_sampling_client(model_path=named).result()
    assert [s.logprobs for s in of_path.sample(sampling_params=params, **asked).result().sequences] == [
        pytest.approx(s.logprobs, abs=1e-6) for s in after
    ]
    stop = types.SamplingParams(max_tokens=9, seed=11, stop=[before[0].tokens[0]])
    stopped = sampler.sample(sampling_params=stop, **asked).result().sequences[0]
    assert (stopped.tokens, stopped.stop_reason) == (before[0].tokens[:1], "stop")


def test_a_loss_of_the_clients_own_trains_by_its_derivatives(service: Service) -> None:
    data = [of_loss(datum(length, length), "weights") for length in LENGTHS[:3]]

    def squares(_: list[types.Datum], logprobs: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
        return torch.stack([(one**2).sum() for one in logprobs]).sum(), {}

    custom, given = service.run(seed=4), service.run(seed=4)
    custom.forward_backward_custom(data, squares).result()
    logprobs = [out["logprobs"].to_numpy() for out in given.forward(data, "cross_entropy").result().loss_fn_outputs]
    weighted = [
        types.Datum(
            model_input=one.model_input,
            loss_fn_inputs={"target_tokens": one.loss_fn_inputs["target_tokens"], "weights": (-2 * values).tolist()},
        )
        for one, values in zip(data, logprobs, strict=True)
    ]
    given.forward_backward(weighted, "cross_entropy").result()
    norms = [run.optim_step(types.AdamParams()).result().metrics["grad_norm:mean"] for run in (custom, given)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)
    assert norms[0] > 1


def test_weights_that_are_saved_again_are_those_that_are_sampled_from(service: Service) -> None:
    run = service.run(seed=6)
    found = []
    for seed in (70, 80):
        numbers(run, seed, 1)
        path = run.save_weights_for_sampler("again").result().path
        sampler = service.client().create_sampling_client(model_path=path).result()
        scored = sampler.compute_logprobs(types.ModelInput.from_ints(list(range(9)))).result()
        asked = types.SamplingParams(max_tokens=4, seed=1)
        sampled = sampler.sample(types.ModelInput.from_ints(list(range(9))), 1, asked).result().sequences[0]
        found.append((scored, sampled.logprobs))
        if seed == 70:
            first = sampler
    with pytest.raises(Exception, match="deleted or overwritten"):
        first.compute_logprobs(types.ModelInput.from_ints([1, 2])).result()
    assert found[0][0] != found[1][0]
    assert found[0][1] != found[1][1]


def test_what_is_not_served_fails_its_request_alone(service: Service) -> None:
    run = service.run()
    good = of_loss(datum(5, 0), "weights")
    bad = [
        (lambda: run.forward_backward([good], "gspo"), "use one of cross_entropy"),
        (lambda: run.forward_backward([good], "ppo"), "datum 0 has no logprobs"),
        (lambda: run.forward_backward([of_loss(datum(80, 0), "weights")], "cross_entropy"), "80 tokens"),
        (lambda: run.forward_backward([good], "cross_entropy", {"beta": 1.0}), "settings none"),
        (lambda: run.load_state("tinker://a/weights/b"), "unknown saved weights"),
    ]
    sent = [(ask(), text) for ask, text in bad]
    last = run.forward_backward([good], "cross_entropy")
    for future, text in sent:
        with pytest.raises(tinker.TinkerError, match=text):
            future.result()
    assert math.isfinite(last.result().metrics["loss:sum"])
    with pytest.raises(tinker.TinkerError, match="a forward_backward before this optim_step failed"):
        run.optim_step(types.AdamParams()).result()
    assert run.optim_step(types.AdamParams()).result().metrics == {"skipped:max": 1.0, "grad_norm:mean": 0.0}
    run.forward_backward([of_loss(datum(5, 0, weights=[3e38] * 5), "weights")], "cross_entropy").result()
    assert run.optim_step(types.AdamParams()).result().metrics == {"skipped:max": 1.0}
    run.forward_backward([good], "cross_entropy").result()
    too_large, after = run.optim_step(types.AdamParams(learning_rate=1e39)), run.optim_step(types.AdamParams())
    with pytest.raises(tinker.TinkerError, match="adam_params.learning_rate: "):
        too_large.result()
    assert after.result().metrics["skipped:max"] == 0
    in_the_way = service.key_file.parent / "weights" / run.get_info().model_id
    in_the_way.parent.mkdir(exist_ok=True)
    in_the_way.write_text("")
    with pytest.raises(tinker.TinkerError, match="the weights cannot be saved"):
        run.save_state("one").result()
    in_the_way.unlink()
    assert run.save_state("one").result().path


def test_runs_go_on_from_saved_weights_after_a_rank_and_after_the_server_is_killed(model: Path, tmp_path: Path) -> None:
    with Service(tmp_path, model) as service:
        run = service.run(rank=5, seed=9)
        undisturbed = numbers(run, 50, 3)
        run = service.run(rank=5, seed=9)
        numbers(run, 50, 1)
        path = run.save_state("one").result().path
        numbers(run, 999, 1)
        _, rank = children_of(service.job.process.pid)
        os.kill(rank, signal.SIGKILL)
        for ask in (lambda: run.forward([of_loss(datum(5, 0), "weights")], "cross_entropy"),) * 2:
            with pytest.raises(tinker.TinkerError, match=f"resume from {path}"):
                ask().result()
        with pytest.raises(tinker.TinkerError, match=f"resume from {path}"):
            run.optim_step(types.AdamParams()).result()
        resumed = service.client().create_training_client_from_state_with_optimizer(path).result()
        after_rank = numbers(resumed, 60, 2)
        assert after_rank == undisturbed[len(undisturbed) // 3 :]
        os.kill(service.job.process.pid, signal.SIGKILL)
        service.job.process.wait()
    with Service(tmp_path, model) as service:
        resumed = service.client().create_training_client_from_state_with_optimizer(path).result()
        assert numbers(resumed, 60, 2) == after_rank
        os.kill(service.job.process.pid, signal.SIGINT)
        assert service.job.finish() == 0
        stopped = service.job.stdout.split("saved ")[1].split()[0]
        assert service.folder_of(stopped).is_dir()
