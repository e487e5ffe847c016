"""Optimizer settings of components and parameter groups, and their checks against the model."""

from collections.abc import Iterable, Mapping

from automodel_rl.config import ModelConfig, OptimizerConfig
from automodel_rl.errors import InputError
from automodel_rl.hf.read import EMBEDDING, TIED_HEAD
from automodel_rl.model.handle import ModelHandle
from automodel_rl.parallel.host_collectives import gather_objects

SHARED = ("max_grad_norm", "warmup_steps", "warmup_ratio", "decay", "min_lr_ratio", "max_skipped_steps")
"""Settings common to all components: one schedule, one gradient norm, one decision to skip a step."""


Settings = OptimizerConfig | Mapping[str, OptimizerConfig]
"""Optimizer settings for all components, or by component name."""


def of_components(settings: Settings, encoders: Iterable[str]) -> dict[str, OptimizerConfig]:
    """Returns the optimizer settings of every component.

    Args:
        settings: for all components; or for `language` and for encoders that differ, in anything but `SHARED`.

    Raises:
        InputError: the language model has no settings, an unknown component has some, or `SHARED` settings differ.
    """
    configs = {"language": settings} if isinstance(settings, OptimizerConfig) else settings
    names = [*encoders]
    if "language" not in configs or configs.keys() - {"language", *names}:
        wanted = "language" + (f" and, optionally, for {' or '.join(names)}" if names else "")
        raise InputError(f"optimizer has settings for {[*configs]}: set them for {wanted}")
    whole = configs["language"]
    for name in names:
        encoder = configs.get(name, whole)
        for key in SHARED:
            if getattr(encoder, key) != getattr(whole, key):
                raise InputError(
                    f"optimizer: {key} is {getattr(encoder, key)} for {name} and {getattr(whole, key)} for language: "
                    "all components share schedule, gradient norm and skipped steps, so set them to the same"
                )
    return {"language": whole, **{name: configs.get(name, whole) for name in names}}


def check_masters(model: ModelConfig, configs: Mapping[str, OptimizerConfig]) -> None:
    """Raises InputError on all ranks if a component's optimizer cannot round master weights."""
    for name, config in configs.items():
        if model.master_dtype != "auto" and config.name == "muon":
            raise InputError(
                f"optimizer.name=muon, of {name}, with model.master_dtype={model.master_dtype}: its steps do not round "
                "weights: use adamw or adamw_8bit"
            )


def check_groups(handle: ModelHandle, configs: Mapping[str, OptimizerConfig]) -> None:
    """Raises InputError on all ranks if an optimizer group matches no trained parameter, or only one of two tied
    ones. A collective. If all components share one setting, its groups refer to all parameters."""
    config = configs["language"]
    is_cut = handle.whole_config.tie_word_embeddings and handle.layout.parallel.pp > 1
    embedding, head = (config.of_parameter(name, 1.0) for name in (EMBEDDING, TIED_HEAD))
    if is_cut and embedding != head:
        raise InputError(
            "optimizer.groups: the model's head is tied to its embedding, and a pipeline holds two copies: name "
            "both embed_tokens and lm_head in one group"
        )
    has_one = all(of is config for of in configs.values())
    for which in ("language",) if has_one else configs:
        names = [
            name
            for component in handle.components
            if has_one or component.name == which
            for name, parameter in handle.named_parameters(component)
            if parameter.requires_grad
        ]
        groups = configs[which].groups
        own = [any(group.covers(name) for name in names) for group in groups]
        for place, found in enumerate(zip(*gather_objects(own, handle.layout.world_control), strict=True)):
            if not any(found):
                where = "" if has_one else f" of {which}"
                raise InputError(
                    f"optimizer.groups.{place}.names={[*groups[place].names]}{where}: no trained parameter has "
                    "one of these names: name modules or parameters of the model"
                )
