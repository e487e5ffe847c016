"""Bugs of data and batches, and of how a step goes through them."""

import dataclasses
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from automodel_rl.batch import LocalMicrobatch, Microbatch, local_microbatch
from automodel_rl.data.media import cut
from tests.faults.fault import Fault, Verified, everywhere, patch


def _one_document(microbatch: Microbatch, *place: int) -> LocalMicrobatch:
    """A microbatch without its cu_seqlens: the documents see each other."""
    return local_microbatch(dataclasses.replace(microbatch, lengths=(microbatch.num_tokens,)), *place)


def _positions_go_on() -> Any:
    def going_on(microbatch: Microbatch, *place: Any) -> LocalMicrobatch:
        made = local_microbatch(microbatch, *place)
        return dataclasses.replace(made, position_ids=torch.arange(made.num_tokens))

    return patch("step.local_microbatches.local_microbatch", going_on)


def _empty_microbatches_count() -> Any:
    from automodel_rl.batch import empty_microbatch

    def counting(like: Any = None) -> Microbatch:
        microbatch = empty_microbatch(like)
        return dataclasses.replace(microbatch, loss_mask=microbatch.targets >= 0)

    return everywhere(counting, "tools.verify.comparison.empty_microbatch", "step.runner.empty_microbatch")


def _local_counts() -> Any:
    from automodel_rl.losses import count
    from automodel_rl.step.agreement import GlobalBatch, agree_on_batch

    def agree(microbatches: list, *rest: Any) -> GlobalBatch:
        return dataclasses.replace(agree_on_batch(microbatches, *rest), counts=count(microbatches))

    return patch("step.runner.agree_on_batch", agree)


def _evaluation_of_fewer_microbatches() -> Any:
    from automodel_rl.engine import Engine

    evaluate = Engine.evaluate
    return mock.patch.object(
        Engine, "evaluate", lambda engine, microbatches, *rest: evaluate(engine, microbatches[:-1], *rest)
    )


def _first_block_again() -> Any:
    from automodel_rl.step.runner import StepRunner

    forward, block = StepRunner.forward, StepRunner._forward_block
    first: list[list[Tensor]] = []

    def anew(runner: Any, *args: Any) -> list[Tensor]:
        first.clear()
        return forward(runner, *args)

    def again(runner: Any, *args: Any) -> list[Tensor]:
        first.append(block(runner, *args))
        pairs = zip(first[-1], first[0], strict=False)
        return [old if old.shape == own.shape else own for own, old in pairs] + first[-1][len(first[0]) :]

    return mock.patch.multiple(StepRunner, forward=anew, _forward_block=again)


def _mask_of_turns(change: Callable[[Tensor], Tensor]) -> Any:
    """Changes the loss mask after the prompt."""
    from automodel_rl.trainers.rollout_batch import _sequence

    def changed(row: Any, config: Any) -> Any:
        sequence = _sequence(row, config)
        num_prompt = len(row.group.prompt.token_ids)
        mask = torch.cat([sequence.loss_mask[:num_prompt], change(sequence.loss_mask[num_prompt:])])
        return dataclasses.replace(sequence, loss_mask=mask)

    return patch("trainers.rollout_batch._sequence", changed)


def _first_tokens_count() -> Any:
    """A program counts first tokens, too, which nothing predicts."""
    from automodel_rl.policy.policy import Policy

    shares = Policy.shares

    def counting(policy: Any, batch: Any, *given: Any, **named: Any) -> Any:
        global_batch, dealt = shares(policy, batch, *given, **named)
        firsts = sum(int(sequence.loss_mask[0]) for sequence in batch.sequences)
        counts = {**global_batch.counts, "tokens": global_batch.counts["tokens"] + firsts}
        return dataclasses.replace(global_batch, counts=counts), dealt

    return mock.patch.object(Policy, "shares", counting)


