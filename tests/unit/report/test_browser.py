"""The page in a real browser: charts draw, controls work, and a page that is watched follows its run."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import sync_playwright

from automodel_rl.observe.metrics import MetricsFile
from automodel_rl.report.page import write_report
from tests.unit.report.runs import conversation, episode, make_grpo_run, make_sft_run
from tests.unit.report.test_report import served

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs chromium: apt-get install chromium")

LINES = ".js-plotly-plot .scatterlayer path.js-line"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def tab(browser: Any) -> Iterator[Any]:
    """A page that fails the test if a script on it has failed."""
    page = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme="dark", offline=False)
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    yield page
    page.close()
    assert errors == []


def card(tab: Any, title: str) -> Any:
    return tab.locator(".card").filter(has=tab.locator(".title", has_text=title)).first


def num_points(tab: Any, title: str) -> int:
    return card(tab, title).locator(".chart").evaluate("plot => plot.data[0].y.length")


def test_charts_of_several_runs_draw_without_a_network(tab: Any, tmp_path: Path) -> None:
    folders = [
        make_sft_run(tmp_path / "one"),
        make_sft_run(tmp_path / "other", steps=30),
        make_grpo_run(tmp_path / "rl"),
    ]
    write_report(tmp_path / "page.html", folders)
    tab.context.set_offline(True)
    tab.goto((tmp_path / "page.html").as_uri())
    tab.wait_for_selector(LINES)
    loss = card(tab, "Loss")
    loss.scroll_into_view_if_needed()
    loss.locator(".scatterlayer path.js-line").nth(2).wait_for(state="attached")  # a flat line has no height
    assert loss.locator(".legendtext").all_text_contents() == ["one", "other", "rl"]
    assert loss.locator(".xtick").count() > 2
    assert loss.locator(".ytick").count() > 2
    card(tab, "mine/own metric").wait_for()  # a metric that no group names
    assert tab.locator("h1").all_inner_texts() == ["one", "other", "rl"]


def test_a_phone_sees_whole_charts(tab: Any, tmp_path: Path) -> None:
    write_report(tmp_path / "page.html", [make_sft_run(tmp_path / "run")])
    tab.set_viewport_size({"width": 390, "height": 800})
    tab.goto((tmp_path / "page.html").as_uri())
    tab.wait_for_selector(LINES)
    assert tab.evaluate("document.documentElement.scrollWidth") == 390
    assert tab.evaluate("Math.max(...[...document.querySelectorAll('.main-svg')].map(e => e.clientWidth))") < 390


def test_controls_change_what_is_drawn(tab: Any, tmp_path: Path) -> None:
    write_report(tmp_path / "page.html", [make_sft_run(tmp_path / "run")])
    tab.goto((tmp_path / "page.html").as_uri())
    tab.wait_for_selector(LINES)
    plot = card(tab, "Loss").locator(".chart")
    card(tab, "Loss").get_by_role("button", name="log").click()
    assert plot.evaluate("plot => plot.layout.yaxis.type") == "log"
    tab.locator("#smoothing").fill("0.9")
    assert plot.evaluate("plot => plot.data.length") == 2  # the values, faint, and their mean
    tab.locator("#axis").select_option("time")
    assert plot.evaluate("plot => plot.data[0].x.at(-1)") == pytest.approx(40 * 0.5 / 3600)
    narrow = plot.evaluate("plot => plot.clientWidth")
    card(tab, "Loss").get_by_role("button", name="wide").click()
    assert plot.evaluate("plot => plot.clientWidth") > 1.5 * narrow
    time = card(tab, "Time of a step by phase")
    time.scroll_into_view_if_needed()
    time.locator("path.js-fill").first.wait_for()
    assert time.locator(".chart").evaluate("plot => plot.data.map(one => one.stackgroup)") == ["one", "one"]
    tab.locator("#search").fill("grad")
    assert tab.locator(".card:visible .title").all_inner_texts() == ["Gradient norm"]


def test_rollouts_are_side_by_side_and_filtered(tab: Any, tmp_path: Path) -> None:
    write_report(tmp_path / "page.html", [make_grpo_run(tmp_path / "run")])
    tab.goto((tmp_path / "page.html").as_uri())
    section = tab.locator("#rollouts")
    assert section.locator(".prompt").all_inner_texts() == ["question 1 of step 12", "question 0 of step 12"]
    first = section.locator(".group").first
    boxes = [one.bounding_box() for one in first.locator(".completion").all()]
    assert boxes[0]["y"] == boxes[1]["y"]
    rewarded = first.locator(".completion").nth(1)
    assert rewarded.locator(".chip").all_inner_texts() == [
        *("reward 1", "advantage 0.7", "math 1", "short 0.5", "tokens 4"),
    ]
    assert "the reward failed" in rewarded.inner_text()
    colours = rewarded.locator(".token").evaluate_all("all => all.map(one => one.style.background)")
    assert "37, 99, 235" in colours[0]  # the model finds it likelier than the generator
    assert "232, 113, 10" in colours[1]
    long = first.locator(".completion").first.locator(".fold")
    before = long.bounding_box()["height"]
    long.click()
    assert long.bounding_box()["height"] > 2 * before
    section.locator("select").nth(1).select_option("rewards differ")
    assert section.locator(".prompt").all_inner_texts() == ["question 1 of step 12"]
    section.get_by_label("reward from").fill("0.5")
    assert section.locator(".completion").count() == 1
    section.get_by_label("step", exact=True).fill("0")
    section.get_by_text("question 1 of step 1", exact=True).wait_for()
    assert "<b>2+2</b>" in tab.locator("#samples").inner_text()
    assert "d.jsonl:1, 9 tokens" in tab.locator("#examples").inner_text()
    assert tab.locator("#examples .trained").all_inner_texts() == ["four"]
    assert tab.locator("#examples .given").all_inner_texts() == ["What is <b>this</b>?"]


def test_a_timeline_shows_who_works_when(tab: Any, tmp_path: Path) -> None:
    write_report(tmp_path / "page.html", [make_grpo_run(tmp_path / "run")])
    tab.goto((tmp_path / "page.html").as_uri())
    plot = tab.locator("#timeline .timeline.js-plotly-plot")
    plot.wait_for()
    assert tab.locator("#timeline .bar span").first.inner_text() == "step 12"
    labels = plot.evaluate("plot => plot._fullLayout.yaxis.ticktext")
    assert labels == ["trainer 87%", "generator of rank 0 13%", "rewards 1%"]
    names = plot.evaluate("plot => plot.data.map(trace => trace.name)")
    assert names[:3] == ["rollout 2 s", "pack 0.1 s", "train 12.9 s"]
    written = plot.evaluate("plot => plot.data[3].text")
    assert written == ["0", "1 at -0.5 s", "2 at -0.5 s", "3 at 0.2 s", "2 at 1 s", "1 at 1.5 s", "0 at 2 s"]
    tab.locator("#timeline input[type=range]").fill("0")
    tab.wait_for_function("document.querySelector('#timeline .timeline').data[2].name === 'train 1.9 s'")


def test_agents_show_their_turns_as_a_tree(tab: Any, tmp_path: Path) -> None:
    run = make_grpo_run(tmp_path / "run")
    (run / "rollouts" / "step_12.jsonl").write_text(json.dumps(episode()) + "\n")
    write_report(tmp_path / "page.html", [run])
    tab.goto((tmp_path / "page.html").as_uri())
    card = tab.locator("#rollouts .completion").first
    assert card.locator(".chips").first.locator(".chip").all_inner_texts()[-3:] == ["turns 4", "calls 1", "rows 3"]
    assert card.locator(".tree > .branch").count() == 2  # two histories
    first = card.locator(".tree > .branch").first
    assert first.locator(":scope > .branch").count() == 2  # one answer that was gone on with in two ways
    assert "→ look_up" in first.locator(":scope > .node").inner_text()
    assert first.locator(".untrained").count() == 1
    assert card.locator(".fork").all_inner_texts() == [
        "one history continued in two ways",
        "new history: tools changed",
    ]


def test_runs_that_are_compared_show_what_differs_in_their_configs(tab: Any, tmp_path: Path) -> None:
    runs = [make_sft_run(tmp_path / "one"), make_grpo_run(tmp_path / "two")]
    write_report(tmp_path / "page.html", runs)
    tab.goto((tmp_path / "page.html").as_uri())
    rows = [row.split("\t") for row in tab.locator(".differs tr").all_inner_texts()]
    assert rows[0][1:] == ["one", "two"]
    assert ["algorithm", '"sft"', '"grpo"'] in rows
    assert not {"output", "model.path"} & {row[0] for row in rows}


def test_conversations_show_their_turns_and_what_is_not_trained(tab: Any, tmp_path: Path) -> None:
    run = make_grpo_run(tmp_path / "run")
    (run / "rollouts" / "step_12.jsonl").write_text(json.dumps(conversation()) + "\n")
    write_report(tmp_path / "page.html", [run])
    tab.goto((tmp_path / "page.html").as_uri())
    card = tab.locator("#rollouts .completion").first
    assert card.locator(".chip").all_inner_texts()[-3:] == ["turns 2", "calls 1", "ended by tokens"]
    assert [turn.split("\n")[:2] for turn in card.locator(".turn").all_inner_texts()] == [
        ["assistant", '→ look_up {"word":"<b>"}'],
        ["tool look_up", "found <b>"],
        ["assistant", "It is there."],
    ]
    assert card.inner_text().count("It is there.") == 1
    assert card.locator(".token").count() == 0
    card.get_by_role("button", name="tokens").click()
    assert card.locator(".turn").count() == 0
    assert [token.inner_text() for token in card.locator(".token.given").all()] == ["found"]
    card.get_by_role("button", name="tokens").click()
    assert card.locator(".turn").count() == 3


HOSTILE = [
    *(
        "__proto__",
        "constructor",
        "toString",
        "hasOwnProperty",
        "length",
        "",
        " ",
        "</script><script>alert(1)</script>",
    ),
    *(
        "<b>bold</b>",
        "a'b\"c`d",
        "${1}",
        "%{y}",
        "$x$",
        "&lt;",
        "naïve 模型 🙂 \u202e\u2028\ud800",
        "long" * 200,
        "Loss",
        "0",
    ),
]


def test_metrics_of_any_name_are_shown(tab: Any, tmp_path: Path) -> None:
    folder = make_sft_run(tmp_path / "run", steps=3)
    metrics = MetricsFile(folder / "metrics.jsonl", 3)
    for step in (4, 5):
        metrics.write({"step": step, **dict.fromkeys(HOSTILE, step)})
        metrics.write({"step": step + 2, **{f"rollout/reward_{name}": step for name in HOSTILE}})
    for number, folders in enumerate([[folder], [folder, make_sft_run(tmp_path / "other", steps=3)]]):
        write_report(tmp_path / f"{number}.html", folders)
        tab.goto((tmp_path / f"{number}.html").as_uri())
        tab.wait_for_selector(LINES)
        titles = tab.locator(".card .title").all_text_contents()
        shown = [name.replace("\ud800", "\ufffd") or "(a metric without a name)" for name in HOSTILE]
        assert {one.replace("\ud800", "\ufffd") for one in titles} >= {*shown}
        together = card(tab, "Reward by component")
        together.locator(LINES).nth(len(HOSTILE) - 1).wait_for(state="attached")
        legend = together.locator(".legendtext").all_text_contents()
        prefix = "run: " if number else ""
        for name in ("__proto__", "constructor", "<b>bold</b>", "%{y}", "&lt;"):
            assert f"{prefix}rollout/reward_{name}" in legend
        assert max(map(len, legend)) < 60
        assert tab.evaluate("document.documentElement.scrollWidth") == 1280


@pytest.mark.parametrize("width", [390, 1280])
def test_long_names_stay_in_their_cards(tab: Any, tmp_path: Path, width: int) -> None:
    folder = tmp_path / ("folder_of_a_long_name_" * 10) / ("another_one_" * 20)
    folder.mkdir(parents=True)
    run = make_grpo_run(folder / ("my_run_" * 20))
    (run / "versions.json").write_text(json.dumps({"commit": "0123456789" * 20, "transformers": "5"}))
    tab.set_viewport_size({"width": width, "height": 800})
    for runs in ([run], [run, make_sft_run(tmp_path / "other")]):
        write_report(tmp_path / "page.html", runs)
        tab.goto((tmp_path / "page.html").as_uri())
        tab.wait_for_selector(LINES)
        assert tab.evaluate("document.documentElement.scrollWidth") == width
        wide = (
            "[...document.querySelectorAll('.card')].filter(e => e.scrollWidth > e.clientWidth).map(e => e.innerText)"
        )
        assert tab.evaluate(wide) == []


def test_charts_of_nothing_but_zeros_are_a_line_until_they_are_asked_for(tab: Any, tmp_path: Path) -> None:
    run = make_sft_run(tmp_path / "run", steps=3)
    metrics = MetricsFile(run / "metrics.jsonl", 3)
    for step in (4, 5):
        metrics.write(
            {"step": step, "train/skipped": 0, "rollout/failed": 0, "rollout/truncated": step - 4, "train/lr": 1e-5}
        )
    write_report(tmp_path / "page.html", [run])
    tab.goto((tmp_path / "page.html").as_uri())
    tab.wait_for_selector(LINES)
    titles = tab.locator(".card:visible .title")
    assert "Truncated, share" in titles.all_inner_texts()
    assert not {"Failed", "Skipped steps"} & {*titles.all_inner_texts()}
    assert tab.locator(".zeros:visible").all_inner_texts() == [
        "constant:\nFailed: 0",
        "constant:\nSkipped steps: 0",
    ]
    tab.get_by_role("button", name="Failed").click()
    assert "Failed" in titles.all_inner_texts()
    assert tab.locator(".zeros:visible").count() == 1
    rate = card(tab, "Learning rate")
    rate.scroll_into_view_if_needed()
    rate.locator(LINES).wait_for(state="attached")
    lowest, highest = rate.locator(".chart").evaluate("plot => plot._fullLayout.yaxis.range")
    assert lowest == 0  # and not 1 below a rate that is almost 0
    assert highest < 1e-4


def test_the_last_and_the_best_values_are_at_the_top(tab: Any, tmp_path: Path) -> None:
    run = make_grpo_run(tmp_path / "run")
    metrics = MetricsFile(run / "metrics.jsonl", 12)
    for step, (reward, passed) in enumerate([(0.5, 0.75), (0.25, 0.5)], 13):
        metrics.write({"step": step, "val/reward_mean": reward, "val/pass@4": passed, "train/loss": 0.2})
    write_report(tmp_path / "page.html", [run])
    tab.goto((tmp_path / "page.html").as_uri())
    assert [one.split("\n") for one in tab.locator("#summary .figure").all_inner_texts()] == [
        ["validation reward", "0.25", "best 0.5 at step 13"],
        ["reward", "1", "best 1 at step 12"],
        ["val/pass@4", "0.5", "best 0.75 at step 13"],
        ["loss", "0.2"],  # of a policy, which says not how good it is
    ]
    write_report(tmp_path / "page.html", [run, make_sft_run(tmp_path / "other")])
    tab.reload()
    loss = tab.locator("#summary .figure").nth(3)
    assert loss.inner_text().split("\n") == ["loss", "0.2", "0.075", "best 0.075 at step 40"]
    assert loss.locator(".swatch").evaluate_all("all => all.map(one => one.title)") == ["run", "other"]


def test_a_failure_is_at_the_top_and_the_config_below(tab: Any, tmp_path: Path) -> None:
    run = make_sft_run(tmp_path / "run")
    (run / "flight").mkdir()
    (run / "flight" / "failure.txt").write_text("the job failed\nerror: rank 1: out of memory")
    write_report(tmp_path / "page.html", [run])
    tab.goto((tmp_path / "page.html").as_uri())
    assert "error: rank 1: out of memory" in tab.locator(".failure").inner_text()
    assert tab.locator(".badge").inner_text() == "failed"
    assert "sequences: 8" in tab.locator("#facts").inner_text()
    assert "transformers" in tab.locator("#facts").inner_text()


def test_a_watched_page_follows_its_run(tab: Any, tmp_path: Path) -> None:
    run = make_grpo_run(tmp_path / "run")
    with served(run) as server:
        tab.goto(server.url)
        tab.wait_for_selector(LINES)
        assert num_points(tab, "Reward") == 12
        MetricsFile(run / "metrics.jsonl", 12).write({"step": 13, "rollout/reward_mean": 0.25, "train/loss": 0.1})
        tab.get_by_text("step 13 of 40").wait_for()
        tab.wait_for_function(
            "[...document.querySelectorAll('.chart')].some(plot => plot.data && plot.data[0].y.at(-1) === 0.25)"
        )
        tab.locator("#rollouts").get_by_label("step", exact=True).fill("4")
        tab.get_by_text("question 1 of step 5", exact=True).wait_for()
        tab.goto("about:blank")  # asks no more while the server ends
