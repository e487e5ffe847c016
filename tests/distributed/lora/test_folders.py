"""Folders of adapters: training goes on from them, or they are merged, as PEFT does it in float64."""

import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path

import peft
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from automodel_rl.batch import pack_microbatch
from automodel_rl.cli import main
from automodel_rl.config import ModelConfig, OptimizerConfig, ParallelConfig
from automodel_rl.config.model import LoraConfig
from automodel_rl.engine import Engine
from automodel_rl.errors import InputError
from automodel_rl.lora.experts import STACKED
from automodel_rl.losses import sft_loss
from automodel_rl.model.handle import ModelHandle
from automodel_rl.optimizers import OPTIMIZERS
from automodel_rl.tools.export import export
from automodel_rl.tools.verify.one_process import OneProcess, Training
from tests.distributed.lora.test_lora import sequences_of
from tests.rank_pool import RankPool
from tests.tiny import make_sequences, save_tiny_model

STEPS = 2

KINDS: dict[str, dict] = {
    "two names": {"target_modules": ["q_proj", "o_proj"], "lora_alpha": 8},
    "all linear, rslora": {"target_modules": "all-linear", "use_rslora": True},
    "some layers": {"target_modules": ["v_proj"], "layers_to_transform": [1, 2]},
    "a pattern": {"target_modules": r".*layers\.[02]\..*o_proj"},
    "of experts": {"target_modules": ["k_proj"], "target_parameters": [f"mlp.experts.{name}" for name in STACKED]},
    "of half the experts": {"target_parameters": ["experts.gate_up_proj"], "target_modules": ["o_proj"]},
    "of one layer's experts": {
        "target_parameters": [f"model.layers.1.mlp.experts.{name}" for name in STACKED],
        "target_modules": ["v_proj"],
    },
    "of other experts in each layer": {
        "target_parameters": ["layers.0.mlp.experts.gate_up_proj", "layers.1.mlp.experts.down_proj"],
        "target_modules": ["v_proj"],
    },
    "of experts by bare names": {"target_parameters": [*STACKED], "target_modules": ["v_proj"]},
    "lengths of rows": {"target_modules": ["q_proj", "o_proj"], "lora_alpha": 8, "use_dora": True},
    "head and embedding whole": {"target_modules": ["k_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
}
"""Configs of adapters that PEFT itself makes and writes."""

DENSE = [kind for kind in KINDS if "experts" not in kind and kind != "lengths of rows"]


def save_adapters_of_peft(folder: Path, family: str, kind: str) -> Path:
    """Saves a checkpoint and lively adapters for it; the folder of the adapters."""
    save_tiny_model(folder / "base", family)
    words = Tokenizer(WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="[UNK]").save_pretrained(folder / "base")
    model = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float64)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, task_type="CAUSAL_LM", **KINDS[kind]))
    generator = torch.Generator().manual_seed(1)
    for parameter in (parameter for parameter in adapted.parameters() if parameter.requires_grad):
        torch.nn.init.normal_(parameter, std=0.1, generator=generator)
    adapted.save_pretrained(folder / "adapters")
    return folder / "adapters"


def reference_of(folder: Path) -> OneProcess:
    """One process that goes on training the adapters with PEFT."""
    reference = OneProcess(folder / "base", torch.float64, Training(lr=1e-2), torch.device("cpu"))
    reference.model = PeftModel.from_pretrained(reference.model, folder / "adapters", is_trainable=True)
    reference.optimizers = OPTIMIZERS["adamw"].reference(
        reference.model, reference.training.config, reference.run_examples
    )
    return reference


def train_on(folder: Path, parallel: ParallelConfig) -> list[float]:
    handle = ModelHandle.from_pretrained(ModelConfig(path=str(folder / "adapters"), dtype="float64"), parallel)
    engine = Engine(handle, OptimizerConfig(lr=1e-2, max_grad_norm=0.5, decay="constant"))
    losses = []
    for step in range(STEPS):
        microbatches = [pack_microbatch(sequences_of(step, handle.layout.data_rank, number)) for number in range(2)]
        losses.append(engine.train_step(microbatches, sft_loss).loss)
    handle.save_pretrained(folder / "trained")
    return losses


