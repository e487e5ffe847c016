"""Clients whose requests would cost others memory, time or their turn, and pages of other sites."""

import contextlib
import random
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from automodel_rl.serve.messages import RunPass
from automodel_rl.serve.wire import MESSAGES
from tests.unit.serve.test_fuzzed_requests import ADDRESS, KEY, Answering, GoodClient, client_of, post, training

WRONG_COUNTS = (0, 1, 2, 3, 5, 2**31 - 1, 2**31, 2**40, 2**62, 2**63 - 1, -1, -2, -(2**63))


def lying_training(random_: random.Random, run: str, seq_id: int) -> bytes:
    message = MESSAGES["Request"].FromString(training(run, seq_id))
    array = message.data[0].inputs["target_tokens"]
    ends = [random_.choice(WRONG_COUNTS) for _ in range(4)] if random_.random() < 0.7 else [0, 1, 2, 3]
    columns = [random_.choice(WRONG_COUNTS) for _ in range(3)] if random_.random() < 0.5 else [0, 0, 0]
    array.csr.row_ends = np.array(ends, np.int64).tobytes()
    array.csr.columns = np.array(columns, np.int64).tobytes()
    array.csr.values = np.ones(3, np.int64).tobytes()
    array.shape.extend(random_.choice([[3, 3], [3, 1000], [3, 2**20], [3, 2**62], [2**62, 4], [3, -1], [3], [3, 1, 1]]))
    return message.SerializeToString()


def lying(random_: random.Random, good: GoodClient, sampler: str, number: int) -> tuple[str, Any]:
    """Path and body of a small request with odd sizes, counts and numbers."""
    count = random_.choice(WRONG_COUNTS)
    if random_.random() < 0.5:
        return "forward_backward", lying_training(random_, good.run, random_.choice([number, number + 7, 2**31 - 1]))
    sample = {"sampling_session_id": sampler, "seq_id": number, "prompt": {"chunks": [{"tokens": [1, 2, 3]}]}}
    named = {"data": [1], "dtype": "int64", "shape": [2, max(count, 0)]}
    named |= {"sparse_crow_indices": [0, count, 1], "sparse_col_indices": [count]}
    odd = random_.choice(
        [
            {"num_samples": count},
            {"topk_prompt_logprobs": count},
            {"topk_sample_logprobs": count},
            {"prompt_logprobs": True, "prompt_logprobs_last_n": count},
            {"target_prompt_logprobs": named},
            {"sampling_params": {"max_tokens": count}},
            {"seq_id": count},
        ]
    )
    return "asample", {"sampling_params": {}, **sample, **odd}


@contextlib.contextmanager
def traced(max_bytes: float) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < max_bytes
    finally:
        tracemalloc.stop()


def test_a_client_whose_sizes_are_lies_takes_no_memory_and_no_turn_of_another(tmp_path: Path) -> None:
    random_, ranks = random.Random(0), Answering()
    with client_of(tmp_path, ranks) as client:
        good, greedy = GoodClient(client), GoodClient(client)
        body = {"session_id": greedy.session, "sampling_session_seq_id": 1, "base_model": "base"}
        sampler = post(client, "create_sampling_session", body).json()["sampling_session_id"]
        good.step()
        before = len(ranks.jobs)
        for number in range(1, 2001):
            path, asked = lying(random_, greedy, sampler, number)
            with traced(max_bytes=20 * 0.05 * 2**20) if number % 4 == 0 else contextlib.nullcontext():
                answer = post(client, path, asked)
            assert answer.status_code in (200, 400, 404, 429), answer.text
            assert "Traceback" not in answer.text
            if number % 200 == 0:
                good.step()
    trained = [job for job in ranks.jobs[before:] if isinstance(job, RunPass) and job.run == good.run]
    assert [job.data[0].tokens.tolist() for job in trained] == [[1, 2, 3]] * 10


def test_requests_out_of_order_leave_room_for_others(tmp_path: Path) -> None:
    ranks = Answering()
    with client_of(tmp_path, ranks, waiting=200) as client:
        good, greedy = GoodClient(client), GoodClient(client)
        answers = [post(client, "forward_backward", training(greedy.run, seq)) for seq in range(2, 302)]
        assert sum(answer.status_code == 429 for answer in answers) > 200
        good.step()
        post(client, "forward_backward", training(greedy.run, 1))
        assert sum(isinstance(job, RunPass) for job in ranks.jobs) > 50  # those that had room, and no other, have run


@pytest.mark.parametrize("headers", [{"Host": "evil.example"}, {"Origin": "http://evil.example"}, {"Origin": "null"}])
def test_pages_of_other_sites_are_refused_whatever_key_they_have(tmp_path: Path, headers: dict[str, str]) -> None:
    with client_of(tmp_path, Answering()) as client:
        for method, path in (("POST", "/api/v1/create_session"), ("GET", f"/?key={KEY}"), ("GET", "/v1/models")):
            assert client.request(method, path, headers=headers).status_code == 403
            assert client.request(method, path, headers={"Origin": ADDRESS}).status_code == 200
