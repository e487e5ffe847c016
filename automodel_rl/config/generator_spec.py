"""What a run or a service requires of its generators."""

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
    """A generator to create.

    Attributes:
        choice: its kind, placement and options.
        longest_sequence: maximum tokens of a prompt with its completion.
        weight_sync: how it receives weights.
        sleep_level: vLLM sleep level between rollouts; 0: it stays awake.
        shares_memory: whether it and the trainer use the GPU's memory in turns.
        stop_token_ids: additional end tokens.
        has_stop_texts: whether requests may have stop strings.
        reports_routes: whether it returns the experts chosen for each token.
        pixels: minimum and maximum pixels of an image; None: no limit.
        template_variables: variables of the chat template, on which the model's end tokens may depend.
        num_adapters: adapters it holds at once if adapters are synced without the base model: the newest, and those
            that running completions still use.
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
        """Number of GPUs it is split over."""
        return self.choice.tensor_parallel if isinstance(self.choice, VllmGeneratorConfig) else 1
