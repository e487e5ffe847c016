"""ModelHandle: a Hugging Face model on its layout, whole or in pipeline stages, loaded and saved."""

import functools
import gc
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from automodel_rl.compat.fsdp import keep_gradients
from automodel_rl.compat.process_groups import clear_mesh_caches
from automodel_rl.config import ModelConfig, ParallelConfig
from automodel_rl.config.components import ComponentsConfig
from automodel_rl.config.model import LoraConfig, MemoryConfig
from automodel_rl.errors import InputError
from automodel_rl.families.classifier import is_classifier
from automodel_rl.families.known import CheckpointFamily, checkpoint_family, language_family, num_deepstack
from automodel_rl.hf.buckets import Source, whole_tensors
from automodel_rl.hf.opened_model import OpenedModel
from automodel_rl.hf.read import Checkpoint, read_whole_config
from automodel_rl.hf.sources import adapters_alone, gradient_sources, merged_sources
from automodel_rl.hf.write import ComponentTensors, save_hf_checkpoint
from automodel_rl.launch.process_group import join_process_group
from automodel_rl.lora.add import add_adapters
from automodel_rl.lora.peft import AdapterOrigin, check_magnitudes, save_adapters
from automodel_rl.mixture.routers import router_shape, routers_of
from automodel_rl.model.attention import choose_attention, set_attention_of_heads
from automodel_rl.model.build import EmptyModel, build_empty_model
from automodel_rl.model.compiled_layers import are_compiled
from automodel_rl.model.encoder import as_encoder, freeze, parallelise_encoder
from automodel_rl.model.float8 import check_float8
from automodel_rl.model.flops import StepFlops
from automodel_rl.model.offload import Offload
from automodel_rl.model.parallelise import dtypes_of, parallelise
from automodel_rl.model.part_forward import numbered_layers
from automodel_rl.model.sparse_attention import freeze_indexers
from automodel_rl.model.split import split_model
from automodel_rl.parallel.gradients import tied_embedding
from automodel_rl.parallel.host_collectives import gather_objects
from automodel_rl.parallel.layout import Layout, Meshes, build_meshes
from automodel_rl.parallel.sharding import gather_whole, local_tensor, release_gathered
from automodel_rl.quantized.base import quantized_weights
from automodel_rl.support.combination import Combination
from automodel_rl.support.description import ModelDescription, describe_model


