"""Bugs around training: of configs, launching, files of runs, reports, services, plans and weight syncs."""

import dataclasses
import importlib
import re
import time
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests.faults.fault import Fault, everywhere, patch


def _epochs_not_counted() -> Any:
    from automodel_rl.config.data import PolicyBatchConfig

    return mock.patch.object(
        PolicyBatchConfig, "steps_of_all_epochs", property(lambda batch: int(batch.optimizer_steps))
    )


def _first_override_counts() -> Any:
    from automodel_rl.config.load import parse_overrides

    return patch("config.load.parse_overrides", lambda *arguments: parse_overrides(*arguments)[::-1])


def _penalty_in_the_reward_forgotten() -> Any:
    """`on_policy: auto` does not see that a penalty in the reward reads old log-probabilities."""
    from automodel_rl.config.algorithms import GRPOConfig

    own = GRPOConfig.is_on_policy.fget  # type: ignore[attr-defined]

    def careless(config: Any) -> bool:
        in_loss = config.loss.kl.model_copy(update={"where": "loss"})
        return own(config.model_copy(update={"loss": config.loss.model_copy(update={"kl": in_loss})}))

    return mock.patch.object(GRPOConfig, "is_on_policy", property(careless))


def _reference_without_memory() -> Any:
    from automodel_rl.estimate.memory import RankMemory

    peak = RankMemory.peak.fget  # type: ignore[attr-defined]
    return mock.patch.object(
        RankMemory, "peak", property(lambda memory: peak(dataclasses.replace(memory, reference=0)))
    )


def _moments_stay() -> Any:
    """Moments are counted on the device though they are on the host."""
    from automodel_rl.estimate.memory import MemoryModel

    rank = MemoryModel._rank

    def staying(model: Any, *given: Any) -> Any:
        *before, memory, backward = given
        return rank(model, *before, memory.model_copy(update={"offload_optimizer": False}), backward)

    return mock.patch.object(MemoryModel, "_rank", staying)


def _losses_of_peers_are_causes() -> Any:
    from automodel_rl.launch.record import FailureRecord

    return mock.patch.object(FailureRecord, "is_lost_peer", property(lambda _: False))


def _last_failure_first() -> Any:
    return patch("launch.rank_processes.first_cause", lambda records: max(records, key=lambda record: record.time))


def _kills_forgotten() -> Any:
    """What came of a killed rank's end is taken for a cause of its own."""
    from automodel_rl.launch.rank_processes import RankFailures

    own = RankFailures.is_silent.fget  # type: ignore[attr-defined]
    return mock.patch.object(
        RankFailures, "is_silent", property(lambda ends: own(dataclasses.replace(ends, was_killed=False)))
    )


def _checkpoints_by_name() -> Any:
    from automodel_rl.observe.run_directory import RunDirectory

    own = RunDirectory.list_checkpoints
    return mock.patch.object(RunDirectory, "list_checkpoints", lambda directory: sorted(own(directory)))


def _metrics_of_one_step_more() -> Any:
    from automodel_rl.observe.metrics import MetricsFile

    make = MetricsFile.__init__
    return mock.patch.object(MetricsFile, "__init__", lambda file, path, first: make(file, path, first and first + 1))


def _zeros_not_tracked() -> Any:
    return patch(
        "observe.trackers._measured",
        lambda record: {name: value for name, value in record.items() if value and name != "step"},
    )


def _finished_once_is_finished() -> Any:
    from automodel_rl.report.run_data import _status

    return patch(
        "report.run_data._status",
        lambda files, failure, step: _status(files, failure, min(step, files.finished_after or step)),
    )


def _steps_by_name() -> Any:
    from automodel_rl.report.run_data import _steps_of

    return patch("report.run_data._steps_of", lambda folder: sorted(_steps_of(folder), key=str))


def _unfinished_results_let_go() -> Any:
    from automodel_rl.serve.results import Results

    def by_age(results: Any) -> None:
        oldest = time.monotonic() - results.seconds
        results._entries = {name: entry for name, entry in results._entries.items() if entry.since > oldest}

    return mock.patch.object(Results, "forget_old", by_age)


