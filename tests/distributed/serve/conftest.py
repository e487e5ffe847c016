"""A small model and a service with it, for all tests of this folder: a service takes half a minute to start."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.services import Service, write_model


@pytest.fixture(name="model", scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("serve") / "base" / "model"
    write_model(folder)
    return folder


@pytest.fixture(scope="session")
def shared_service(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with Service(tmp_path_factory.mktemp("service"), model, limits={"runs": 100}) as service:
        yield service


@pytest.fixture(name="service", scope="module")
def make_service(shared_service: Service) -> Iterator[Service]:
    """The service, whose clients are those of one file."""
    yield shared_service
    shared_service.close_clients()
