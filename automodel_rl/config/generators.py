"""What writes completions: transformers, vLLM, or servers of vLLM that run already. Each kind has the keys that it
needs."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from automodel_rl.config.base import Fraction, PathText, Positive, Section

Transport = Literal["local", "ipc", "collective"]
"""How weights reach transformers generators. local: within a process. ipc: to a process on the same device, which
reads the trainer's buffers in place. collective: one rank of each stage broadcasts to all generators."""

Devices = Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)]
"""Devices by number, among those that ranks see."""


def _refuse_twice(devices: tuple[int, ...]) -> None:
    if len(set(devices)) < len(devices):
        raise ValueError(f"place={list(devices)}: each generator needs a device of its own: name none twice")


class _StartedByRanks(Section):
    """What kinds have in common that ranks start."""

    @property
    def devices(self) -> tuple[int, ...]:
        """Devices of its own; none if it shares its rank's."""
        return ()

    @property
    def is_apart(self) -> bool:
        """Whether it has memory of its own, which the trainer cannot use."""
        return bool(self.devices)


class TransformersSamplerConfig(_StartedByRanks):
    """transformers: a whole copy of the model in every rank's process."""

    kind: Literal["transformers"] = "transformers"

    batch_size: Positive = 64
    """Most completions that are written at once on each rank."""

    @property
    def transport(self) -> Transport:
        """How it gets weights."""
        return "local"


class TransformersGeneratorConfig(TransformersSamplerConfig):
    """transformers: a whole copy of the model for every rank."""

    place: Literal["in_process", "shared"] | Devices = "in_process"
    """The place where it runs. in_process: its rank's process. shared: a process of its own on its rank's device. A
    list: processes of their own on these devices, one for each rank of a machine, by number among those that ranks
    see."""

    batch_size: Positive = 256
    """Most completions that are written at once on each rank."""

    @property
    def devices(self) -> tuple[int, ...]:
        """Devices of its own; none if it shares its rank's."""
        return () if isinstance(self.place, str) else self.place

    @property
    def has_process(self) -> bool:
        """Whether it runs beside its rank's process."""
        return self.place != "in_process"

    @property
    def runs_vllm(self) -> bool:
        return False

    @property
    def transport(self) -> Transport:
        """How it gets weights."""
        return "local" if not self.has_process else "collective" if self.devices else "ipc"

    @model_validator(mode="after")
    def _has_devices(self) -> "TransformersGeneratorConfig":
        _refuse_twice(self.devices)
        return self


class VllmSamplerConfig(_StartedByRanks):
    """vLLM in a process of its own beside every rank, on its device."""

    kind: Literal["vllm"] = "vllm"

    python: PathText | None = None
    """Python interpreter of an environment with vLLM, whose pinned dependencies conflict with this package's; null
    takes the interpreter of this process."""

    memory_fraction: Fraction = 0.4
    """Share of the device's memory for vLLM's weights and cache."""

    options: dict[str, str | int | float | bool] = Field(default_factory=dict)
    """Further arguments of vllm.LLM, e.g. max_num_seqs."""


class VllmGeneratorConfig(VllmSamplerConfig):
    """vLLM in processes of its own."""

    place: Literal["shared"] | Devices = "shared"
    """The place where it runs. shared: beside every rank, on its device. A list: these devices, by number among those
    that ranks see. There may be fewer vLLMs than ranks: the first ranks of a machine lead one each."""

    tensor_parallel: Positive = 1
    """Number of GPUs over which each vLLM is split. So many consecutive ranks of a machine share one, and the first of
    them leads it; it must divide the number of ranks on a machine. With devices in `place`, each vLLM has so many of
    those."""

    replicas: Positive = 1
    """Number of vLLM on each rank's device, which share `memory_fraction`; each has a copy of the weights. vLLM works
    through its sequences in one Python thread, and a small model's GPU waits for that: 2 then write in two thirds of
    the time of one."""

    sleep: Literal["none", 1, 2, "auto"] = "none"
    """Whether vLLM on a rank's device gives its memory back between rollouts. none: it keeps it. 1: its weights wait on
    the host. 2: its weights are dropped, and each rollout begins with a whole weight sync. auto: 2, or 1 with
    weight_sync.adapters=alone. With memory.offload each side has the device to itself."""

    drafts: Annotated[int, Field(ge=0)] = 0
    """Number of tokens that the checkpoint's own layer for multi-token prediction drafts at a time, which the model
    then takes or not (speculative decoding). Weight syncs leave this layer as it is in the checkpoint, and completions
    are sampled at rollout.temperature=1; log-probabilities are those of this temperature for any request. With sleep, 1
    is needed, since 2 drops the layer. 0: no drafts."""

    @property
    def devices(self) -> tuple[int, ...]:
        """Devices of its own; none if it shares its rank's."""
        return () if isinstance(self.place, str) else self.place

    @property
    def has_process(self) -> bool:
        return True

    @property
    def runs_vllm(self) -> bool:
        return True

    @model_validator(mode="after")
    def _keeps_drafts(self) -> "VllmGeneratorConfig":
        if self.drafts and self.sleep in (2, "auto"):
            raise ValueError(
                f"drafts={self.drafts} with sleep={self.sleep}: the layer that drafts would be dropped, and no weight "
                "sync brings it back: use sleep=1"
            )
        return self

    @model_validator(mode="after")
    def _devices_fit(self) -> "VllmGeneratorConfig":
        _refuse_twice(self.devices)
        if len(self.devices) % self.tensor_parallel:
            raise ValueError(
                f"place={list(self.devices)}: not whole groups of tensor_parallel={self.tensor_parallel}: list a "
                "multiple of it"
            )
        if self.replicas > 1 and (self.devices or self.tensor_parallel > 1):
            other = f"place={list(self.devices)}" if self.devices else f"tensor_parallel={self.tensor_parallel}"
            raise ValueError(
                f"replicas={self.replicas} with {other}: several replicas share a rank's device: leave replicas out"
            )
        if self.devices and self.sleep != "none":
            raise ValueError(
                f"sleep={self.sleep} with place={list(self.devices)}: the trainer has other devices and could not use "
                "the memory: leave sleep out"
            )
        return self