def _newest_by_path() -> Any:
    from automodel_rl.serve.saved_weights import SavedWeights

    def by_path(table: Any, run: str, kind: str = "weights") -> Any:
        own = [path for path in table.paths if path.startswith(f"tinker://{run}/{kind}/")]
        return table[max(own)] if own else None

    return mock.patch.object(SavedWeights, "newest", by_path)


def _weights_to_sample_from_are_trained() -> Any:
    from automodel_rl.serve.saved_weights import SavedWeights

    def of_any_kind(table: Any, run: str, kind: str = "weights") -> Any:
        own = [table[path] for path in table.paths if path.startswith(f"tinker://{run}/")]
        return max(own, key=lambda saved: saved.created, default=None)

    return mock.patch.object(SavedWeights, "newest", of_any_kind)


def _every_weight_expires() -> Any:
    from automodel_rl.serve.saved_weights import SavedWeights

    def expired(table: Any) -> list[str]:
        return [path for path in table.paths if (table[path].expires or 0.0) < time.time()]

    return mock.patch.object(SavedWeights, "expired", property(expired))


def _origins_not_compared() -> Any:
    from automodel_rl.serve.saved_weights import SavedWeights

    return mock.patch.object(SavedWeights, "usable", lambda table, path: table[path])


def _kept_as_at_first(kind: str, *names: str) -> Any:
    """What a joint job counts is that of its first job, whatever joins it."""
    from automodel_rl.serve import joining

    joint = getattr(joining, kind)
    takes = joint.takes

    def forgetful(one: Any, job: Any) -> bool:
        before = {name: getattr(one, name) for name in names}
        before = {name: {*value} if isinstance(value, set) else value for name, value in before.items()}
        answer = takes(one, job)
        vars(one).update(before)
        return bool(answer)

    return mock.patch.object(joint, "takes", forgetful)


def _version_kept_meanwhile() -> Any:
    from automodel_rl.weight_sync.receiver import Receiver

    return mock.patch.object(Receiver, "begin", return_value=None)


def _checksum_of_a_set() -> Any:
    """A checksum that does not see elements exchanged."""

    def plain(elements: Tensor, start: int = 0) -> Tensor:
        kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        return elements.detach().view(-1).view(kinds[elements.element_size()]).to(torch.int64).sum()

    return everywhere(
        plain, "weight_sync.checksum.checksum", "weight_sync.receiver.checksum", "weight_sync.producer.checksum"
    )


def _checksum_without_place() -> Any:
    """The checksum of a stretch does not say where in its tensor the stretch is."""
    from automodel_rl.weight_sync.checksum import checksum

    return everywhere(
        lambda elements, start=0: checksum(elements),
        "weight_sync.checksum.checksum",
        "weight_sync.receiver.checksum",
        "weight_sync.producer.checksum",
    )


def _gpus_by_name() -> Any:
    return everywhere(
        lambda name: (0, name),
        "ray.cluster.device_order",
        "ray.policy_group.device_order",
        "ray.node_agent.device_order",
    )


def _held_out_trained(where: str) -> Any:
    """Held-out examples are the first ones, which are trained."""
    module, _, name = where.rpartition(".")
    make: Callable[..., Any] = getattr(importlib.import_module(f"automodel_rl.{module}"), name)

    def overlapping(num_train: int, num_held_out: int, seed: int, *largest: int) -> Any:
        train, _ = make(num_train, num_held_out, seed, *largest)
        return train, train[:num_held_out]

    return patch(where, overlapping)


def _first_number_answers() -> Any:
    return patch("quickstart.problems.final_number", lambda text: next(iter(re.findall(r"\d+", text)), None))


def _microbatches_of_every_rank() -> Any:
    """Every data rank has all microbatches of a step."""
    return everywhere(
        lambda packing, parallel: max(parallel.pp, packing.microbatches),
        "tools.plan.packing.microbatches",
        "tools.plan.alternatives.microbatches",
        "tools.plan.command.microbatches",
        "tools.plan.encoders.microbatches",
    )


def _best_not_kept() -> Any:
    from automodel_rl.trainers.run_checkpoints import RunCheckpoints

    own = RunCheckpoints._keep_chosen
    return mock.patch.object(
        RunCheckpoints,
        "_keep_chosen",
        lambda checkpoints, written: own(checkpoints, dataclasses.replace(written, best=None)),
    )


