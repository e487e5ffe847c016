"""Training loop of the algorithms with existing data: sft, dpo, kto, reward and distill."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from automodel_rl.batch import Batch
from automodel_rl.data.loader import LoadedStep
from automodel_rl.engine.engine import LOGPROBS
from automodel_rl.losses import LossFn, Readout
from automodel_rl.trainers.example_data import ExampleData
from automodel_rl.trainers.run import Goal, Run
from automodel_rl.trainers.samples import Sample
from automodel_rl.trainers.step import Step


@dataclass(frozen=True)
class Objective:
    """An algorithm's part of the loop.

    Attributes:
        examples: plural noun for the examples on the console, such as "pairs".
        prepare: called before each optimizer step: adds values that the loss reads to the step's rows, and returns
            the loss.
        prepare_held_out: the same for the validation data, before each validation.
        readout: per-token outputs that the loss reads.
        samples: generates completions of the trained model for the report.
    """

    examples: str
    prepare: Callable[[Step, LoadedStep], LossFn]
    prepare_held_out: Callable[[], LossFn]
    readout: Readout = LOGPROBS
    samples: Callable[[], list[Sample]] = list


def train_on_examples(run: Run, data: ExampleData, held_out: Batch, objective: Objective) -> Path:
    """Trains from the checkpoint to resume, if any, to the end of the run. Requires `policy.begin`. Returns the
    folder of the trained checkpoint.

    Args:
        held_out: the validation data; may be empty.
    """
    policy = run.policy
    run.resume(Goal(data.total_steps), {"data": data.train})
    batches = data.steps()
    run.save_examples(data.examples)
    for step in run.steps(f"{data.per_step} {objective.examples} a step, of {data.num_records:,}"):
        with step.time("data"):
            loaded = next(batches)
        loss = objective.prepare(step, loaded)
        with step.time("train"):
            output = policy.train_step(loaded.batch, loss, objective.readout)
        step.record([output], policy.size(loaded.batch))
        data.note(step, loaded)
        if len(held_out) and run.validates:
            with step.time("validate"):
                loss = objective.prepare_held_out()
                step.metrics["val/loss"], metrics = policy.evaluate(held_out, loss, objective.readout)
            step.metrics |= {f"val/{name.removeprefix('train/')}": value for name, value in metrics.items()}
    return run.finish(objective.samples)
