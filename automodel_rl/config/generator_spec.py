"""What a generator is made of, whoever asks for it: a run or a service."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from automodel_rl.config.generators import (
    JoinedGeneratorConfig,
    TransformersSamplerConfig,
    VllmGeneratorConfig,
    VllmSamplerConfig,
    VllmServersConfig,
)
from automodel_rl.config.rollout import WeightSyncConfig


@dataclass(frozen=True)
class GeneratorSpec:
    """A generator that is to be made.

    Attributes:
        choice: its kind, its place and the options of this kind.
        longest_sequence: most tokens of a prompt with its completion.
        weight_sync: how it gets weights.
        sleep_level: level at which it sleeps between rollouts; 0 if it stays awake.
        shares_memory: whether it and the trainer have the device's memory in turns.
        stop_token_ids: tokens that end a completion, besides the model's own.
        has_stop_texts: whether requests may name texts that end a completion.
        reports_routes: whether it reports the experts that tokens went to.
        pixels: fewest and most pixels of an image, where they are limited.
        template_variables: variables of the chat template, on which the model's end tokens may depend.
        num_adapters: adapters that it has at once, if they come alone: new ones, and those that completions are still
            written with.
    """

    choice: TransformersSamplerConfig | VllmSamplerConfig | VllmServersConfig | JoinedGeneratorConfig
    longest_sequence: int
    weight_sync: WeightSyncConfig
    sleep_level: int = 0
    shares_memory: bool = False
    stop_token_ids: tuple[int, ...] = ()
    has_stop_texts: bool = False
    reports_routes: bool = False
    pixels: tuple[int | None, int | None] = (None, None)
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    num_adapters: int = 2

    @property
    def tensor_parallel(self) -> int:
        """Number of GPUs over which it is split."""
        return self.choice.tensor_parallel if isinstance(self.choice, VllmGeneratorConfig) else 1
