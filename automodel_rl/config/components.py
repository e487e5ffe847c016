"""Meshes of a vision-language model: its two components, vision and language, each on ranks of its own."""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from automodel_rl.config.base import Positive, Section
from automodel_rl.config.parallel import ParallelConfig


def _ranks(value: Any) -> Any:
    """Turns a text such as `0-3` into [0, 1, 2, 3], and a single number into a list. Other values stay as they are."""
    if isinstance(value, int):
        return [value]
    if not isinstance(value, str):
        return value
    first, dash, last = value.partition("-")
    if not first.isdecimal() or (dash and not last.isdecimal()):
        raise ValueError(f"{value!r} is no range of ranks: write 0-3 or [0, 1, 2, 3]")
    return list(range(int(first), int(last or first) + 1))


Ranks = Annotated[tuple[Annotated[int, Field(ge=0)], ...], BeforeValidator(_ranks), Field(min_length=1)]


class VisionComponent(Section):
    """The encoder of images, and the projector that turns its output into embeddings of the language model.

    Example:
        >>> VisionComponent(ranks="0-3", dp_shard=4).ranks
        (0, 1, 2, 3)
    """

    ranks: Ranks
    """Ranks of the job that hold this component, e.g. 0-3 or [0, 1, 2, 3]."""

    dp_shard: Positive = 1
    """Number of ranks that divide the images among themselves, with sharded weights (FSDP2)."""

    dp_replicate: Positive = 1
    """Number of copies of these ranks, which divide the images further."""

    tp: Positive = 1
    """Number of ranks that every layer is split over (tensor parallel)."""

    pp: Positive = 1
    """Number of pipeline stages; the projector is on the last."""

    @property
    def parallel(self) -> ParallelConfig:
        """Its layout, without the ranks."""
        return ParallelConfig(dp_shard=self.dp_shard, dp_replicate=self.dp_replicate, tp=self.tp, pp=self.pp)


class LanguageComponent(ParallelConfig):
    """The language model. It has the keys of `parallel`, and the ranks.

    Example:
        >>> LanguageComponent(ranks="4-7", pp=2, dp_shard=2).world_size
        4
    """

    ranks: Ranks
    """Ranks of the job that hold this component, e.g. 0-3 or [0, 1, 2, 3]."""

    @property
    def parallel(self) -> ParallelConfig:
        """Its layout, without the ranks."""
        return ParallelConfig(**self.model_dump(exclude={"ranks"}))


class ComponentsConfig(Section):
    """A mesh for each component. Both are over the same ranks, or they have no rank in common. Together they hold all
    ranks of the job.

    Example:
        >>> components = ComponentsConfig(vision={"ranks": 0}, language={"ranks": "1-2", "pp": 2})
        >>> components.world_size, components.is_colocated
        (3, False)
    """

    vision: VisionComponent
    language: LanguageComponent

    def __str__(self) -> str:
        pairs = (("vision", self.vision), ("language", self.language))
        return ", ".join(f"{name} {component.parallel} on ranks {_span(component.ranks)}" for name, component in pairs)

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return len({*self.vision.ranks, *self.language.ranks})

    @property
    def is_colocated(self) -> bool:
        """Whether every rank holds both components."""
        return self.vision.ranks == self.language.ranks

    @model_validator(mode="after")
    def _fits(self) -> "ComponentsConfig":
        vision, language = self.vision.ranks, self.language.ranks
        for name, ranks, size in (
            ("vision", vision, self.vision.parallel.world_size),
            ("language", language, self.language.parallel.world_size),
        ):
            if len(set(ranks)) != len(ranks) or list(ranks) != sorted(ranks):
                raise ValueError(f"{name}.ranks={list(ranks)}: name every rank once, in rising order")
            if len(ranks) != size:
                raise ValueError(
                    f"{name}.ranks={list(ranks)} are {len(ranks)} ranks but its layout has {size}: change one of them"
                )
        shared = sorted({*vision} & {*language})
        if shared and not self.is_colocated:
            raise ValueError(
                f"ranks {shared} hold both components and others only one: give both the same ranks, or none in common"
            )
        missing = sorted({*range(max(*vision, *language) + 1)} - {*vision, *language})
        if missing:
            raise ValueError(f"ranks {missing} hold no component: give each rank below the highest one to a component")
        lanes, served = self.vision.parallel.num_data_ranks, self.language.num_data_ranks
        if lanes % served and served % lanes:
            raise ValueError(
                f"the {lanes} data ranks of vision and the {served} of language (dp_shard x dp_replicate): one must "
                "divide the other, so that each encoder serves as many data ranks: change one of them"
            )
        return self


def _span(ranks: tuple[int, ...]) -> str:
    """Ranks as text: `0-3` if they are consecutive, otherwise a list of them."""
    if list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"
    return ", ".join(map(str, ranks))


def one_layout(parallel: ParallelConfig) -> ComponentsConfig:
    """Both components on all ranks of a layout. The vision component shards its weights over all of them."""
    ranks = tuple(range(parallel.world_size))
    language = LanguageComponent(ranks=ranks, **parallel.model_dump(exclude={"ranks"}))
    return ComponentsConfig(vision=VisionComponent(ranks=ranks, dp_shard=len(ranks)), language=language)
