"""What is recomputed, moved to the host or compiled, so that a model fits and runs fast."""

from typing import Literal

from automodel_rl.config.base import Section


class MemoryConfig(Section):
    """What is given up for memory or speed.

    Example:
        >>> MemoryConfig(activation_checkpointing="full").offload_optimizer
        False
    """

    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """What the backward recomputes of every layer: nothing; all but matrix products and attention; everything."""

    offload_optimizer: bool = False
    """Keep the optimizer's moments in host memory and bring them to the device for each update only."""

    compile: bool = False
    """Compile every layer with torch.compile around its attention; takes a minute at the start."""
