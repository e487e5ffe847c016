"""2,000 broken requests: each gets an answer in one line, none reaches the ranks, and a good client goes on."""

import asyncio
import errno
import json
import random
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from automodel_rl.config import LoraConfig, ModelConfig, ServeConfig, ServeLimitsConfig
from automodel_rl.errors import InputError
from automodel_rl.rollout.openai_answers import OpenAIAnswers
from automodel_rl.rollout.sampled import Sampled
from automodel_rl.serve.app import make_app
from automodel_rl.serve.messages import LossResult, RunMethodCall, RunPass, SampleJob, ServiceJob
from automodel_rl.serve.openai import Completions
from automodel_rl.serve.saved_weights import SavedWeights, about
from automodel_rl.serve.service import Service
from automodel_rl.serve.wire import INT64, MESSAGES

KEY = "tml-unit-tests"
ADDRESS = "http://127.0.0.1"
VOCAB = 50
NUM_REQUESTS = 2000


class Answering:
    """Stands for the ranks: checks every job, and answers at once."""

    vocab_size = VOCAB
    num_waiting = peak_bytes = num_joint = 0
    are_ready = True

    def __init__(self) -> None:
        self.jobs: list[ServiceJob] = []
        self.orders: list[Any] = []

    def submit(self, job: ServiceJob) -> Future:
        self.jobs.append(job)
        answer: Future = Future()
        match job:
            case RunPass(data=data):
                for datum in data:
                    assert datum.tokens.min() >= 0
                    assert datum.tokens.max() < VOCAB
                    assert all(values.shape == datum.tokens.shape for values in datum.inputs.values())
                    assert all(np.isfinite(values).all() for values in datum.inputs.values())
                answer.set_result(LossResult(1.0, [np.zeros(len(datum), np.float32) for datum in data]))
            case RunMethodCall(method="optimizer_step"):
                answer.set_result({"grad_norm:mean": 1.0})
            case SampleJob(prompts=prompts):
                assert all(0 <= token < VOCAB for prompt in prompts for token in prompt.tokens)
                assert all(len(prompt.tokens) + prompt.sampling.max_tokens <= 32 for prompt in prompts)
                answer.set_result([Sampled() for _ in prompts])
            case _:
                answer.set_result(None)
        return answer


def is_call(job: ServiceJob, method: str) -> bool:
    return isinstance(job, RunMethodCall) and job.method == method


@pytest.fixture(name="ranks")
def make_ranks() -> Answering:
    return Answering()


@pytest.fixture(name="client")
def make_client(tmp_path: Path, ranks: Answering) -> TestClient:
    return client_of(tmp_path, ranks)


def client_of(tmp_path: Path, ranks: Answering, **limits: Any) -> TestClient:
    config = ServeConfig(
        output=str(tmp_path),
        model=ModelConfig(path="base", lora=LoraConfig(rank=8)),
        microbatch_tokens=32,
        limits=ServeLimitsConfig(body_mib=0.05, runs=3, sequences=20, **limits),
    )
    service = Service(config, ranks, SavedWeights(tmp_path, 1e9, LoraConfig(rank=8), "base"))  # type: ignore[arg-type]
    return TestClient(make_app(service, config, KEY), ADDRESS, headers={"X-API-Key": KEY})


def post(client: TestClient, path: str, body: Any, **options: Any) -> Any:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return client.post(f"/api/v1/{path}", content=content, **options)


def training(model_id: str, seq_id: int, tokens: list[int] | None = None, **changes: Any) -> bytes:
    tokens = [1, 2, 3] if tokens is None else tokens
    message = MESSAGES["Request"](model_id=model_id, seq_id=seq_id, loss_fn=changes.get("loss_fn", "cross_entropy"))
    datum = message.data.add()
    datum.chunks.add().text.tokens = np.array(tokens, np.int32).tobytes()
    targets, weights = datum.inputs["target_tokens"], datum.inputs["weights"]
    targets.dense, targets.dtype = np.array(changes.get("targets", tokens), np.int64).tobytes(), INT64
    weights.dense, weights.dtype = np.array(changes.get("weights", [1.0] * len(tokens)), np.float32).tobytes(), 1
    return message.SerializeToString()


def result(client: TestClient, submitted: Any) -> Any:
    assert submitted.status_code == 200, submitted.text
    return post(client, "retrieve_future", {"request_id": submitted.json()["request_id"]})


