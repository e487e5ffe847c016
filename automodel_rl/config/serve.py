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
    """Limits on client requests. Requests that exceed one are rejected with a message that states it."""

    body_mib: Annotated[float, Field(gt=0)] = 64.0
    """Maximum request body in MiB."""

    runs: Positive = 16
    """Maximum concurrent training runs. Each keeps its state in host memory."""

    samplers_of_run: Positive = 4
    """Maximum number of unnamed weights kept per run for sampling. The oldest are evicted."""

    waiting: Positive = 20_000
    """Maximum requests that are queued or whose results are kept. A client may hold at most as many as are still
    free."""

    waiting_gib: Annotated[float, Field(gt=0)] = 4.0
    """Maximum memory in GiB of queued requests and kept results, with sparse arrays counted as dense. A client may hold
    at most as much as is still free."""

    sequences: Positive = 4096
    """Maximum sequences per request: datums of a forward and backward, or samples of a prompt."""

    disk_gib: Annotated[float, Field(gt=0)] = 100.0
    """Maximum disk space of saved weights in GiB."""

    session_minutes: Annotated[float, Field(gt=0)] = 30.0
    """Minutes without contact from its client after which a session ends, with its runs and their unnamed weights."""

    result_minutes: Annotated[float, Field(gt=0)] = 30.0
    """Minutes for which a result is kept for retries by the client."""


class ServeConfig(Section):
    """A model behind an HTTP server with Tinker's API.

    Example:
        >>> lora = LoraConfig(rank=32)
        >>> ServeConfig(output="service", model=ModelConfig(path="Qwen/Qwen3-0.6B", lora=lora)).address
        '127.0.0.1:8000'
    """

    algorithm: Literal["serve"] = "serve"

    output: PathText
    """Folder of the service, with its key and the saved weights, from which a restarted service resumes."""

    model: ModelConfig
    """The base model. `lora.rank` is the maximum rank of a run; `lora.alpha` and `lora.targets` apply to all runs.
    Without `lora` there is one run at a time, which trains all weights."""

    name: str | None = None
    """Name of the base model for clients, which load its tokenizer by this name: a hub id, or a folder on their
    machine. null: model.path."""

    teachers: dict[str, FrozenModelConfig] = Field(default_factory=dict)
    """Additional base models by their names for clients, on the same ranks, for scoring only: log-probabilities of a
    prompt's tokens, of the most likely tokens, and of tokens that a client names. Samples from them have one token, the
    most likely."""

    parallel: ParallelConfig = ParallelConfig()
    memory: MemoryConfig = MemoryConfig()

    microbatch_tokens: Positive = 8192
    """Maximum tokens of a microbatch, and of a sequence including its last target."""

    generator: SamplerConfig = TransformersSamplerConfig()
    """The generator next to every rank: transformers (a full copy of the model in the rank's process) or vllm (in a
    separate process on the rank's device). Either its name, or a section with its name as `kind` and the keys of this
    kind."""

    host: str = "127.0.0.1"
    """Address on which the server listens. Non-loopback addresses require a `key`."""

    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """Port on which the server listens; 0: any free port."""

    key: Annotated[str, Field(min_length=12, pattern="^tml-")] | None = None
    """Key that clients must send: tml- and at least 8 more characters. null: a random key, written to output/key."""

    limits: ServeLimitsConfig = ServeLimitsConfig()

    launch: LaunchConfig = LaunchConfig()

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def max_bytes(self) -> int:
        """Maximum bytes of a request body, and of an array in it."""
        return int(self.limits.body_mib * 2**20)

    @property
    def max_runs(self) -> int:
        """Maximum concurrent training runs."""
        return 1 if self.model.lora is None else self.limits.runs

    @property
    def pass_tokens(self) -> int:
        """Maximum tokens of several runs combined in one pass: enough to occupy all ranks. 0 if runs only take turns,
        as with adapters on experts, which reorder tokens."""
        lora = self.model.lora
        return 0 if lora is None or lora.has_experts else self.microbatch_tokens * self.parallel.world_size

    @property
    def generator_spec(self) -> GeneratorSpec:
        """The generator of each rank. Adapters are sent without the base model, so that it can sample with those of any
        run."""
        sync = WeightSyncConfig(adapters="merged" if self.model.lora is None else "alone")
        return GeneratorSpec(self.generator, self.microbatch_tokens, sync, has_stop_texts=True)

    @property
    def base_name(self) -> str:
        """Name of the base model for clients."""
        return self.name or self.model.path

    @model_validator(mode="after")
    def _can_be_served(self) -> "ServeConfig":
        if self.launch.ray is not None and self.launch.ray.generators:
            raise ValueError("launch.ray.generators: generators join runs, not services: remove it")
        lora = self.model.lora
        if lora is not None and (lora.dropout or lora.modules_to_save or lora.dora):
            raise ValueError("model.lora: dropout, dora and modules_to_save cannot be served: remove them")
        if self.model.num_labels is not None:
            raise ValueError("model.num_labels: a service samples tokens and needs the vocabulary head: remove it")
        if self.memory.mlp_tile is not None:
            raise ValueError("memory.mlp_tile cannot be served, because a tile has tokens of several runs: remove it")
        if self.memory.offloads_optimizer or self.memory.offload is not None:
            raise ValueError(
                "memory: offload_optimizer and offload cannot be served, because runs wait on the host: remove them"
            )
        if self.base_name in self.teachers:
            raise ValueError(f"teachers.{self.base_name}: the base model has this name: rename the teacher")
        if not is_loopback(self.host) and self.key is None:
            raise ValueError(
                f"host={self.host} is reachable from other machines: set your own key (tml-...), and prefer an SSH "
                "tunnel to 127.0.0.1, because nothing is encrypted"
            )
        return self
