"""When checkpoints are written, how, and which are kept."""

from typing import Annotated, Literal

from pydantic import Field

from automodel_rl.config.base import Positive, Section


class CheckpointConfig(Section):
    every_steps: Positive | None = 100
    """Steps between checkpoints, the last one at the end; null counts no steps."""

    every_minutes: Annotated[float, Field(gt=0)] | None = None
    """Minutes between checkpoints, besides those of every_steps; null counts none."""

    keep_last: Positive = 2
    """Newest checkpoints kept."""

    keep_best: bool = True
    """Also keep the best one of those written at a step that validates: by val/loss, of grpo by val/reward_mean."""

    in_background: Annotated[bool, Field(alias="async")] = True
    """Write while training goes on, from a copy on the host of all weights and moments; false writes them directly,
    while training waits."""

    format: Literal["sharded", "both"] = "sharded"
    """sharded: the ranks' shards, to resume from on any layout. both: also a Hugging Face checkpoint in hf/, made of
    them by a process of its own."""
