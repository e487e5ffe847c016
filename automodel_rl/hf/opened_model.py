"""A checkpoint that has been located, read and described once for all later uses."""

from dataclasses import dataclass, replace

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from automodel_rl.config import AnyRun, ComponentsConfig, MemoryConfig, ModelConfig, ParallelConfig
from automodel_rl.families.known import language_config
from automodel_rl.hf.find import ModelFiles, find_model
from automodel_rl.hf.generation import generation_stop_ids
from automodel_rl.hf.read import read_config
from automodel_rl.hf.tokenizer import load_tokenizer
from automodel_rl.support.combination import Combination
from automodel_rl.support.description import ModelDescription, describe_model
from automodel_rl.support.table import check_supported


@dataclass(frozen=True)
class OpenedModel:
    """A checkpoint without its weights.

    Attributes:
        requested: the config section `model` that names it.
        whole: Hugging Face config of the trained model, with its encoders.
    """

    requested: ModelConfig
    files: ModelFiles
    whole: PretrainedConfig
    description: ModelDescription

    @classmethod
    def open(cls, model: ModelConfig) -> "OpenedModel":
        """Locates and describes a checkpoint.

        Raises:
            InputError: there is no such checkpoint, or its config.json is damaged.
        """
        files = find_model(model, with_weights=False)
        whole = read_config(files.folder, model.num_labels, model.text_only)
        return cls(model, files, whole, describe_model(whole))

    @property
    def model(self) -> ModelConfig:
        """The section `model` with the local folder and the config of the trained adapters."""
        return self.files.described(self.requested)

    @property
    def language(self) -> PretrainedConfig:
        """The Hugging Face config of the language model."""
        return language_config(self.whole)

    def with_weights(self) -> "OpenedModel":
        """Returns the opened model with its weight files, downloaded if it is on the hub.

        Raises:
            InputError: a file differs from its export.
        """
        return replace(self, files=find_model(self.requested))

    def checked(self, run: AnyRun) -> AnyRun:
        """Returns a run's config with the local folder of its model.

        Raises:
            InputError: generation_config.json is damaged, or the run is not supported.
        """
        run = run.model_copy(update={"model": self.model})
        generation_stop_ids(self.files.folder, self.whole)  # finds a damaged file now rather than at the end of the run
        check_supported(Combination.of_run(self.description, run))
        return run

    def check_layout(
        self, parallel: ParallelConfig, memory: MemoryConfig, components: ComponentsConfig | None = None
    ) -> None:
        """Raises InputError if the support table rejects the model on a layout, for any run."""
        check_supported(Combination(self.description, self.model, parallel, memory, components))

    def tokenizer(self, template: str | None = None) -> PreTrainedTokenizerBase:
        """Loads the checkpoint's tokenizer, with the chat template in the file `template` if given.

        Raises:
            InputError: the tokenizer cannot be opened or does not fit the model.
        """
        return load_tokenizer(
            self.files.tokenizer_folder, self.language.vocab_size, template, self.requested.trust_remote_code
        )
