"""Generators of completions: transformers, vLLM, running vLLM servers, or generators that join the run. Each kind has
its own keys."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from automodel_rl.config.base import Fraction, PathText, Positive, Section

Transport = Literal["local", "ipc", "collective"]
"""How weights reach transformers generators. local: within a process. ipc: to a process on the same device, which reads
the trainer's buffers in place. collective: one rank of each stage broadcasts to all generators."""

Devices = Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)]
"""Device indices among those visible to the ranks."""


def _refuse_twice(devices: tuple[int, ...]) -> None:
    if len(set(devices)) < len(devices):
        raise ValueError(f"place={list(devices)}: each generator needs its own device: list each only once")


class _StartedByRanks(Section):
    """Common base of kinds whose generators the ranks start."""

    @property
    def devices(self) -> tuple[int, ...]:
        """Devices of its own; empty if it shares its rank's device."""
        return ()

    @property
    def has_own_memory(self) -> bool:
        """Whether its memory is separate from the trainer's."""
        return bool(self.devices)


class TransformersSamplerConfig(_StartedByRanks):
    """transformers: a full copy of the model in every rank's process."""

    kind: Literal["transformers"] = "transformers"

    batch_size: Positive = 64
    """Maximum concurrent completions per rank."""

    @property
    def transport(self) -> Transport:
        """How it receives weights."""
        return "local"


class TransformersGeneratorConfig(TransformersSamplerConfig):
    """transformers: a full copy of the model for every rank."""

    place: Literal["in_process", "shared"] | Devices = "in_process"
    """Processes and devices. in_process: its rank's process. shared: a separate process on its rank's device. A list of
    device indices, e.g. [2, 3]: separate processes on these devices, one per rank of a machine."""

    batch_size: Positive = 256
    """Maximum concurrent completions per rank."""

    @property
    def devices(self) -> tuple[int, ...]:
        """Devices of its own; empty if it shares its rank's device."""
        return () if isinstance(self.place, str) else self.place

    @property
    def has_process(self) -> bool:
        """Whether it runs in a process of its own."""
        return self.place != "in_process"

    @property
    def runs_vllm(self) -> bool:
        return False

    @property
    def transport(self) -> Transport:
        """How it receives weights."""
        return "local" if not self.has_process else "collective" if self.devices else "ipc"

    @model_validator(mode="after")
    def _has_devices(self) -> "TransformersGeneratorConfig":
        _refuse_twice(self.devices)
        return self


class VllmSamplerConfig(_StartedByRanks):
    """vLLM in a separate process next to every rank, on its device."""

    kind: Literal["vllm"] = "vllm"

    python: PathText | None = None
    """Python interpreter of an environment with vLLM, whose pinned dependencies conflict with this package's; null: the
    interpreter of this process."""

    memory_fraction: Fraction = 0.4
    """Fraction of the device's memory for vLLM's weights and cache."""

    options: dict[str, str | int | float | bool] = Field(default_factory=dict)
    """Further arguments of vllm.LLM, e.g. max_num_seqs."""


