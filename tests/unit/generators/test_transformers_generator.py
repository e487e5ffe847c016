"""In-process generation: what it samples, and what it says of it, against transformers one prompt at a time."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from automodel_rl.data.stop_tokens import completion_stop_ids
from automodel_rl.errors import WeightSyncError
from automodel_rl.families.known import checkpoint_family
from automodel_rl.generator_messages import Request, Sampling
from automodel_rl.generators.model_copy import ModelCopy
from automodel_rl.generators.protocol import Completion
from automodel_rl.generators.transformers_generator import TransformersGenerator, TransformersSettings
from automodel_rl.quickstart.model import train_tokenizer
from tests.tiny import save_tiny_model
from tests.tiny_families import SIZES, VOCAB
from tests.weights import receive

PROMPTS = [[5, 6, 7], [9], [4, 4, 8, 1, 2, 3, 3, 60], [11, 12]]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return train_tokenizer(["a b c"], 300)


@pytest.fixture(params=["qwen3", "qwen3_moe", "gemma2", "gpt_oss"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> PreTrainedModel:
    # transformers' written-out attention casts to float32, in which float64's mask value is infinite.
    dtype = torch.float32 if request.param in ("gemma2", "gpt_oss") else torch.float64
    save_tiny_model(tmp_path, request.param, tied=request.param == "gemma2", dtype=dtype)
    experts = {"experts_implementation": "eager"} if request.param in ("qwen3_moe", "gpt_oss") else {}
    return AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype, attn_implementation="eager", **experts).eval()


def weights_on_disk(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def own_ends(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    return tuple(completion_stop_ids(Path(model.config._name_or_path), model.config, tokenizer))


def make_generator(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, capture_routes: bool = False, **options: Any
) -> TransformersGenerator:
    writing = TransformersSettings(
        **{"tokenizer": tokenizer, "batch_size": 3, "ends": own_ends(model, tokenizer), **options}
    )
    names = weights_on_disk(Path(model.config._name_or_path))
    copy = ModelCopy(
        model.config,
        checkpoint_family(model.config, names),
        model.dtype,
        torch.device("cpu"),
        capture_routes=capture_routes,
    )
    generator = TransformersGenerator(copy, writing)
    receive(generator.receiver, weights_on_disk(Path(model.config._name_or_path)))
    return generator


@torch.no_grad()
def score(model: PreTrainedModel, prompt: list[int], completion: Completion, temperature: float) -> Tensor:
    ids = torch.tensor([[*prompt, *completion.token_ids]])
    logits = model(ids).logits[0, len(prompt) - 1 : -1].double()
    logprobs = (logits / temperature).log_softmax(-1)
    return logprobs.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]


def test_it_reports_the_logprobs_of_what_it_sampled(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    generator = make_generator(model, tokenizer)
    requests = [Request(prompt, seed, Sampling(12, 0.7)) for seed, prompt in enumerate(PROMPTS)]
    tolerance = 2e-6 if model.dtype == torch.float64 else 1e-4  # rotary tables are float32
    for request, completion in zip(requests, generator.generate(requests), strict=True):
        assert len(completion.logprobs) == len(completion.token_ids)
        assert completion.finish == ("length" if len(completion.token_ids) == 12 else "stop")
        expected = score(model, request.prompt, completion, 0.7)
        actual = torch.tensor(completion.logprobs, dtype=torch.float64)
        torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("family", SIZES)
def test_completions_of_any_family_that_end_apart_go_on_alone(
    family: str, tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Prompts of unequal lengths, one batch, and limits that leave fewer rows token by token."""
    # With a bias, which no published model has, transformers' own convolution sees pads.
    plain = {"conv_bias": False} if family == "lfm2" else {}
    save_tiny_model(tmp_path, family, dtype=torch.float32, **plain)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    limits = (9, 2, 5, 7)
    requests = [
        Request(prompt, seed, Sampling(limit, stop_token_ids=()))
        for seed, (prompt, limit) in enumerate(zip(PROMPTS, limits, strict=True))
    ]
    completions = make_generator(model, tokenizer, batch_size=4).generate(requests)
    for request, limit, completion in zip(requests, limits, completions, strict=True):
        assert len(completion.token_ids) == limit
        actual = torch.tensor(completion.logprobs, dtype=torch.float64)
        torch.testing.assert_close(actual, score(model, request.prompt, completion, 1.0), rtol=0, atol=1e-3)