def _keeps(settings: Callable[[Any], dict[str, Any]]) -> Any:
    """Other checkpoints are kept than the config says."""
    from automodel_rl.trainers.run_checkpoints import RunCheckpoints

    own = RunCheckpoints._keep_chosen

    def other(checkpoints: Any, *given: Any) -> Any:
        checkpoints.config = checkpoints.config.model_copy(update=settings(checkpoints.config))
        return own(checkpoints, *given)

    return mock.patch.object(RunCheckpoints, "_keep_chosen", other)


def _higher_is_better() -> Any:
    from automodel_rl.trainers.run_checkpoints import RunCheckpoints

    return mock.patch.object(
        RunCheckpoints,
        "_is_better",
        lambda checkpoints, metric, best: best is None or metric > best["metric"],
    )


def _never_calm() -> Any:
    """Steps without signal count though there were others between."""
    from automodel_rl.trainers.step_rollouts import RewardWatch

    look_at = RewardWatch.look_at

    def adding(watch: Any, groups: Any) -> None:
        before = watch.num_steps
        look_at(watch, groups)
        watch.num_steps = max(before, watch.num_steps)

    return mock.patch.object(RewardWatch, "look_at", adding)


def _rewards_not_weighted() -> Any:
    from automodel_rl.rollout.rewards.scorer import Scorer

    score = Scorer._score

    def plain(scorer: Any, results: Any) -> Any:
        found = score(scorer, results)
        return dataclasses.replace(found, total=sum(found.parts))

    return mock.patch.object(Scorer, "_score", plain)


def _seeds_of_groups() -> Any:
    """All completions of a prompt have the same seed."""
    from automodel_rl.rollout import rollouts

    seed = rollouts.completion_seed
    return mock.patch.object(rollouts, "completion_seed", lambda run, prompt, _: seed(run, prompt, 0))


POLICY = "unit/config/test_grpo.py"
ON_POLICY = f"{POLICY}::test_old_log_probabilities_are_computed_where_something_reads_them"
MEMORY = "unit/estimate/test_memory.py"
CAUSE = "unit/launch/test_record.py::test_the_cause_is_the_first_failure_that_is_none_of_a_peer"
OBSERVE = "unit/observe/test_observe.py"
REPORT = "unit/report/test_report.py"
SAVED = "unit/serve/test_saved_weights.py"
NEWEST = f"{SAVED}::test_the_newest_weights_are_those_that_were_saved_last"
JOINING = "unit/serve/test_joining.py::test_jobs_meet_without_coming_before_another_of_their_run"
RECEIVER, CHECKSUM = "unit/weight_sync/test_receiver.py", "unit/weight_sync/test_checksum.py"
JOINED = "unit/generators/test_joined_members.py"
CLUSTER = "unit/ray/test_cluster.py"
PROBLEMS = "unit/quickstart/test_problems.py"
CHECKPOINTS = "unit/trainers/test_run_checkpoints.py"
KEPT = f"{CHECKPOINTS}::test_the_last_and_the_best_are_kept"


def _changes_ored() -> Any:
    """Bits of numbers are or-ed with what has changed, as of a number that was zero."""
    from automodel_rl.weight_sync import published

    def load(packed: Any, tensors: Mapping[str, Tensor]) -> Any:
        names = [name for name, *_ in packed[0]["chunks"]]
        before = {name: published.bits_of(tensors[name]).copy() for name in names}
        changes = loaded(packed, tensors)
        for name in names:
            published.bits_of(tensors[name])[:] |= before[name] * (not packed[0]["whole"])
        return changes

    loaded = published._load_block
    return everywhere(load, "weight_sync.published._load_block")


def _evaluators_told_all() -> Any:
    from automodel_rl.generators.fleet import Fleet

    def use(fleet: Any, version: Any) -> None:
        used(fleet, version)
        if fleet.evaluators is not None:
            used(fleet.evaluators, version)

    used = Fleet._use
    return patch("generators.fleet.Fleet._use", use)


def _work_not_dealt_again() -> Any:
    from automodel_rl.generators.fleet import Fleet

    def lose(fleet: Any, member: Any, problem: str, **_: Any) -> None:
        member.problem = problem
        fleet.members.remove(member)

    return mock.patch.object(Fleet, "_mark_lost", lose)


