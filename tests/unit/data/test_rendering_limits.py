"""A template that loops or grows ends with one line, and leaves the process as it was."""

import resource
import signal
import time

import pytest

from automodel_rl.config import RunConfig
from automodel_rl.data import rendering_limits as limits
from automodel_rl.data.chat import check_chats
from automodel_rl.data.messages import Chat
from automodel_rl.errors import InputError
from automodel_rl.hf.opened_model import OpenedModel
from tests.unit.data.workspaces import sft_config

CHAT = Chat([{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}])
LOOPS = "{% for x in range(10**5) %}{% for y in range(10**5) %}{% endfor %}{% endfor %}"


def checked(config: RunConfig, chats: list[tuple[Chat, str]]) -> list[str]:
    return check_chats(config, OpenedModel.open(config.model), chats)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            LOOPS,
            "did not write it within 1 seconds of processor time: set data.chat_template to one that terminates",
        ),
        ("{% if messages|length > 1 %}" + LOOPS + "{% endif %}", "the chat template did not write it within 1 seconds"),
        ("{{ 'a' * 10**11 }}", r"d.jsonl:1: the chat template refuses these messages \(MemoryError\)"),
        (
            "{% for m in messages %}{{ m.content * 10**3 }}{% endfor %}",
            "the chat template writes [0-9,]+ characters, more than",
        ),
    ],
)
def test_a_template_without_end_is_one_line(
    tmp_path, monkeypatch: pytest.MonkeyPatch, template: str, message: str
) -> None:
    monkeypatch.setattr(limits, "MAX_SECONDS", 1)
    monkeypatch.setattr(limits, "MAX_CHARACTERS", 1000)
    before = signal.getsignal(signal.SIGPROF), resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(InputError, match=message):
        checked(sft_config(tmp_path, template), [(CHAT, "d.jsonl:1")])
    assert (signal.getsignal(signal.SIGPROF), resource.getrlimit(resource.RLIMIT_AS)) == before
    assert signal.getitimer(signal.ITIMER_PROF) == (0, 0)


def test_time_in_which_the_machine_does_something_else_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_SECONDS", 0.2)
    with limits.rendering_limits("d.jsonl:1"):
        time.sleep(0.4)


def test_what_is_written_in_time_is_left_alone(tmp_path) -> None:
    assert checked(sft_config(tmp_path, None), [(CHAT, "d.jsonl:1")]) == []
    plain = "{% for m in messages %}{{ m.role }}:{% generation %}{{ m.content }}{% endgeneration %}\n{% endfor %}"
    (warning,) = checked(sft_config(tmp_path, plain), [(CHAT, "d.jsonl:1")] * 2)
    assert warning.startswith(
        "d.jsonl:1: no trained turn ends with a special token, so the model does not learn to stop"
    )
