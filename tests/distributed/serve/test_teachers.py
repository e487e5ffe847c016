"""A further base model of a service, which scores prompts: equal to plain transformers, beside runs that train."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tinker
import torch
from tinker import types
from transformers import AutoModelForCausalLM

from automodel_rl.quickstart.model import train_tokenizer
from tests.services import VOCAB, Service, datum, of_loss, write_model
from tests.tiny import save_tiny_model

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::ResourceWarning"
)

PROMPTS = ([5, 0, 17, 250, 17, 3], [9], [1, 2, 3, 4, 299])
"""The last has a token that only the teacher has."""


@pytest.fixture(name="folders", scope="module")
def make_folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("teachers")
    write_model(folder / "base" / "model")
    torch.manual_seed(5)
    save_tiny_model(folder / "teacher", num_layers=3, dtype=torch.float64, vocab_size=VOCAB + 20)
    train_tokenizer(["1 + 2 is 3", "4 + 5 is 9"], VOCAB).save_pretrained(folder / "teacher")
    return folder / "base" / "model", folder / "teacher"


@pytest.fixture(name="service", scope="module", params=["device", "host"])
def make_service(
    request: pytest.FixtureRequest, folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    base, teacher = folders
    teachers = {"a/teacher": {"path": str(teacher), "between": request.param}}
    with Service(tmp_path_factory.mktemp("service"), base, teachers=teachers) as service:
        yield service


def test_a_teacher_scores_prompts_as_plain_transformers_do(service: Service, folders: tuple[Path, Path]) -> None:
    client = service.client()
    listed = {one.model_name: one for one in client.get_server_capabilities().supported_models}
    assert {name: (one.trainable, one.sampleable) for name, one in listed.items()} == {
        service.model: (True, True),
        "a/teacher": (False, True),
    }
    plain = AutoModelForCausalLM.from_pretrained(folders[1], dtype=torch.float64)
    run = service.run()
    teacher = client.create_sampling_client(base_model="a/teacher").result()
    assert teacher.get_base_model() == "a/teacher"
    run.forward_backward([of_loss(datum(9, 1), "weights")], "cross_entropy").result()
    for prompt in PROMPTS:
        expected = plain(torch.tensor([prompt])).logits[0].detach().log_softmax(-1)
        tokens = types.ModelInput.from_ints(prompt)
        own = expected[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
        scored = teacher.compute_logprobs(tokens).result()
        assert scored == [None, *(pytest.approx(value, abs=1e-5) for value in own.tolist())]
        asked: dict[str, Any] = {"include_prompt_logprobs": True, "topk_prompt_logprobs": 3}
        found = teacher.sample(tokens, 1, types.SamplingParams(max_tokens=1), **asked).result()
        for top, values in zip(found.topk_prompt_logprobs[1:], expected[:-1], strict=True):
            best = values.topk(3)
            assert [token for token, _ in top] == best.indices.tolist()
            assert [value for _, value in top] == pytest.approx(best.values.tolist(), abs=1e-5)
        (sequence,) = found.sequences
        assert sequence.tokens == [int(expected[-1].argmax())]
        assert sequence.logprobs == pytest.approx([float(expected[-1].max())], abs=1e-5)
    assert run.optim_step(types.AdamParams()).result().metrics["grad_norm:mean"] > 0


def test_what_a_teacher_does_not_do_is_refused(service: Service) -> None:
    client = service.client()
    teacher = client.create_sampling_client(base_model="a/teacher").result()
    prompt = types.ModelInput.from_ints([1, 2, 3])
    with pytest.raises(tinker.TinkerError, match="'a/teacher' only scores prompts here: request max_tokens=1"):
        teacher.sample(prompt, 1, types.SamplingParams(max_tokens=2)).result()
    with pytest.raises(tinker.TinkerError, match="base_model='a/teacher' only scores prompts here"):
        client.create_lora_training_client(base_model="a/teacher", rank=4).result()
    with pytest.raises(tinker.TinkerError, match="and 'a/teacher' to score prompts: request that"):
        client.create_sampling_client(base_model="another").result()
    saved = service.run().save_weights_for_sampler("one").result().path
    with pytest.raises(tinker.TinkerError, match="remove base_model"):
        client.create_sampling_client(base_model="a/teacher", model_path=saved).result()
