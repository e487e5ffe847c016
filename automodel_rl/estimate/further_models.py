"""Memory of models beside the trained one, while that one computes."""

from collections.abc import Mapping

from transformers import PretrainedConfig

from automodel_rl.config import RunConfig
from automodel_rl.config.further_models import FurtherModel
from automodel_rl.config.optimizer import OptimizerConfig
from automodel_rl.estimate.memory import MemoryModel

ANY_TOKENS = 1024
"""Capacity of microbatches, on which what stays between forwards does not depend."""


def bytes_beside(config: RunConfig, wholes: Mapping[str, PretrainedConfig]) -> int:
    """Bytes that further models take on a rank while the trained model computes: weights, and moments of trained ones.
    Those that wait in host memory take none.

    Args:
        config: the run's config.
        wholes: the Hugging Face configs of the further models by name.
    """
    on_device = {name: asked for name, asked in config.further_models.items() if asked.between == "device"}
    return sum(_bytes_of(asked, wholes[name], config) for name, asked in on_device.items())


def _bytes_of(asked: FurtherModel, whole: PretrainedConfig, config: RunConfig) -> int:
    model = MemoryModel(whole, asked.model, ANY_TOKENS, OptimizerConfig())
    rank = max(model.plan(config.parallel, config.memory, config.parallel.pp).ranks, key=lambda one: one.weights)
    if asked.is_trained:
        return rank.weights + rank.moments
    return rank.weights * model.compute // model.master
