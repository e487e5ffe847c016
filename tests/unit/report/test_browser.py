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
from tests.unit.report.runs import conversation, make_grpo_run, make_sft_run
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
    assert [token.inner_text() for token in card.locator(".token.given").all()] == ["found"]


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
