"""Multi-token prediction by plain transformers: its module, one process, one sequence at a time."""

import copy
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, PretrainedConfig
from transformers.modeling_layers import MtpLayer

from automodel_rl.batch import TokenSequence
from automodel_rl.families.known import FAMILIES
from automodel_rl.tools.verify.one_process import compute_rule_in_float64, reference_attention
from tests.tiny import save_tiny_model

NUM_LAYERS = 4
IN_LAYER = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "post_norm": "shared_head.norm"}
IN_MIMO = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "post_norm": "final_layernorm"}
IN_MTP = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "post_norm": "norm"}


def save_model_with_mtp(folder: Path, family: str, **sizes: object) -> None:
    """A checkpoint whose files have the layer for multi-token prediction, with lively weights."""
    save_tiny_model(folder, family, num_layers=NUM_LAYERS, **sizes)
    add_mtp(folder, family)


def add_mtp(folder: Path, family: str, std: float = 0.1) -> None:
    """Gives a checkpoint the layer for multi-token prediction."""
    layer = mtp_layer(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64))
    generator = torch.Generator().manual_seed(1)
    for parameter in layer.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=std, generator=generator)
        else:
            nn.init.uniform_(parameter, 0.8, 1.2, generator=generator)
    number = layer.config.num_hidden_layers - 1
    found = {name: t for own, tensor in layer.state_dict().items() for name, t in in_files(own, tensor, family, number)}
    path = folder / "model.safetensors"
    (first, *_) = files = load_file(path)
    found = {name: tensor.to(files[first].dtype) for name, tensor in found.items()}
    save_file({**files, **found}, path, metadata={"format": "pt"})


def mtp_layer(model: nn.Module) -> MtpLayer:
    """transformers' module for a model."""
    config: PretrainedConfig = copy.deepcopy(model.config)
    number = config.num_hidden_layers
    config.num_hidden_layers = number + 1
    is_mimo = config.model_type == "mimo_v2_flash"
    of_layer = ("sliding_attention", "dense") if is_mimo else ("full_attention", "sparse")
    for key, kind in zip(("layer_types", "mlp_layer_types"), of_layer, strict=True):
        if kinds := config.to_dict().get(key):
            setattr(config, key, [*kinds, kind])
    body = model.model
    return MtpLayer(config, type(body.layers[-1]), type(body.norm), number).double()


def in_files(own: str, tensor: Tensor, family: str, number: int = NUM_LAYERS) -> Iterator[tuple[str, Tensor]]:
    """The names in files, and the tensors, of a tensor of transformers' module."""
    within = FAMILIES[family].mtp_files == "mtp"
    first, _, rest = own.partition(".")
    if family == "mimo_v2_flash":
        rest = rest.replace("post_attention_layernorm", "pre_mlp_layernorm").replace("sinks", "attention_sink_bias")
        name = f"model.mtp.layers.0.{rest if first == 'mtp_block' else f'{IN_MIMO[first]}.{rest}'}"
    elif first == "mtp_block":
        name = f"mtp.layers.0.{rest}" if within else f"model.layers.{number}.{rest}"
    else:
        parts, start = (IN_MTP, "mtp") if within else (IN_LAYER, f"model.layers.{number}")
        name = f"{start}.{parts[first]}.{rest}"
    yield from single_experts(name, tensor)


