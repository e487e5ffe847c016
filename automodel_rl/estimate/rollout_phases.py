"""Device memory of a rank outside training: in rollouts, and in the weight syncs before them."""

from dataclasses import dataclass

from transformers import PretrainedConfig

from automodel_rl.config import RolloutRunConfig, RunConfig
from automodel_rl.config.generators import VllmGeneratorConfig
from automodel_rl.config.rollout import LARGEST_BUFFER
from automodel_rl.estimate.memory import RankMemory

ASLEEP = 2 * 2**30
"""Bytes of a vLLM instance besides weights and cache, even asleep: its CUDA context, graphs and communicators.
Measured: 1.3 GiB on one GPU."""

USABLE_IN_ROLLOUTS = 0.97
"""Fraction of a device's memory that rollouts may fill. vLLM enforces its own share by itself."""


@dataclass(frozen=True)
class RolloutPhases:
    """Bytes on a rank's device, by phase.

    Attributes:
        beside_training: generator and weight-sync buffers during training.
        weight_sync: total during a weight sync.
        rollout: total during generation.
        shares_memory: whether a generator keeps its device memory during training.
    """

    beside_training: float = 0
    weight_sync: float = 0
    rollout: float = 0
    shares_memory: bool = False

    @property
    def peak(self) -> float:
        """Peak bytes outside training."""
        return max(self.weight_sync, self.rollout)


def has_adapters_alone(config: RunConfig) -> bool:
    """Whether a run's generators receive adapters alone."""
    run = config.generation
    return run is not None and run.weight_sync.adapters == "alone"


def rollout_phases(
    config: RunConfig,
    language: PretrainedConfig,
    model_bytes: int,
    rank: RankMemory,
    device_bytes: float,
    resident_bytes: float = 0,
) -> RolloutPhases:
    """Returns the phases of a run that generates; all 0 for others.

    Args:
        config: the run's config.
        language: Hugging Face config of the language model.
        model_bytes: bytes of a generator's full copy of the model.
        rank: training memory of the rank.
        device_bytes: memory of the device.
        resident_bytes: bytes of additional models that stay on the device.
    """
    run = config.generation
    if run is None:
        return RolloutPhases()
    rollout, memory = run.rollout, run.memory
    buffers = _buffers(run, language, model_bytes)
    what = () if memory.offload is None else memory.offload.what
    weights, moments = rank.weights, rank.moments
    without_moments = 0 if "moments" in what else moments
    always = buffers + rank.reference + resident_bytes
    in_rollouts = always + without_moments + (0 if "weights" in what else weights)
    generator = rollout.generator
    if generator.has_own_memory:
        return RolloutPhases(buffers, always + weights + without_moments, in_rollouts)
    if isinstance(generator, VllmGeneratorConfig):
        awake = generator.memory_fraction * device_bytes
        replicas = generator.replicas
        in_sync = replicas * (model_bytes / generator.tensor_parallel + ASLEEP) if run.sleep_level else awake
    else:
        awake = in_sync = float(model_bytes)
        replicas = 1
    return RolloutPhases(
        beside_training=buffers + (replicas * ASLEEP if run.sleep_level else awake),
        weight_sync=always + in_sync + weights + without_moments,
        rollout=in_rollouts + awake,
        shares_memory=not run.sleep_level,
    )


def _buffers(config: RolloutRunConfig, language: PretrainedConfig, model_bytes: int) -> float:
    """Bytes of weight-sync buffers. vLLM receives whole tensors, the largest of which is the embedding."""
    sync = config.weight_sync
    size = LARGEST_BUFFER if sync.buffer_mib == "auto" else sync.buffer_mib * 2**20
    if config.rollout.generator.runs_vllm and not (config.model.lora and sync.adapters == "alone"):
        size = max(size, 2 * language.vocab_size * language.hidden_size)
    return sync.num_buffers * min(size, model_bytes)
