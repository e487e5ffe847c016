"""Teachers behind servers: the same numbers as on the run's ranks, and what servers say when they cannot tell."""

import contextlib
import http.server
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from automodel_rl.batch import Batch, TokenSequence
from automodel_rl.config.further_models import TeacherConfig
from automodel_rl.errors import InputError
from automodel_rl.trainers import remote_teachers
from automodel_rl.trainers.remote_teachers import open_remote_teacher
from tests.distributed.trainers.runs import Settings, assert_refused, metrics_of, settings_of, train
from tests.rank_pool import RankPool
from tests.services import Service, heartbeats

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::ResourceWarning"
)

NUMBERS = ("train/divergence", "train/loss", "train/grad_norm")


@pytest.fixture(name="teacher", scope="module")
def make_teacher(ranks: RankPool, workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model after some fine-tuning."""
    output = tmp_path_factory.mktemp("taught") / "run"
    settings = settings_of("sft", workspace, output, length={"steps": 10})
    settings["optimizer"] = {"lr": 3e-3, "warmup_steps": 2}
    ranks(1).run(train, settings)
    return output / "final"


@pytest.fixture(name="service", scope="module")
def make_service(teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with Service(tmp_path_factory.mktemp("service"), teacher, microbatch_tokens=256, parallel={}) as service:
        yield service


class Vllm(http.server.BaseHTTPRequestHandler):
    """Answers as vLLM 0.32 does, of which real answers were looked at."""

    model: Any
    most = 20
    failures = 0

    def log_message(self, *_: Any) -> None: ...

    def answer(self, status: int, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        self.answer(200, {"data": [{"id": "large"}]})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if type(self).failures:
            type(self).failures -= 1
            self.answer(503, {"error": {"message": "busy"}})
            return
        k = asked["prompt_logprobs"]
        if k > self.most:
            self.answer(400, {"error": {"message": f"Requested prompt logprobs of {k}, which is greater than max"}})
            return
        ids = asked["prompt"]
        logprobs = self.model(torch.tensor([ids])).logits[0].detach().log_softmax(-1)
        scored: list[Any] = [None]
        for token, values in zip(ids[1:], logprobs, strict=False):
            order = values.argsort(descending=True).tolist()
            shown = {token, *order[:k]}  # the row's own comes first, wherever it ranks
            one = {
                str(i): {"logprob": values[i].item(), "rank": order.index(i) + 1} for i in [token, *order] if i in shown
            }
            scored.append(one)
        self.answer(200, {"choices": [{"prompt_logprobs": scored}]})


@pytest.fixture(name="vllm", scope="module")
def make_vllm(teacher: Path) -> Iterator[str]:
    Vllm.model = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float64)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Vllm)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with contextlib.closing(server.socket):
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def train_with_key(settings: Settings, key: str) -> None:
    os.environ["TINKER_API_KEY"] = key
    train(settings)


def compared(output: Path) -> list[float]:
    return [row[name] for row in metrics_of(output) for name in NUMBERS if row["step"]]


@pytest.mark.parametrize(
    "loss", [{"top_k": 7}, {"divergence": "reverse_kl", "top_k": 5, "tokens_of": "student"}], ids=["theirs", "own"]
)
def test_a_teacher_behind_tinkers_api_teaches_what_it_does_on_the_ranks(
    ranks: RankPool, workspace: Path, tmp_path: Path, teacher: Path, service: Service, loss: Settings
) -> None:
    for place in ("here", "there"):
        settings = settings_of("distill", workspace, tmp_path / place, loss=loss, length={"steps": 2})
        settings["teachers"] = {"large": {"path": str(teacher)}}
        if place == "there":
            settings["teachers"]["large"] |= {"url": service.url, "api": "tinker"}
        ranks(2).run(train_with_key, settings | {"parallel": {"dp_shard": 2}}, service.key)
    assert ranks(2).run(heartbeats, service.url) == [0, 0]
    assert compared(tmp_path / "there") == pytest.approx(compared(tmp_path / "here"), rel=2e-4)


def test_it_judges_what_a_policy_writes(
    ranks: RankPool, workspace: Path, tmp_path: Path, teacher: Path, service: Service
) -> None:
    for place in ("here", "there"):
        settings = settings_of("grpo", workspace, tmp_path / place, rewards=[], loss={}, length={"steps": 1})
        settings["rollout"] |= {"group_size": 1, "prompts": 8}
        settings["teachers"] = {"large": {"path": str(teacher)}}
        if place == "there":
            settings["teachers"]["large"] |= {"url": service.url, "api": "tinker"}
        ranks(1).run(train_with_key, settings, service.key)
    found = [metrics_of(tmp_path / place)[-1]["train/teacher_kl"] for place in ("here", "there")]
    assert found[1] == pytest.approx(found[0], rel=1e-5)


def test_a_teacher_behind_vllm_teaches_what_it_does_on_the_ranks(
    ranks: RankPool, workspace: Path, tmp_path: Path, teacher: Path, vllm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Vllm, "failures", 2)
    for place in ("here", "there"):
        settings = settings_of("distill", workspace, tmp_path / place, loss={"top_k": 7}, length={"steps": 2})
        settings["teachers"] = {"large": {"path": str(teacher)}}
        if place == "there":
            settings["teachers"]["large"] |= {"url": vllm, "name": "large"}
        ranks(1).run(train, settings)
    assert compared(tmp_path / "there") == pytest.approx(compared(tmp_path / "here"), rel=2e-4)


def test_what_servers_cannot_tell_is_one_line(
    teacher: Path, vllm: str, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_teachers, "TRIES", 1)
    monkeypatch.setenv("TINKER_API_KEY", service.key)
    tokenizer = AutoTokenizer.from_pretrained(teacher)

    def opened(**given: Any) -> Any:
        return open_remote_teacher("teachers.large", TeacherConfig(path=str(teacher), **given), tokenizer)

    batch = Batch([TokenSequence(torch.tensor([1, 2, 3]), torch.ones(3, dtype=torch.bool))])
    with pytest.raises(InputError, match="Requested prompt logprobs of 21"):
        opened(url=vllm, name="large").top_logprobs(batch, 21)
    with pytest.raises(InputError, match="serves large: use one of them"):
        opened(url=vllm)
    with pytest.raises(InputError, match="refused"):
        opened(url="http://127.0.0.1:9")
    with pytest.raises(InputError, match="this server has"):
        opened(url=service.url, api="tinker", name="another")


TEACHER = {"path": "MODEL", "url": "http://127.0.0.1:9"}
BAD: list[tuple[Settings, str]] = [
    ({"teachers": {"large": TEACHER | {"between": "host"}}}, "between with url=http://127.0.0.1:9: the server decides"),
    ({"teachers": {"large": {"path": "MODEL", "api": "tinker"}}}, "api is for a teacher behind a server"),
    ({"teachers": {"large": TEACHER}, "loss": {"tokens_of": "student"}}, "use tokens_of=teacher, or api=tinker"),
    (
        {"teachers": {"large": TEACHER}, "loss": {"temperature": 2.0}},
        "servers return log-probabilities at temperature 1",
    ),
    ({"teachers": {"large": TEACHER | {"path": "nowhere"}}}, "cannot open a tokenizer and config"),
]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("changes", "message"), BAD, ids=[message[:40] for _, message in BAD])
def test_bad_input_is_one_line_and_writes_nothing(
    workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: Settings, message: str
) -> None:
    settings = settings_of("distill", workspace, tmp_path / "run")
    settings |= json.loads(json.dumps(changes).replace("MODEL", str(workspace / "model")))
    assert_refused("distill", settings, message, tmp_path, capsys)
