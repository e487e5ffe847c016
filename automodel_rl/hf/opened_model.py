"""A checkpoint that has been found, read and described, once for everything that begins with it."""

from dataclasses import dataclass, replace

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from automodel_rl.config import AnyRun, ComponentsConfig, MemoryConfig, ModelConfig, ParallelConfig
from automodel_rl.families.known import language_config
from automodel_rl.hf.find import ModelFiles, find_model
from automodel_rl.hf.generation import generation_ends
from automodel_rl.hf.read import read_config
from automodel_rl.hf.tokenizer import load_tokenizer
from automodel_rl.support.combination import Combination
from automodel_rl.support.description import ModelDescription, describe_model
from automodel_rl.support.table import check_supported


@dataclass(frozen=True)
class OpenedModel:
    """A checkpoint without its weights: what it is, and what the table of what works together says of it.

    Attributes:
        asked: the section `model` that names it.
        files: its local files.
        whole: the Hugging Face config of the model that is trained, with its encoders.
        description: what rules judge.
    """

    asked: ModelConfig
    files: ModelFiles
    whole: PretrainedConfig
    description: ModelDescription

    @classmethod
    def open(cls, model: ModelConfig) -> "OpenedModel":
        """Finds and describes a checkpoint.

        Raises:
            InputError: there is no such checkpoint, or its config.json is damaged.
        """
        files = find_model(model, with_weights=False)
        whole = read_config(files.folder, model.num_labels, model.text_only)
        return cls(model, files, whole, describe_model(whole))

    @property
    def model(self) -> ModelConfig:
        """The section `model` with the local folder, and with the config of the adapters that are trained."""
        return self.files.described(self.asked)

    @property
    def language(self) -> PretrainedConfig:
        """The Hugging Face config of the language model."""
        return language_config(self.whole)

    def with_weights(self) -> "OpenedModel":
        """The opened model with its weight files, which are downloaded if the model is on the hub.

        Raises:
            InputError: a file is not as it was exported.
        """
        return replace(self, files=find_model(self.asked))

    def checked(self, run: AnyRun) -> AnyRun:
        """A run's config with the local folder of its model, if the run is supported.

        Raises:
            InputError: generation_config.json is damaged, or the table refuses the run.
        """
        run = run.model_copy(update={"model": self.model})
        generation_ends(self.files.folder, self.whole)  # a damaged file is found now, and not when the run ends
        check_supported(Combination.of_run(self.description, run))
        return run

    def check_layout(
        self, parallel: ParallelConfig, memory: MemoryConfig, components: ComponentsConfig | None = None
    ) -> None:
        """Raises InputError if the table refuses the model on a layout, whatever the run."""
        check_supported(Combination(self.description, self.model, parallel, memory, components))

    def tokenizer(self, template: str | None = None) -> PreTrainedTokenizerBase:
        """The checkpoint's tokenizer.

        Args:
            template: the file of a chat template in place of the tokenizer's own.

        Raises:
            InputError: the tokenizer cannot be opened or does not fit the model.
        """
        return load_tokenizer(
            self.files.tokenizer_folder, self.language.vocab_size, template, self.asked.trust_remote_code
        )