class GoodClient:
    """A client that does all in order, in between the broken requests."""

    def __init__(self, client: TestClient):
        self.client, self.seq = client, 0
        self.session = post(client, "create_session", {}).json()["session_id"]
        body = {"session_id": self.session, "model_seq_id": 0, "base_model": "base", "lora_config": {"rank": 4}}
        self.run = result(client, post(client, "create_model", body)).json()["model_id"]

    def turn(self) -> int:
        self.seq += 1
        return self.seq

    def step(self) -> None:
        trained = result(self.client, post(self.client, "forward_backward", training(self.run, self.turn())))
        assert trained.headers["content-type"] == "application/x-protobuf"
        step = post(self.client, "optim_step", {"model_id": self.run, "seq_id": self.turn(), "adam_params": {}})
        assert result(self.client, step).json() == {"metrics": {"grad_norm:mean": 1.0}}
        body = {"session_id": self.session, "sampling_session_seq_id": self.seq, "base_model": "base"}
        sampler = post(self.client, "create_sampling_session", body).json()["sampling_session_id"]
        sample = {"sampling_session_id": sampler, "seq_id": 0, "num_samples": 1, "sampling_params": {}}
        asked = post(self.client, "asample", sample | {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}]}})
        assert len(asked.json()["sample_sequence_ids"]) == 1
        assert result(self.client, asked).status_code == 200


ODD = (
    None,
    True,
    -1,
    0,
    2**40,
    1e400,
    1.5,
    "",
    "x" * 3000,
    "../../etc",
    "tinker://a/b",
    [],
    [1, "a"],
    {},
    {"a": 1},
    "é\0",
)

PATHS = (
    *("create_session", "session_heartbeat", "create_model", "get_info", "optim_step", "save_weights"),
    *("save_weights_for_sampler", "load_weights", "create_sampling_session", "asample", "retrieve_future"),
    *("client/config", "telemetry"),
)

FIELDS = (
    *("session_id", "model_seq_id", "base_model", "lora_config", "user_metadata", "model_id", "seq_id", "adam_params"),
    *("path", "ttl_seconds", "overwrite", "optimizer", "sampling_session_seq_id", "model_path", "sampling_session_id"),
    *("num_samples", "prompt", "sampling_params", "prompt_logprobs", "request_id", "topk_prompt_logprobs"),
    *("optimizer_config", "kind"),
)

BAD_TRAINING: tuple[dict[str, Any], ...] = (
    {"tokens": [1, VOCAB]},
    {"tokens": [-1]},
    {"tokens": []},
    {"tokens": [1] * 33},
    {"targets": [1]},
    {"targets": [1, 2, VOCAB]},
    {"weights": [1.0, float("nan"), 0.0]},
    {"weights": [1.0]},
    {"loss_fn": "stable_reinforce"},
    {"loss_fn": "ppo"},
    {"loss_fn": ""},
)


def broken(random_: random.Random, good: GoodClient) -> tuple[str, Any, dict[str, Any]]:
    """Path, body and options of a request that is wrong in some way, or asks for what is not there."""
    known = {"session_id": good.session, "model_id": good.run, "base_model": "base"}
    match random_.randrange(6):
        case 0:
            return random_.choice(PATHS), random_.randbytes(random_.randrange(200)), {}
        case 1:
            return "forward_backward", random_.randbytes(random_.randrange(1, 200)), {}
        case 2:
            return random_.choice(PATHS), {}, {"headers": {"X-API-Key": random_.choice(["", "tml-other", KEY + "x"])}}
        case 3:
            return random_.choice(PATHS), b"[" * random_.randrange(60_000), {}
        case 4:
            body = {field: random_.choice(ODD) for field in FIELDS if random_.random() < 0.5}
            return random_.choice(PATHS), json.dumps(body | {"session_id": "none", "model_id": "none"}).encode(), {}
    body = {**known, **{field: random_.choice(ODD) for field in FIELDS if field not in known}}
    return random_.choice(["create_model", "asample", "load_weights", "create_sampling_session"]), body, {}


