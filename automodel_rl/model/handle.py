"""ModelHandle: the one seam behind which a model is an `nn.Module` or an `AutoPipeline`."""

import contextlib
import dataclasses
import functools
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from nemo_automodel.components.distributed.pipelining import AutoPipeline
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from automodel_rl.batch import LocalRow, PackedBatch, RouterShape, empty_row, local_row
from automodel_rl.config import ModelConfig, ParallelConfig
from automodel_rl.config.families import FAMILIES
from automodel_rl.config.memory import MemoryConfig
from automodel_rl.errors import InputError
from automodel_rl.launch.process_group import join_process_group
from automodel_rl.losses import Denominator, LossFn, Readout
from automodel_rl.model.attention import choose_attention
from automodel_rl.model.build import build_empty_model
from automodel_rl.model.flops import StepFlops
from automodel_rl.model.hf_buckets import Source, whole_tensors
from automodel_rl.model.hf_read import (
    Checkpoint,
    describe_model,
    read_config,
    resolve_checkpoint,
    stored_buffers,
)
from automodel_rl.model.hf_write import save_hf_checkpoint
from automodel_rl.model.logprobs import read_targets
from automodel_rl.model.lora import adapted_weights, add_adapters, is_adapter, merge, save_adapters
from automodel_rl.model.nemo import parts_of, split_model
from automodel_rl.model.parallelise import dtypes_of, parallelise
from automodel_rl.model.part_forward import numbered_layers
from automodel_rl.model.router_replay import replay_metrics
from automodel_rl.model.routers import global_loads, load_metric, router_shape, routers_of
from automodel_rl.parallel.combinations import check_supported, needs_mathematics
from automodel_rl.parallel.drivers import Driver, PipelineDriver, SequentialDriver
from automodel_rl.parallel.gradients import TiedEmbedding, sum_partial_gradients
from automodel_rl.parallel.host_collectives import gather_objects, tensor_from_last_stage
from automodel_rl.parallel.last_stage import LogitsCapturer, LossTotals, OutputFn, PPLossAdapter, whole_rows
from automodel_rl.parallel.layout import Layout, build_layout
from automodel_rl.parallel.sharding import local_tensor

FORWARD_ROWS = 64
"""Rows of one pass without gradients; enough that a pipeline is full most of the time."""