@pytest.mark.parametrize(("top_p", "top_k"), [(0.9, 0), (1.0, 1), (0.7, 5), (0.01, 0), (1.0, 10_000)])
@pytest.mark.parametrize("model", ["qwen3"], indirect=True)
def test_tokens_are_left_out_as_transformers_leaves_them_out(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, top_p: float, top_k: int
) -> None:
    warpers = [TemperatureLogitsWarper(0.7)]
    warpers += [TopKLogitsWarper(top_k)] if top_k else []
    warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    requests = [Request(prompt, seed, Sampling(12, 0.7, top_p, top_k)) for seed, prompt in enumerate(PROMPTS)]
    whole = [Request(prompt, seed, Sampling(12, 0.7)) for seed, prompt in enumerate(PROMPTS)]
    generator = make_generator(model, tokenizer)
    truncated = generator.generate([*requests, *whole])
    assert [c.token_ids for c in truncated[4:]] == [c.token_ids for c in generator.generate(whole)]
    for request, completion in zip(requests, truncated, strict=False):
        ids = [*request.prompt]
        for token, logprob in zip(completion.token_ids, completion.logprobs, strict=True):
            with torch.no_grad():
                logits = model(torch.tensor([ids])).logits[:, -1].float()
            for warper in warpers:
                logits = warper(None, logits)
            assert logits.log_softmax(1)[0, token].item() == pytest.approx(logprob, abs=1e-4)
            ids.append(token)


