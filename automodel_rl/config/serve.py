"""Config of a training service (`automodel-rl serve`)."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from automodel_rl.config.base import PathText, Positive, Section
from automodel_rl.config.further_models import FrozenModelConfig
from automodel_rl.config.generator_spec import GeneratorSpec
from automodel_rl.config.generators import SamplerConfig, TransformersSamplerConfig
from automodel_rl.config.launch import LaunchConfig
from automodel_rl.config.model import MemoryConfig, ModelConfig
from automodel_rl.config.parallel import ParallelConfig
from automodel_rl.config.rollout import WeightSyncConfig
from automodel_rl.origins import is_loopback


class ServeLimitsConfig(Section):
    """Limits of what clients may ask for. What is above is refused, with the limit."""

    body_mib: Annotated[float, Field(gt=0)] = 64.0
    """Largest body of a request in MiB."""

    runs: Positive = 16
    """Most training runs at once. Each has its state in host memory."""

    samplers_of_run: Positive = 4
    """Most weights without a name that are kept of a run to sample from. Older ones are let go."""

    waiting: Positive = 20_000
    """Most requests that wait or whose results are kept. A client has at most as many as are free."""

    waiting_gib: Annotated[float, Field(gt=0)] = 4.0
    """Most memory in GiB of requests that wait and of results that are kept, with arrays as they are once they are
    dense. A client has at most as much as is free."""

    sequences: Positive = 4096
    """Most sequences of a request: datums of a forward and backward, or samples of a prompt."""

    disk_gib: Annotated[float, Field(gt=0)] = 100.0
    """Most disk space of saved weights in GiB."""

    session_minutes: Annotated[float, Field(gt=0)] = 30.0
    """Minutes without a sign of its client after which a session ends, with its runs and their unnamed weights."""

    result_minutes: Annotated[float, Field(gt=0)] = 30.0
    """Minutes for which a result is kept for a client that asks again."""


class ServeConfig(Section):
    """A model behind an HTTP server that speaks Tinker's API.

    Example:
        >>> lora = LoraConfig(rank=32)
        >>> ServeConfig(output="service", model=ModelConfig(path="Qwen/Qwen3-0.6B", lora=lora)).address
        '127.0.0.1:8000'
    """

    algorithm: Literal["serve"] = "serve"

    output: PathText
    """Folder of the service: its key and the saved weights, with which a service goes on that is started again."""

    model: ModelConfig
    """The base model. `lora.rank` is the largest rank of a run, `lora.alpha` and `lora.targets` are those of all
    runs. Without `lora` there is one run at a time, which trains all weights."""

    name: str | None = None
    """Name of the base model for clients, which open the tokenizer of this name: a hub id, or a folder on their
    machine. null: model.path."""

    teachers: dict[str, FrozenModelConfig] = Field(default_factory=dict)
    """Further base models, by their names for clients, on the same ranks. They score prompts and are not trained, as
    teachers are: log-probabilities of a prompt's tokens, of the likeliest ones, and of tokens that a client names. A
    sample of theirs has one token, the likeliest."""

    parallel: ParallelConfig = ParallelConfig()
    memory: MemoryConfig = MemoryConfig()

    microbatch_tokens: Positive = 8192
    """Most tokens of a microbatch, and of a sequence with its last target."""

    generator: SamplerConfig = TransformersSamplerConfig()
    """What samples, next to every rank: transformers (a whole copy of the model in the rank's process) or vllm (in a
    process of its own on the rank's device). Its name alone, or a section with its name as `kind` and the keys of this
    kind."""

    host: str = "127.0.0.1"
    """Address on which the server listens. Others than loopback need a `key`."""

    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """Port on which the server listens; 0 for a free one."""

    key: Annotated[str, Field(min_length=12, pattern="^tml-")] | None = None
    """Key that clients send, tml- and at least 8 more characters. null: a random one, which is in output/key."""

    limits: ServeLimitsConfig = ServeLimitsConfig()

    launch: LaunchConfig = LaunchConfig()

    @property
    def address(self) -> str:
        """Host and port."""
        return f"{self.host}:{self.port}"

    @property
    def most_bytes(self) -> int:
        """Largest body of a request, and largest array in one."""
        return int(self.limits.body_mib * 2**20)

    @property
    def most_runs(self) -> int:
        """Most training runs at once."""
        return 1 if self.model.lora is None else self.limits.runs

    @property
    def pass_tokens(self) -> int:
        """Most tokens of runs that meet in one pass: those that keep all ranks at work. 0 if runs only take turns, as
        with adapters of experts, whose tokens change their places."""
        lora = self.model.lora
        return 0 if lora is None or lora.has_experts else self.microbatch_tokens * self.parallel.world_size

    @property
    def generator_spec(self) -> GeneratorSpec:
        """The generator that each rank samples with. Adapters come alone, so that it samples with those of any run."""
        sync = WeightSyncConfig(adapters="merged" if self.model.lora is None else "alone")
        return GeneratorSpec(self.generator, self.microbatch_tokens, sync, has_stop_texts=True)

    @property
    def base_name(self) -> str:
        """Name of the base model for clients."""
        return self.name or self.model.path

    @model_validator(mode="after")
    def _can_be_served(self) -> "ServeConfig":
        if self.launch.ray is not None and self.launch.ray.generators:
            raise ValueError("launch.ray.generators: generators join runs, and no service: leave it out")
        lora = self.model.lora
        if lora is not None and (lora.dropout or lora.modules_to_save or lora.dora):
            raise ValueError("model.lora: dropout, dora and modules_to_save are not served: leave them out")
        if self.model.num_labels is not None:
            raise ValueError("model.num_labels: a service samples tokens and needs the vocabulary's head: leave it out")
        if self.memory.mlp_tile is not None:
            raise ValueError("memory.mlp_tile is not served, for a tile has tokens of several runs: leave it out")
        if self.memory.offloads_optimizer or self.memory.offload is not None:
            raise ValueError(
                "memory: offload_optimizer and offload are not served, runs wait on the host: leave them out"
            )
        if self.base_name in self.teachers:
            raise ValueError(f"teachers.{self.base_name}: the base model has this name: give the teacher another")
        if not is_loopback(self.host) and self.key is None:
            raise ValueError(
                f"host={self.host} can be reached from other machines: give a key of your own (tml-...), and prefer "
                "an SSH tunnel to 127.0.0.1, for nothing is encrypted"
            )
        return self
