"""ModelHandle: the one seam behind which a model is an `nn.Module` or an `AutoPipeline`, of one module or of two."""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from nemo_automodel.components.distributed.pipelining import AutoPipeline
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from automodel_rl.batch import LocalRow, PackedBatch, empty_row
from automodel_rl.config import ModelConfig, ParallelConfig
from automodel_rl.config.families import FAMILIES
from automodel_rl.config.memory import MemoryConfig
from automodel_rl.config.modules import ModulesConfig, one_layout
from automodel_rl.errors import InputError
from automodel_rl.launch.process_group import join_process_group
from automodel_rl.losses import Denominator, LossFn, Readout
from automodel_rl.model.attention import choose_attention
from automodel_rl.model.block_sizes import block_sizes
from automodel_rl.model.build import EmptyModel, build_empty_model
from automodel_rl.model.flops import StepFlops
from automodel_rl.model.hf_buckets import Source, whole_tensors
from automodel_rl.model.hf_read import (
    Checkpoint,
    describe_model,
    read_config,
    resolve_checkpoint,
)
from automodel_rl.model.hf_sources import adapters_alone, gradient_sources, merged_sources
from automodel_rl.model.hf_write import ModuleTensors, save_hf_checkpoint
from automodel_rl.model.image_encoder import ImageEncoder
from automodel_rl.model.local_rows import local_rows
from automodel_rl.model.logprobs import read_targets
from automodel_rl.model.lora import AdapterOrigin, add_adapters, save_adapters
from automodel_rl.model.nemo import parts_of, split_model
from automodel_rl.model.parallelise import dtypes_of, parallelise
from automodel_rl.model.part_forward import numbered_layers
from automodel_rl.model.router_replay import replay_metrics
from automodel_rl.model.routers import global_loads, load_metric, router_shape, routers_of
from automodel_rl.model.vision import (
    VisionPart,
    blank_image,
    freeze,
    parallelise_encoder,
)
from automodel_rl.parallel.agreement import GlobalRows, agree_on_rows, raise_everywhere
from automodel_rl.parallel.bridge import Bridge
from automodel_rl.parallel.combinations import check_supported, needs_mathematics
from automodel_rl.parallel.drivers import Driver, PipelineDriver, SequentialDriver
from automodel_rl.parallel.fsdp_state import reset_fsdp
from automodel_rl.parallel.gradients import TiedEmbedding, sum_partial_gradients
from automodel_rl.parallel.host_collectives import gather_objects, tensor_from_last_stage
from automodel_rl.parallel.last_stage import LogitsCapturer, LossTotals, OutputFn, PPLossAdapter, whole_rows
from automodel_rl.parallel.layout import Layout, build_layout
from automodel_rl.parallel.sharding import abandon_step, local_tensor, release_gathered


