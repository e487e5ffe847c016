"""Bugs of linear heads, critics, teachers, judged completions, multi-token prediction and indexers."""

import dataclasses
from typing import Any
from unittest import mock

from tests.faults.fault import Fault, patch


def _teacher_at_temperature_1() -> Any:
    from automodel_rl.policy.policy import Policy

    top = Policy.top_logprobs
    return mock.patch.object(Policy, "top_logprobs", lambda policy, batch, k, temperature=1.0: top(policy, batch, k))


def _reference_point_of_a_part() -> Any:
    from automodel_rl.losses.kto import mismatched

    return patch("trainers.kto.mismatched", lambda rows, capacity: mismatched(rows[: len(rows) // 2], capacity))


def _no_detached_head() -> Any:
    from automodel_rl.model.mtp import mtp_readout

    return patch("model.readouts.mtp_readout", lambda *arguments: mtp_readout(*arguments[:-1], False))


def _steps_over_observations() -> Any:
    def every_token(mask: Any, level: str) -> list[list[int]]:
        return [[place] for place in range(int(mask.nonzero()[-1, 0]) + 1)]

    return patch("losses.gae._steps", every_token)


def _whole_gradient_on_every_rank() -> Any:
    from automodel_rl.model import part_forward

    head = part_forward._head
    return patch("model.part_forward._head", lambda *given: dataclasses.replace(head(*given), copies=1))


def _weights_of_one_tp_rank() -> Any:
    from automodel_rl.model.indexer_loss import IndexerLoss

    return patch("model.parallelise.IndexerLoss", lambda weight, scope, num_tp: IndexerLoss(weight, scope, 1))


def _loss_over_all_keys() -> Any:
    from automodel_rl.model.sparse_attention import KeyIndex

    gradients = KeyIndex.gradients

    def over_all(index: KeyIndex, *arguments: Any) -> Any:
        return gradients(KeyIndex(index.queries, index.keys, index.weights, 1000, index.loss), *arguments)

    return patch("model.sparse_attention.KeyIndex.gradients", over_all)


def _gathered_without_gradients() -> Any:
    from automodel_rl.model.sparse_attention import KeyIndex

    gathered = KeyIndex.gathered

    def without(index: KeyIndex, group: Any) -> KeyIndex:
        found = gathered(index, group)
        found.keys = found.keys.detach()
        return found

    return patch("model.sparse_attention.KeyIndex.gathered", without)


SCORES = "distributed/policy/test_scores.py"
DISTILL = "distributed/trainers/test_distill.py"

MTP = "distributed/model/test_mtp.py::test_layouts_equal_transformers_module"
INDEXER = "distributed/model/test_indexer_loss.py::test_layouts_equal_transformers"

FAULTS: dict[str, Fault] = {
    "values of states after their tokens": Fault(
        lambda: patch("trainers.ppo.to_token", lambda values: values),
        f"{SCORES}::test_a_value_is_that_of_the_state_before_its_token[{{}}]",
    ),
    "a linear head's whole gradient on every tp rank": Fault(
        _whole_gradient_on_every_rank, f"{SCORES}::test_scores_and_steps_are_those_of_transformers[dp and tp]"
    ),
    "the teacher at temperature 1": Fault(
        _teacher_at_temperature_1,
        f"{DISTILL}::test_a_student_learns_as_by_transformers[the teacher's likeliest-one rank]",
    ),
    "tokens that are not compared dropped": Fault(
        lambda: patch("losses.distill._completed", lambda logprobs, outside: logprobs),
        "unit/losses/test_golden_distillation.py::test_divergences_have_the_numbers_of_other_packages"
        "[topk3_beta0_tail1]",
    ),
    "a reference point of a part of the batch": Fault(
        _reference_point_of_a_part, "distributed/trainers/test_kto.py::test_it_learns_as_by_transformers[one rank]"
    ),
    "advantages over what the model did not write": Fault(
        _steps_over_observations,
        "unit/losses/test_critic.py::test_advantages_and_returns_have_the_numbers_of_other_packages[nrl_gae]",
    ),
    "indexers by attention's weights of one tp rank": Fault(
        _weights_of_one_tp_rank, f"{INDEXER}[deepseek_v32-{{'cp': 2, 'tp': 2}}-none-0]"
    ),
    "indexers by keys that queries do not see": Fault(_loss_over_all_keys, f"{INDEXER}[deepseek_v32-{{}}-full-0]"),
    "indexers without gradients of other ranks' queries": Fault(
        _gathered_without_gradients, f"{INDEXER}[deepseek_v32-{{'cp': 2, 'tp': 2}}-none-0]"
    ),
    "multi-token prediction of the next token": Fault(
        lambda: patch("step.local_microbatches.mtp_targets", lambda microbatch: microbatch.targets),
        f"{MTP}[deepseek_v3-{{}}-True]",
    ),
    "multi-token prediction over the end of a sequence": Fault(
        lambda: patch("model.mtp._moved_up", lambda values, microbatch, last: values.roll(-1)),
        f"{MTP}[deepseek_v3-{{}}-True]",
    ),
    "the head trained by the MTP layer": Fault(_no_detached_head, f"{MTP}[deepseek_v3-{{}}-True]"),
}