def _file_hashes_not_compared() -> Any:
    """What was read of a published version is taken for what was written."""
    from automodel_rl.weight_sync import published

    def read(files: Any, number: int, *given: Any) -> Any:
        version = found(files, number, *given)
        stored = {}
        for name, (num_bytes, _) in version.files.items():
            with files.opened(number, name, num_bytes) as file:
                stored[name] = published._size_and_hash(file)
        return dataclasses.replace(version, files=stored)

    found = published.read_version
    return patch("weight_sync.published.read_version", read)


ELSEWHERE = "unit/weight_sync/test_versions_elsewhere.py"

FAULTS: dict[str, Fault] = {
    "signatures of published versions not verified": Fault(
        lambda: patch("weight_sync.signatures.SignatureCheck.accepts", lambda *_: True),
        f"{ELSEWHERE}::test_only_what_the_run_has_signed_is_taken[forged]",
    ),
    "hashes of a published version's files not compared": Fault(
        _file_hashes_not_compared, f"{ELSEWHERE}::test_what_is_damaged_on_the_way_is_refused_and_read_again"
    ),
    "ranks on a machine that is gone not let go of": Fault(
        lambda: patch("serve.ranks.Ranks.drop", lambda *_: None),
        "unit/serve/test_ranks.py::test_ranks_on_a_machine_that_is_gone_are_let_go_of",
    ),
    "changes of a published version or-ed": Fault(
        _changes_ored,
        "distributed/weight_sync/test_published.py::test_damage_is_noticed_and_an_older_version_is_still_there",
    ),
    "losses of generators not counted against their requests": Fault(
        lambda: patch("generators.pending_requests.PendingRequest.count_loss", lambda task, member: True),
        "unit/generators/test_fleet.py::test_a_request_with_which_generators_are_lost_does_not_take_all_of_them",
    ),
    "generators that have joined told no new version": Fault(
        lambda: patch("generators.fleet.Fleet._tell_version", lambda *_: None),
        f"{JOINED}::test_requests_are_dealt_and_say_who_wrote_them",
    ),
    "evaluators told versions that are newer than what they evaluate": Fault(
        _evaluators_told_all,
        f"{JOINED}::test_evaluators_keep_the_version_that_they_are_told_and_get_no_requests_of_training",
    ),
    "a generator that joins late told no version": Fault(
        lambda: patch("generators.member.Member.use", lambda *_: None),
        f"{JOINED}::test_requests_wait_for_the_next_guest_which_gets_the_version_first",
    ),
    "work of a generator that is gone not dealt again": Fault(
        _work_not_dealt_again, f"{JOINED}::test_what_a_guest_that_is_gone_was_to_write_goes_to_others"
    ),
    "passes over a batch not counted as optimizer steps": Fault(
        _epochs_not_counted, f"{POLICY}::test_optimizer_steps_of_all_passes_are_counted"
    ),
    "a penalty in the reward taken for one in the loss": Fault(_penalty_in_the_reward_forgotten, ON_POLICY),
    "of two overrides the first counts": Fault(
        _first_override_counts, "unit/config/test_load.py::test_overrides_reach_sections_lists_and_missing_sections"
    ),
    "a reference that takes no memory": Fault(
        _reference_without_memory, f"{MEMORY}::test_all_that_is_there_at_once_adds_up"
    ),
    "moments on the host planned on the device": Fault(
        _moments_stay, f"{MEMORY}::test_references_and_moments_are_where_the_config_has_them"
    ),
    "the loss of a peer shown as the cause": Fault(_losses_of_peers_are_causes, CAUSE),
    "the last failure shown as the cause": Fault(_last_failure_first, CAUSE),
    "what came of a kill shown as the cause": Fault(_kills_forgotten, CAUSE),
    "checkpoints in the order of their names": Fault(_checkpoints_by_name, KEPT),
    "metrics of a step that runs again are there twice": Fault(
        _metrics_of_one_step_more, f"{OBSERVE}::test_metrics_of_steps_that_run_again_are_removed"
    ),
    "numbers that are 0 not tracked": Fault(
        _zeros_not_tracked,
        "unit/observe/test_trackers.py"
        "::test_tensorboard_has_every_number_and_a_resumed_run_goes_on_after_its_checkpoint",
    ),
    "a run that went on shown as finished": Fault(
        _finished_once_is_finished, f"{REPORT}::test_a_status_is_that_of_the_run"
    ),
    "samples of an older step shown": Fault(_steps_by_name, f"{REPORT}::test_samples_are_those_of_the_newest_step"),
    "results let go before they are there": Fault(
        _unfinished_results_let_go,
        "unit/serve/test_results.py::test_a_result_is_kept_for_its_time_and_until_it_is_there",
    ),
    "the newest weights by their names": Fault(_newest_by_path, NEWEST),
    "weights to sample from trained on": Fault(_weights_to_sample_from_are_trained, NEWEST),
    "weights without a time to live deleted": Fault(
        _every_weight_expires, f"{SAVED}::test_weights_with_a_time_to_live_expire_after_it_and_others_never"
    ),
    "weights of another model used": Fault(
        _origins_not_compared, f"{SAVED}::test_weights_are_used_with_the_model_and_settings_that_they_belong_to"
    ),
    "tokens of passes that meet not added up": Fault(lambda: _kept_as_at_first("_JointPass", "tokens"), JOINING),
    "rows of passes that meet not noted": Fault(lambda: _kept_as_at_first("_JointPass", "rows"), JOINING),
    "completions of samples that meet not added up": Fault(lambda: _kept_as_at_first("_JointSample", "count"), JOINING),
    "the old version in the middle of a weight sync": Fault(
        _version_kept_meanwhile, f"{RECEIVER}::test_between_begin_and_commit_there_is_no_version"
    ),
    "a checksum that sees no exchange": Fault(
        _checksum_of_a_set, f"{CHECKSUM}::test_it_notices_every_bit_and_every_exchange"
    ),
    "a checksum without the place of its stretch": Fault(
        _checksum_without_place, f"{CHECKSUM}::test_stretches_add_up_across_blocks"
    ),
    "GPUs in the order of their names": Fault(_gpus_by_name, f"{CLUSTER}::test_gpus_are_in_the_order_of_their_numbers"),
    "the driver's GPUs named to other machines": Fault(
        lambda: patch("ray.cluster.NOT_FOR_NODES", ("RAY_", "SLURM_", "TORCHELASTIC_", "HOSTNAME", "PWD", "TMPDIR")),
        f"{CLUSTER}::test_nodes_get_the_drivers_variables_but_not_those_of_its_machine",
    ),
    "held-out problems trained": Fault(
        lambda: _held_out_trained("quickstart.problems.make_problems"),
        f"{PROBLEMS}::test_no_held_out_question_is_trained",
    ),
    "held-out products trained": Fault(
        lambda: _held_out_trained("quickstart.calculator.make_products"),
        f"{PROBLEMS}::test_no_held_out_question_is_trained",
    ),
    "the first number taken for the answer": Fault(
        _first_number_answers, f"{PROBLEMS}::test_answers_are_the_last_number_of_the_working_and_right"
    ),
    "every data rank planned with all microbatches": Fault(
        _microbatches_of_every_rank,
        "unit/tools/test_packing.py::test_data_ranks_share_the_microbatches_and_every_stage_has_one",
    ),
    "a damaged checkpoint called whole": Fault(
        lambda: patch("tools.verify_checkpoint.check_files", return_value=None),
        "unit/checkpoint/test_folder.py::test_what_is_wrong_is_said_in_one_line",
    ),
    "the best checkpoint removed": Fault(_best_not_kept, KEPT),
    "a checkpoint more kept": Fault(lambda: _keeps(lambda config: {"keep_last": config.keep_last + 1}), KEPT),
    "the best kept though it is not asked for": Fault(lambda: _keeps(lambda _: {"keep_best": True}), KEPT),
    "a higher loss is better": Fault(
        _higher_is_better, f"{CHECKPOINTS}::test_the_best_is_by_the_trainers_own_direction"
    ),
    "steps without signal counted over others": Fault(
        _never_calm, "unit/trainers/test_reward_watch.py::test_steps_without_signal_count_in_a_row_and_over_a_resume"
    ),
    "weights of rewards ignored": Fault(_rewards_not_weighted, "unit/rollout/test_rewards.py::test_weights_add_up"),
    "completions of a group with one seed": Fault(
        _seeds_of_groups,
        "unit/rollout/test_rollouts.py::test_every_completion_of_every_prompt_and_run_has_a_seed_of_its_own",
    ),
}
