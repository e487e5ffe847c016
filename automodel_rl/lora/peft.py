"""Adapters in PEFT's file format: adapter_model.safetensors and adapter_config.json."""

import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from automodel_rl.config.model import Base, LoraConfig
from automodel_rl.errors import InputError
from automodel_rl.families.classifier import HEAD_IN_FILES, HEAD_IN_MODEL
from automodel_rl.families.known import FAMILIES, CheckpointFamily
from automodel_rl.files import atomic_folder
from automodel_rl.lora.experts import (
    ADAPTERS,
    EXPERTS,
    STACKED,
    adapted_weight,
    adapted_weights_by_name,
)
from automodel_rl.lora.layers import ADAPTER, adapted_layers, merged
from automodel_rl.lora.magnitude import MAGNITUDE, has_magnitude, is_magnitude, magnitude_of
from automodel_rl.lora.peft_kinds import problem_of
from automodel_rl.lora.stacks import from_peft, to_peft
from automodel_rl.manifest import write_manifest
from automodel_rl.parallel.host_collectives import gather_objects
from automodel_rl.parallel.sharding import local_box, local_tensor
from automodel_rl.tokenizer_files import save_tokenizer

PEFT_PREFIX = "base_model.model."
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"

NOTES, BASE = "auto_mapping", "automodel_rl_base"
"""Key of adapter_config.json for notes, which PEFT keeps and ignores if there is a `task_type`; and the note with
`LoraConfig.base`, if not plain."""

_OF_STACKS = tuple(f".{EXPERTS}.{ADAPTERS}.{name}" for name in STACKED)