def single_experts(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Experts one by one; other tensors as they are."""
    block, found, kind = name.partition(".experts.")
    if not found or tensor.ndim != 3:
        yield name, tensor
        return
    for number, weight in enumerate(tensor):
        if kind == "gate_up_proj":
            gate, up = weight.chunk(2)
            yield f"{block}.experts.{number}.gate_proj.weight", gate.contiguous()
            yield f"{block}.experts.{number}.up_proj.weight", up.contiguous()
        else:
            yield f"{block}.experts.{number}.down_proj.weight", weight.contiguous()


def gradients_of_one_process(
    folder: Path, family: str, sequences: list[TokenSequence], weight: float, detached: bool
) -> tuple[float, dict[str, Tensor]]:
    """The mean negative log-probability of tokens after the next, and the gradients of sft and, times a weight, of it,
    by the names of files."""
    model, layer = open_model(folder, family)
    num_tokens = sum(int(sequence.loss_mask[1:].sum()) for sequence in sequences)
    total, count = torch.zeros((), dtype=torch.float64), 0
    for sequence in sequences:
        ids, mask = sequence.input_ids[None], sequence.loss_mask
        hidden = model.model(ids).last_hidden_state
        loss = nll(model.lm_head(hidden)[0, :-1], ids[0, 1:], mask[1:])
        if len(sequence) > 2:
            further, count = predicted(model, layer, ids, hidden, detached), count + int(mask[2:].sum())
            of_mtp = nll(further[0, :-1], ids[0, 2:], mask[2:])
            total += of_mtp.detach()
            loss = loss + weight * of_mtp
        (loss / num_tokens).backward()
    found = {}
    for name, parameter in model.named_parameters():
        found |= dict(single_experts(name.replace(".sinks", ".attention_sink_bias"), gradient_of(parameter)))
    for own, parameter in layer.named_parameters():
        found |= dict(in_files(own, gradient_of(parameter), family))
    return (total / count).item(), found


def open_model(folder: Path, family: str) -> tuple[nn.Module, MtpLayer]:
    """The model of a checkpoint and its layer, in float64."""
    attention = "reference_attention" if FAMILIES[family].has_sinks else "sdpa"
    if attention == "reference_attention":
        AttentionInterface.register(attention, reference_attention)
        AttentionMaskInterface.register(attention, lambda *args, **kwargs: None)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, experts_implementation="eager", attn_implementation=attention
    )
    layer, files = mtp_layer(model), load_file(folder / "model.safetensors")
    for name, module in model.named_modules():
        if name.endswith(".linear_attn"):
            compute_rule_in_float64(module)
    for own, tensor in layer.state_dict().items():
        named = [files[name] for name, _ in in_files(own, tensor, family)]
        if own.endswith("gate_up_proj"):
            tensor.copy_(torch.stack([torch.cat(pair) for pair in zip(named[::2], named[1::2], strict=True)]))
        else:
            tensor.copy_(torch.stack(named).view_as(tensor))
    return model, layer


@torch.no_grad()
def accepted_drafts(folder: Path, family: str, prompts: list[list[int]], written: list[list[int]]) -> tuple[int, int]:
    """Drafts of a token each along greedy completions, and how many of them are what the model says."""
    model, layer = open_model(folder, family)
    drafts = accepted = 0
    for prompt, completion in zip(prompts, written, strict=True):
        ids = torch.tensor([prompt + completion])
        further = predicted(model, layer, ids, model.model(ids).last_hidden_state, True)[0].argmax(-1)
        last = len(prompt)  # the first token that is sampled
        while last < ids.shape[1] - 1:
            is_right = bool(further[last - 1] == ids[0, last + 1])
            drafts, accepted = drafts + 1, accepted + is_right
            last += 1 + is_right
    return drafts, accepted


def predicted(model: nn.Module, layer: MtpLayer, ids: Tensor, hidden: Tensor, detached: bool) -> Tensor:
    """Logits of tokens after the next, [1, n - 1, V]."""
    embedded, before, head = model.model.embed_tokens(ids[:, 1:]), hidden[:, :-1], model.lm_head.weight
    if detached:
        embedded, before, head = embedded.detach(), before.detach(), head.detach()
    places = torch.arange(ids.shape[1] - 1)[None]
    axes = FAMILIES[model.config.model_type].rotary_axes
    kind = {"layer_type": "sliding_attention"} if model.config.model_type == "mimo_v2_flash" else {}
    turns = model.model.rotary_emb(before, position_ids=places if axes == 1 else places.expand(axes, 1, -1), **kind)
    return layer(embedded, before, turns, None, places, None) @ head.T


def nll(logits: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    return -logits.log_softmax(-1).gather(-1, targets[:, None])[mask].sum()


def gradient_of(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
