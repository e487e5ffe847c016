"""Checks that the groups of an optimizer's config fit the model."""

from automodel_rl.config import OptimizerConfig
from automodel_rl.errors import InputError
from automodel_rl.hf.read import EMBEDDING, TIED_HEAD
from automodel_rl.model.handle import ModelHandle
from automodel_rl.parallel.host_collectives import gather_objects


def check_groups(handle: ModelHandle, config: OptimizerConfig) -> None:
    """Raises InputError on all ranks if a group of the optimizer names no trained parameter, or one of two tied. A
    collective.

    Args:
        handle: the model.
        config: the optimizer's settings.
    """
    is_cut = handle.whole_config.tie_word_embeddings and handle.layout.parallel.pp > 1
    embedding, head = (config.of_parameter(name, 1.0) for name in (EMBEDDING, TIED_HEAD))
    if is_cut and embedding != head:
        raise InputError(
            "optimizer.groups: the model's head is tied to its embedding, and a pipeline holds two copies: name "
            "both embed_tokens and lm_head in one group"
        )
    names = [name for name, parameter in handle.named_parameters() if parameter.requires_grad]
    own = [any(group.covers(name) for name in names) for group in config.groups]
    for place, found in enumerate(zip(*gather_objects(own, handle.layout.world_control), strict=True)):
        if not any(found):
            raise InputError(
                f"optimizer.groups.{place}.names={[*config.groups[place].names]}: no trained parameter has "
                "one of these names: name modules or parameters of the model"
            )