@dataclass(frozen=True)
class Component:
    """Parts of the model that share meshes.

    Attributes:
        name: "language", "vision" or "audio".
        layout: this rank's layout among the component's ranks.
    """

    name: str
    parts: list[Any]
    layout: Layout

    def every_parameter(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields names and parameters of all parts; a tied weight once for each copy on this rank."""
        return itertools.chain(*(part.named_parameters() for part in self.parts))


class ModelHandle:
    """A causal or multimodal model on any layout: its parts, their layouts, and its tensors as in Hugging Face files.
    `StepRunner` runs it.

    A program that loads several models one after the other closes each, with `close` or as a context manager.

    Attributes:
        parts: this rank's parts of all components.
        components: the components of which this rank has parts.
        config: Hugging Face config of the language model.
        whole_config: Hugging Face config of the whole model; the same as `config` for a text model.
        model: settings of the checkpoint, of computation and of what is trained.
        memory: settings of recomputation, offloading and compilation.
        meshes: the layouts of its components.
        stages: this rank's pipeline stages of the language model.
        layout: the language model's layout; this rank may be an outsider there (see `Layout`).
        flops: FLOPs of a sequence in a training step by its length, without encoders.
        router_shape: shape of the whole model's routes; None for a dense model.
        family: the checkpoint's family, with the tensor names in its files.
        num_deepstack: number of the language model's first layers after which image features are added.
        extras: what a step needs of each language model part, in the order of `stages`.
        unused_tensors: names of checkpoint tensors that the model does not have, such as its MTP layers.
        partial_in_encoders: by encoder, parameters, as (module, name), whose gradient on each tp rank is only a
            summand.
        trained_encoders: names of encoders with any trained parameter, projector included.
        has_changed: whether training or a checkpoint has changed the weights since they were loaded.
        tied: the two copies of a tied embedding that a pipeline has split, else None.

    Example:
        >>> handle = ModelHandle.from_pretrained(checkpoint)  # a folder or a hub id; every rank calls it
        >>> name, embedding = next(handle.named_hf_tensors())
        >>> name, embedding.dtype
        ('model.embed_tokens.weight', torch.bfloat16)
    """

    def __init__(
        self,
        empty: EmptyModel,
        meshes: Meshes,
        model: ModelConfig,
        memory: MemoryConfig,
        family: CheckpointFamily | None = None,
    ):
        """Lays out the parts of a model without storage. `from_pretrained` also allocates and loads its weights."""
        self.family, self._name = family or checkpoint_family(empty.config), model.path
        self._checkpoint: Checkpoint | None = None
        self.whole_config, self.config = empty.config, empty.language.config
        self.model, self.memory, self.meshes, self.layout = model, memory, meshes, meshes.language
        self.flops = StepFlops(empty.language)
        layers = numbered_layers(empty.language)
        layers.pop(self.config.num_hidden_layers, None)  # an MTP layer's router follows no routes
        routers = routers_of(layers, self.family.language)
        self.router_shape = router_shape(self.config.num_hidden_layers, routers)
        self.stages = split_model(empty.language, self.layout, model.implementation)
        language = [stage.part for stage in self.stages]
        self.num_deepstack = num_deepstack(self.whole_config)
        how = (self.layout, model, memory, self.whole_config, empty.base)
        self.extras = [parallelise(part, *how) for part in language]
        self.components = [Component("language", language, self.layout)] if language else []
        self.trained_encoders = {n for n, of in empty.encoders.items() if any(p.requires_grad for p in of.parameters())}
        self.partial_in_encoders: dict[str, list[tuple[nn.Module, str]]] = {}
        for name, layout in meshes.encoders.items():
            if not layout.is_outsider:
                self.partial_in_encoders[name] = parallelise_encoder(empty.encoders[name], layout, model, memory)
                self.components.append(Component(name, [empty.encoders[name]], layout))
        self.parts = [part for component in self.components for part in component.parts]
        is_cut = self.whole_config.tie_word_embeddings and self.layout.parallel.pp > 1
        self.tied = tied_embedding(language, self.layout) if is_cut else None
        self._readers: list[Callable[[], None]] = []
        self._weights = Offload(lambda: (t for p in self.parts for t in (*p.parameters(), *p.buffers())))
        self.unused_tensors: list[str] = []
        self.has_changed = False

    @classmethod
    def from_pretrained(
        cls,
        model: str | ModelConfig,
        parallel: ParallelConfig | None = None,
        memory: MemoryConfig | None = None,
        components: ComponentsConfig | None = None,
    ) -> "ModelHandle":
        """Loads a Hugging Face checkpoint onto a layout. A collective: every rank calls it.

        Joins the existing process group, else starts one from torchrun's environment.

        Args:
            model: folder or hub id, or a `ModelConfig` for more settings.
            parallel: sizes of the mesh axes; one rank by default.
            memory: recomputation, offloading and compilation; none by default.
            components: ranks and sizes per component of a multimodal model, in place of `parallel`. By default all
                components are on all ranks.

        Raises:
            InputError: the layout does not fit the model or the job, or the checkpoint is missing or damaged.
        """
        opened = OpenedModel.open(ModelConfig(path=model) if isinstance(model, str) else model)
        parallel = (parallel or ParallelConfig()) if components is None else components.language.parallel
        memory = memory or MemoryConfig()
        opened.check_layout(parallel, memory, components)
        return cls.load(opened, parallel, memory, components)

    @classmethod
    def load(
        cls,
        opened: OpenedModel,
        parallel: ParallelConfig,
        memory: MemoryConfig,
        components: ComponentsConfig | None = None,
        *,
        is_trained: bool = True,
    ) -> "ModelHandle":
        """`from_pretrained` for an opened checkpoint. A collective. The support table has accepted `parallel`,
        `memory` and `components`.

        Args:
            opened: the checkpoint.
            parallel, memory, components: as for `from_pretrained`.
            is_trained: False for a model that is only read: its weights have neither master copies nor gradients.

        Raises:
            InputError: the weights are missing or damaged, or the job has another number of ranks.
        """
        opened = opened.with_weights()
        files, config, model, description = opened.files, opened.whole, opened.model, opened.description
        combination = Combination(description, model, parallel, memory, components)
        device = join_process_group(parallel.world_size if components is None else components.world_size)
        meshes = build_meshes(parallel, components, device, [*description.encoders])
        dtypes = dtypes_of(model)
        compute, wide = dtypes.compute, dtypes.gradient
        compiled = are_compiled(combination, device, compute)
        attention = choose_attention(combination, device, compute, compiled)
        if model.fp8 is not None:
            check_float8(model.fp8, device)
        memory = memory.model_copy(update={"compile": compiled})
        has_mtp = model.mtp is not None and is_trained
        empty = build_empty_model(config, model.implementation, wide, attention, parallel.pp > 1, has_mtp)
        for head_dim in description.other_head_dims:
            of_kind = replace(combination, description=replace(description, head_dim=head_dim, value_dim=head_dim))
            set_attention_of_heads(empty.language, head_dim, choose_attention(of_kind, device, compute, compiled))
        checkpoint = Checkpoint(files, config, model.pickled_weights)
        for part in empty.parts:
            checkpoint.check(part)
        unused = checkpoint.unused(empty.parts)
        if model.indexer is None:
            freeze_indexers(numbered_layers(empty.language).values(), language_family(config))
        lora = None if model.lora is None else _with_adapters(empty, model.lora, checkpoint)
        _check_files_of_adapters(empty, checkpoint)
        if empty.encoders:
            freeze(empty.language, empty.encoders, model.frozen)
        if not is_trained:
            for part in empty.parts:
                part.requires_grad_(False)
        if lora is not None:
            empty = replace(empty, base=checkpoint.quantized_base(lora.base, empty.language))
        handle = cls(empty, meshes, model.model_copy(update={"lora": lora}), memory, checkpoint.family)
        handle._name = files.name
        handle._checkpoint, handle.unused_tensors = checkpoint, unused
        handle._fill(checkpoint)
        return handle

    def close(self) -> None:
        """Destroys this model's process groups, with their threads and connections. A collective: every rank calls it
        after the last use of the model. Process exit does the same. Threads end once nothing refers to the model."""
        self.meshes.close()
        clear_mesh_caches()
        gc.collect()  # modules and hooks of closed models form reference cycles

    def __enter__(self) -> "ModelHandle":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _fill(self, checkpoint: Checkpoint) -> None:
        dtypes = dtypes_of(self.model)
        for part in self.parts:
            checkpoint.fill(part, self.layout.device)
            if dtypes.master != dtypes.gradient:
                keep_gradients(part, dtypes.gradient)
        self._check_finite()

    @property
    def source(self) -> Path:
        """Folder of the loaded checkpoint."""
        return Path(self.model.path)

    @property
    def tokenizer_folder(self) -> Path:
        """Folder of the tokenizer: the loaded adapters' if they include one, else the checkpoint's."""
        return self.source if self._checkpoint is None else self._checkpoint.files.tokenizer_folder

    @property
    def quantized_here(self) -> tuple[str, ...]:
        """Names of checkpoint tensors that this rank quantized to nf4 while loading."""
        return () if self._checkpoint is None else tuple(dict.fromkeys(self._checkpoint.quantized_here))

    @functools.cached_property
    def description(self) -> ModelDescription:
        """Properties of the model that the support table's rules check."""
        return describe_model(self.whole_config)

    def fingerprint(self) -> str:
        """Returns a string that changes if the loaded weight files change."""
        return "" if self._checkpoint is None else self._checkpoint.fingerprint()

    @property
    def num_values(self) -> int:
        """Total number of values in the loaded checkpoint's tensors."""
        return 0 if self._checkpoint is None else self._checkpoint.num_values

    @property
    def dtype(self) -> torch.dtype:
        """The compute dtype."""
        return dtypes_of(self.model).compute

    @property
    def adapter_origin(self) -> AdapterOrigin | None:
        """The base model of the trained adapters; None if there are none."""
        return None if self.model.lora is None else AdapterOrigin(self.model.lora, self._name, self.family)

    @property
    def has_encoder(self) -> bool:
        """Whether the model has an image or audio encoder."""
        return bool(self.meshes.encoders)

    @property
    def is_mixture(self) -> bool:
        """Whether the model has experts and routers."""
        return self.router_shape is not None

    @property
    def router_layers(self) -> tuple[int, ...]:
        """Numbers of this rank's layers with a router."""
        return tuple(sorted(number for extras in self.extras for number in extras.router_watch.routers))

    def is_mtp(self, name: str) -> bool:
        """Returns whether the tensor called `name` in the model belongs to the MTP layer."""
        return name.startswith(f"model.layers.{self.config.num_hidden_layers}.")

    @property
    def trains_auxiliary(self) -> bool:
        """Whether any parameters are trained without effect on the model's own output."""
        return self.model.indexer is not None or (self.model.mtp is not None and self.model.mtp.detached)

    def is_auxiliary(self, name: str) -> bool:
        """Returns whether training the parameter called `name` leaves the model's own output unchanged, as for
        indexers and a detached MTP layer. Such gradients have a norm of their own."""
        return self.trains_auxiliary and (".indexer." in name or self.is_mtp(name))

    def check_mtp(self, *, is_read: bool) -> None:
        """Raises InputError, alike on every rank, if `is_read` and the model has no MTP layer."""
        if is_read and self.model.mtp is None:
            raise InputError("the model has no layer for multi-token prediction: set model.mtp, or read without it")

    def named_parameters(self, component: Component | None = None) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields names and (sharded) parameters of this rank's parts; a tied weight only once in the model.

        Args:
            component: one of `components`; by default all.
        """
        for part in self.parts if component is None else component.parts:
            for name, parameter in part.named_parameters():
                if self.tied is None or parameter is not self.tied.copy:
                    yield name, parameter

    def named_hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields Hugging Face names and whole tensors of this rank's stages. A collective of each stage's ranks.

        Tensors are in the compute dtype, with adapters merged. Successive tensors may share memory.
        """
        return itertools.chain(*(self._whole_tensors(component) for component in self.components))

    def _whole_tensors(self, component: Component) -> Iterator[tuple[str, Tensor]]:
        return whole_tensors(self.hf_sources(component, self.dtype), self.family, component.layout)

    def hf_sources(self, component: Component, dtype: torch.dtype) -> list[Source]:
        """Returns sources of a component's tensors on this rank, with adapters merged in fp32. A collective of each
        stage's ranks.

        Args:
            component: one of `components`.
            dtype: dtype of the sent parameters; buffers keep theirs.
        """
        self.check_on_device()
        return merged_sources(self.named_parameters(component), component.parts, dtype, self.family, component.layout)

    def adapter_sources(self, dtype: torch.dtype) -> list[Source]:
        """Returns sources of the adapters of this rank's stages, to be sent in `dtype`."""
        self.check_on_device()
        return adapters_alone(self.named_parameters(), dtype)

    def save_pretrained(
        self,
        path: str | Path,
        tokenizer: PreTrainedTokenizerBase | None = None,
        stop_token_ids: Sequence[int] = (),
        pads_with: int | None = None,
    ) -> None:
        """Writes a Hugging Face checkpoint in the compute dtype, or PEFT files if adapters are trained. A collective.
        The folder appears only once complete.

        Args:
            path: the folder to write, on a file system shared by all ranks; replaced if it exists.
            tokenizer: a tokenizer to save with the model.
            stop_token_ids: stop tokens besides those of the checkpoint's generation_config.json, which adapters do not
                have.
            pads_with: padding token in the config of a model with a linear head; None keeps the checkpoint's.
        """
        self.check_on_device()
        if self.adapter_origin is not None:
            save_adapters(
                Path(path), self._trained_tensors(), self.adapter_origin, tokenizer, self.layout.world_control
            )
            return
        of_components = [
            ComponentTensors(component.name, component.layout, self._whole_tensors(component))
            for component in self.components
        ]
        of_components.append(ComponentTensors("rest", self.layout, self._copied_tensors()))
        is_composite = self._checkpoint is not None and self._checkpoint.is_composite
        config = read_whole_config(self.source) if is_composite else self.whole_config
        config = type(config).from_dict(config.to_dict())
        config.dtype = self.dtype
        if pads_with is not None:
            config.pad_token_id = pads_with
        world = self.layout.world_control
        save_hf_checkpoint(Path(path), of_components, config, tokenizer, self.source, world, stop_token_ids)

    def _trained_tensors(self) -> dict[str, Tensor]:
        """Returns the whole trained tensors of this rank's stages, on the host; empty on all but one rank of a stage.
        A collective of each stage's ranks."""
        found = {}
        for component in self.components:
            for name, parameter in self.named_parameters(component):
                whole = gather_whole(parameter, component.layout) if parameter.requires_grad else None
                if whole is not None and component.layout.writes_for_stage:
                    found[name] = whole.cpu()
        return found

    def _copied_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields, on one rank, the checkpoint's tensors that belong to no part, such as unused MTP layers."""
        if self._checkpoint is not None and self.layout.writes_for_stage and self.layout.pp_rank == 0:
            for name in self.unused_tensors:
                yield name, self._checkpoint.read_untrained(name, self.dtype)

    def add_reader(self, hold: Callable[[], None]) -> None:
        """Registers a reader of the weights that runs while the model computes.

        Args:
            hold: called once before the weights change; blocks until the reader has finished.
        """
        self._readers.append(hold)

    def wait_for_readers(self) -> None:
        """Waits for readers. Call it before any change of the weights or of the optimizer's state."""
        while self._readers:
            self._readers.pop()()

    def to_host(self) -> int:
        """Moves weights and buffers to the host and releases gradients, to free their device memory for another
        process. Until `to_device` the model can neither compute nor be read.

        Returns:
            Bytes freed, as `Offload.to_host`.
        """
        self.wait_for_readers()
        self.zero_grad()
        for part in self.parts:
            release_gathered(part)
        return self._weights.to_host()

    def to_device(self) -> None:
        """Brings back everything that `to_host` moved, bit for bit. If memory runs out, it can be called again."""
        self._weights.to_device()

    def to_device_after(self, tensors: Iterable[Tensor]) -> AbstractContextManager[None]:
        """Brings everything back. Parameters and buffers in `tensors`, or shards of them, get their values only after
        the block, which may use their memory for other values."""
        return self._weights.to_device_after(tensors)

    @property
    def is_on_host(self) -> bool:
        """Whether the weights are on the host."""
        return self._weights.is_on_host

    def check_on_device(self) -> None:
        """Raises RuntimeError if the weights are on the host."""
        if self.is_on_host:
            raise RuntimeError("the model's weights are on the host: call ModelHandle.to_device() first")

    @property
    def has_linear_head(self) -> bool:
        """Whether a linear head replaces the vocabulary's."""
        return is_classifier(self.whole_config)

    def check_head(self, *, is_linear: bool) -> None:
        """Raises InputError, alike on every rank, if the model's head is not linear as required, or is although
        `is_linear` is False."""
        if self.has_linear_head and not is_linear:
            raise InputError(
                "the model has a linear head (model.num_labels) instead of a vocabulary head, so tokens have no "
                "log-probabilities: read it with Readout(scores=True)"
            )
        if is_linear and not self.has_linear_head:
            raise InputError("the model has no linear head, but its scores are requested: set model.num_labels")

    def named_hf_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yields Hugging Face names and whole gradients of this rank's stages, between `forward_backward` and
        `zero_grad`. A collective of each stage's ranks.

        Gradients have the dtype in which they are reduced. A weight not used in the step has gradient 0. Frozen
        weights have none; with LoRA only adapters have gradients, under their own names. Successive tensors may share
        memory.
        """
        for component in self.components:
            named = [(name, p) for name, p in self.named_parameters(component) if p.requires_grad]
            yield from whole_tensors(gradient_sources(named), self.family, component.layout)

    def zero_grad(self) -> None:
        """Releases all gradients."""
        for part in self.parts:
            part.zero_grad(set_to_none=True)

    def _finite_if_weights_are(self) -> Iterator[tuple[str, Tensor]]:
        """Yields this rank's weights; for quantized ones, tensors that hold an inf or nan if the dequantized weight
        does."""
        yield from ((name, local_tensor(parameter)) for name, parameter in self.named_parameters())
        for part in self.parts:
            yield from ((name, of) for name, held, _ in quantized_weights(part) for of in held.numbers())

    def _check_finite(self) -> None:
        bad = next((name for name, tensor in self._finite_if_weights_are() if not tensor.isfinite().all()), None)
        for name in gather_objects(bad, self.layout.world_control):
            if name is not None:
                raise InputError(
                    f"{self.source}: tensor {name} holds NaN or infinite weights: use an intact checkpoint"
                )


def _with_adapters(empty: EmptyModel, lora: LoraConfig, checkpoint: Checkpoint) -> LoraConfig:
    """Adds adapters to a model without storage. Returns their config with the targets found in it."""
    encoders = [as_encoder(part) for part in empty.encoders.values()]
    found = add_adapters(empty.language, lora, encoders)
    check_magnitudes(empty.language, checkpoint.family)
    return found


def _check_files_of_adapters(empty: EmptyModel, checkpoint: Checkpoint) -> None:
    """Raises InputError if loaded adapters do not fit the model. A base for merging is quantized as in their
    training."""
    adapters = checkpoint.files.adapters
    if adapters is None:
        return
    adapters.check(empty.parts)
    if adapters.merges and adapters.config.base == "nf4":
        checkpoint.read_base_in_nf4(empty.language, adapters.tensors)