def told(job: ServiceJob) -> tuple[str, Any]:
    """What a job has the ranks compute."""
    match job:
        case RunPass(data=data):
            numbers = [{name: values.tolist() for name, values in datum.inputs.items()} for datum in data]
            return "pass", [(datum.tokens.tolist(), inputs) for datum, inputs in zip(data, numbers, strict=True)]
        case SampleJob(prompts=prompts):
            return "sample", [list(prompt.tokens) for prompt in prompts]
    return type(job).__name__, None


def test_broken_requests_are_refused_and_lose_nothing(client: TestClient, ranks: Answering, tmp_path: Path) -> None:
    random_, num_steps = random.Random(0), NUM_REQUESTS // 100 + 1
    with client:
        good = GoodClient(client)
        for number in range(NUM_REQUESTS):
            if number % 100 == 0:
                good.step()
            path, body, options = broken(random_, good)
            num_jobs = len(ranks.jobs)
            answer = post(client, path, body, **options)
            if path in ("client/config", "telemetry", "create_session") and answer.status_code == 200:
                continue
            assert answer.status_code in (400, 401, 404, 413, 429), (path, body, answer.text)
            text = answer.json()["detail"]
            assert text
            assert "\n" not in text
            assert "Traceback" not in text
            assert len(ranks.jobs) == num_jobs
        for changes in BAD_TRAINING:
            sent = training(good.run, good.turn(), **changes)
            failed = result(client, post(client, "forward_backward", sent)).json()
            assert failed["category"] == "user"
            assert failed["error"]
            assert ranks.jobs[-1] == RunMethodCall(
                good.run, "mark_failed"
            )  # else the next optimizer step would go without it
        good.step()
    alone = Answering()
    with client_of(tmp_path / "alone", alone) as undisturbed:
        good = GoodClient(undisturbed)
        for _ in range(num_steps):
            good.step()
    of_good = [told(job) for job in ranks.jobs if not is_call(job, "mark_failed")]
    assert of_good == [told(job) for job in alone.jobs], "ranks compute what they do without the broken requests"


def training_without_weights(run: str, seq_id: int) -> bytes:
    message = MESSAGES["Request"].FromString(training(run, seq_id))
    del message.data[0].inputs["weights"]
    return message.SerializeToString()


def test_cross_entropy_without_weights_counts_every_token(client: TestClient, ranks: Answering) -> None:
    with client:
        good = GoodClient(client)
        sent = post(client, "forward_backward", training_without_weights(good.run, good.turn()))
        assert result(client, sent).headers["content-type"] == "application/x-protobuf"
        assert isinstance(ranks.jobs[-1], RunPass)
        weights = ranks.jobs[-1].data[0].inputs["weights"]
        assert (weights.tolist(), weights.dtype) == ([1, 1, 1], np.float32)


def test_a_number_that_comes_again_with_another_body_is_refused_and_the_same_is_not(client: TestClient) -> None:
    with client:
        good = GoodClient(client)
        of_session = {"session_id": good.session, "base_model": "base"}
        made = {**of_session, "model_seq_id": 0, "lora_config": {"rank": 4}}
        step = {"model_id": good.run, "seq_id": good.turn(), "adam_params": {}}
        saving = {"model_id": good.run, "seq_id": good.turn(), "path": "one"}
        wrong = {"model_id": good.run, "seq_id": good.turn(), "adam_params": {"beta1": 7.0}}
        sampler = {**of_session, "sampling_session_seq_id": 1}
        name = post(client, "create_sampling_session", sampler).json()["sampling_session_id"]
        prompt = {"prompt": {"chunks": [{"tokens": [1]}]}, "sampling_params": {"seed": 1}}
        sample = {"sampling_session_id": name, "seq_id": 0, **prompt}
        sent = [
            ("create_model", made, {"lora_config": {"rank": 2}}),
            ("optim_step", step, {"adam_params": {"learning_rate": 1.0}}),
            ("save_weights", saving, {"path": "two"}),
            ("optim_step", wrong, {"adam_params": {"beta1": 8.0}}),
            ("asample", sample, {"num_samples": 2}),
        ]
        for path, body, other in sent:
            first = post(client, path, body).json()
            result(client, post(client, path, body))
            assert post(client, path, body).json() == first
            refused = post(client, path, body | other)
            assert (
                refused.status_code,
                "a different request with this number was already accepted" in refused.text,
            ) == (400, True)
        refused = post(client, "save_weights_for_sampler", saving)
        assert "a different request with this number was already accepted" in refused.json()["detail"]
        path = "tinker://" + good.run + "/weights/one"
        assert (
            "a sampler of other weights" in post(client, "create_sampling_session", sampler | {"model_path": path}).text
        )
        assert post(client, "create_sampling_session", sampler).json()["sampling_session_id"] == name
        first_bytes, other_bytes = training(good.run, good.turn()), training(good.run, good.seq, weights=[2.0] * 3)
        assert (
            post(client, "forward_backward", first_bytes).json() == post(client, "forward_backward", first_bytes).json()
        )
        assert post(client, "forward_backward", other_bytes).status_code == 400