class VllmGeneratorConfig(VllmSamplerConfig):
    """vLLM in separate processes."""

    place: Literal["shared"] | Devices = "shared"
    """Devices. shared: those of the ranks, next to every rank. A list of device indices, e.g. [2, 3]: these devices of
    each machine. There may be fewer instances than ranks: the first ranks of a machine lead one each."""

    tensor_parallel: Positive = 1
    """Number of GPUs per vLLM instance. On shared devices, this many consecutive ranks of a machine share an instance,
    which the first of them leads; must divide the number of ranks per machine. With devices in `place`, each instance
    takes this many of them."""

    replicas: Positive = 1
    """Number of vLLM instances on each rank's device. They share `memory_fraction`, and each holds a copy of the
    weights. vLLM schedules in a single Python thread, which leaves the GPU idle with small models: 2 instances then
    take two thirds of the time of one."""

    sleep: Literal["none", 1, 2, "auto"] = "none"
    """Whether vLLM on a rank's device releases its memory between rollouts. none: it does not. 1: its weights are moved
    to host memory. 2: its weights are discarded, and each rollout begins with a full weight sync. auto: 2, or 1 with
    weight_sync.adapters=alone. Combine with memory.offload to give trainer and vLLM the whole device in turns."""

    drafts: Annotated[int, Field(ge=0)] = 0
    """Speculative decoding: draft tokens per step, from the checkpoint's MTP layer; 0 is off. Weight syncs do not
    change this layer. Requires rollout.temperature=1, at which log-probabilities are returned for any request. With
    sleep, use 1, since 2 discards the layer."""

    @property
    def devices(self) -> tuple[int, ...]:
        """Devices of its own; empty if it shares its rank's device."""
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
                f"drafts={self.drafts} with sleep={self.sleep}: the drafting layer would be dropped, and weight syncs "
                "do not restore it: use sleep=1"
            )
        return self

    @model_validator(mode="after")
    def _devices_fit(self) -> "VllmGeneratorConfig":
        _refuse_twice(self.devices)
        if len(self.devices) % self.tensor_parallel:
            raise ValueError(
                f"place={list(self.devices)}: the number of devices must be a multiple of "
                f"tensor_parallel={self.tensor_parallel}"
            )
        if self.replicas > 1 and (self.devices or self.tensor_parallel > 1):
            other = f"place={list(self.devices)}" if self.devices else f"tensor_parallel={self.tensor_parallel}"
            raise ValueError(
                f"replicas={self.replicas} with {other}: several replicas share a rank's device: remove replicas"
            )
        if self.devices and self.sleep != "none":
            raise ValueError(
                f"sleep={self.sleep} with place={list(self.devices)}: the trainer uses other devices and could not use "
                "the memory: remove sleep"
            )
        return self


class _StartedElsewhere(Section):
    """Common base of kinds whose generators are not started by ranks."""

    @property
    def devices(self) -> tuple[int, ...]:
        return ()

    @property
    def has_process(self) -> bool:
        return True

    @property
    def has_own_memory(self) -> bool:
        return True


class VllmServersConfig(_StartedElsewhere):
    """Running vLLM servers on devices of their own."""

    kind: Literal["servers"] = "servers"

    urls: Annotated[tuple[str, ...], Field(min_length=1)]
    """Server URLs, e.g. http://localhost:8000, or files with one such URL per line, e.g. file:servers.txt, which are
    read again before every weight sync, so that servers may be added and removed during a run. Start each server with
    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --host 127.0.0.1 --logprobs-mode processed_logprobs --weight-transfer-config
    '{"backend": "nccl"}'. Servers on other machines need a token: pass it to them as --api-key, and to the run in
    VLLM_API_KEY."""

    @property
    def runs_vllm(self) -> bool:
        return True


class JoinedGeneratorConfig(_StartedElsewhere):
    """Generators on any machine that join and leave the run at any time: `automodel-rl generate --join FOLDER`, where
    FOLDER is weight_sync.publish, or `--join HOST:PORT`. They read published weights. Unfinished completions of a lost
    generator are generated by others, with the same seeds."""

    kind: Literal["joined"] = "joined"

    at_least: Positive = 1
    """Number of generators that must have joined before the run begins."""

    evaluators: Annotated[int, Field(ge=0)] = 0
    """Number of additional generators that only evaluate: `automodel-rl generate --join FOLDER --evaluate`. Held-out
    prompts are then completed during training, with the weights of the validated step, and the metrics appear in a
    later step's record with that step as val/step. 0: training waits for validation."""

    wait_minutes: Annotated[float, Field(gt=0)] = 30.0
    """Maximum time in minutes without any generator. Then the run saves a checkpoint and ends."""

    host: str = "localhost"
    """Host name or address under which generators reach the first rank's machine. localhost: only generators on the
    same machine can join."""

    port: Annotated[int, Field(ge=0, lt=2**16)] = 0
    """Port on which the first rank's machine accepts generators; 0: any free port."""

    key: Path | None = None
    """File with the secret key shared by run and generators, created at the first start. Anyone who has it can run code
    on both sides. null: a new key for each start, in join.json of the folder."""

    weights_port: Annotated[int, Field(ge=0, lt=2**16)] | None = None
    """Port on which the first rank's machine serves published weights over HTTP to generators without access to the
    folder, which join with --join HOST:PORT --key FILE; 0: any free port; null: weights are not served."""

    batch_size: Positive = 256
    """Maximum concurrent completions of a transformers generator."""

    @property
    def runs_vllm(self) -> bool:
        return False


def _of_kind(value: Any) -> Any:
    """Expands a bare kind, or nothing (the first kind), to a section of this kind with its defaults."""
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
