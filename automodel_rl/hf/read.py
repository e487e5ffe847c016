"""A Hugging Face checkpoint on disk: checking it, and reading this rank's shards."""

import contextlib
import functools
import json
import math
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor, nn
from transformers import AutoConfig, PretrainedConfig

from automodel_rl.config.model import Base
from automodel_rl.errors import InputError
from automodel_rl.families.classifier import HEAD_IN_FILES, HEAD_IN_MODEL, as_classifier, is_classifier
from automodel_rl.families.known import COMPOSITES, SAME_AS, TEXT, checkpoint_family, left_out, text_model_config
from automodel_rl.hf.find import ModelFiles
from automodel_rl.hf.names import Piece, is_stack, pieces
from automodel_rl.hf.quantized import RoundedTensor, TransposedTensor, stored_dtype, stored_tensors
from automodel_rl.hf.stored import Opened, PackedTensor, PlainTensor, StoredTensor
from automodel_rl.hf.weight_files import open_tensors, weight_files
from automodel_rl.lora.layers import initialise, initialise_magnitudes, is_adapter
from automodel_rl.lora.magnitude import is_magnitude
from automodel_rl.lora.peft import WEIGHTS as ADAPTER_WEIGHTS
from automodel_rl.parallel.sharding import allocate_storage, local_box, local_tensor
from automodel_rl.quantized.base import all_in_nf4, names_of_base, quantized_weights, weights_of_layers
from automodel_rl.quantized.formats import QuantizedFormat
from automodel_rl.quantized.nf4 import quantize
from automodel_rl.quantized.weight import QuantizedWeight, is_quantized

SAMPLE_BYTES, NUM_SAMPLES = 2**16, 16
"""Size and number of the samples of a file in its fingerprint."""

TIED_HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"


def read_config(folder: Path, num_labels: int | None = None, text_only: bool = False) -> PretrainedConfig:
    """Returns the config of the trained model, without untrained encoders: for a checkpoint in `COMPOSITES` that of a
    part.

    Args:
        num_labels: number of outputs of a linear head; None for the vocabulary's head.

    Raises:
        InputError: config.json is not a model config, or the model supports no linear head or no text-only training.
    """
    whole = read_whole_config(folder)
    if whole.model_type in COMPOSITES:
        key = COMPOSITES[whole.model_type]
        part = vars(whole)[key]
        if key == TEXT:
            part.tie_word_embeddings, text_only = whole.tie_word_embeddings, False  # text-only already
        whole = part
    elif "tie_word_embeddings" not in whole.to_dict():  # Qwen2-Audio's config class lacks the key
        whole.tie_word_embeddings = False
    for key in left_out(whole):
        setattr(whole, key, None)
    if text_only:
        whole = text_model_config(whole)
    return whole if num_labels is None else as_classifier(whole, num_labels)


def read_whole_config(folder: Path) -> PretrainedConfig:
    """Returns a checkpoint's config as in config.json.

    Raises:
        InputError: config.json is not a model config.
    """
    try:
        values = PretrainedConfig.get_config_dict(folder)[0]
        if values.get("model_type") in SAME_AS:
            ours = {key: value for key, value in values.items() if key not in ("model_type", "auto_map")}
            return AutoConfig.for_model(SAME_AS[values["model_type"]], **ours)
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # config classes raise errors of their own
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"model.path={folder}: config.json is not a model config of transformers ({reason})") from None