class AdapterFolder:
    """Adapters on disk in PEFT's format. The folder is untrusted.

    Args:
        merges: whether adapters are merged into the weights instead of trained.

    Attributes:
        config: their config, with the kind of base that they were trained on if known, and without dropout.
        base: folder or hub id of their base checkpoint.

    Raises:
        InputError: the config is damaged, or requests unsupported adapters.
    """

    def __init__(self, folder: Path, merges: bool = False):
        self.folder, self.merges = folder, merges
        values = _read_config(folder / CONFIG)
        if problem := problem_of(values):
            raise InputError(f"{folder}: {problem}")
        try:
            self.base: str = values.get("base_model_name_or_path") or ""
            self.base_revision: str = values.get("revision") or "main"
            self._target_parameters: list[str] = values.get("target_parameters") or []
            self._rank: int = values["r"]
            self._has_magnitudes: bool = values.get("use_dora") or False
            self._is_of_classifier = values.get("task_type") == OF_CLASSIFIER
            self._noted: Base | None = (values.get(NOTES) or {}).get(BASE)
            if self._rank < 1:
                raise ValueError(f"r={self._rank}")
            targets = values.get("target_modules") or []
            self.config = LoraConfig(
                rank=self._rank,
                alpha=values["lora_alpha"],
                rslora=values.get("use_rslora", False),
                dora=self._has_magnitudes,
                base=self._noted or "plain",
                targets=self._layers
                if isinstance(targets, str) or self._is_multimodal
                else self._names(targets, values),
                modules_to_save=_own_modules(values.get("modules_to_save") or ()),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{folder / CONFIG}: is not the config of LoRA adapters ({_first_line(error)})") from None

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Adapters and modules to save by their names in the model, memory-mapped."""
        try:
            named = {
                _own_name(name.removeprefix(PEFT_PREFIX)): t for name, t in load_file(self.folder / WEIGHTS).items()
            }
        except (OSError, SafetensorError) as error:
            raise InputError(f"{self.folder / WEIGHTS}: damaged or missing ({error}): copy it again") from None
        self._check_magnitudes(named)
        return from_peft(named, self._rank, self._target_parameters)

    def _check_magnitudes(self, named: dict[str, Tensor]) -> None:
        """Raises InputError unless each adapter has magnitudes if the config says so, and none otherwise."""
        wanted = {magnitude_of(layer) for layer in _layers_of(named)} if self._has_magnitudes else set()
        found = {name for name in named if is_magnitude(name)}
        if wanted != found:
            what, name = ("no", min(wanted - found)) if wanted - found else ("a", min(found - wanted))
            raise InputError(
                f"{self.folder / WEIGHTS}: has {what} {name}, but {CONFIG} has use_dora={self._has_magnitudes}: copy "
                "both files again"
            )

    @property
    def num_labels(self) -> int | None:
        """Number of outputs of a saved linear head; None for a base with the vocabulary's head."""
        return len(self.tensors[HEAD_IN_MODEL]) if self._is_of_classifier else None

    def check_base(self, base: Base) -> None:
        """Raises InputError if they were trained on a base with other values. `plain` and `stored` bases have the
        same values."""
        if self._noted is not None and (base == "nf4") != (self._noted == "nf4"):
            raise InputError(
                f"model.lora.base={base}: the adapters of {self.folder} were trained on base={self._noted}, which has "
                f"other values: use that, or merge them first, with automodel-rl export {self.folder} NEW --merge"
            )

    def check(self, parts: Sequence[Any]) -> None:
        """Compares names and shapes of the tensors with a model's.

        Args:
            parts: the language model and any encoders, with adapters to be filled or, for merging, without.

        Raises:
            InputError: a tensor fits nothing in the model, or an adapter of the model has no tensor.
        """
        file, own = self.folder / WEIGHTS, dict(itertools.chain(*(part.named_parameters() for part in parts)))
        is_transposed = FAMILIES[parts[0].config.model_type].transposes_experts
        for name, tensor in self.tensors.items():
            adapted = ADAPTER.fullmatch(name)
            if name in own:
                fits = tensor.shape == own[name].shape
            elif is_magnitude(name):
                weight = own.get(adapted_weight(name.removesuffix(magnitude_of("")))) if self.merges else None
                fits = weight is not None and tensor.shape == weight.shape[:1]
            else:
                weight = own.get(adapted_weight(adapted[1])) if adapted and self.merges else None
                fits = weight is not None and _fits(name, tensor, weight, is_transposed)
            if not fits:
                raise InputError(
                    f"{file}: {name} with shape {[*tensor.shape]} matches nothing in the model: use adapters of this "
                    "model"
                )
        lacks = {name for name, p in own.items() if p.requires_grad and not self.merges} - self.tensors.keys()
        if lacks:
            raise InputError(f"{file}: has no {min(lacks)}, which {CONFIG} requires: copy both files again")

    @torch.no_grad()
    def fill(self, name: str, parameter: Tensor, family: CheckpointFamily) -> None:
        """Fills this rank's shard of an adapter or of a module to save, or merges an adapter into that of its weight.

        Args:
            name: the parameter's name. Ignored if the folder has nothing for it.
            parameter: the parameter; for merging it already holds the checkpoint's values.
        """
        box, local = local_box(parameter), local_tensor(parameter)
        if name in self.tensors:
            local.copy_(self.tensors[name][box])
        elif self.merges and name in self._adapted:
            layer = self._adapted[name]
            down, up = self.tensors[f"{layer}.lora_A.weight"], self.tensors[f"{layer}.lora_B.weight"]
            is_stack = down.ndim == 3
            own = down[box[0]] if is_stack else down[:, box[1]]
            is_transposed = is_stack and family.language.transposes_experts
            lengths = self.tensors[magnitude_of(layer)][box[0]] if self._has_magnitudes else None
            if lengths is not None and local.shape[1] != down.shape[1]:
                raise InputError(
                    f"{self.folder}: adapters with use_dora=True need whole rows, but tp splits those of {name}: merge "
                    "them first, with automodel-rl export, or use tp=1"
                )
            local.copy_(merged(local.cpu(), own, up[box[0]], self.config.scale, is_transposed, lengths))

    @cached_property
    def _is_multimodal(self) -> bool:
        """Whether they belong to a multimodal model, where short names may also refer to encoder layers."""
        try:
            with safe_open(self.folder / WEIGHTS, "pt") as file:
                names = [*file.keys()]
        except (OSError, SafetensorError):
            return False  # reading the tensors will report it
        return any(name.startswith(f"{PEFT_PREFIX}model.language_model.") for name in names)

    @cached_property
    def _adapted(self) -> dict[str, str]:
        return adapted_weights_by_name(self.tensors)

    @property
    def _layers(self) -> tuple[str, ...]:
        return tuple(sorted(weight.removesuffix(".weight") for weight in self._adapted))

    def _names(self, targets: list[str], values: dict[str, Any]) -> tuple[str, ...]:
        """Returns the targets by short name, or by full name if only some layers of that name have adapters."""
        weights = [
            f"{EXPERTS}.{name}" if name in STACKED else name.removesuffix(".weight")
            for name in values.get("target_parameters") or []
        ]
        if values.get("layers_to_transform") is not None or values.get("exclude_modules"):
            return self._layers
        names = {*targets, *weights}
        for path in {name.rpartition(".")[0] for name in weights}:
            both = {f"{path}.{name}" for name in STACKED}
            if both <= names:
                names = names - both | {path if any(part.isdigit() for part in path.split(".")) else EXPERTS}
        return tuple(sorted(names))


def _read_config(file: Path) -> dict[str, Any]:
    """Reads an adapter_config.json, which must have a `peft_type`."""
    try:
        values: dict[str, Any] = json.loads(file.read_text())
        values["peft_type"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{file}: is not the config of LoRA adapters ({_first_line(error)})") from None
    return values


def _fits(name: str, adapter: Tensor, weight: Tensor, is_transposed: bool) -> bool:
    """Returns whether an adapter's shape fits a weight; for experts both are stacks."""
    if adapter.ndim != weight.ndim:
        return False
    shape = weight.mT.shape if weight.ndim == 3 and is_transposed else weight.shape
    dim = -1 if ".lora_A." in name else -2
    return adapter.shape[:-2] == shape[:-2] and adapter.shape[dim] == shape[dim]


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


@dataclass(frozen=True)
class AdapterOrigin:
    """The model that adapters belong to.

    Attributes:
        base: absolute path or hub id of the base checkpoint.
    """

    config: LoraConfig
    base: str
    family: CheckpointFamily


def check_magnitudes(model: nn.Module, family: CheckpointFamily) -> None:
    """Raises InputError if PEFT could not open the model's DoRA adapters: it wraps layers that share a name with
    expert weights by `target_parameters`, which has no magnitudes."""
    adapted, experts = set(adapted_layers(model)), family.file_names.experts
    short = () if experts is None else (experts.gate, experts.up, experts.down)
    for name, module in model.named_modules():
        if module in adapted and has_magnitude(module) and name.rpartition(".")[2] in short:
            raise InputError(
                f"model.lora.dora=true: PEFT has no row magnitudes for {name}, because its experts have the same "
                f"names: remove {', '.join(short)} from model.lora.targets"
            )


def save_adapters(
    folder: Path,
    tensors: dict[str, Tensor],
    origin: AdapterOrigin,
    tokenizer: PreTrainedTokenizerBase | None,
    world: dist.ProcessGroup,
) -> None:
    """Writes adapter_model.safetensors and adapter_config.json for PEFT. A collective.

    Args:
        folder: the folder to write, on a file system shared by all ranks; replaced if it exists.
        tensors: whole adapters and modules to save by name, each on one of the ranks.
    """
    of_ranks = gather_objects(tensors, world)
    with atomic_folder(folder, world) as unfinished:
        if dist.get_rank() == 0:
            write_adapters(unfinished, {k: v for of_rank in of_ranks for k, v in of_rank.items()}, origin)
            if tokenizer is not None:
                save_tokenizer(tokenizer, unfinished)
            write_manifest(unfinished)


def write_adapters(folder: Path, tensors: dict[str, Tensor], origin: AdapterOrigin) -> None:
    """Writes adapters and modules to save in PEFT's format, to an existing folder."""
    _write(folder, to_peft(tensors), origin, _peft_targets(_layers_of(tensors), origin))


def write_single_adapters(folder: Path, tensors: dict[str, Tensor], origin: AdapterOrigin) -> None:
    """Writes adapters of layers and of experts one by one, as vLLM reads them, to an existing folder."""
    short = {layer.rpartition(".")[2] for layer in _layers_of(tensors)}
    _write(folder, tensors, origin, {"target_modules": sorted(short)})


def _name_in_class(name: str, family: CheckpointFamily) -> str:
    """Returns the name of a tensor or layer in transformers' class, as PEFT sees it. There a multimodal model's
    language model is a submodule."""
    if family.is_classifier and name == HEAD_IN_MODEL:
        return HEAD_IN_FILES
    name = name.removesuffix(".weight") if is_magnitude(name) else name
    if not family.is_multimodal:
        return name
    return re.sub(r"^model\.(layers|embed_tokens|norm)\.", r"model.language_model.\1.", name)


def _own_name(name: str) -> str:
    """Returns the name in the model's parts of a tensor in PEFT's file."""
    name = f"{name}.weight" if name.endswith(f".{MAGNITUDE}") else name
    return HEAD_IN_MODEL if name == HEAD_IN_FILES else re.sub(r"^model\.language_model\.", "model.", name)


HEAD, HEAD_OF_CLASSIFIER = "lm_head", "score"
"""Module of a linear head in the model, and in transformers' sequence classifiers."""

OF_CLASSIFIER = "SEQ_CLS"
"""PEFT's task type of a sequence classifier."""

UNUSED = "classifier"
"""A module that PEFT lists for every sequence classifier, even without one."""


def _own_modules(names: Sequence[str]) -> tuple[str, ...]:
    """Returns modules to save of PEFT's config by their names in the model's parts."""
    return tuple(HEAD if name == HEAD_OF_CLASSIFIER else name for name in names if name != UNUSED)


def _modules_in_class(names: Sequence[str], family: CheckpointFamily) -> list[str]:
    """Returns the modules to save by their names in transformers' class."""
    return [HEAD_OF_CLASSIFIER if name == HEAD and family.is_classifier else name for name in names]


def _layers_of(tensors: dict[str, Tensor]) -> list[str]:
    return sorted({layer for name in tensors for layer in ADAPTER.findall(name)})


def _write(folder: Path, tensors: dict[str, Tensor], origin: AdapterOrigin, targets: dict[str, list[str]]) -> None:
    named = {f"{PEFT_PREFIX}{_name_in_class(name, origin.family)}": tensor for name, tensor in tensors.items()}
    save_file(named, folder / WEIGHTS, {"format": "pt"})
    values = {
        "peft_type": "LORA",
        "task_type": OF_CLASSIFIER if origin.family.is_classifier else "CAUSAL_LM",
        "base_model_name_or_path": origin.base,
        "r": origin.config.rank,
        "lora_alpha": origin.config.alpha,
        "lora_dropout": origin.config.dropout,
        "use_rslora": origin.config.rslora,
        "use_dora": origin.config.dora,
        "modules_to_save": _modules_in_class(origin.config.modules_to_save, origin.family) or None,
        "bias": "none",
        "inference_mode": True,
    }
    notes = {} if origin.config.base == "plain" else {NOTES: {BASE: origin.config.base}}
    (folder / CONFIG).write_text(json.dumps(values | targets | notes, indent=2))


def _peft_targets(layers: list[str], origin: AdapterOrigin) -> dict[str, list[str]]:
    """Returns the target entries of adapter_config.json.

    PEFT applies an entry of `target_modules` to fused experts if it ends with the name of an expert's weight in the
    files, such as gate_proj. So dense layers and shared experts of such a name are listed in `target_parameters`.
    """
    experts = origin.family.file_names.experts
    of_experts = () if experts is None else (experts.gate, experts.up, experts.down)
    stacks = [adapted_weight(layer) for layer in layers if layer.endswith(_OF_STACKS)]
    dense = [layer for layer in layers if not layer.endswith(_OF_STACKS)]
    by_weight = [layer for layer in dense if layer.rpartition(".")[2] in of_experts]
    # In the encoder, PEFT would match the same short names.
    has_full_names = origin.family.is_multimodal or any(
        target.count(".") > target.startswith(f"{EXPERTS}.") for target in origin.config.targets
    )
    by_name = {layer if has_full_names else layer.rpartition(".")[2] for layer in dense if layer not in by_weight}
    if not has_full_names:
        stacks = sorted({".".join(name.split(".")[-2:]) for name in stacks})
    named = [_name_in_class(name, origin.family) for name in (*(f"{layer}.weight" for layer in by_weight), *stacks)]
    return {
        "target_modules": sorted(_name_in_class(layer, origin.family) for layer in by_name),
        "target_parameters": named,
    }
