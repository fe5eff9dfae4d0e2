"""The page in a headless Chromium: it draws, answers mouse and keyboard, asks for nothing, and logs no error."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from slipstream.tools.report.page import page
from slipstream.tools.report.read import read_run

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

WriteRun = Callable[..., Path]
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1280,900",
)

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver"),
]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    webdriver = pytest.importorskip("selenium.webdriver")
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    try:
        yield driver
    finally:
        driver.quit()


@dataclass(frozen=True)
class Page:
    """What a reader does with a page, and sees of it."""

    browser: Chrome

    def all(self, selector: str) -> list[Any]:
        return self.browser.find_elements("css selector", selector)

    def one(self, selector: str) -> Any:
        return self.browser.find_element("css selector", selector)

    def text(self, selector: str) -> str:
        return self.one(selector).text

    def run(self, script: str, *arguments: Any) -> Any:
        return self.browser.execute_script(script, *arguments)

    def range_of(self, plot: Any) -> tuple[float, float]:
        return float(plot.get_attribute("data-from")), float(plot.get_attribute("data-to"))

    def drag(self, plot: Any, begin: float, end: float) -> None:
        """Over shares of its width."""
        from selenium.webdriver import ActionChains

        width = plot.size["width"]
        begin_at, end_at = (round(width * (share - 0.5)) for share in (begin, end))
        actions = ActionChains(self.browser, duration=20).move_to_element_with_offset(plot, begin_at, 0)
        actions.click_and_hold().move_by_offset(end_at - begin_at, 0).release().perform()

    def double_click(self, plot: Any) -> None:
        from selenium.webdriver import ActionChains

        ActionChains(self.browser, duration=20).double_click(plot).perform()

    def hover(self, node: Any, right: int = 0, down: int = 0) -> None:
        from selenium.webdriver import ActionChains

        ActionChains(self.browser, duration=20).move_to_element_with_offset(node, right, down).perform()

    def press(self, *keys: str) -> None:
        from selenium.webdriver import ActionChains

        ActionChains(self.browser, duration=20).send_keys(*keys).perform()


@pytest.fixture(scope="module")
def files(write_run: WriteRun, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    hostile = "<script>window.wasHere = 1</script><img src=x onerror='window.wasHere = 1'>"
    one = read_run(write_run(), "demo")
    other = read_run(write_run("other", last_loss=1.5, learning_rate=0.01), "other")
    young = read_run(write_run("young", without=("metrics.jsonl", "summary.json", "trace.json")), hostile)
    folder = tmp_path_factory.mktemp("pages")
    turns = [{"step": step, "before": "2", "after": "4"} for step in (10, 20)]
    turned = replace(one, summary=one.summary | {"reshapes": turns, "resumed_at": 5})
    pages = {
        "one": [one],
        "two": [one, other],
        "turned": [turned, other],
        "hostile": [young],
        "hostile pair": [young, other],
    }
    for name, runs in pages.items():
        (folder / f"{name}.html").write_text(page(runs), encoding="utf-8")
    return {name: folder / f"{name}.html" for name in pages}


@pytest.fixture
def open_page(browser: Chrome, files: dict[str, Path]) -> Iterator[Callable[[str], Page]]:
    """Afterwards, whatever the test did with it, the page must not have complained or asked for anything."""

    def visit(name: str) -> Page:
        browser.get("about:blank")  # a page of which only the #part differs would not be loaded again
        browser.get(files[name].as_uri())
        return Page(browser)

    yield visit
    assert browser.get_log("browser") == []
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0


def test_changes_of_shape_and_resumes_are_marked_on_the_curves(open_page: Callable[[str], Page]) -> None:
    assert not open_page("one").all(".turn")
    shown = open_page("turned")
    marks = shown.all("#Overview .turn") or shown.all(".turn")
    places = [float(mark.get_attribute("x1")) for mark in marks[:3]]
    assert places == sorted(places) and len(set(places)) == 3
    titles = [mark.get_attribute("textContent") for mark in marks[:3]]
    assert titles[0] == "resumed after step 5" and titles[1] == "2 -> 4 (stages x replicas) after step 10"


TABS = ["Overview", "Training", "Pipeline", "Memory", "Configuration"]


def test_every_tab_draws_by_click(open_page: Callable[[str], Page]) -> None:
    shown = open_page("one")
    assert [tab.text for tab in shown.all("[role=tab]")] == TABS
    for name, drawn in zip(TABS, (".card", ".line", "canvas", ".bar", "tbody tr"), strict=True):
        shown.one(f"#tab-{name.lower()}").click()
        assert [panel.get_attribute("id") for panel in shown.all("[role=tabpanel]:not([hidden])")] == [
            f"panel-{name.lower()}"
        ]
        assert shown.all(f"#panel-{name.lower()} {drawn}")
        assert shown.run("return document.documentElement.scrollWidth <= innerWidth")


def test_tabs_switch_by_keyboard(open_page: Callable[[str], Page]) -> None:
    shown = open_page("one")
    shown.run("document.getElementById('tab-overview').focus()")
    selected = []
    for key in ("\ue014", "\ue014", "\ue012", "\ue010", "\ue014"):  # right, right, left, end, right
        shown.press(key)
        selected.append(shown.text("[role=tab][aria-selected=true]"))
        assert shown.run("return document.activeElement.getAttribute('aria-selected')") == "true"
    assert selected == ["Training", "Pipeline", "Training", "Configuration", "Overview"]


def test_dragging_zooms_and_a_double_click_shows_all(open_page: Callable[[str], Page]) -> None:
    shown = open_page("one")
    plot = shown.one("#panel-overview svg[role=img]")
    assert shown.range_of(plot) == (1, 40)
    shown.drag(plot, 0.5, 0.75)
    begin, end = shown.range_of(plot)
    assert 15 < begin < 25 < end < 35
    shown.one("#tab-training").click()  # the others follow
    assert all(shown.range_of(other) == (begin, end) for other in shown.all("#panel-training svg[role=img]"))
    shown.one("#tab-overview").click()
    shown.double_click(plot)
    assert shown.range_of(plot) == (1, 40)


def test_the_axis_can_be_tokens_or_time(open_page: Callable[[str], Page]) -> None:
    shown = open_page("one")
    plot = shown.one("#panel-overview svg[role=img]")
    buttons = {button.text: button for button in shown.all("#axis button")}
    buttons["tokens"].click()
    assert shown.range_of(plot) == (4096, 40 * 4096)
    buttons["time"].click()
    assert shown.range_of(plot) == (0.5, 20)


def test_the_pointer_reads_values(open_page: Callable[[str], Page]) -> None:
    shown = open_page("one")
    plot = shown.one("#panel-overview svg[role=img]")
    shown.hover(plot, right=200)
    tip = shown.text("#panel-overview .tip")
    assert tip.startswith("step ") and "training" in tip and "held out" in tip


def test_a_legend_hides_its_line_and_shows_it_again(open_page: Callable[[str], Page]) -> None:
    shown = open_page("one")
    held_out = shown.all("#panel-overview .legend button")[1]
    assert len(shown.all("#panel-overview .line")) == 2
    held_out.click()
    assert len(shown.all("#panel-overview .line")) == 1 and held_out.get_attribute("aria-pressed") == "false"
    held_out.click()
    assert len(shown.all("#panel-overview .line")) == 2


def test_a_logarithmic_axis_keeps_what_it_shows(open_page: Callable[[str], Page]) -> None:
    shown = open_page("one")
    shown.one("#panel-overview .heading button").click()
    plot = shown.one("#panel-overview svg[role=img]")
    assert 0 < float(plot.get_attribute("data-low")) < 2 and float(plot.get_attribute("data-high")) > 5


def test_the_timeline_zooms_and_reads(open_page: Callable[[str], Page]) -> None:
    shown = open_page("one")
    shown.one("#tab-pipeline").click()
    canvas = shown.one("canvas")
    shown.run("arguments[0].scrollIntoView({block: 'center'})", canvas)
    before = shown.range_of(canvas)
    shown.drag(canvas, 0.4, 0.6)
    begin, end = shown.range_of(canvas)
    assert before[0] < begin < end < before[1]
    shown.double_click(canvas)
    assert shown.range_of(canvas)[0] == 0 and shown.range_of(canvas)[1] > before[1]
    readings = set()
    for right in range(-300, 300, 40):
        shown.hover(canvas, right=right, down=-canvas.size["height"] // 2 + 15)
        readings.add(shown.run("return document.querySelector('#panel-pipeline canvas + .tip strong')?.textContent"))
    assert any(reading and reading.startswith(("0F", "0B")) and "@v" in reading for reading in readings)


def test_the_split_of_time_follows_the_zoom(open_page: Callable[[str], Page]) -> None:
    shown = open_page("one")
    shown.one("#tab-pipeline").click()
    assert "steady window" in shown.text("#panel-pipeline .bars ~ .about")
    assert shown.text("#panel-pipeline .bar span") == "30.0 %"
    shown.drag(shown.one("#panel-pipeline svg[role=img]"), 0.3, 0.9)
    assert "Share of the time from step" in shown.text("#panel-pipeline .bars ~ .about")
    assert shown.text("#panel-pipeline .bar span") == "20.0 %"


def test_the_configuration_can_be_searched(open_page: Callable[[str], Page]) -> None:
    shown = open_page("one")
    shown.one("#tab-configuration").click()
    assert len(shown.all("#config tbody tr")) == 8
    shown.one("#search").send_keys("two_bw")
    assert [row.text for row in shown.all("#config tbody tr")] == ["pipeline.schedule two_bw"]


def test_two_runs_are_compared(open_page: Callable[[str], Page]) -> None:
    shown = open_page("two")
    names = [button.text for button in shown.all("#panel-overview .legend button")]
    assert names == ["demo, training", "demo, held out", "other, training", "other, held out"]
    loss = shown.one("#comparison tbody tr")
    assert "1.5000" in loss.find_element("css selector", ".best").text
    shown.one("#tab-configuration").click()
    assert [row.text for row in shown.all("#config tbody tr")] == ["optimizer.learning_rate 0.02 0.01"]
    shown.one("#different").click()
    assert len(shown.all("#config tbody tr")) == 8


def test_a_hostile_name_is_only_text(open_page: Callable[[str], Page]) -> None:
    shown = open_page("hostile pair")
    assert "<script>window.wasHere" in shown.text("#header")
    for tab in TABS:
        shown.one(f"#tab-{tab.lower()}").click()
    assert shown.run("return window.wasHere === undefined && !document.querySelector('img')")


def test_what_is_missing_is_said(open_page: Callable[[str], Page]) -> None:
    shown = open_page("hostile")
    assert "no summary.json" in shown.text("#notes") and "no metrics yet" in shown.text("#notes")
    assert "not finished" in shown.text("#header")


def test_a_narrow_window_has_nothing_beside_it(browser: Chrome, open_page: Callable[[str], Page]) -> None:
    size = {"width": 400, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        shown = open_page("two")
        for tab in TABS:
            shown.one(f"#tab-{tab.lower()}").click()
            assert shown.run("return document.documentElement.scrollWidth <= innerWidth"), tab
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
