"""Packed loading over data ranks, and resuming between steps."""

import json
from itertools import islice
from pathlib import Path

from automodel_rl.config import DataConfig, ParallelConfig, SourceConfig
from automodel_rl.config.data import CommonBatchConfig
from automodel_rl.data.chat import ChatTokenizer
from automodel_rl.data.examples import ChatDataset
from automodel_rl.data.loader import PackedLoader
from automodel_rl.data.sampler import Draw, Order
from automodel_rl.hf.tokenizer import load_tokenizer
from automodel_rl.launch.process_group import join_process_group
from automodel_rl.parallel.layout import build_layout
from automodel_rl.quickstart.model import train_tokenizer
from automodel_rl.quickstart.problems import make_problems
from tests.rank_pool import RankPool

Microbatches = list[list[int]]
"""Token ids of every microbatch."""


BATCH = CommonBatchConfig(microbatch_tokens=128)


def write_data(folder: Path) -> None:
    records, _ = make_problems(50, 0, seed=0)
    records[0]["messages"][1]["content"] *= 9  # longer than a microbatch
    (folder / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    train_tokenizer([m["content"] for r in records for m in r["messages"]], 300).save_pretrained(folder)


def load(folder: Path, overlong: str) -> tuple[list[Microbatches], list[tuple[int, ...]], list[Microbatches]]:
    """Microbatches of every step, the counts of every step, and the microbatches after resuming behind the second."""
    parallel = ParallelConfig(dp_shard=2)
    layout = build_layout(parallel, join_process_group(2))
    source = SourceConfig(path=str(folder / "data.jsonl"))
    data = DataConfig(train=(source,), overlong=overlong)
    chat = ChatTokenizer(load_tokenizer(folder, 10_000), "all")

    def make_loader() -> PackedLoader:
        dataset = ChatDataset((source,), chat, BATCH, None, data)
        return PackedLoader(dataset, 16, layout, float, Order(1, epochs=1))

    def microbatches(step) -> Microbatches:
        return [microbatch.input_ids.tolist() for microbatch in step.microbatches]

    steps = list(make_loader())
    counts = [
        (s.size.num_sequences, s.size.num_tokens, s.size.num_microbatches, s.num_truncated, s.num_dropped)
        for s in steps
    ]
    stopped = make_loader()
    list(islice(stopped, 2))
    resumed = make_loader()
    resumed.load_state_dict(stopped.state_dict())
    return [microbatches(s) for s in steps], counts, [microbatches(s) for s in resumed]


def test_data_ranks_share_global_batches_and_resume_between_steps(ranks: RankPool, tmp_path: Path) -> None:
    write_data(tmp_path)
    (first, counts, first_resumed), (second, other_counts, second_resumed) = ranks(2).run(load, tmp_path, "truncate")
    assert counts == other_counts
    assert [c[0] for c in counts] == [16, 16, 16, 2]
    assert sum(c[3] for c in counts) == 1
    assert [len(microbatches) for microbatches in first] == [len(microbatches) for microbatches in second]
    for mine, theirs, (_, num_tokens, *_) in zip(first, second, counts, strict=True):
        assert sum(map(len, mine)) + sum(map(len, theirs)) == num_tokens
    assert first_resumed == first[2:]
    assert second_resumed == second[2:]


def test_overlong_examples_can_be_dropped(ranks: RankPool, tmp_path: Path) -> None:
    write_data(tmp_path)
    _, counts, _ = ranks(2).run(load, tmp_path, "drop")[0]
    assert sum(c[0] for c in counts) == 49
    assert sum(c[4] for c in counts) == 1


Steps = list[tuple[tuple[Draw, ...], list[tuple[int, list[int]]]]]
"""Of every step the draws of the global batch, and places in it and token ids of what this rank has."""


def sequences_by_place(folder: Path, num_ranks: int) -> Steps:
    layout = build_layout(ParallelConfig(dp_shard=num_ranks), join_process_group(num_ranks))
    source = SourceConfig(path=str(folder / "data.jsonl"))
    chat = ChatTokenizer(load_tokenizer(folder, 10_000), "all")
    batch = CommonBatchConfig(microbatch_tokens=128, min_microbatches=5, microbatches_multiple=4)
    dataset = ChatDataset((source,), chat, batch, None, DataConfig(train=(source,), overlong="drop"))
    found: Steps = []
    for step in PackedLoader(dataset, 16, layout, float, Order(1, epochs=1)):
        assert len(step.microbatches) >= 8
        assert len(step.microbatches) % 4 == 0
        microbatches = [
            (microbatch.order, microbatch.input_ids.split(microbatch.lengths))
            for microbatch in step.microbatches
            if not microbatch.is_empty
        ]
        found.append(
            (step.draws, [(p, i.tolist()) for order, ids in microbatches for p, i in zip(order, ids, strict=True)])
        )
    return found


def test_a_global_batch_has_the_same_order_on_any_number_of_ranks(ranks: RankPool, tmp_path: Path) -> None:
    write_data(tmp_path)
    (alone,) = ranks(1).run(sequences_by_place, tmp_path, 1)
    for (draws, expected), *shares in zip(alone, *ranks(2).run(sequences_by_place, tmp_path, 2), strict=True):
        assert all(share[0] == draws for share in shares)
        assert sorted(piece for share in shares for piece in share[1]) == sorted(expected)
