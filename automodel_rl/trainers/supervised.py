"""The loop of algorithms whose data exist before the run: sft, dpo, kto, reward and distill."""

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
    """What an algorithm trains in each step, and validates.

    Attributes:
        examples: what the console calls the examples, in the plural, such as "pairs".
        prepare: called before each optimizer step: adds the values that the loss reads to the step's rows, and returns
            the loss.
        prepare_held_out: the same for the validation data, called before each validation.
        readout: what the loss gets for every token.
        samples: makes completions of the trained model for the report.
    """

    examples: str
    prepare: Callable[[Step, LoadedStep], LossFn]
    prepare_held_out: Callable[[], LossFn]
    readout: Readout = LOGPROBS
    samples: Callable[[], list[Sample]] = list


def train_on_examples(run: Run, data: ExampleData, held_out: Batch, objective: Objective) -> Path:
    """Trains from the checkpoint to resume, if there is one, to the end of the run. `policy.begin` has been called.

    Args:
        run: the frame around the steps.
        data: the run's examples.
        held_out: the validation data; empty without.
        objective: the algorithm's own part.

    Returns:
        The folder of the trained checkpoint.
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