def test_what_is_not_served_is_told_by_its_name(client: TestClient) -> None:
    with client:
        for method, path in (("POST", "/api/v1/copy_weights"), ("PUT", "/api/v1/asample"), ("POST", "/v1/embeddings")):
            answer = client.request(method, path)
            assert (answer.status_code, answer.json()["detail"][: len(method + path) + 1]) == (404, f"{method} {path}")
            assert client.request(method, path, headers={"X-API-Key": "other"}).status_code == 401


OF_OPENAI = (
    *("model", "prompt", "messages", "max_tokens", "max_completion_tokens", "n", "temperature", "top_p", "top_k"),
    *("seed", "stop", "logprobs", "echo", "stream", "tools", "logit_bias", "return_token_ids", "user"),
)


def test_broken_requests_of_openais_api_are_refused(
    client: TestClient, ranks: Answering, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoTokenizer:
        chat_template = None

        def __call__(self, *_: Any) -> None:
            raise InputError("there is no tokenizer here")

        decode = __call__

    answers = property(lambda self: OpenAIAnswers(NoTokenizer(), (), self._sample))  # type: ignore[arg-type]
    monkeypatch.setattr(Completions, "answers", answers)
    random_ = random.Random(0)
    good = {"model": "base", "prompt": [1, 2], "max_tokens": 4}
    with client:
        for _ in range(300):
            odd = {field: random_.choice(ODD) for field in OF_OPENAI if random_.random() < 0.15}
            path = random_.choice(["completions", "chat/completions"])
            answer = client.post(f"/v1/{path}", content=json.dumps(good | odd).encode())
            assert answer.status_code in ((200,) if not odd and path == "completions" else (200, 400, 404)), answer.text
            if answer.status_code != 200:
                text = answer.json()["error"]["message"]
                assert text
                assert "\n" not in text
        assert client.post("/v1/completions", json=good).json()["usage"]["prompt_tokens"] == 2
        assert client.get("/v1/models", headers={"X-API-Key": "", "Authorization": f"Bearer {KEY}"}).status_code == 401
        bearer = TestClient(client.app, ADDRESS, headers={"Authorization": f"Bearer {KEY}"})
        assert bearer.get("/v1/models").json()["data"][0]["id"] == "base"
        assert bearer.get("/v1/models", headers={"Authorization": "Bearer tml-other"}).status_code == 401
    assert any(isinstance(job, SampleJob) for job in ranks.jobs)


def test_arrays_that_a_loss_does_not_read_may_be_anything(client: TestClient, ranks: Answering) -> None:
    with client:
        good = GoodClient(client)
        message = MESSAGES["Request"].FromString(training(good.run, good.turn()))
        extra = message.data[0].inputs["mask"]
        extra.dense, extra.dtype = np.ones(99, np.float32).tobytes(), 1
        sent = post(client, "forward_backward", message.SerializeToString())
        assert result(client, sent).headers["content-type"] == "application/x-protobuf"
        assert isinstance(ranks.jobs[-1], RunPass)
        assert ranks.jobs[-1].data[0].inputs.keys() == {"target_tokens", "weights"}


@pytest.mark.parametrize("name", [".", "..", ".hidden", "a/b", "", "x" * 129])
def test_names_that_are_no_names_of_folders_are_refused(client: TestClient, name: str) -> None:
    with client:
        good = GoodClient(client)
        body = {"model_id": good.run, "seq_id": good.turn(), "path": name}
        assert result(client, post(client, "save_weights", body)).json()["error"].startswith("path: ")
        good.step()


WRONG_STEPS: tuple[dict[str, Any], ...] = (
    {"learning_rate": 1e39},
    {"learning_rate": -1.0},
    {"beta1": 1.0},
    {"beta2": 1 - 1e-12},
    {"eps": 1e-320},
    {"eps": 1e39},
    {"weight_decay": 1e308},
    {"grad_clip_norm": 1e308},
    {"grad_clip_norm": 1e-320},
)


def test_steps_with_numbers_that_fp32_does_not_hold_take_their_turn_and_fail(
    client: TestClient, ranks: Answering
) -> None:
    with client:
        good = GoodClient(client)
        for wrong in WRONG_STEPS:
            body = {"model_id": good.run, "seq_id": good.turn(), "adam_params": wrong}
            failed = result(client, post(client, "optim_step", body)).json()
            assert (failed["category"], f"adam_params.{min(wrong)}: " in failed["error"]) == ("user", True), failed
        assert not any(is_call(job, "optimizer_step") for job in ranks.jobs)
        for setting in (1e31, 1e308, float("nan")):
            message = MESSAGES["Request"].FromString(training(good.run, good.turn()))
            message.loss_fn, message.settings["beta"].number = "dro", setting
            failed = result(client, post(client, "forward_backward", message.SerializeToString())).json()
            assert "loss_fn_config.beta: dro supports the settings beta, numbers of at most 1e+30" in failed["error"]
        good.step()


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"temperature": 1e-320}, "temperature: must be 0 (greedy) or at least 0.01"),
        ({"temperature": 101}, "temperature"),
        ({"top_p": 1e-320}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"seed": 2**63}, "seed"),
        ({"stop": [str(number) for number in range(65)]}, "stop"),
        ({"stop": [VOCAB]}, "sampling_params.stop has token 50"),
    ],
)
def test_samples_with_numbers_out_of_their_limits_are_refused(
    client: TestClient, wrong: dict[str, Any], text: str
) -> None:
    with client:
        body = {"session_id": GoodClient(client).session, "sampling_session_seq_id": 1, "base_model": "base"}
        sampler = post(client, "create_sampling_session", body).json()["sampling_session_id"]
        sample = {"sampling_session_id": sampler, "seq_id": 0, "prompt": {"chunks": [{"tokens": [1]}]}}
        refused = post(client, "asample", sample | {"sampling_params": wrong})
        assert (refused.status_code, text in refused.text) == (400, True), refused.text
        if "stop" not in wrong:  # OpenAI's API has texts there
            refused = client.post("/v1/completions", json={"model": "base", "prompt": [1], **wrong})
            assert (refused.status_code, text in refused.text) == (400, True), refused.text


