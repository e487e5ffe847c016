"""Models with a linear head in place of the vocabulary's, as reward models and critics are: transformers' sequence
classifiers.

In the model the head stays `lm_head`; in files it is `score.weight` [labels, H], and there is no bias.
"""

import copy

from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as CLASSES

from automodel_rl.errors import InputError
from automodel_rl.families.text import TEXT_FAMILIES

HEAD_IN_MODEL, HEAD_IN_FILES = "lm_head.weight", "score.weight"

ENDING = "ForSequenceClassification"
"""End of the names of transformers' classes."""


def is_classifier(config: PretrainedConfig) -> bool:
    """Whether a config is of a sequence classifier.

    Args:
        config: the config of the whole model.
    """
    return any(name.endswith(ENDING) for name in config.architectures or ())


def classifier_families() -> list[str]:
    """The families that can have a linear head, by the `model_type` of their configs."""
    return [name for name in TEXT_FAMILIES if name in CLASSES]


def as_classifier(config: PretrainedConfig, num_labels: int) -> PretrainedConfig:
    """The config of the sequence classifier with the body of another model.

    Args:
        config: the config of a text model.
        num_labels: number of the head's outputs.

    Raises:
        InputError: transformers has no such class for the family, so that nobody could load what is trained.
    """
    name = CLASSES.get(config.model_type) if config.model_type in TEXT_FAMILIES else None
    if name is None:
        raise InputError(
            f"model.num_labels={num_labels}: there is no class {ENDING} of transformers that a {config.model_type!r} "
            f"model could be trained as here: use a model of one of {', '.join(classifier_families())}"
        )
    classifier = copy.deepcopy(config)
    classifier.architectures = [name]
    classifier.num_labels = num_labels
    classifier.problem_type = "regression"  # or vLLM gives the sigmoid of a single score
    classifier.tie_word_embeddings = False  # its head has nothing to be tied to
    return classifier