class Checkpoint:
    """The tensors of a checkpoint by name, read on demand.

    Args:
        pickled: names of pickled weight files that may be read.

    Raises:
        InputError: there are no weights, or a file is damaged.
    """

    def __init__(self, files: ModelFiles, config: PretrainedConfig, pickled: Sequence[str] = ()):
        self.files, self.folder = files, files.folder
        plain: dict[str, PlainTensor] = {}
        self._files = weight_files(self.folder, pickled)
        for file in self._files:
            with open_tensors(file) as tensors:
                for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                    part = tensors.get_slice(name)
                    plain[name] = PlainTensor(name, file, tuple(part.get_shape()), part.get_dtype())
        with self._opened() as opened:
            self._tensors = stored_tensors(plain, _block_of_fp8(self.folder), opened)
        self.family = checkpoint_family(config, plain)
        self.quantized_here: list[str] = []
        self._lacks_head = is_classifier(config) and HEAD_IN_FILES not in self._tensors
        self._foreign = {TIED_HEAD} if is_classifier(config) else set[str]()

    @property
    def names(self) -> list[str]:
        return [*self._tensors]

    def read(self, name: str) -> Tensor:
        """Reads a whole tensor, on the host."""
        stored = self._tensors[name]
        with self._opened() as opened:
            return stored.read(opened, tuple(slice(0, size) for size in stored.shape))

    def read_base_in_nf4(self, model: Any, trained: Collection[str]) -> None:
        """Makes later reads round the adapters' base to nf4, unless it is stored so. Call it after `check`.

        Args:
            trained: names of adapters and modules to save, which are not part of the base.

        Raises:
            InputError: a weight cannot be in nf4.
        """
        base = {name: weight for name, weight in weights_of_layers(model) if name not in trained}
        for name in all_in_nf4(base.items()):
            for piece in pieces(name, tuple(base[name].shape), self.family):
                stored = self._tensors[piece.name]
                if self._kept(stored) != QuantizedFormat("nf4"):
                    self._tensors[piece.name] = RoundedTensor(stored)

    @property
    def num_values(self) -> int:
        """Total number of values of all tensors."""
        return sum(math.prod(tensor.shape) for tensor in self._tensors.values())

    def read_untrained(self, name: str, dtype: torch.dtype) -> Tensor:
        """Reads a whole tensor that belongs to no part of the model, for exports: in the file's dtype, or in `dtype`
        if quantized."""
        tensor = self.read(name)
        return tensor if isinstance(self._tensors[name], PlainTensor) else tensor.to(dtype)

    @property
    def is_composite(self) -> bool:
        """Whether it holds more than the trained model, which exports keep."""
        whole = read_whole_config(self.folder)
        return whole.model_type != self.family.name or any(vars(whole)[key] for key in left_out(whole))

    @contextlib.contextmanager
    def _opened(self) -> Iterator[Opened]:
        """Opens files on first access, and closes them at the end."""
        with contextlib.ExitStack() as stack:
            yield functools.cache(lambda file: stack.enter_context(open_tensors(file)))

    def fingerprint(self) -> str:
        """Returns a hash of samples of the weight and adapter files, to detect changes."""
        state = xxhash.xxh3_64()
        adapters = [] if self.files.adapters is None else [self.files.adapters.folder / ADAPTER_WEIGHTS]
        for path in (*sorted(self._files), *adapters):
            size = path.stat().st_size
            state.update(f"{path.name} {size}".encode())
            with path.open("rb") as file:
                for place in range(NUM_SAMPLES):
                    file.seek(max(0, size - SAMPLE_BYTES) * place // (NUM_SAMPLES - 1))
                    state.update(file.read(SAMPLE_BYTES))
        return state.hexdigest()

    def check(self, model: Any) -> None:
        """Compares the tensors' names and shapes with those of a model or component. Call it before adapters are
        added.

        Raises:
            InputError: a tensor is missing or has another shape, or a head differs from the embedding it is tied to.
        """
        is_tied = model.config.tie_word_embeddings and TIED_HEAD in dict(model.named_parameters(remove_duplicate=False))
        for name, tensor in persistent_tensors(model):
            if (name == TIED_HEAD and is_tied) or (name == HEAD_IN_MODEL and self._lacks_head) or is_adapter(name):
                continue
            for piece in pieces(name, tuple(tensor.shape), self.family):
                if self.family.file_names.files_transpose_experts and is_stack(name):
                    self._turn(piece)
                self._check_piece(piece, type(model).__name__, is_real=tensor.is_floating_point())
        head, embedding = (next(pieces(name, (1, 1), self.family)).name for name in (TIED_HEAD, EMBEDDING))
        if is_tied and head in self._tensors and not torch.equal(self.read(head), self.read(embedding)):
            raise InputError(
                f"{self.folder}: config.json ties {head} to {embedding} but the weights differ: "
                "set tie_word_embeddings to false in config.json, or remove the head from the weights"
            )

    def unused(self, models: Sequence[Any]) -> list[str]:
        """Returns names of tensors that no part of the model has, such as MTP layers, given all its parts."""
        used = {
            piece.name
            for model in models
            for name, tensor in model.state_dict(keep_vars=True).items()
            for piece in pieces(name, tuple(tensor.shape), self.family)
        }
        return sorted(self._tensors.keys() - used - self._foreign)

    def _turn(self, piece: Piece) -> None:
        """Transposes a stack of experts if the file stores it the other way round."""
        _, rows, columns = piece.shape
        if rows == columns:
            raise InputError(
                f"{self.folder}: {piece.name} has square matrices, {rows} x {columns}, but the file does not say which "
                "dim is the input's: use a model of other sizes"
            )
        stored = self._tensors.get(piece.name)
        if stored is not None and stored.shape[1:] == (columns, rows):
            self._tensors[piece.name] = TransposedTensor(stored)

    def _check_piece(self, piece: Piece, needed_by: str, *, is_real: bool) -> None:
        if piece.name not in self._tensors:
            raise InputError(f"{self.folder}: the checkpoint has no tensor {piece.name}, which {needed_by} needs")
        stored = self._tensors[piece.name]
        if is_real and isinstance(stored, PlainTensor) and stored.dtype.startswith(("I", "U")):
            raise InputError(
                f"{self.folder}: {piece.name} is stored in integers ({stored.dtype}), a quantization that is not "
                "supported: use a checkpoint in bfloat16, fp8, MXFP4 or nf4"
            )
        if stored.shape != piece.shape:
            raise InputError(
                f"{self.folder}: {piece.name} has shape {stored.shape} in the weights but {piece.shape} by config.json"
            )

    def fill(self, part: Any, device: torch.device) -> None:
        """Gives a part storage on `device` and reads this rank's shard of each tensor."""
        for parameter in part.parameters():
            allocate_storage(parameter, device)
        part.to(device)  # moves buffers, and makes FSDP notice the new storage
        with self._opened() as opened, torch.no_grad():
            for name, tensor in persistent_tensors(part):
                if is_adapter(name) and not is_magnitude(name) and self.files.adapters is None:
                    initialise(name, tensor)
                if is_adapter(name) or is_quantized(name):
                    continue
                if name == HEAD_IN_MODEL and self._lacks_head:
                    _initialise_head(tensor, part.config.initializer_range)
                    continue
                stored = EMBEDDING if name == TIED_HEAD and part.config.tie_word_embeddings else name
                local, box = local_tensor(tensor), local_box(tensor)
                for piece in pieces(stored, tuple(tensor.shape), self.family):
                    overlap = piece.overlap(box) if box else ((), ())
                    if overlap is not None:
                        local[overlap[1]].copy_(self._tensors[piece.name].read(opened, overlap[0]))
            for name, held, _ in quantized_weights(part):
                self._fill_quantized(name, held, opened)
            if self.files.adapters is None:
                initialise_magnitudes(part)
            else:
                for name, tensor in part.named_parameters():
                    self.files.adapters.fill(name, tensor, self.family)

    def quantized_base(self, base: Base, model: Any) -> dict[str, QuantizedFormat]:
        """Returns the quantized formats of an adapters' base by weight name, without plain weights.

        Raises:
            InputError: a weight cannot be in such a format.
        """
        if base == "plain":
            return {}
        if base == "nf4":
            return all_in_nf4(names_of_base(model))
        stored = {name: self._stored_base(name, tuple(weight.shape)) for name, weight in names_of_base(model)}
        found = {name: kept for name, kept in stored.items() if kept is not None}
        if not found:
            raise InputError(
                f"model.lora.base=stored: {self.folder} has no quantized weight of the base: use base=plain or nf4"
            )
        return found

    def _stored_base(self, name: str, shape: tuple[int, ...]) -> QuantizedFormat | None:
        """Returns the format of a weight as stored; None if plain."""
        whole = tuple(slice(0, size) for size in shape)
        places = [(self._tensors[piece.name], piece.overlap(whole)) for piece in pieces(name, shape, self.family)]
        if all(isinstance(stored, PlainTensor) for stored, _ in places):
            return None
        kept, *others = {self._kept(stored) for stored, _ in places}
        # Pieces must be whole rows.
        if kept is None or others or any(place is None or place[1][-1] != whole[-1] for _, place in places):
            raise InputError(
                f"model.lora.base=stored: {self.folder} has {name} in blocks or parts that cannot be kept as stored: "
                "use base=plain, or nf4 if its rows are multiples of 64 values"
            )
        return kept

    @staticmethod
    def _kept(stored: StoredTensor) -> QuantizedFormat | None:
        return stored.quantized_format if isinstance(stored, PackedTensor) else None

    def _fill_quantized(self, name: str, weight: QuantizedWeight, opened: Opened) -> None:
        """Fills a quantized weight: stored codes are copied, other values quantized to nf4."""
        plain, targets = weight.plain(), (local_tensor(weight.codes), local_tensor(weight.scale_bytes))
        box = local_box(plain)
        for piece in pieces(name, tuple(plain.shape), self.family):
            overlap, stored = piece.overlap(box), self._tensors[piece.name]
            weight.rounded_to = stored_dtype(stored)  # also on a rank without rows
            if overlap is None:
                continue
            inside, held = (weight.stored_box(box) for box in overlap)
            if isinstance(stored, PackedTensor) and stored.quantized_format == weight.quantized_format:
                found = stored.read_packed(opened, inside)
            else:
                assert weight.quantized_format == QuantizedFormat(
                    "nf4"
                )  # other formats exist only as stored in the files
                self.quantized_here.append(piece.name)
                codes, scales = quantize(stored.read(opened, inside).to(targets[0].device))
                found = codes, scales.view(torch.uint8)
            starts, stops = (weight.format.widths(end) for end in (held[-1].start, held[-1].stop))
            for target, part, start, stop in zip(targets, found, starts, stops, strict=True):
                target[(*held[:-1], slice(start, stop))].copy_(part)


def _initialise_head(weight: Tensor, deviation: float) -> None:
    """Initialises a linear head from a normal distribution, identically on every layout."""
    values = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)) * deviation
    local_tensor(weight).copy_(values[local_box(weight) or (slice(0, 0),)])


def _block_of_fp8(folder: Path) -> tuple[int, int] | None:
    """Returns rows and columns of an fp8 block from config.json, if specified."""
    values = json.loads((folder / "config.json").read_text())
    block = (values.get("quantization_config") or {}).get("weight_block_size")
    return None if block is None else (block[0], block[1])


def persistent_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields names and values of parameters and of the buffers in checkpoints."""
    yield from module.named_parameters()
    yield from stored_buffers(module)


def stored_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields names and values of the buffers in checkpoints, which exclude rotary frequencies and the like."""
    stored = module.state_dict().keys()
    yield from ((name, buffer) for name, buffer in module.named_buffers() if name in stored)