def test_metadata_that_json_does_not_hold_are_refused_and_others_come_back(client: TestClient) -> None:
    with client:
        session = GoodClient(client).session
        body = {"session_id": session, "model_seq_id": 1, "base_model": "base", "lora_config": {"rank": 1}}
        for wrong in ({"a": float("nan")}, {"a": [{"b": float("inf")}]}, {"a": "x" * 70_000}):
            assert post(client, "create_model", body | {"user_metadata": wrong}).status_code in (400, 413), wrong
        made = post(client, "create_model", body | {"user_metadata": {"a": "é"}}).json()
        found = client.get(f"/api/v1/training_runs/{made['model_id']}")
        assert found.json()["user_metadata"] == {"a": "é"}


def test_ranks_that_are_gone_are_told_by_healthz(client: TestClient, ranks: Answering) -> None:
    with client:
        assert client.get("/api/v1/healthz").json() == {"status": "ok"}
        ranks.are_ready = False
        answer = client.get("/api/v1/healthz")
        assert (answer.status_code, "restarted" in answer.json()["detail"]) == (503, True)


def test_an_error_of_the_server_is_a_line_too(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: str) -> None:
        raise RuntimeError("odd\nindeed")

    with client:
        monkeypatch.setattr(service_of(client), "heartbeat", fail)
        answer = post(client, "session_heartbeat", {"session_id": "any"})
        assert (answer.status_code, answer.json()["detail"].count("\n")) == (500, 0)
        assert "odd" in answer.json()["detail"]


