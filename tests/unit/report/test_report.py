"""What the page holds of a run, and the server that shows runs as they go on."""

import contextlib
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from automodel_rl.cli import main
from automodel_rl.errors import InputError
from automodel_rl.observe.metrics import MetricsFile
from automodel_rl.report.page import page, plotly, write_report
from automodel_rl.report.rollouts import groups_of, shortened, spread
from automodel_rl.report.run_data import MAX_POINTS, read_run, thinned
from automodel_rl.report.server import RunServer
from tests.unit.report.runs import make_grpo_run, make_sft_run, set_finished


def test_a_page_needs_no_other_files_and_runs_no_text_of_the_data(tmp_path: Path) -> None:
    write_report(tmp_path / "page.html", [make_grpo_run(tmp_path / "run")])
    text = (tmp_path / "page.html").read_text().replace(plotly(), "")
    assert "src=" not in text
    assert "http" not in text.replace("http://www.w3.org", "")
    assert "<script>alert" not in text
    assert text.count("</script>") == 3


def test_metrics_without_a_number_leave_gaps(tmp_path: Path) -> None:
    steps, losses = read_run(make_sft_run(tmp_path / "run"))["series"]["train/loss"]
    assert 5 not in steps
    assert len(steps) == len(losses) == 39
    assert losses[-1] == 0.075


def test_long_curves_keep_their_ends_and_peaks() -> None:
    points = [(step, 0.0) for step in range(100_000)]
    points[51_234] = (51_234, 9.0)
    points[7] = (7, -9.0)
    kept = thinned(points, MAX_POINTS)
    assert len(kept) <= MAX_POINTS + 1
    assert {points[0], points[-1], points[51_234], points[7]} <= {*kept}
    assert [step for step, _ in kept] == sorted({step for step, _ in kept})


def test_a_status_is_that_of_the_run(tmp_path: Path) -> None:
    run = make_sft_run(tmp_path / "run")
    assert read_run(run)["status"] == "stopped"  # killed: it says nothing of its end
    (run / "flight").mkdir()
    for text, status in (("stopped by SIGTERM after step 3", "stopped"), ("error: rank 0: out of memory", "failed")):
        (run / "flight" / "failure.txt").write_text(text)
        found = read_run(run)
        assert (found["status"], found["failure"]) == (status, text)
    set_finished(run, 40)
    assert read_run(run)["status"] == "finished"
    assert read_run(run, status="running")["status"] == "running"
    for step, status in ((39, "failed"), (41, "finished")):  # after 39 the run went on and failed
        (run / ".finished_after").write_text(json.dumps(step))
        assert read_run(run)["status"] == status


def test_samples_are_those_of_the_newest_step(tmp_path: Path) -> None:
    run = make_sft_run(tmp_path / "run")
    for step in (9, 10, 2):
        (run / "samples").mkdir(exist_ok=True)
        (run / "samples" / f"step_{step}.jsonl").write_text(json.dumps({"prompt": f"of {step}"}) + "\n")
    assert read_run(run)["samples"] == [{"step": 10, "prompt": "of 10"}]


def test_config_versions_and_length_are_there(tmp_path: Path) -> None:
    found = read_run(make_sft_run(tmp_path / "run"))
    assert "sequences: 8" in found["config"]
    assert {"torch", "transformers", "python", "device", "started"} <= found["versions"].keys()
    assert (found["step"], found["total_steps"]) == (40, 40)


def test_rollouts_of_some_steps_are_in_a_page_and_all_are_served(tmp_path: Path) -> None:
    run = make_grpo_run(tmp_path / "run")
    found = read_run(run)
    assert found["steps_with_rollouts"] == [1, 3, 4, 6, 7, 9, 10, 12]
    assert read_run(run, rollouts=False)["steps_with_rollouts"] == [*range(1, 13)]
    first, second = found["rollouts"][12]
    assert first["prompt"] == "question 1 of step 12"  # has tokens, so it comes first
    assert second["prompt"] == "question 0 of step 12"
    assert [c["reward"] for c in first["completions"]] == [0.0, 1.0]
    assert first["completions"][1]["pieces"][0] == ["<i>", -0.5, -0.1]
    assert spread([1, 2, 3], 8) == [1, 2, 3]
    assert found["steps_with_timelines"] == found["steps_with_rollouts"]
    assert found["timelines"][12][0]["spans"][2] == [2.1, 15.0]


def test_long_texts_lose_their_middle(tmp_path: Path) -> None:
    text = shortened("a" * 50_000 + "b" * 50_000)
    assert len(text) < 7000
    assert text.startswith("aaa")
    assert text.endswith("bbb")
    assert "[... 94,000 characters ...]" in text
    record = {"prompt": "p", "completion": "c" * 10_000, "pieces": [["c", 0.0, 0.0]], "reward": 1.0}
    (tmp_path / "step_1.jsonl").write_text(json.dumps(record) + "\n")
    ((group,)) = groups_of(tmp_path / "step_1.jsonl")
    assert "pieces" not in group["completions"][0]


@contextlib.contextmanager
def served(*folders: Path) -> Iterator[RunServer]:
    with RunServer(folders, 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def fetch(url: str, host: str | None = None) -> str:
    request = urllib.request.Request(url, headers={} if host is None else {"Host": host})
    with urllib.request.urlopen(request) as answer:
        return answer.read().decode()


def test_a_server_shows_news_alone_and_only_to_this_machine(tmp_path: Path) -> None:
    run = make_grpo_run(tmp_path / "run")
    # The other run's folder is not even there.
    with served(run, tmp_path / "later") as server:
        assert "<!doctype html>" in fetch(server.url)
        data = json.loads(fetch(f"{server.url}data"))
        assert [one["status"] for one in data["runs"]] == ["stopped", "waiting"]
        assert fetch(f"{server.url}data?state={data['state']}") == "null"
        MetricsFile(run / "metrics.jsonl", 12).write({"step": 13, "rollout/reward_mean": 0.5})
        again = json.loads(fetch(f"{server.url}data?state={data['state']}"))
        assert again["runs"][0]["step"] == 13
        assert len(json.loads(fetch(f"{server.url}rollouts?run=0&step=2"))) == 2
        lanes = json.loads(fetch(f"{server.url}timeline?run=0&step=2"))
        assert [lane["lane"] for lane in lanes] == ["trainer", "generator of rank 0", "rewards"]
        for wrong, host in (("rollouts?run=7&step=1", None), ("../config.yaml", None), ("data", "evil.example:80")):
            with pytest.raises(urllib.error.HTTPError) as error:
                fetch(f"{server.url}{wrong}", host)
            error.value.close()


def test_commands_say_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_sft_run(tmp_path / "run")
    for arguments, message in (
        (["report"], "report takes the folders of runs"),
        (["watch"], "watch takes the folders of runs"),
        (["report", str(tmp_path)], "does not hold a run: pass the output folder of one"),
        (["report", str(run), "--out", str(tmp_path)], "cannot be written"),
        (["watch", str(run), "--port", "99999999"], "--port 99999999: cannot be used"),
    ):
        assert main(arguments) == 2
        assert message in capsys.readouterr().err
    assert main(["report", str(run), str(make_grpo_run(tmp_path / "other")), "--out", str(tmp_path / "both.html")]) == 0
    assert main(["report", str(run)]) == 0
    assert (run / "report.html").is_file()
    with pytest.raises(InputError):
        write_report(tmp_path / "page.html", [tmp_path])
    assert not (tmp_path / "page.html").exists()
    assert "null" in page(None)
