"""The HTML page as people see it: in a real browser, wide and narrow, light and dark, without a network."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright
from typer.testing import CliRunner

import loadgen.cli.main as cli
import loadgen.page.page as page_module
from loadgen.page.page import MAX_CHARTED_RUNS, write_page
from loadgen.report.run import read_run
from tests.loadgen.reports import write_run
from tools.debian_tools import provide

pytestmark = pytest.mark.needs_tool("chromium")
DESKTOP, PHONE = (1360, 900), (390, 844)
MAX_BYTES = 2_000_000
SIMULATED = [
    "--moe-time",
    "mi355x-v4-pro",
    "--sweep",
    "4,8",
    "--duration",
    "40",
    "--warmup-requests",
    "1",
    "--plain",
]
SIMULATED += ["--unsafe-override"]  # the scenario itself takes one concurrency
CHARTS = {
    "Between tokens",
    "Whole requests",
    "Path mix",
    "Rows per rank",
    "Rows over time",
    "Stages",
    "Output",
}


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a served run."""
    run = write_run(tmp_path_factory.mktemp("one"))
    return write_page([read_run(run)], run.with_name("report.html"))


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page that a sweep leaves."""
    folder = tmp_path_factory.mktemp("sweep")
    result = CliRunner().invoke(cli.app, [*SIMULATED, "--out", str(folder)])
    assert result.exit_code == 0, result.output
    assert (folder / "c4" / "report.html").exists()
    return folder / "report.html"


@pytest.fixture(scope="module")
def browser(one: Path, sweep: Path) -> Iterator[Browser]:
    """Started after the runs: playwright's loop occupies this thread from then on."""
    shell = provide("chromium")["chromium-headless-shell"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shell, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(params=[(DESKTOP, "light"), (DESKTOP, "dark"), (PHONE, "light"), (PHONE, "dark")], ids=str)
def page(request: pytest.FixtureRequest, browser: Browser) -> Iterator[Page]:
    """An empty tab; whatever goes wrong in it fails the test."""
    (width, height), scheme = request.param
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    page = context.new_page()
    wrong: list[str] = []
    page.on("console", lambda message: wrong.append(message.text))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda asked: wrong.append(asked.url) if not asked.url.startswith("file:") else None)
    yield page
    context.close()
    assert wrong == []


def luminance(color: str) -> float:
    """Relative luminance of a CSS rgb() colour, as WCAG defines it."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", color)[:3]]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(page: Page, selector: str) -> float:
    """WCAG contrast of the first such element's letters against the card that it is on."""
    colors = page.evaluate(
        """selector => {
            const element = document.querySelector(selector), style = getComputedStyle(element);
            const card = getComputedStyle(element.closest('.card, .tile, body'));
            return [element.closest('svg') ? style.fill : style.color, card.backgroundColor];
        }""",
        selector,
    )
    high, low = sorted(map(luminance, colors), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_a_run_shows_everything_and_fits(one: Path, page: Page) -> None:
    page.goto(one.as_uri())
    assert set(page.locator(".card h3").all_text_contents()) == CHARTS
    assert page.locator("h1").text_content() == "agentx at concurrency 6"
    assert "no valid submission" in page.locator("header").text_content()
    # Nothing sticks out: the page scrolls down only, and every drawing has room for its letters.
    assert page.evaluate("document.documentElement.scrollWidth") <= page.viewport_size["width"]
    for svg in page.locator(".card svg").all():
        box, card = svg.bounding_box(), svg.locator("xpath=..").bounding_box()
        assert box["width"] > 250
        assert box["height"] > 150
        assert card["x"] <= box["x"]
        assert box["x"] + box["width"] <= card["x"] + card["width"]
    letters = page.evaluate(
        "[...document.querySelectorAll('.card svg text')].map(text => text.getBoundingClientRect().height)"
    )
    assert min(letters) >= 7


def test_letters_stand_out_from_their_ground(one: Path, page: Page) -> None:
    page.goto(one.as_uri())
    for selector in ("h1", ".tile b", ".tile span", ".card p", ".card svg text", ".bad"):
        assert contrast(page, selector) >= 4.5, selector


def test_labels_of_an_axis_do_not_touch(one: Path, page: Page) -> None:
    page.goto(one.as_uri())
    rows = page.evaluate(
        """() => [...document.querySelectorAll('.card svg')].map(svg => [...svg.querySelectorAll('text')]
            .map(text => text.getBoundingClientRect()).map(box => [Math.round(box.top), box.left, box.right]))"""
    )
    for texts in rows:
        for (top, _, right), (next_top, left, _) in pairwise(sorted(texts)):
            assert top != next_top or left >= right - 0.5


def test_a_sweep_draws_throughput_against_interactivity(sweep: Path, page: Page) -> None:
    page.goto(sweep.as_uri())
    chart = page.locator(".overview svg")
    assert chart.get_attribute("aria-label").startswith("Total throughput per GPU against P90 interactivity")
    assert {"4", "8"} <= set(chart.locator("text").all_text_contents())
    assert page.locator(".overview table tr").count() == 3
    assert page.evaluate("document.documentElement.scrollWidth") <= page.viewport_size["width"]
    second = page.locator("main > details").nth(1)
    assert not second.locator("svg").first.is_visible()
    second.locator("summary").first.click()
    assert second.locator("svg").first.is_visible()


def test_colors_follow_the_scheme(one: Path, browser: Browser) -> None:
    grounds = {}
    for scheme in ("light", "dark"):
        page = browser.new_page(color_scheme=scheme)
        page.goto(one.as_uri())
        grounds[scheme] = page.evaluate("getComputedStyle(document.body).backgroundColor")
        page.close()
    assert luminance(grounds["light"]) > 0.8
    assert luminance(grounds["dark"]) < 0.05


def test_pages_are_small_and_name_nothing_outside(one: Path, sweep: Path) -> None:
    for path in (one, sweep):
        text = path.read_text()
        outside = set(re.findall(r"""(?:src|href)=["']([^"']+)""", text))
        assert all(target.startswith("#") for target in outside)
        assert "@import" not in text
        assert "<script" not in text
        assert len(text) < MAX_BYTES


def test_a_page_of_very_many_runs_stays_small(
    one: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond so many runs it has tables only."""
    assert MAX_CHARTED_RUNS * len(one.read_text()) < MAX_BYTES
    monkeypatch.setattr(page_module, "MAX_CHARTED_RUNS", 1)
    text = write_page([read_run(one.parent) for _ in range(3)], tmp_path / "many.html").read_text()
    assert text.count("<svg") == 1 + len(CHARTS)
    assert text.count("<details") == 3 * 3


def test_text_of_a_report_is_no_markup(one: Path, tmp_path: Path) -> None:
    report = (one.parent / "report.json").read_text().replace('"traces": "given"', '"traces": "<b>given</b>"')
    (tmp_path / "report.json").write_text(report)
    text = write_page([read_run(tmp_path)], tmp_path / "page.html").read_text()
    assert "&lt;b&gt;given&lt;/b&gt;" in text
    assert "<b>given" not in text


def test_the_same_report_gives_the_same_page(one: Path, tmp_path: Path) -> None:
    assert write_page([read_run(one.parent)], tmp_path / "again.html").read_bytes() == one.read_bytes()


def test_the_command_takes_files_and_folders(one: Path, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    result = CliRunner().invoke(
        cli.app, ["page", str(one.parent), str(one.parent / "report.json"), "--out", str(out)]
    )
    assert result.exit_code == 0, result.output
    assert "2 runs of agentx" in out.read_text()
