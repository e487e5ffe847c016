"""Trains a layout and one process on the same microbatches, and records the largest differences."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from automodel_rl.batch import Microbatch, TokenSequence, empty_microbatch, pack_microbatch
from automodel_rl.block_sizes import small_blocks
from automodel_rl.config import ModelConfig, MuonConfig, ParallelConfig
from automodel_rl.config.components import ComponentsConfig
from automodel_rl.config.model import Attention, Dtype, Implementation, MasterDtype, MemoryConfig
from automodel_rl.config.optimizer import OptimizerName
from automodel_rl.engine import Engine
from automodel_rl.engine.reference_weights import ReferenceWeights
from automodel_rl.losses import Denominator, LossFn, Readout, count, sft_loss
from automodel_rl.model.handle import ModelHandle
from automodel_rl.optimizers import learning_rate
from automodel_rl.parallel.host_collectives import gather_objects
from automodel_rl.parallel.layout import Layout
from automodel_rl.parallel.sharding import gather_whole
from automodel_rl.tools.verify.media import with_media
from automodel_rl.tools.verify.one_process import OneProcess, Training
from automodel_rl.tools.verify.routes import RouteCheck, with_routes

EPS, BETAS, WEIGHT_DECAY = 1e-3, (0.8, 0.9), 0.1
"""Optimizer settings. None is a default and each has an effect: eps is of the size of the gradients."""

NO_STEP = 0
"""Step number of quantities that are compared once, after training."""


@dataclass(frozen=True)
class Case:
    """One comparison.

    Attributes:
        microbatches: microbatches per data rank in each step. The last step has an additional empty one.
        replay: whether a mixture's tokens follow given routes.
        components: layout of a multimodal model, instead of `parallel`.
        frozen: as in `model.frozen`.
        aux_loss: weight of a mixture's load-balancing loss.
        master_dtype: as in `ModelConfig`.
    """

    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    microbatches: tuple[int, ...] = (3, 1, 4)
    dtype: Dtype = "float64"
    implementation: Implementation = "transformers"
    attention: Attention = "auto"
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    replay: bool = False
    components: ComponentsConfig | None = None
    frozen: tuple[str, ...] = ()
    aux_loss: float = 0.0
    optimizer: OptimizerName = "adamw"
    muon: MuonConfig = field(default_factory=MuonConfig)
    master_dtype: MasterDtype = "auto"

    @property
    def training(self) -> Training:
        steps = len(self.microbatches)
        return Training(
            lr=1e-3,
            betas=BETAS,
            eps=EPS,
            weight_decay=WEIGHT_DECAY,
            max_grad_norm=0.5,
            warmup_steps=min(2, steps - 1),
            total_steps=2 * steps,
            aux_loss=self.aux_loss,
            optimizer=self.optimizer,
            muon=self.muon,
        )


@dataclass
class Differences:
    """Largest difference of each kind, by step and tensor.

    Most are relative to the value, or to the largest entry of the tensor. "weights", "exported tensors" and
    "reference log-probabilities" are absolute. "choices of experts" counts choices that deviate from the route.
    "treatment of weights" is 1 for a weight with another optimizer or weight decay.

    Attributes:
        found: by kind, step (from 1, or `NO_STEP`) and tensor name ("" if there is none).
    """

    found: dict[str, dict[int, dict[str, float]]] = field(default_factory=dict)

    def record(self, kind: str, difference: float, step: int = NO_STEP, name: str = "") -> None:
        difference = float("inf") if difference != difference else difference
        by_name = self.found.setdefault(kind, {}).setdefault(step, {})
        by_name[name] = max(by_name.get(name, 0.0), difference)

    def merge(self, others: Sequence["Differences"]) -> "Differences":
        for other in others:
            for kind, by_step in other.found.items():
                for step, by_name in by_step.items():
                    for name, difference in by_name.items():
                        self.record(kind, difference, step, name)
        return self

    def largest(self, kind: str, step: int | None = None) -> float:
        steps = self.found[kind].values() if step is None else [self.found[kind][step]]
        return max(max(by_name.values()) for by_name in steps)

    @property
    def all(self) -> dict[str, float]:
        return {kind: self.largest(kind) for kind in self.found}

    @property
    def first(self) -> dict[str, float]:
        """Largest difference of each kind in the first step, before rounding errors grow over optimizer steps."""
        return {kind: self.largest(kind, 1) for kind, by_step in self.found.items() if 1 in by_step}


def make_sequences(num_sequences: int, seed: int, vocab_size: int, longest: int = 18) -> list[TokenSequence]:
    """Random sequences of different lengths and loss masks, each with at least one trained token."""
    generator = torch.Generator().manual_seed(seed)
    sequences = []
    for _ in range(num_sequences):
        length = int(torch.randint(3, longest, (), generator=generator))
        mask = torch.rand(length, generator=generator) < 0.7
        mask[-1] = True
        sequences.append(TokenSequence(torch.randint(0, vocab_size, (length,), generator=generator), mask))
    return sequences


def compare(case: Case, folder: Path, scratch: Path) -> Differences:
    """Trains on the layout and in one process, and compares every step. A collective. Returns the largest
    differences on any rank.

    Args:
        folder: the checkpoint.
        scratch: a folder that all ranks share, for the export.
    """
    asked = model_of(case, folder)
    with (
        small_blocks(),
        ModelHandle.from_pretrained(asked, case.parallel, case.memory, case.components) as handle,
    ):
        return _compare(case, handle, folder, scratch)


def _compare(case: Case, handle: ModelHandle, folder: Path, scratch: Path) -> Differences:
    engine = Engine(handle, case.training.config, case.training.total_steps)
    expected = OneProcess(folder, handle.dtype, case.training, handle.layout.device)
    everywhere, named = handle.layout.world_control, [*handle.named_parameters()]
    frozen = [name for name, parameter in named if not parameter.requires_grad]
    expected.freeze({name for of_rank in gather_objects(frozen, everywhere) for name in of_rank})
    if case.master_dtype == "bfloat16":
        narrow = [name for name, parameter in named if parameter.dtype == torch.bfloat16]
        expected.keep_in_bfloat16({name for of_rank in gather_objects(narrow, everywhere) for name in of_rank})
    found = Differences()
    swap = _SwapCheck(engine)
    check = RouteCheck(handle) if case.replay else None
    for step, num_microbatches in enumerate(case.microbatches):
        ranks = range(handle.layout.parallel.num_data_ranks)
        of_ranks = [microbatches_of(step, rank, num_microbatches, handle, case.replay) for rank in ranks]
        if step == len(case.microbatches) - 1:
            of_ranks = [[*microbatches, []] for microbatches in of_ranks]
        _compare_step(step + 1, of_ranks, engine, expected, found)
    if check is not None:
        found.record("choices of experts", check.num_wrong if check.num_right or not handle.router_layers else math.inf)
    found.record("reference log-probabilities", swap.largest_difference())
    _compare_export(engine, scratch, found)
    for step in range(case.training.total_steps or 0):  # also beyond the trained steps, as the rate keeps falling
        rate, right = learning_rate(engine.config, step, engine.total_steps), case.training.rate(step)
        found.record("learning rate", abs(rate - right) / right)
    return Differences().merge(gather_objects(found, handle.layout.world_control))


def model_of(case: Case, folder: Path) -> ModelConfig:
    return ModelConfig.model_validate(
        {
            "path": str(folder),
            "dtype": case.dtype,
            "master_dtype": case.master_dtype,
            "implementation": case.implementation,
            "attention": case.attention,
            "frozen": case.frozen,
            "moe": {"aux_loss": case.aux_loss},
        }
    )


def microbatches_of(
    step: int, rank: int, num_microbatches: int, handle: ModelHandle, replay: bool
) -> list[list[TokenSequence]]:
    """Returns the sequences of a data rank's microbatches; an empty microbatch has none.

    Counts and lengths differ between ranks and microbatches, with two exceptions, so that mixed-up microbatches of
    equal shape are detected: in the first step every second microbatch repeats the lengths of the one before, and in
    later steps all have the same lengths. In the first step, the last microbatch of odd ranks is empty.
    """
    vocab, shape = handle.config.vocab_size, handle.router_shape
    microbatches = []
    for m in range(num_microbatches):
        seed, like = 1000 * step + 100 * rank, 0 if step else m - m % 2
        microbatch = make_sequences(1 + (like + rank) % 3, seed + like, vocab)
        microbatches.append(
            microbatch
            if m == like
            else [_of_same_length(s, seed + 10 * m + n, vocab) for n, s in enumerate(microbatch)]
        )
    if handle.has_encoder:
        microbatches = [
            [with_media(s, handle.whole_config, 7 * m + 5 * rank + n + step) for n, s in enumerate(microbatch)]
            for m, microbatch in enumerate(microbatches)
        ]
    if step == 0 and rank % 2:
        microbatches[-1] = []
    if not replay or shape is None:
        return microbatches
    return [[with_routes(sequence, shape) for sequence in microbatch] for microbatch in microbatches]


def _of_same_length(sequence: TokenSequence, seed: int, vocab: int) -> TokenSequence:
    generator = torch.Generator().manual_seed(seed)
    return TokenSequence(torch.randint(0, vocab, (len(sequence),), generator=generator), sequence.loss_mask)


def _compare_step(
    step: int,
    of_ranks: list[list[list[TokenSequence]]],
    engine: Engine,
    expected: OneProcess,
    found: Differences,
) -> None:
    """Trains one step on both sides and records the differences.

    Args:
        step: from 1.
        of_ranks: sequences, by data rank and microbatch.
        engine: the layout's side.
        expected: the reference.
    """
    handle = engine.handle
    mine = [] if handle.layout.is_outsider else of_ranks[handle.layout.data_rank]
    microbatches = packed(mine)
    with torch.no_grad():
        logprobs = [expected.logprobs(sequence) for microbatch in mine for sequence in microbatch]
    for actual, right in zip(engine.logprobs(microbatches), logprobs, strict=True):
        found.record("log-probabilities", _largest(actual, right) / right.abs().max().item(), step)
    everywhere = [microbatch for rank in of_ranks for microbatch in rank if microbatch]
    loss = _backward(expected, everywhere, handle.layout)
    found.record("evaluated loss", abs(engine.evaluate(microbatches, sft_loss)[0] - loss) / abs(loss), step)
    _compare_gradients(step, engine, microbatches, everywhere, expected, found)
    rate = expected.training.rate(expected.num_steps)
    _compare_treatments(step, engine, expected, found)
    output = engine.train_step(microbatches, sft_loss)
    norm = expected.step()
    found.record("loss", abs(output.loss - loss) / abs(loss), step)
    found.record("gradient norm", abs(output.grad_norm - norm) / norm, step)
    found.record("learning rate", abs(output.lr - rate) / rate, step)
    weights = expected.weights()
    for component in handle.components:
        for name, parameter in component.every_parameter():
            found.record("weights", _largest(gather_whole(parameter, component.layout), weights[name]), step, name)


def _compare_treatments(step: int, engine: Engine, expected: OneProcess, found: Differences) -> None:
    """Compares each weight's optimizer and weight decay, which differences in fp32 may be too coarse to show."""
    own = _treatments(engine.optimizer.optimizers, id)
    right = _treatments(expected.optimizers, _storage)  # matrices of a stack are views of it
    trained = {name: parameter for name, parameter in expected.parameters() if parameter.grad is not None}
    for name, parameter in engine.handle.named_parameters():
        if name in trained and id(parameter) in own:
            differs = own[id(parameter)] != right[_storage(trained[name])]
            found.record("treatment of weights", float(differs), step, name)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _treatments(
    optimizers: Sequence[torch.optim.Optimizer], key: Callable[[Tensor], int]
) -> dict[int, tuple[bool, float]]:
    """Maps each parameter's key to whether AdamW trains it, and its weight decay."""
    return {
        key(parameter): (isinstance(optimizer, torch.optim.AdamW), group["weight_decay"])
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


def packed(of_microbatches: list[list[TokenSequence]]) -> list[Microbatch]:
    return [pack_microbatch(sequences) if sequences else empty_microbatch() for sequences in of_microbatches]


def counted(everywhere: list[list[TokenSequence]]) -> dict[Denominator, int]:
    """Token counts of a step, made independently because the engine's own counts are under test."""
    return count([pack_microbatch([sequence for microbatch in everywhere for sequence in microbatch])])


def _backward(expected: OneProcess, microbatches: list[list[TokenSequence]], layout: Layout) -> float:
    """Returns the reference loss and sets gradients in `expected`. The first rank computes both for all, as all have
    the same weights. A collective."""
    is_first = layout.world_control.rank() == 0
    loss = expected.backward(microbatches) if is_first else 0.0
    gradients = {name: p.grad.cpu() for name, p in expected.parameters() if p.grad is not None} if is_first else {}
    loss, gradients = gather_objects((loss, gradients), layout.world_control)[0]
    expected.take_gradients(gradients)
    return loss


def _compare_gradients(
    step: int,
    engine: Engine,
    microbatches: list[Microbatch],
    everywhere: list[list[TokenSequence]],
    expected: OneProcess,
    found: Differences,
) -> None:
    handle = engine.handle
    counts = counted(everywhere)
    # A linear loss computes its gradients in the head's forward, other losses in the backward.
    loss: LossFn = sft_loss if step % 2 else lambda outputs, microbatch: sft_loss(outputs, microbatch)
    engine.runner.forward_backward(microbatches, loss, Readout(), counts)
    right = expected.gradients()
    least = MIN_GRADIENT
    if handle.dtype != torch.float64:
        least = SMALL_GRADIENT * max(gradient.abs().max().item() for gradient in right.values())
    for component in handle.components:
        for name, parameter in component.every_parameter():
            if not parameter.requires_grad:
                continue
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            difference = _largest(gather_whole(gradient, component.layout), right[name])
            kind = re.sub(r"^model\.|(layers|blocks)\.\d+\.", "", name)
            # A gradient that should be zero, as for a bias that a softmax cancels, is only rounding.
            scale = max(right[name].abs().max().item(), least)
            found.record(f"gradient of {kind}", difference / scale, step, name)
    handle.zero_grad()


MIN_GRADIENT = 1e-6
"""A gradient whose largest entry is below this is rounding. Others are larger by orders of magnitude."""

SMALL_GRADIENT = 0.1
"""Share of the model's largest gradient that is the smallest scale of relative differences in float32, as the
summands of small gradients are rounded like those of large ones: this alone makes transformers' own gpt_oss differ
by 1e-4 in a bias."""


class _SwapCheck:
    """Checks that reference weights reproduce the initial log-probabilities, and are swapped back afterwards."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.microbatches = _one_microbatch(engine.handle, seed=7)
        self.at_start = engine.logprobs(self.microbatches)
        self.reference = ReferenceWeights(engine.handle)

    def largest_difference(self) -> float:
        before = self.engine.logprobs(self.microbatches)
        with self.reference.in_place():
            swapped = self.engine.logprobs(self.microbatches)
        after = self.engine.logprobs(self.microbatches)
        pairs = [*zip(swapped, self.at_start, strict=True), *zip(after, before, strict=True)]
        return max((_largest(actual, right) for actual, right in pairs), default=0.0)


def _compare_export(engine: Engine, scratch: Path, found: Differences) -> None:
    """Compares log-probabilities of the export, opened with transformers, with those of the trained model."""
    handle = engine.handle
    handle.save_pretrained(scratch / "exported")
    actual = engine.logprobs(_one_microbatch(handle, seed=8))
    opened = OneProcess(scratch / "exported", handle.dtype, Training(), handle.layout.device)
    with torch.no_grad():
        for sequence, logprobs in zip(_two_sequences(handle, seed=8), actual, strict=bool(actual)):
            found.record("exported tensors", _largest(opened.logprobs(sequence), logprobs))


def _one_microbatch(handle: ModelHandle, seed: int) -> list[Microbatch]:
    """A microbatch of two sequences, the same on every data rank; none on ranks outside the layout."""
    return [] if handle.layout.is_outsider else [pack_microbatch(_two_sequences(handle, seed))]


def _two_sequences(handle: ModelHandle, seed: int) -> list[TokenSequence]:
    sequences = make_sequences(2, seed, handle.config.vocab_size)
    if not handle.has_encoder:
        return sequences
    return [with_media(s, handle.whole_config, 1 + n) for n, s in enumerate(sequences)]


def _largest(actual: Tensor, expected: Tensor) -> float:
    return (actual - expected).abs().max().item()