@pytest.mark.parametrize(
    ("kind", "family", "sizes"),
    [
        *((kind, "qwen3", {"pp": 2} if number % 2 else {"dp_shard": 2}) for number, kind in enumerate(DENSE)),
        ("head and embedding whole", "qwen3", {"pp": 2}),
        ("lengths of rows", "qwen2", {"dp_shard": 2}),
        ("lengths of rows", "qwen3", {"pp": 2}),
        ("two names", "llama", {"cp": 2}),
        ("of experts", "qwen3_moe", {"dp_shard": 2, "ep": 2}),
        ("of experts", "gpt_oss", {"pp": 2}),
        ("of half the experts", "qwen3_moe", {"cp": 2, "ep": 2}),
        ("of one layer's experts", "qwen3_moe", {"pp": 2}),
        ("of other experts in each layer", "qwen3_moe", {"cp": 2}),
        ("of experts by bare names", "gpt_oss", {"cp": 2}),
    ],
)
def test_training_goes_on_as_with_peft(
    ranks: RankPool, tmp_path: Path, kind: str, family: str, sizes: dict[str, int]
) -> None:
    save_adapters_of_peft(tmp_path, family, kind)
    parallel = ParallelConfig(**sizes)
    losses = ranks(2).run(train_on, tmp_path, parallel)[0]
    reference = reference_of(tmp_path)
    for step, loss in enumerate(losses):
        of_ranks = [sequences_of(step, rank, number) for rank in range(parallel.num_data_ranks) for number in range(2)]
        assert loss == pytest.approx(reference.backward([[*itertools.chain.from_iterable(of_ranks)]]), rel=1e-9)
        reference.step()
    reference.model.save_pretrained(tmp_path / "expected")
    expected = load_file(tmp_path / "expected" / "adapter_model.safetensors")
    saved = load_file(tmp_path / "trained" / "adapter_model.safetensors")
    assert saved.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(saved[name], tensor, rtol=0, atol=1e-8)
    PeftModel.from_pretrained(reference_of(tmp_path).model.unload(), tmp_path / "trained")


def merged_logprobs(folder: Path, parallel: ParallelConfig) -> list[Tensor]:
    model = ModelConfig(path=str(folder / "adapters"), dtype="float64", merge_adapters=True)
    handle = ModelHandle.from_pretrained(model, parallel)
    assert all(parameter.requires_grad for _, parameter in handle.named_parameters())
    return Engine(handle, OptimizerConfig(decay="constant")).logprobs([pack_microbatch(make_sequences(3, seed=0))])


@pytest.mark.parametrize(
    ("kind", "family", "sizes"),
    [
        *((kind, "qwen3", {"tp": 2}) for kind in DENSE),
        ("two names", "qwen3_moe", {"ep": 2, "dp_shard": 2}),
        ("lengths of rows", "qwen2", {"dp_shard": 2}),
        ("of experts", "qwen3_moe", {"ep": 2, "dp_shard": 2}),
        ("of experts", "gpt_oss", {"dp_shard": 2}),
        ("of half the experts", "gpt_oss", {"tp": 2}),
    ],
)
def test_merged_weights_are_those_of_peft(
    ranks: RankPool, tmp_path: Path, kind: str, family: str, sizes: dict[str, int]
) -> None:
    save_adapters_of_peft(tmp_path, family, kind)
    parts = ranks(2).run(merged_logprobs, tmp_path, ParallelConfig(**sizes))
    reference = reference_of(tmp_path)
    reference.model = reference.model.merge_and_unload()
    with torch.no_grad():
        expected = [reference.logprobs(sequence) for sequence in make_sequences(3, seed=0)]
    for actual, right in zip(max(parts, key=len), expected, strict=True):
        torch.testing.assert_close(actual, right, rtol=0, atol=1e-9)
    export(tmp_path / "adapters", tmp_path / "merged", adapters="merged")
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float64)
    expected_weights = dict(reference.model.named_parameters())
    assert {name for name, _ in whole.named_parameters()} == expected_weights.keys()
    for name, own in whole.named_parameters():
        torch.testing.assert_close(own, expected_weights[name], rtol=0, atol=1e-12, msg=name)


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match")  # peft's own patterns
def test_adapters_of_single_experts_are_written_for_vllm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adapters = save_adapters_of_peft(tmp_path, "mixtral", "of experts")
    assert main(["export", str(adapters), str(tmp_path / "single"), "--per-expert"]) == 0
    single = load_file(tmp_path / "single" / "adapter_model.safetensors")
    stem = "base_model.model.model.layers.0.block_sparse_moe.experts.3."
    assert {name: [*tensor.shape] for name, tensor in single.items() if name.startswith(stem)} == {
        f"{stem}{name}.lora_{kind}.weight": shape
        for name, (inputs, outputs) in {"w1": (32, 64), "w3": (32, 64), "w2": (64, 32)}.items()
        for kind, shape in {"A": [4, inputs], "B": [outputs, 4]}.items()
    }
    config = json.loads((tmp_path / "single" / "adapter_config.json").read_text())
    assert config["target_modules"] == ["k_proj", "w1", "w2", "w3"]
    logprobs = []
    for folder in (adapters, tmp_path / "single"):  # PEFT turns single experts into stacks when it opens them
        reference = OneProcess(tmp_path / "base", torch.float64, Training(), torch.device("cpu"))
        reference.model = PeftModel.from_pretrained(reference.model, folder)
        with torch.no_grad():
            logprobs.append(reference.logprobs(make_sequences(1, seed=0)[0]))
    torch.testing.assert_close(*logprobs, rtol=0, atol=1e-12)
    save_adapters_of_peft(tmp_path / "stacked", "gpt_oss", "of experts")
    assert main(["export", str(tmp_path / "stacked" / "adapters"), str(tmp_path / "no"), "--per-expert"]) == 2
    assert "vLLM supports no per-expert names for gpt_oss models" in capsys.readouterr().err
    assert main(["export", str(adapters), str(tmp_path / "no"), "--per-expert", "--merge"]) == 2
    assert not (tmp_path / "no").exists()


