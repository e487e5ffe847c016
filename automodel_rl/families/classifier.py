"""Models with a linear head rather than the vocabulary's, such as reward models and critics: transformers' sequence
classifiers.

The head is `lm_head` in the model and `score.weight` [labels, H] in files, without a bias.
"""

import copy

from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as CLASSES

from automodel_rl.errors import InputError
from automodel_rl.families.text import TEXT_FAMILIES

HEAD_IN_MODEL, HEAD_IN_FILES = "lm_head.weight", "score.weight"

ENDING = "ForSequenceClassification"
"""Suffix of transformers' class names."""


def is_classifier(config: PretrainedConfig) -> bool:
    """Whether the config of a whole model is that of a sequence classifier."""
    return any(name.endswith(ENDING) for name in config.architectures or ())


def classifier_families() -> list[str]:
    """Families that support a linear head, by the `model_type` of their configs."""
    return [name for name in TEXT_FAMILIES if name in CLASSES]


def as_classifier(config: PretrainedConfig, num_labels: int) -> PretrainedConfig:
    """Converts the config of a text model to that of a sequence classifier with `num_labels` outputs. Raises InputError
    if transformers has no such class, so that the trained model could not be loaded."""
    name = CLASSES.get(config.model_type) if config.model_type in TEXT_FAMILIES else None
    if name is None:
        raise InputError(
            f"model.num_labels={num_labels}: transformers has no class {ENDING} that a {config.model_type!r} model "
            f"could be trained as here: use a model of one of {', '.join(classifier_families())}"
        )
    classifier = copy.deepcopy(config)
    classifier.architectures = [name]
    classifier.num_labels = num_labels
    classifier.problem_type = "regression"  # otherwise vLLM applies a sigmoid to a single score
    classifier.tie_word_embeddings = False  # the new head is not the embedding
    return classifier