@dataclass(frozen=True)
class Module:
    """Parts of the model that share meshes.

    Attributes:
        name: "language", or "vision" for the encoder of images with its projector.
        parts: this rank's.
        layout: this rank's place among the module's ranks.
    """

    name: str
    parts: list[Any]
    layout: Layout

    def every_parameter(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Of all parts, by name; a tied weight as often as this rank has it."""
        return itertools.chain(*(part.named_parameters() for part in self.parts))


class ModelHandle:
    """A causal or vision-language model on any layout: parts, forward, forward_backward, named Hugging Face tensors.

    Attributes:
        parts: this rank's model chunks, of all modules.
        modules: the modules that this rank has parts of.
        config: the Hugging Face config of the language model.
        whole_config: of the model, which for most is the same.
        model: which checkpoint it is, how it computes, and what of it is trained.
        memory: what is recomputed, offloaded or compiled.
        layout: this rank's place among the ranks of the language model, of which it may be a guest.
        flops: of a sequence in a training step, by its length; those of the encoder are not counted.
        router_shape: what routes of the whole model look like, None for a dense one.
        extras: of every part of the language model.
        tied: the two copies of a tied embedding, where a pipeline has split them.

    Example:
        >>> handle = ModelHandle.from_pretrained(checkpoint)  # a folder or a hub id; every rank calls it
        >>> name, embedding = next(handle.named_hf_tensors())
        >>> name, embedding.dtype
        ('model.embed_tokens.weight', torch.bfloat16)
    """

    def __init__(
        self,
        empty: EmptyModel,
        config: PretrainedConfig,
        model: ModelConfig,
        memory: MemoryConfig,
        layout: Layout,
        vision_layout: Layout | None,
        modules: ModulesConfig | None,
        family: str | None = None,
    ):
        """Lays out the parts of a model that has no storage yet; `from_pretrained` gives it some."""
        self._family = family or config.model_type
        self.whole_config, self.config = config, empty.language.config
        self.model, self.memory, self.layout = model, memory, layout
        self.flops = StepFlops(empty.language)
        routers = routers_of(numbered_layers(empty.language), FAMILIES[self.config.model_type])
        self.router_shape = router_shape(self.config.num_hidden_layers, routers)
        built = None if layout.is_guest else split_model(empty.language, layout)
        language = [] if built is None else parts_of(built)
        self.extras = [parallelise(part, layout, model, memory) for part in language]
        self.modules = [Module("language", language, layout)] if language else []
        self._encoder: ImageEncoder | None = None
        if empty.vision is not None:
            assert vision_layout is not None
            assert modules is not None
            self._encoder = self._build_encoder(empty.vision, vision_layout, modules)
        self.parts = [part for module in self.modules for part in module.parts]
        self.tied = _tied_embedding(language, layout) if config.tie_word_embeddings and layout.parallel.pp > 1 else None
        self._readers: list[Callable[[], None]] = []
        self._driver: Driver | None = None
        if isinstance(built, AutoPipeline):
            self._driver = PipelineDriver(built, layout, self.config.hidden_size, self.dtype)
        elif built is not None:
            self._driver = SequentialDriver(built)

    @classmethod
    def from_pretrained(
        cls,
        model: str | ModelConfig,
        parallel: ParallelConfig | None = None,
        memory: MemoryConfig | None = None,
        modules: ModulesConfig | None = None,
    ) -> "ModelHandle":
        """Loads a Hugging Face checkpoint onto a layout. A collective: every rank calls it.

        Joins the process group that is there, else starts one from torchrun's environment.

        Args:
            model: folder or hub id, or a `ModelConfig` with more to say.
            parallel: sizes of the mesh axes; by default one rank.
            memory: what is recomputed; by default nothing.
            modules: in place of `parallel`, meshes for the modules of a vision-language model; by default both are on
                all ranks.

        Raises:
            InputError: the layout does not fit the model or the job, or the checkpoint is missing or damaged.
        """
        model = ModelConfig(path=model) if isinstance(model, str) else model
        parallel = (parallel or ParallelConfig()) if modules is None else modules.language.parallel
        memory = memory or MemoryConfig()
        folder = resolve_checkpoint(model.path)
        config = read_config(folder)
        description = describe_model(config)
        check_supported(description, model, parallel, memory, modules)
        device = join_process_group(parallel.world_size if modules is None else modules.world_size)
        if description.vision is not None:
            modules = modules or one_layout(parallel)
        layout = build_layout(parallel, device, None if modules is None else modules.language.ranks)
        vision_layout = None if modules is None else build_layout(modules.vision.parallel, device, modules.vision.ranks)
        compute, master = dtypes_of(model)
        attention = choose_attention(model.attention, needs_mathematics(description), device, compute)
        empty = build_empty_model(config, model.implementation, master, attention, untie=parallel.pp > 1)
        checkpoint = Checkpoint(folder, config.model_type, model.pickled_weights)
        for part in empty.parts:
            checkpoint.check(part)
        lora = None if model.lora is None else add_adapters(empty.language, model.lora)
        if empty.vision is not None:
            freeze(empty.language, empty.vision, model.frozen)
        model = model.model_copy(update={"path": str(folder), "lora": lora})
        handle = cls(empty, config, model, memory, layout, vision_layout, modules, checkpoint.family)
        for part in handle.parts:
            checkpoint.fill(part, device)
        handle._check_finite()
        return handle

    def _build_encoder(self, part: VisionPart, layout: Layout, modules: ModulesConfig) -> ImageEncoder:
        """Lays out this rank's part of the encoder, if it has one, and the way of its embeddings."""
        if not layout.is_guest:
            parallelise_encoder(part, layout, self.model, self.memory)
            self.modules.append(Module("vision", [part], layout))
        return ImageEncoder(
            None if layout.is_guest else part,
            Bridge(layout, self.layout, modules.vision.ranks, modules.language.ranks),
            blank_image(self.whole_config),
            like=torch.empty(0, self.config.hidden_size, dtype=self.dtype, device=self.layout.device),
            trains=not {"vision", "projector"} <= {*self.model.frozen},
        )

    @property
    def source(self) -> Path:
        """Folder of the checkpoint it was loaded from."""
        return Path(self.model.path)

    @property
    def family(self) -> str:
        """How tensors are named in files, a key of `FAMILIES`: as in the checkpoint it was loaded from."""
        return self._family

    @property
    def dtype(self) -> torch.dtype:
        """What the model computes in."""
        return dtypes_of(self.model)[0]

    def forward_backward(
        self, batches: Sequence[PackedBatch], loss_fn: LossFn, readout: Readout, counts: dict[Denominator, int]
    ) -> LossTotals:
        """Adds the gradients of one global step to every parameter, summed over data ranks.

        Args:
            batches: this data rank's rows; every data rank has equally many.
            loss_fn: gives sums over a row.
            readout: what the loss gets of every token.
            counts: global denominators of those sums, by which gradients are divided: `global_rows(batches).counts`.

        Returns:
            Undivided sums of this data rank, on ranks with the last stage; empty totals elsewhere.

        Raises:
            MicrobatchError: on every rank, if the loss raises on any.
        """
        with self.abandoning_on_failure():
            for part in self.parts:
                part.train()
            for extras in self.extras:
                extras.router_watch.start_step(counts["positions"])
                extras.router_replay.start_step()
            batches = self._filled_up(batches)
            embeddings = [] if self._encoder is None else self._encoder.forward(batches, train=True)
            # Whole rows are for the loss, which other stages do not compute.
            rows = [batch.to(self.layout.device) for batch in batches] if self.layout.has_last_stage else batches
            adapter = PPLossAdapter(loss_fn, rows, counts, stage=self.layout.parallel.num_stages - 1)
            if self._driver is not None:
                with self._rows_let_go():
                    local = self._local(batches, embeddings)
                    self._driver.forward_backward(local, adapter, self._whole_rows(read_targets(readout)))
            if self.layout.tp_group is not None:
                partial = [pair for extras in self.extras for pair in extras.partial_gradients]
                sum_partial_gradients([module.get_parameter(name) for module, name in partial], self.layout.tp_group)
            if self.tied is not None:
                self.tied.sum_gradients()
            if self._encoder is not None:
                self._encoder.backward(embeddings)
            raise_everywhere(adapter.failure, self.layout)
            return adapter.totals

    @contextlib.contextmanager
    def abandoning_on_failure(self) -> Iterator[None]:
        """Where the block raises, the handle is after it what it was before the step: no gradients, no gathered
        weights, no row in any layer. What is not a loss may fail on one rank alone and leave the others in a
        collective; then this rank is as before and the job is not."""
        try:
            yield
        except BaseException as error:
            try:
                self._abandon_step()
            except Exception as more:  # a device that has failed, or a peer that has gone: what came first matters
                error.add_note(f"the handle cannot be used any more: {type(more).__name__}: {more}")
            raise

    def _abandon_step(self) -> None:
        for extras in self.extras:
            extras.row_scope.clear()
        if self._encoder is not None:
            self._encoder.abandon_step()
        for part in self.parts:
            abandon_step(part)

    def global_rows(self, batches: Sequence[PackedBatch]) -> GlobalRows:
        """How many rows there are and what losses divide by, over all data ranks. A collective.

        Args:
            batches: this data rank's rows.

        Raises:
            InputError: on every rank, if the rows do not fit the model or each other.
        """
        return agree_on_rows(batches, self.config.vocab_size, self.layout)

    def forward(self, batches: Sequence[PackedBatch], output_fn: OutputFn) -> list[Tensor]:
        """What `output_fn` makes of every row, without gradients. A collective.

        Args:
            batches: this data rank's rows; every data rank has equally many.
            output_fn: (final hidden states [t, H], `Head`, this rank's `LocalRow`) -> [t, ...]; in chunks, so that
                [t, V] never exists.

        Returns:
            One tensor [T, ...] for each row, of `output_fn`'s dtype; equal on all stages of this data rank.

        Raises:
            InputError: on every rank, if the rows do not fit the model or each other.
        """
        num_rows = self.global_rows(batches).num_rows
        for part in self.parts:
            part.eval()
        results: list[Tensor] = []
        try:
            # In blocks, for a pipeline has receive buffers for all rows that it runs at once.
            for start in range(0, num_rows, block_sizes.forward_rows):
                results += self._forward_block(batches[start : start + block_sizes.forward_rows], output_fn)
        except BaseException:  # FSDP may be in the midst of a layer; gradients of a step before stay
            for part in self.parts:
                reset_fsdp(part)
            raise
        finally:
            for part in self.parts:
                release_gathered(part)
        return results

    def _forward_block(self, batches: Sequence[PackedBatch], output_fn: OutputFn) -> list[Tensor]:
        capturer = LogitsCapturer(self._whole_rows(output_fn))
        filled = self._filled_up(batches)
        embeddings = [] if self._encoder is None else self._encoder.forward(filled, train=False)
        if self._driver is None:
            return []
        with self._rows_let_go():
            self._driver.forward(self._local(filled, embeddings), capturer)
        whole = torch.cat(capturer.outputs) if self.layout.has_last_stage else None
        results = tensor_from_last_stage(whole, self.layout).split([batch.num_tokens for batch in filled])
        return list(results[: len(batches)])

    @property
    def sees(self) -> bool:
        """Whether it has an encoder of images."""
        return self._encoder is not None

    @property
    def is_mixture(self) -> bool:
        """Whether layers have experts and routers."""
        return self.router_shape is not None

    @property
    def router_layers(self) -> tuple[int, ...]:
        """Numbers of this rank's layers that have a router."""
        return tuple(sorted(number for extras in self.extras for number in extras.router_watch.routers))

    def named_parameters(self, module: Module | None = None) -> Iterator[tuple[str, nn.Parameter]]:
        """Names and (sharded) parameters of this rank's parts; a tied weight only once in the model.

        Args:
            module: one of `modules`; by default all.
        """
        for part in self.parts if module is None else module.parts:
            for name, parameter in part.named_parameters():
                if self.tied is None or parameter is not self.tied.copy:
                    yield name, parameter

    def named_hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Hugging Face names and whole tensors of this rank's stages. A collective of each stage's ranks.

        They have the dtype that the model computes in, so that they give the same results. Adapters are merged. Those
        that come one after the other may share memory.
        """
        return itertools.chain(*(self._whole_tensors(module) for module in self.modules))

    def _whole_tensors(self, module: Module) -> Iterator[tuple[str, Tensor]]:
        return whole_tensors(self.hf_sources(module, self.dtype), self.family, module.layout)

    def hf_sources(self, module: Module, dtype: torch.dtype) -> list[Source]:
        """What this rank holds of a module's tensors, as a Hugging Face checkpoint has them, adapters merged in fp32.
        A collective of each stage's ranks.

        Args:
            module: one of `modules`.
            dtype: of parameters; buffers keep theirs.
        """
        return merged_sources(self.named_parameters(module), module.parts, dtype, self.family, module.layout)

    def adapter_sources(self, dtype: torch.dtype) -> list[Source]:
        """What this rank holds of its stages' adapters.

        Args:
            dtype: that they are sent in.
        """
        return adapters_alone(self.named_parameters(), dtype)

    def save_pretrained(self, path: str | Path, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        """Writes a Hugging Face checkpoint in the compute dtype, or PEFT's files if adapters are trained. A collective.

        Complete, or not there at all.

        Args:
            path: a folder, replaced if it exists; on a file system that all ranks share.
            tokenizer: saved along, if given.
        """
        if self.model.lora is not None:
            origin = AdapterOrigin(self.model.lora, self.source, self.family)
            save_adapters(Path(path), self.named_parameters(), origin, tokenizer, self.layout)
            return
        config = type(self.whole_config).from_dict(self.whole_config.to_dict())
        config.dtype = self.dtype
        of_modules = [ModuleTensors(module.name, module.layout, self._whole_tensors(module)) for module in self.modules]
        save_hf_checkpoint(Path(path), of_modules, config, tokenizer, self.source, self.layout.world_control)

    def balance_routers(self) -> dict[str, float]:
        """After an update of a mixture: moves the routers' biases, if asked for. A collective.

        Returns:
            The load of the step by `LOAD_METRIC`, and how far routes and routers differed.
        """
        watches = [extras.router_watch for extras in self.extras]
        loads = global_loads(watches, self.layout)
        for watch in watches:
            if watch.config.bias_update_rate:
                watch.update_biases(loads)
        replays = [extras.router_replay for extras in self.extras]
        return {**load_metric(loads, self.layout), **replay_metrics(replays, self.layout)}

    def let_read(self, hold: Callable[[], None]) -> None:
        """Lets something read the weights beside the computation.

        Args:
            hold: called once, before they change.
        """
        self._readers.append(hold)

    def before_change(self) -> None:
        """For whoever changes weights or what belongs to them: lets readers finish first."""
        while self._readers:
            self._readers.pop()()

    def named_hf_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Hugging Face names and whole gradients of this rank's stages, between `forward_backward` and `zero_grad`. A
        collective of each stage's ranks.

        They have the dtype in which they are reduced, and are 0 for what took no part. Frozen weights have none; with a
        LoRA only adapters have, under their own names. Those that come one after the other may share memory.
        """
        for module in self.modules:
            named = [(name, p) for name, p in self.named_parameters(module) if p.requires_grad]
            yield from whole_tensors(gradient_sources(named), self.family, module.layout)

    def zero_grad(self) -> None:
        """Lets go of all gradients."""
        for part in self.parts:
            part.zero_grad(set_to_none=True)

    def _filled_up(self, batches: Sequence[PackedBatch]) -> list[PackedBatch]:
        """With empty rows added where the driver needs more."""
        if self._driver is None:
            return []
        missing = self._driver.fill_up_to(len(batches)) - len(batches)
        return [*batches, *(empty_row(batches[0]) for _ in range(missing))]

    def _whole_rows(self, output_fn: OutputFn) -> OutputFn:
        return whole_rows(output_fn, self.layout.cp_group)

    def _local(self, batches: Sequence[PackedBatch], embeddings: Sequence[Tensor]) -> list[LocalRow]:
        """This rank's tokens of every row.

        Args:
            batches: this data rank's rows.
            embeddings: of the images of every row; none on ranks without a use for them.
        """
        if not self.is_mixture and any(batch.routes is not None for batch in batches):
            raise ValueError("a row has routes, and no layer of this model has a router: leave routes out")
        return local_rows(batches, embeddings, self.layout, self.whole_config, self.router_layers)

    @contextlib.contextmanager
    def _rows_let_go(self) -> Iterator[None]:
        """After the block no layer holds a row, also if one has failed."""
        try:
            yield
        finally:
            for extras in self.extras:
                extras.row_scope.clear()

    def _check_finite(self) -> None:
        bad = next((name for name, p in self.named_parameters() if not local_tensor(p).isfinite().all()), None)
        for name in gather_objects(bad, self.layout.world_control):
            if name is not None:
                raise InputError(
                    f"{self.source}: tensor {name} holds NaN or infinite weights: use an intact checkpoint"
                )


def _tied_embedding(parts: list[Any], layout: Layout) -> TiedEmbedding:
    embeddings = [part.model.embed_tokens.weight for part in parts if part.model.embed_tokens is not None]
    heads = [part.lm_head.weight for part in parts if part.lm_head is not None]
    return TiedEmbedding(next(iter(embeddings), None), next(iter(heads), None), layout)
