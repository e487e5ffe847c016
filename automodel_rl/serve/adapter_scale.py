"""The factor of adapters' output, which generators must know: runs of one service have adapters of several ranks."""

import dataclasses

from automodel_rl.generators.protocol import Generator
from automodel_rl.generators.transformers_generator import TransformersGenerator
from automodel_rl.lora.rank import set_scale
from automodel_rl.weight_sync.transport import Transport
from automodel_rl.weight_sync.vllm_adapters import VllmAdapters


class AdapterScale:
    """Tells this rank's generator the factor of the output of the adapters that come next. It is told again to a
    generator that is started again."""

    def __init__(self) -> None:
        self.scale = 1.0
        self._told: tuple[Generator, Transport] | None = None

    def prepare(self, generator: Generator, transport: Transport) -> None:
        """Tells it to a generator that has been started."""
        self._told = generator, transport
        self.set(self.scale)

    def set(self, scale: float) -> None:
        """Tells the generator another factor."""
        self.scale = scale
        if self._told is None:
            return
        generator, transport = self._told
        if isinstance(generator, TransformersGenerator):
            set_scale([generator.model], scale)
        elif isinstance(transport, VllmAdapters):
            # vLLM has places of the largest rank, and computes the factor from what a folder of adapters says.
            lora = transport.origin.config
            own = lora.model_copy(update={"alpha": scale * lora.rank, "rslora": False})
            transport.origin = dataclasses.replace(transport.origin, config=own)
