"""Number of microbatches per step, estimated by packing a sample of the user's data."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from automodel_rl.batch import assign_bins
from automodel_rl.config import ParallelConfig, RunConfig
from automodel_rl.config.data import ExamplesConfig
from automodel_rl.families.known import encoder_families
from automodel_rl.hf.opened_model import OpenedModel

SAMPLE = 512
"""Number of examples that are tokenized and packed."""


NO_DATA = "no data to measure"


@dataclass(frozen=True)
class PlannedPacking:
    """Packing of the user's data into microbatches.

    Attributes:
        microbatches: count per step, over all data ranks.
        efficiency: tokens / (microbatches x capacity); None if nothing was measured.
        positions: positions per step in each encoder's layers, by encoder name; empty if nothing was measured.
        lengths: token counts of sample sequences, for the attention estimate; without data, one that fills a
            microbatch.
        lacks: why lengths were not measured; empty if they were.
    """

    microbatches: int
    efficiency: float | None
    positions: Mapping[str, int] = field(default_factory=dict)
    lengths: tuple[int, ...] = ()
    lacks: str = ""


def measure_packing(config: RunConfig, opened: OpenedModel) -> PlannedPacking:
    """Packs a sample of the training data. Without data or a tokenizer, assumes that every sequence fills a
    microbatch.

    Runs that generate completions are assumed to have prompts and completions of maximum length.
    """
    capacity, count = config.batch.capacity, config.sequences_per_step
    if config.generation is not None:
        longest = config.longest_sequence
        return PlannedPacking(math.ceil(count / (capacity // longest)), None, lengths=(longest,), lacks=NO_DATA)
    from automodel_rl.data.sources import is_local

    if not all(map(is_local, config.data.train)):
        return PlannedPacking(count, None, lengths=(capacity,), lacks=NO_DATA)
    if not opened.files.has_tokenizer:
        return PlannedPacking(
            count, None, lengths=(capacity,), lacks="model.path has no tokenizer to measure the data with"
        )
    from automodel_rl.data.chat import open_chat_tokenizer
    from automodel_rl.data.examples import DATASETS, checked
    from automodel_rl.data.sampler import BatchSampler, Order

    assert isinstance(config.data, ExamplesConfig)  # a run that does not generate holds its examples
    kind = DATASETS[config.record_type]
    chat = open_chat_tokenizer(config, opened)
    dataset = kind(config.data.train, chat, config.batch, opened.description.context, config.data)
    size = min(count // kind.sequences_per_example, SAMPLE)
    draws = next(iter(BatchSampler(dataset.sources.sizes, dataset.sources.weights, size, Order(config.seed))))
    examples = [checked(dataset[draw]) for draw in draws]
    lengths = [sum(map(len, example.sequences)) for example in examples if example.sequences]
    single = tuple(len(sequence) for example in examples for sequence in example.sequences)
    bins = assign_bins(lengths, capacity)
    share = len(draws) * kind.sequences_per_example / count
    encoders = encoder_families(opened.whole)
    positions: dict[str, int] = dict.fromkeys(opened.description.encoders, 0)
    for item in (item for example in examples for sequence in example.sequences for item in sequence.media):
        positions[item.encoder] += encoders[item.encoder].num_positions(opened.whole, item)
    scaled = {name: math.ceil(number / share) for name, number in positions.items()}
    return PlannedPacking(math.ceil(len(bins) / share), sum(lengths) / (len(bins) * capacity), scaled, single)


def microbatches(packing: PlannedPacking, parallel: ParallelConfig) -> int:
    """Number of microbatches per data rank: at least one per pipeline rank."""
    return max(parallel.pp, math.ceil(packing.microbatches / parallel.num_data_ranks))
