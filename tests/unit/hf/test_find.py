"""A model that cannot be opened is one line with the remedy."""

from unittest import mock

import pytest
from huggingface_hub.errors import GatedRepoError

from automodel_rl.config import ModelConfig
from automodel_rl.errors import InputError
from automodel_rl.hf.find import find_model


def test_a_gated_model_names_the_page_and_the_login() -> None:
    gated = GatedRepoError("403", response=mock.Mock())
    with (
        mock.patch("automodel_rl.hf.find.snapshot_download", side_effect=gated),
        pytest.raises(InputError, match="request access on https://huggingface.co/meta/llama, and log in with hf auth"),
    ):
        find_model(ModelConfig(path="meta/llama"))
