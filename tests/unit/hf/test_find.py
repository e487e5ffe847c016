"""A model that cannot be opened is one line with the remedy."""

from pathlib import Path
from unittest import mock

import pytest
from huggingface_hub.errors import GatedRepoError

from automodel_rl.config import ModelConfig
from automodel_rl.errors import InputError
from automodel_rl.hf.find import find_model
from automodel_rl.hf.tokenizer import load_tokenizer


def test_a_gated_model_names_the_page_and_the_login() -> None:
    gated = GatedRepoError("403", response=mock.Mock())
    with (
        mock.patch("automodel_rl.hf.find.snapshot_download", side_effect=gated),
        pytest.raises(InputError, match="request access on https://huggingface.co/meta/llama, and log in with hf auth"),
    ):
        find_model(ModelConfig(path="meta/llama"))


def test_a_folder_without_tokenizer_files_is_no_folder_without_a_template(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.raises(InputError, match=r"has no tokenizer files, such as tokenizer.json: copy those of the model"):
        load_tokenizer(tmp_path, vocab_size=10)