@pytest.mark.parametrize("model", ["qwen3"], indirect=True)
def test_tokens_of_the_user_end_a_completion_and_stay_in_it(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    requests = [Request(prompt, seed, Sampling(12, 1.0)) for seed, prompt in enumerate(PROMPTS)]
    whole = make_generator(model, tokenizer).generate(requests)
    asked = tuple({completion.token_ids[3] for completion in whole if len(completion.token_ids) > 3})
    for completion, cut in zip(
        whole,
        make_generator(model, tokenizer, ends=(*own_ends(model, tokenizer), *asked)).generate(requests),
        strict=True,
    ):
        end = next((n for n, token in enumerate(completion.token_ids) if token in asked), len(completion.token_ids) - 1)
        assert cut.token_ids == completion.token_ids[: end + 1]
        assert cut.finish == ("stop" if cut.token_ids[-1] in asked else completion.finish)


@pytest.mark.parametrize("model", ["qwen3"], indirect=True)
def test_completions_of_a_batch_are_told_before_the_next_batch_is_written(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    told: list[object] = []
    requests = [Request(prompt, seed, Sampling(12, 0.7)) for seed, prompt in enumerate(PROMPTS)]
    generator = make_generator(model, tokenizer)
    written = generator.generate(requests, lambda: told.append("token"), lambda *finished: told.append(finished))
    finished = [event for event in told if event != "token"]
    assert sorted(place for place, _ in finished) == [0, 1, 2, 3]
    assert all(written[place] is completion for place, completion in finished)
    assert "token" in told[told.index(finished[2]) : told.index(finished[3])]


@pytest.mark.parametrize("model", ["qwen3_moe", "gpt_oss"], indirect=True)
def test_it_says_which_experts_prompt_and_completion_went_to(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    generator = make_generator(model, tokenizer, capture_routes=True)
    model.config.eos_token_id = None
    requests = [Request(prompt, seed, Sampling(12, 0.7)) for seed, prompt in enumerate(PROMPTS)]
    chosen: list[Tensor] = []
    for layer in model.model.layers:
        router = layer.mlp.router if "router" in dict(layer.mlp.named_children()) else layer.mlp.gate
        router.register_forward_hook(lambda _module, _input, output: chosen.append(output[2]))
    for request, completion in zip(requests, generator.generate(requests), strict=True):
        chosen.clear()
        with torch.no_grad():
            model(torch.tensor([[*request.prompt, *completion.token_ids]]))
        expected = torch.stack(chosen, 1)[:-1]  # the last token is never computed
        assert torch.equal(torch.from_numpy(completion.routes).long(), expected)


@pytest.fixture
def dense(tmp_path: Path) -> PreTrainedModel:
    save_tiny_model(tmp_path)
    return AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64).eval()


def test_a_completion_depends_on_its_own_seed_only(dense: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    generator = make_generator(dense, tokenizer)
    requests = [Request(prompt, seed, Sampling(12, 1.0)) for seed, prompt in enumerate(PROMPTS)]
    together = generator.generate(requests)
    alone = [generator.generate([request])[0] for request in reversed(requests)][::-1]
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]
    others = generator.generate([Request(r.prompt, r.seed + 100, Sampling(12, 1.0)) for r in requests])
    assert [c.token_ids for c in together] != [c.token_ids for c in others]


def test_samples_follow_the_distribution(dense: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    generator = make_generator(dense, tokenizer, batch_size=4000)
    drawn = generator.generate([Request([5, 6, 7], seed, Sampling(1, 1.5)) for seed in range(4000)])
    with torch.no_grad():
        expected = (dense(torch.tensor([[5, 6, 7]])).logits[0, -1] / 1.5).softmax(-1)
    counts = torch.bincount(torch.tensor([c.token_ids[0] for c in drawn]), minlength=VOCAB)
    likely = expected * 4000 > 20
    z = (counts - expected * 4000) / (expected * (1 - expected) * 4000).sqrt()
    assert z[likely].abs().max() < 4.5


def test_temperature_0_takes_the_likeliest_token(dense: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    generator = make_generator(dense, tokenizer)
    for prompt in PROMPTS:
        (completion,) = generator.generate([Request(prompt, 0, Sampling(12, 0.0))])
        written = dense.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0, len(prompt) :]
        assert completion.token_ids == written.tolist()


def test_stop_tokens_and_texts_end_a_completion(dense: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    (free,) = make_generator(dense, tokenizer).generate([Request([5, 6, 7], 1, Sampling(12, 1.0))])
    assert len(free.token_ids) == 12
    text = tokenizer.decode(free.token_ids[4])
    (stopped,) = make_generator(dense, tokenizer).generate([Request([5, 6, 7], 1, Sampling(12, stop=(text,)))])
    assert stopped.finish == "stop"
    assert stopped.token_ids == free.token_ids[: len(stopped.token_ids)]
    assert text in tokenizer.decode(stopped.token_ids)
    assert len(stopped.token_ids) <= 5
    (long,) = make_generator(dense, tokenizer).generate([Request([5, 6, 7], 1, Sampling(60, 1.0))])
    text = tokenizer.decode(long.token_ids[2:50])  # longer than any window of a fixed size
    (stopped,) = make_generator(dense, tokenizer).generate([Request([5, 6, 7], 1, Sampling(60, stop=(text,)))])
    assert (stopped.finish, stopped.token_ids) == ("stop", long.token_ids[:50])
    dense.config.eos_token_id = free.token_ids[2]
    (ended,) = make_generator(dense, tokenizer).generate([Request([5, 6, 7], 1, Sampling(12, 1.0))])
    assert ended.finish == "stop"
    assert ended.token_ids[-1] == free.token_ids[2]
    assert len(ended.token_ids) <= 3


def test_completions_of_one_batch_have_limits_and_ends_of_their_own(
    dense: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    generator = make_generator(dense, tokenizer, batch_size=4)
    (free,) = generator.generate([Request([5, 6, 7], 1, Sampling(12))])
    ways = [Sampling(12), Sampling(3), Sampling(12, stop_token_ids=(free.token_ids[5],)), Sampling(12, 0.5)]
    together = generator.generate([Request([5, 6, 7], 1, way) for way in ways])
    alone = [generator.generate([Request([5, 6, 7], 1, way)])[0] for way in ways]
    assert [one.token_ids for one in together] == [one.token_ids for one in alone]
    assert [one.finish for one in together[:3]] == ["length", "length", "stop"]
    assert together[1].token_ids == free.token_ids[:3]
    assert together[2].token_ids == free.token_ids[: free.token_ids.index(free.token_ids[5]) + 1]
    dense.config.eos_token_id = free.token_ids[2]
    ends_of_its_own = make_generator(dense, tokenizer).generate(
        [Request([5, 6, 7], 1, Sampling(12, stop_token_ids=()))]
    )
    assert ends_of_its_own[0].token_ids == free.token_ids, "the model's own end does not count then"


def test_without_complete_weights_it_does_not_generate(
    dense: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    generator = make_generator(dense, tokenizer)
    generator.receiver.begin()
    with pytest.raises(WeightSyncError, match="no complete weights"):
        generator.generate([Request([5], 0, Sampling(12, 1.0))])
    generator.receiver.commit(2)
    (completion,) = generator.generate([Request([5], 0, Sampling(12, 1.0))])
    assert completion.versions == (2, 2)


def test_weights_that_come_in_the_midst_of_a_completion_are_those_of_the_next_token(
    dense: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    """The first tokens are the old weights', the others are scored by the new ones, over the old keys and values."""
    generator = make_generator(dense, tokenizer)
    old = weights_on_disk(Path(dense.config._name_or_path))
    new = {
        name: tensor + (0.05 if name == "lm_head.weight" else 0.0) * tensor.roll(1, 0) for name, tensor in old.items()
    }
    request, tokens = Request([5, 6, 7], 3, Sampling(12, 1.0)), 0
    (before,) = generator.generate([request])

    def load() -> None:
        nonlocal tokens
        tokens += 1
        if tokens == 5:
            receive(generator.receiver, new, version=2)

    (across,) = generator.generate([request], between_tokens=load)
    assert across.versions == (1, 2)
    assert across.logprobs[:4] == before.logprobs[:4]
    assert across.logprobs[4:] != before.logprobs[4:]
    (after,) = generator.generate([request])
    assert after.versions == (2, 2)
    if after.token_ids[:4] == across.token_ids[:4]:  # only the head differs, so keys and values do not
        assert after.logprobs[4] == pytest.approx(across.logprobs[4], abs=1e-12)