def change(folder: Path, **values: object) -> dict:
    file = folder / "adapters" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
    return {}


def cut(folder: Path) -> dict:
    """Only the first half of the weights is left."""
    file = folder / "adapters" / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    return {}


def remove(folder: Path) -> dict:
    (folder / "adapters" / "adapter_model.safetensors").unlink()
    return {}


REFUSED: list[tuple[Callable[[Path], dict], str]] = [
    (lambda folder: change(folder, use_qalora=True), "adapters with use_qalora=True cannot be trained or merged"),
    (lambda folder: change(folder, use_dora=True), "has no model.layers.0.*.lora_magnitude_vector.weight, but"),
    (lambda folder: change(folder, bias="all"), "adapters with bias=all cannot be trained or merged"),
    (lambda folder: change(folder, peft_type="IA3"), "adapters with peft_type=IA3 cannot be trained"),
    (cut, "adapter_model.safetensors: damaged or missing"),
    (remove, "adapter_model.safetensors: damaged or missing"),
    (lambda folder: change(folder, r="x"), "is not the config of LoRA adapters"),
    (lambda folder: change(folder, r=0), "is not the config of LoRA adapters"),
    (lambda folder: change(folder, r=8), "lora_A.weight with shape .* matches nothing in the model"),
    (lambda folder: change(folder, target_modules=["q_proj"]), "o_proj.lora_A.weight .* matches nothing"),
    (lambda folder: change(folder, target_modules=["q_proj", "o_proj", "v_proj"]), "has no .*v_proj.lora_A"),
    (
        lambda folder: change(folder, base_model_name_or_path=str(folder / "moved")),
        "in model.path, and these adapters in model.adapters",
    ),
    (lambda folder: {"adapters": str(folder / "adapters")}, "has adapters, and so has model.adapters"),
    (lambda _: {"lora": LoraConfig(rank=8)}, "model.lora.rank=8: the adapters of .* have 4: remove model.lora.rank"),
    (lambda _: {"lora": LoraConfig(), "merge_adapters": True}, "no folder holds the model that new adapters would"),
    (
        lambda folder: {"path": str(folder / "base"), "merge_adapters": True},
        "merge_adapters=true: .* has no adapters: name them in model.adapters",
    ),
]


@pytest.mark.parametrize(("breaks", "message"), REFUSED)
def test_what_cannot_be_gone_on_with_is_refused(
    ranks: RankPool, tmp_path: Path, breaks: Callable[[Path], dict], message: str
) -> None:
    save_adapters_of_peft(tmp_path, "qwen3", "two names")
    model = ModelConfig(**{"path": str(tmp_path / "adapters"), "dtype": "float64", **breaks(tmp_path)})
    assert re.search(message, ranks(1).run(refusal, model)[0])


@pytest.mark.parametrize("merges", [False, True])
def test_lengths_of_rows_of_which_the_config_says_nothing_are_refused(
    ranks: RankPool, tmp_path: Path, merges: bool
) -> None:
    save_adapters_of_peft(tmp_path, "qwen3", "lengths of rows")
    change(tmp_path, use_dora=False)
    model = ModelConfig(path=str(tmp_path / "adapters"), dtype="float64", merge_adapters=merges)
    assert "lora_magnitude_vector.weight, but adapter_config.json has use_dora=False" in ranks(1).run(refusal, model)[0]


def merge_refusal(model: ModelConfig) -> str:
    with pytest.raises(InputError) as caught:
        ModelHandle.from_pretrained(model, ParallelConfig(tp=2))
    return str(caught.value)


def test_rows_with_lengths_that_tp_cuts_are_not_merged(ranks: RankPool, tmp_path: Path) -> None:
    save_adapters_of_peft(tmp_path, "qwen3", "lengths of rows")
    model = ModelConfig(path=str(tmp_path / "adapters"), dtype="float64", merge_adapters=True)
    assert "need whole rows, but tp splits those of model.layers.0" in ranks(2).run(merge_refusal, model)[0]


def refusal(model: ModelConfig) -> str:
    with pytest.raises(InputError) as caught:
        ModelHandle.from_pretrained(model)
    return str(caught.value)


@pytest.mark.parametrize("shape", [(), (8,), (4, 4, 4), (7, 32)])
def test_damaged_adapters_of_experts_fit_nothing(ranks: RankPool, tmp_path: Path, shape: tuple[int, ...]) -> None:
    adapters = save_adapters_of_peft(tmp_path, "qwen3_moe", "of experts")
    tensors = load_file(adapters / "adapter_model.safetensors")
    name = next(name for name in tensors if name.endswith("experts.lora_B.weight"))
    save_file(tensors | {name: torch.zeros(shape)}, adapters / "adapter_model.safetensors", {"format": "pt"})
    model = ModelConfig(path=str(adapters), dtype="float64")
    assert re.search("lora_B.weight with shape .* matches nothing", ranks(1).run(refusal, model)[0])
