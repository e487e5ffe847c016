"""Meshes of a multimodal model: separate ranks and layouts for its encoders and its language model."""

from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from automodel_rl.config.base import Positive, Section
from automodel_rl.config.parallel import ParallelConfig


def _ranks(value: Any) -> Any:
    """Expands `0-3` to [0, 1, 2, 3] and wraps a single number in a list. Returns other values unchanged."""
    if isinstance(value, int):
        return [value]
    if not isinstance(value, str):
        return value
    first, dash, last = value.partition("-")
    if not first.isdecimal() or (dash and not last.isdecimal()):
        raise ValueError(f"{value!r} is not a range of ranks: write 0-3 or [0, 1, 2, 3]")
    return list(range(int(first), int(last or first) + 1))


Ranks = Annotated[tuple[Annotated[int, Field(ge=0)], ...], BeforeValidator(_ranks), Field(min_length=1)]


class EncoderComponent(Section):
    """An image or audio encoder with the projector that maps its output to embeddings of the language model.

    Example:
        >>> EncoderComponent(ranks="0-3", dp_shard=4).ranks
        (0, 1, 2, 3)
    """

    ranks: Ranks
    """Ranks of this component, e.g. 0-3 or [0, 1, 2, 3]."""

    dp_shard: Positive = 1
    """Data parallel: number of ranks that split the images or clips and shard the weights (FSDP2)."""

    dp_replicate: Positive = 1
    """Data parallel: number of copies of the sharded group, which split the images or clips further (HSDP)."""

    tp: Positive = 1
    """Tensor parallel: number of ranks that split every layer."""

    @property
    def parallel(self) -> ParallelConfig:
        """The layout without the ranks."""
        return ParallelConfig(dp_shard=self.dp_shard, dp_replicate=self.dp_replicate, tp=self.tp)

    @model_validator(mode="before")
    @classmethod
    def _without_stages(cls, values: Any) -> Any:
        if isinstance(values, dict) and "pp" in values:
            raise ValueError(f"pp={values['pp']}: encoders have no pipeline stages: use dp_shard, or tp")
        return values


class LanguageComponent(ParallelConfig):
    """The language model's ranks and layout: the keys of `parallel`, and `ranks`.

    Example:
        >>> LanguageComponent(ranks="4-7", pp=2, dp_shard=2).world_size
        4
    """

    ranks: Ranks
    """Ranks of this component, e.g. 0-3 or [0, 1, 2, 3]."""

    @property
    def parallel(self) -> ParallelConfig:
        """The layout without the ranks."""
        return ParallelConfig(**self.model_dump(exclude={"ranks"}))


class ComponentsConfig(Section):
    """One mesh per component. An encoder runs either on exactly the ranks of the language model or on ranks of its own.
    The components together cover all ranks of the job.

    Example:
        >>> components = ComponentsConfig(vision={"ranks": 0}, language={"ranks": "1-2", "pp": 2})
        >>> components.world_size, components.is_colocated("vision")
        (3, False)
    """

    vision: EncoderComponent | None = None
    """Mesh of the image encoder, for models that have one."""

    audio: EncoderComponent | None = None
    """Mesh of the audio encoder, for models that have one."""

    language: LanguageComponent

    @property
    def encoders(self) -> dict[str, EncoderComponent]:
        """The encoders by name."""
        named = {"vision": self.vision, "audio": self.audio}
        return {name: encoder for name, encoder in named.items() if encoder is not None}

    def __str__(self) -> str:
        return ", ".join(f"{name} {of.parallel} on ranks {_span(of.ranks)}" for name, of in self._all.items())

    @property
    def world_size(self) -> int:
        """Number of ranks of the job."""
        return len(self._all_ranks)

    def is_colocated(self, encoder: str) -> bool:
        """Whether `encoder` runs on the ranks of the language model."""
        return self.encoders[encoder].ranks == self.language.ranks

    @property
    def _all(self) -> dict[str, EncoderComponent | LanguageComponent]:
        return {**self.encoders, "language": self.language}

    @property
    def _all_ranks(self) -> set[int]:
        return {rank for component in self._all.values() for rank in component.ranks}

    @model_validator(mode="after")
    def _fits(self) -> "ComponentsConfig":
        if not self.encoders:
            raise ValueError("no encoder is named: set a layout for vision or audio, or remove components")
        for name, component in self._all.items():
            _check_ranks(name, component.ranks, component.parallel.world_size)
        for name, encoder in self.encoders.items():
            self._check_place(name, encoder)
        missing = sorted({*range(max(self._all_ranks) + 1)} - self._all_ranks)
        if missing:
            raise ValueError(f"ranks {missing} hold no component: assign every rank below the highest to a component")
        return self

    def _check_place(self, name: str, encoder: EncoderComponent) -> None:
        shared = sorted({*encoder.ranks} & {*self.language.ranks})
        if shared and not self.is_colocated(name):
            raise ValueError(
                f"ranks {shared} hold both {name} and language, others only one: assign both the same ranks, or no "
                "common ranks"
            )
        for other, component in self.encoders.items():
            if other != name and not self.is_colocated(name) and {*encoder.ranks} & {*component.ranks}:
                raise ValueError(
                    f"{name} and {other} share ranks with the language model, and each would wait for the other: "
                    "assign them separate ranks"
                )
        lanes, served = encoder.parallel.num_data_ranks, self.language.num_data_ranks
        if lanes % served and served % lanes:
            raise ValueError(
                f"the {lanes} data ranks of {name} and the {served} of language (dp_shard x dp_replicate): one must "
                "divide the other, so that each encoder serves the same number of data ranks: change one of them"
            )


def _check_ranks(name: str, ranks: tuple[int, ...], size: int) -> None:
    if len(set(ranks)) != len(ranks) or list(ranks) != sorted(ranks):
        raise ValueError(f"{name}.ranks={list(ranks)}: list each rank once, in ascending order")
    if len(ranks) != size:
        raise ValueError(
            f"{name}.ranks={list(ranks)} are {len(ranks)} ranks but its layout has {size}: change one of them"
        )


def _span(ranks: tuple[int, ...]) -> str:
    """Formats ranks as `0-3` if they are consecutive, otherwise as a comma-separated list."""
    if list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"
    return ", ".join(map(str, ranks))


def one_layout(parallel: ParallelConfig, encoders: Iterable[str]) -> ComponentsConfig:
    """Places all components on all ranks of the language model's layout. Each encoder shards its weights over all of
    them."""
    ranks = tuple(range(parallel.world_size))
    language = LanguageComponent(ranks=ranks, **parallel.model_dump(exclude={"ranks"}))
    encoder = EncoderComponent(ranks=ranks, dp_shard=len(ranks))
    return ComponentsConfig(language=language, **dict.fromkeys(encoders, encoder))