class _StartedElsewhere(Section):
    """What kinds have in common that no rank starts."""

    @property
    def devices(self) -> tuple[int, ...]:
        return ()

    @property
    def has_process(self) -> bool:
        return True

    @property
    def is_apart(self) -> bool:
        return True


class VllmServersConfig(_StartedElsewhere):
    """Servers of vLLM that run already, on devices of their own."""

    kind: Literal["servers"] = "servers"

    urls: Annotated[tuple[str, ...], Field(min_length=1)]
    """URLs of the servers, e.g. http://localhost:8000, or of files with one such URL a line, e.g. file:servers.txt,
    which are read again before every weight sync, so that servers come and go while a run goes on. Start servers with
    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --host 127.0.0.1 --logprobs-mode processed_logprobs
    --weight-transfer-config '{"backend": "nccl"}'. Those on other machines need a token: give it to them as --api-key,
    and to the run in VLLM_API_KEY."""

    @property
    def runs_vllm(self) -> bool:
        return True


class JoinedGeneratorConfig(_StartedElsewhere):
    """Generators on any machines, which join the run and leave it while it goes on: `automodel-rl generate --join
    FOLDER`, where FOLDER is weight_sync.publish, or `--join HOST:PORT`. They read the weights there, and write what
    ranks' generators would. What one writes that leaves or is killed, others write, with the same seeds."""

    kind: Literal["joined"] = "joined"

    at_least: Positive = 1
    """Number of generators that the run waits for before it begins."""

    evaluators: Annotated[int, Field(ge=0)] = 0
    """Number of generators beside those that the run waits for and that only evaluate: `automodel-rl generate --join
    FOLDER --evaluate`. With some, held-out prompts are completed while training goes on, with the weights of the step
    that validates. Its metrics come in a later step's record, with that step as val/step. 0: validation as usual."""

    wait_minutes: Annotated[float, Field(gt=0)] = 30.0
    """Longest wait without any generator. After it the run saves a checkpoint and ends."""

    host: str = "localhost"
    """Name of the first rank's machine for generators on other machines. localhost lets only this machine's join."""

    port: Annotated[int, Field(ge=0, lt=2**16)] = 0
    """Port on which the first rank's machine waits for them; 0 for any."""

    key: Path | None = None
    """File of the key that both sides must have, made at the first start: whoever has it can run code on both. null: a
    key for each start, in the folder's join.json."""

    weights_port: Annotated[int, Field(ge=0, lt=2**16)] | None = None
    """Port on which the first rank's machine gives published weights over HTTP to generators that do not share the
    folder, and join with --join HOST:PORT --key FILE; 0 for any. null: to none."""

    batch_size: Positive = 256
    """Most completions that a transformers generator writes at once."""

    @property
    def runs_vllm(self) -> bool:
        return False


def _of_kind(value: Any) -> Any:
    """A kind alone, or nothing, is the section of this kind, or of the first, with its defaults."""
    if value is None or (isinstance(value, str) and value):
        return {"kind": value or "transformers"}
    if isinstance(value, dict | Section):
        return value
    raise ValueError(f"must be a name, or a section with its name as kind, not {value!r}")


GeneratorConfig = Annotated[
    Annotated[
        TransformersGeneratorConfig | VllmGeneratorConfig | VllmServersConfig | JoinedGeneratorConfig,
        Field(discriminator="kind"),
    ],
    BeforeValidator(_of_kind),
]

SamplerConfig = Annotated[
    Annotated[TransformersSamplerConfig | VllmSamplerConfig, Field(discriminator="kind")], BeforeValidator(_of_kind)
]
