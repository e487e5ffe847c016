"""Requests of the installed client `tinker`: what it can send is read, or known not to matter."""

from typing import Any

import pytest
from tinker import types
from tinker.types.create_model_request import CreateModelRequest
from tinker.types.create_sampling_session_request import CreateSamplingSessionRequest
from tinker.types.create_session_request import CreateSessionRequest
from tinker.types.load_weights_request import LoadWeightsRequest
from tinker.types.sample_request import SampleRequest
from tinker.types.save_weights_for_sampler_request import SaveWeightsForSamplerRequest
from tinker.types.save_weights_request import SaveWeightsRequest

from automodel_rl.serve import requests

WITHOUT_EFFECT = {
    *("type", "tags", "sdk_version"),
    "project_id",  # there are no projects
    "weights_access_token",  # whoever has the key reads all weights
    *("base_model", "model_path"),  # of a sample, whose session has them
    "sampling_session_seq_id",  # of a save, whose answer has the sampler's name
    "record_stability_info",  # for a loss that is refused
}


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (CreateSessionRequest, requests.NewSessionBody),
        (CreateModelRequest, requests.CreateModelBody),
        (CreateSamplingSessionRequest, requests.SamplingSessionBody),
        (LoadWeightsRequest, requests.LoadBody),
        (SampleRequest, requests.SampleBody),
        (SaveWeightsRequest, requests.SaveBody),
        (SaveWeightsForSamplerRequest, requests.SaveBody),
        (types.LoraConfig, requests.LoraBody),
        (types.AdamParams, requests.AdamBody),
        (types.SamplingParams, requests.SamplingBody),
    ],
)
def test_every_field_of_the_installed_client_is_known(theirs: Any, ours: type[requests.Body]) -> None:
    assert theirs.model_fields.keys() - ours.model_fields.keys() - WITHOUT_EFFECT == set()