def _results_rank_by_rank() -> Any:
    """Results of rows come in the order in which the ranks have them."""

    def as_they_come(answers: Any, count: int) -> list[Any]:
        return [values for answer in answers if answer is not None for values in answer.by_row().values()]

    return patch("policy.policy._in_order", as_they_come)


CONVERSATIONS = "distributed/trainers/test_conversations.py::test_sampled_tokens_alone_are_trained"

FAILED = "distributed/step/test_failed_steps.py"

FAULTS: dict[str, Fault] = {
    "documents see each other": Fault(
        lambda: patch("step.local_microbatches.local_microbatch", _one_document), Verified("qwen3")
    ),
    "positions go on across sequences": Fault(_positions_go_on, Verified("qwen3")),
    "loss mask and values left on their tokens": Fault(
        lambda: patch("batch.microbatch.to_predictor", lambda values: values), Verified("qwen3")
    ),
    "empty microbatches count": Fault(_empty_microbatches_count, Verified("qwen3", {"pp": 2})),
    "first tokens count": Fault(
        _first_tokens_count,
        "distributed/policy/test_policy.py::test_results_are_those_of_an_engine_in_the_order_of_the_rows",
    ),
    "a completion that is cut loses its label": Fault(
        lambda: patch(
            "data.examples.cut", lambda sequence, limit: dataclasses.replace(cut(sequence, limit), values={})
        ),
        "unit/data/test_examples.py::test_a_completion_that_is_cut_keeps_its_label",
    ),
    "tokens that are cut off shown as trained": Fault(
        lambda: patch("data.show.cut", lambda sequence, limit: sequence),
        "unit/data/test_show.py::test_what_the_run_cuts_off_or_leaves_out_is_marked",
    ),
    "keys that stand twice in a config": Fault(
        lambda: patch("config.strict_yaml._Loader._check", lambda *_: None),
        "unit/config/test_strict_yaml.py::test_what_is_no_config_is_refused_with_its_line[key_twice]",
    ),
    "results rank by rank": Fault(
        _results_rank_by_rank,
        "distributed/policy/test_policy.py::test_results_are_those_of_an_engine_in_the_order_of_the_rows",
    ),
    "pictures as they lie in the file": Fault(
        lambda: patch("media.images.TURNED", ()),
        "unit/media/test_images.py::test_sizes_tell_how_many_tokens_the_pixels_make",
    ),
    "place in the data forgotten": Fault(
        lambda: patch("data.loader.ExampleLoader.load_state_dict", return_value=None),
        "unit/data/test_loader.py::test_loading_goes_on_between_two_steps",
    ),
    "local token counts": Fault(_local_counts, Verified("qwen3", {"pp": 2, "dp_shard": 2})),
    "evaluation leaves out the last microbatch": Fault(_evaluation_of_fewer_microbatches, Verified("qwen3")),
    "blocks of microbatches after the first are the first": Fault(_first_block_again, Verified("qwen3")),
    "token ids not looked at": Fault(
        lambda: patch("step.agreement._problem", return_value=""),
        f"{FAILED}::test_token_ids_outside_the_vocabulary_are_refused_on_every_rank",
    ),
    "numbers of microbatches not compared": Fault(
        lambda: patch("step.agreement._agreed_microbatches", lambda of_ranks: int(of_ranks["num_microbatches"].max())),
        f"{FAILED}::test_rows_that_do_not_fit_each_other_are_refused_on_every_rank",
    ),
    "loss mask of turns moved by one": Fault(lambda: _mask_of_turns(lambda mask: mask.roll(1)), CONVERSATIONS),
    "answers of environments trained": Fault(lambda: _mask_of_turns(torch.ones_like), CONVERSATIONS),
    "a step without a trained token": Fault(
        lambda: mock.patch("automodel_rl.engine.engine.math.sqrt", lambda square: square**0.5 + 1e-30),
        f"{FAILED}::test_a_batch_without_a_trained_token_changes_no_weight_and_says_so",
    ),
}