def test_weights_that_the_disk_does_not_let_go_of_are_not_said_to_be_deleted(
    client: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def read_only(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    with client:
        good, service = GoodClient(client), service_of(client)
        for name in ("one", "two"):
            saving = {"model_id": good.run, "seq_id": good.turn(), "path": name, "ttl_seconds": 100.0}
            path = result(client, post(client, "save_weights", saving)).json()["path"]
            service.saved[path].folder.mkdir(parents=True)
            (service.saved[path].folder / "run.json").write_text(json.dumps(about(service.saved[path])))
        one = (
            path.replace("two", "one")
            .replace("tinker://", "/api/v1/training_runs/")
            .replace("/weights", "/checkpoints/weights")
        )
        with monkeypatch.context() as patch:
            patch.setattr(Path, "touch", read_only)
            answer = client.delete(one)
            assert (answer.status_code, "cannot be deleted (Read-only file system" in answer.text) == (403, True)
            service.saved.set_expiry(path, -1)
            service.tidy()
            service.tidy()
            assert capsys.readouterr().err.count(f"warning: {path}: cannot be deleted") == 1
            assert len(service.saved) == 2
        with monkeypatch.context() as patch:
            patch.setattr("shutil.rmtree", read_only)
            assert client.delete(one).status_code == 200
            assert "cannot be removed (Read-only file system): remove it" in capsys.readouterr().err
        assert client.delete(one).status_code == 404
        assert SavedWeights(tmp_path, 1e9, LoraConfig(rank=8), "base")[path].path == path
        assert len(SavedWeights(tmp_path, 1e9, LoraConfig(rank=8), "base")) == 1


def test_turns_come_in_order_however_they_arrive_and_once(client: TestClient, ranks: Answering) -> None:
    with client:
        good = GoodClient(client)
        bodies = [training(good.run, seq, [seq]) for seq in range(1, 6)]
        for seq in (3, 5, 2, 2, 4):
            post(client, "forward_backward", bodies[seq - 1])
        assert not [job for job in ranks.jobs if isinstance(job, RunPass)]
        post(client, "forward_backward", bodies[0])
        post(client, "forward_backward", bodies[0])
        found = [job.data[0].tokens.tolist() for job in ranks.jobs if isinstance(job, RunPass)]
        assert found == [[1], [2], [3], [4], [5]]


def test_more_runs_than_allowed_wait_and_a_missing_turn_fails_those_behind_it(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    with client:
        good = GoodClient(client)
        for number in (1, 2):
            body = {"session_id": good.session, "model_seq_id": number, "base_model": "base"}
            assert post(client, "create_model", body | {"lora_config": {"rank": 1}}).status_code == 200
        body = {"session_id": good.session, "model_seq_id": 3, "base_model": "base", "lora_config": {"rank": 1}}
        refused = post(client, "create_model", body)
        assert (refused.status_code, "the limit is 3" in refused.text) == (429, True)
        waiting = post(client, "forward_backward", training(good.run, 2))
        service = service_of(client)
        monkeypatch.setattr("automodel_rl.serve.service.MISSING_REQUEST_SECONDS", -1.0)
        client.portal.call(in_loop(service.tidy))  # type: ignore[union-attr]
        assert "request 1 of this run never arrived" in result(client, waiting).json()["error"]


def service_of(client: TestClient) -> Service:
    route = next(route for route in client.app.routes if route.path == "/")  # type: ignore[attr-defined]
    return route.endpoint.__self__.service


def in_loop(work: Callable[[], None]) -> Callable[[], Any]:
    async def call() -> None:
        work()
        await asyncio.sleep(0)

    return call


def test_the_page_and_what_it_shows_need_the_key(client: TestClient) -> None:
    with client:
        assert client.get("/").status_code == client.get("/state").status_code == 401
        assert "<title>automodel_rl serve</title>" in client.get("/", params={"key": KEY}).text
        good = GoodClient(client)
        good.step()
        service = service_of(client)
        client.portal.call(in_loop(lambda: service.record_snapshot(5.0)))  # type: ignore[union-attr]
        state = client.get("/state", params={"key": KEY}).json()
    assert state["model"] == "base"
    assert (state["numbers"]["tokens trained"], state["numbers"]["queued jobs"]) == (3, 0)
    (run,) = state["runs"]
    assert (run["name"], run["rank"], run["steps"], run["state"]) == (good.run, 4, 1, "in progress")
    assert run["curve"] == {"step": [1], "loss": [pytest.approx(1 / 3)], "advantage": [None]}
    assert [len(values) for values in state["looks"].values()] == [1] * 5
    assert state["orders"] == state["samples"] == []
