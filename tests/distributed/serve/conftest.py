"""A small model and a service with it, for the tests of a file."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.services import Service, write_model


@pytest.fixture(name="model", scope="module")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("serve") / "base" / "model"
    write_model(folder)
    return folder


@pytest.fixture(name="service", scope="module")
def make_service(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with Service(tmp_path_factory.mktemp("service"), model) as service:
        yield service