class ModelHandle:
    """A causal language model on any layout: parts, forward, forward_backward, named Hugging Face tensors.

    Attributes:
        parts: this rank's model chunks.
        config: the Hugging Face config.
        model: which checkpoint it is, how it computes, and what of it is trained.
        memory: what is recomputed, offloaded or compiled.
        layout: this rank's place among all ranks.
        flops: of a sequence in a training step, by its length.
        router_shape: what routes of the whole model look like, None for a dense one.
        extras: of every part.
        tied: the two copies of a tied embedding, where a pipeline has split them.

    Example:
        >>> handle = ModelHandle.from_pretrained(checkpoint)  # a folder or a hub id; every rank calls it
        >>> name, embedding = next(handle.named_hf_tensors())
        >>> name, embedding.dtype
        ('model.embed_tokens.weight', torch.bfloat16)
    """

    def __init__(
        self,
        built: nn.Module | AutoPipeline,
        config: PretrainedConfig,
        model: ModelConfig,
        memory: MemoryConfig,
        layout: Layout,
        flops: StepFlops,
        router_shape: RouterShape | None,
    ):
        """Lays out the parts of a split model that has no storage yet; `from_pretrained` gives it some."""
        self.parts = parts_of(built)
        self.extras = [parallelise(part, layout, model, memory) for part in self.parts]
        self.config, self.model, self.memory, self.layout, self.flops = config, model, memory, layout, flops
        self.router_shape = router_shape
        self.tied = (
            _tied_embedding(self.parts, layout) if config.tie_word_embeddings and layout.parallel.pp > 1 else None
        )
        self._driver: Driver
        if isinstance(built, AutoPipeline):
            self._driver = PipelineDriver(built, layout, config.hidden_size, self.dtype)
        else:
            self._driver = SequentialDriver(built)

    @classmethod
    def from_pretrained(
        cls, model: str | ModelConfig, parallel: ParallelConfig | None = None, memory: MemoryConfig | None = None
    ) -> "ModelHandle":
        """Loads a Hugging Face checkpoint onto a layout. A collective: every rank calls it.

        Joins the process group that is there, else starts one from torchrun's environment.

        Args:
            model: folder or hub id, or a `ModelConfig` with more to say.
            parallel: sizes of the mesh axes; by default one rank.
            memory: what is recomputed; by default nothing.

        Raises:
            InputError: the layout does not fit the model or the job, or the checkpoint is missing or damaged.
        """
        model = ModelConfig(path=model) if isinstance(model, str) else model
        parallel, memory = parallel or ParallelConfig(), memory or MemoryConfig()
        folder = resolve_checkpoint(model.path)
        config = read_config(folder)
        description = describe_model(config)
        check_supported(description, model, parallel, memory)
        device = join_process_group(parallel.world_size)
        layout = build_layout(parallel, device)
        compute, master = dtypes_of(model)
        attention = choose_attention(model.attention, needs_mathematics(description), device, compute)
        empty = build_empty_model(config, model.implementation, master, attention, untie=parallel.pp > 1)
        checkpoint = Checkpoint(folder, config.model_type)
        checkpoint.check(empty)
        lora = None if model.lora is None else add_adapters(empty, model.lora)
        flops = StepFlops(empty)
        routers = routers_of(numbered_layers(empty), FAMILIES[config.model_type])
        shape = router_shape(config.num_hidden_layers, routers)
        model = model.model_copy(update={"path": str(folder), "lora": lora})
        handle = cls(split_model(empty, layout), config, model, memory, layout, flops, shape)
        for part in handle.parts:
            checkpoint.fill(part, device)
        handle._check_finite()
        return handle

    @property
    def source(self) -> Path:
        """Folder of the checkpoint it was loaded from."""
        return Path(self.model.path)

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
            counts: global denominators of those sums, by which gradients are divided.

        Returns:
            Undivided sums of this data rank, on ranks with the last stage; empty totals elsewhere.
        """
        for part, extras in zip(self.parts, self.extras, strict=True):
            part.train()
            extras.router_watch.start_step(counts["positions"])
            extras.router_replay.start_step()
        batches = self._filled_up(batches)
        # Whole rows are for the loss, which other stages do not compute.
        rows = [batch.to(self.layout.device) for batch in batches] if self.layout.has_last_stage else batches
        adapter = PPLossAdapter(loss_fn, rows, counts, stage=self.layout.parallel.num_stages - 1)
        with self._rows_let_go():
            self._driver.forward_backward(self._local(batches), adapter, self._whole_rows(read_targets(readout)))
        if self.layout.tp_group is not None:
            partial = [pair for extras in self.extras for pair in extras.partial_gradients]
            sum_partial_gradients([module.get_parameter(name) for module, name in partial], self.layout.tp_group)
        if self.tied is not None:
            self.tied.sum_gradients()
        return adapter.totals

    def forward(self, batches: Sequence[PackedBatch], output_fn: OutputFn) -> list[Tensor]:
        """What `output_fn` makes of every row, without gradients. A collective.

        Args:
            batches: this data rank's rows.
            output_fn: (final hidden states [t, H], `Head`, this rank's `LocalRow`) -> [t, ...]; in chunks, so that
                [t, V] never exists.

        Returns:
            One tensor [T, ...] for each row, of `output_fn`'s dtype; equal on all stages of this data rank.
        """
        for part in self.parts:
            part.eval()
        results: list[Tensor] = []
        try:
            # In blocks, for a pipeline has receive buffers for all rows that it runs at once.
            for start in range(0, len(batches), FORWARD_ROWS):
                results += self._forward_block(batches[start : start + FORWARD_ROWS], output_fn)
        finally:
            self._release_gathered_weights()
        return results

    def _forward_block(self, batches: Sequence[PackedBatch], output_fn: OutputFn) -> list[Tensor]:
        capturer = LogitsCapturer(self._whole_rows(output_fn))
        filled = self._filled_up(batches)
        with self._rows_let_go():
            self._driver.forward(self._local(filled), capturer)
        whole = torch.cat(capturer.outputs) if self.layout.has_last_stage else None
        results = tensor_from_last_stage(whole, self.layout).split([batch.num_tokens for batch in filled])
        return list(results[: len(batches)])

    @property
    def is_mixture(self) -> bool:
        """Whether layers have experts and routers."""
        return self.router_shape is not None

    @property
    def router_layers(self) -> tuple[int, ...]:
        """Numbers of this rank's layers that have a router."""
        return tuple(sorted(number for extras in self.extras for number in extras.router_watch.routers))

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Hugging Face names and (sharded) parameters of this rank's stages; a tied weight only once in the model."""
        for part in self.parts:
            for name, parameter in part.named_parameters():
                if self.tied is None or parameter is not self.tied.copy:
                    yield name, parameter

    def named_hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Hugging Face names and whole tensors of this rank's stages. A collective of each stage's ranks.

        They have the dtype that the model computes in, so that they give the same results. Adapters are merged. Those
        that come one after the other may share memory.
        """
        return whole_tensors(self.hf_sources(self.dtype), self.config.model_type, self.layout)

    def hf_sources(self, dtype: torch.dtype) -> list[Source]:
        """What this rank holds of its stages' tensors, as a Hugging Face checkpoint has them, adapters merged in fp32.
        A collective of each stage's ranks.

        Args:
            dtype: of parameters; buffers keep theirs.
        """
        adapted = {weight: linear for part in self.parts for weight, linear in adapted_weights(part)}
        downs = self._whole_downs(adapted.values())
        sources = []
        for name, parameter in self.named_parameters():
            if parameter in adapted:
                linear = adapted[parameter]
                sources.append(Source(name, parameter, dtype, functools.partial(merge, linear, downs[linear])))
            elif not is_adapter(name):
                sources.append(Source.of(name, parameter, dtype))
        for part in self.parts:
            for name, buffer in stored_buffers(part):
                sources.append(Source.of(name, buffer, buffer.dtype))
        return sources

    def adapter_sources(self, dtype: torch.dtype) -> list[Source]:
        """What this rank holds of its stages' adapters.

        Args:
            dtype: that they are sent in.
        """
        own = [(name, parameter) for name, parameter in self.named_parameters() if is_adapter(name)]
        return [Source.of(name, p, dtype) for name, p in own]

    def _whole_downs(self, linears: Collection[Any]) -> dict[Any, Tensor]:
        """All of each adapter's `lora_A`."""
        weights = {str(number): linear.lora_A.weight for number, linear in enumerate(linears)}
        sources = [Source.of(name, w, w.dtype) for name, w in weights.items()]
        whole = dict(whole_tensors(sources, self.config.model_type, self.layout))
        return {linear: whole[str(number)] for number, linear in enumerate(linears)}

    def save_pretrained(self, path: str | Path, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        """Writes a Hugging Face checkpoint in the compute dtype, or PEFT's files if adapters are trained. A collective.

        Complete, or not there at all.

        Args:
            path: a folder, replaced if it exists; on a file system that all ranks share.
            tokenizer: saved along, if given.
        """
        if self.model.lora is not None:
            save_adapters(Path(path), self.named_parameters(), self.model.lora, self.source, tokenizer, self.layout)
            return
        config = type(self.config).from_dict(self.config.to_dict())
        config.dtype = self.dtype
        save_hf_checkpoint(Path(path), self.named_hf_tensors(), config, tokenizer, self.source, self.layout)

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

    def zero_grad(self) -> None:
        """Lets go of all gradients."""
        for part in self.parts:
            part.zero_grad(set_to_none=True)

    def _filled_up(self, batches: Sequence[PackedBatch]) -> list[PackedBatch]:
        """With empty rows added where the driver needs more."""
        missing = self._driver.fill_up_to(len(batches)) - len(batches)
        return [*batches, *(empty_row(batches[0]) for _ in range(missing))]

    def _whole_rows(self, output_fn: OutputFn) -> OutputFn:
        return whole_rows(output_fn, self.layout.cp_group)

    def _local(self, batches: Sequence[PackedBatch]) -> list[LocalRow]:
        """This rank's tokens of every row, on its device, with the routes of its layers."""
        layout = self.layout
        batches = [self._own_routes(batch) for batch in batches]
        multiple = layout.parallel.tp if layout.parallel.sequence_parallel else 1
        rows = [local_row(batch, layout.parallel.cp, layout.cp_rank, multiple) for batch in batches]
        return [row.to(layout.device) for row in rows]

    def _own_routes(self, batch: PackedBatch) -> PackedBatch:
        if batch.routes is None:
            return batch
        if not self.is_mixture:
            raise ValueError("a row has routes, and no layer of this model has a router: leave routes out")
        return dataclasses.replace(batch, routes=batch.routes.select(self.router_layers))

    @contextlib.contextmanager
    def _rows_let_go(self) -> Iterator[None]:
        """After the block no layer holds a row, also if one has failed."""
        try:
            yield
        finally:
            for extras in self.extras:
                extras.row_scope.clear()

    def _release_gathered_weights(self) -> None:
        """Weights gathered for a forward without backward would outlive the next update of their shards."""
        for part in self.parts:
            for module in part.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

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
