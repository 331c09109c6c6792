"""The page as a browser shows it: on a screen, on a phone, in the dark."""

import struct

import pytest
from report_browser import EXECUTABLE, Browser
from report_runs import HOSTILE, write_run, write_text_run

from polopt.launch.report.gather import gather
from polopt.launch.report.page import render

pytestmark = pytest.mark.skipif(EXECUTABLE is None, reason="no Chromium")

PHONE, TABLET, SCREEN = (360, 740), (768, 1024), (1280, 900)
TEXTS = """[...document.querySelectorAll('svg text')].filter(t => t.getClientRects().length)"""


@pytest.fixture(scope="module")
def browser():
    with Browser() as found:
        yield found


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """A page of comparisons, one of the seeds of a recipe, and one of all that is odd."""
    folder = tmp_path_factory.mktemp("pages")
    many = [
        write_run(
            folder / f"{lr}-{seed}",
            seed=seed,
            lr=lr,
            values=[9.0, 80.0 + seed, 10_000.0 + 870.0 * seed],
        )
        for lr in (1.0, 1.25, 1.5)
        for seed in range(3)
    ]
    bad = HOSTILE.replace("\x00", "").replace("\ud800", "").replace("\x1b", "")
    odd = [
        write_text_run(folder / "text", text=HOSTILE + "x" * 3000, name="n" * 300),
        write_run(folder / "bad", name=bad, task="t" * 300),
        write_run(folder / "one", values=[1e308], extra={"loss_objective": -1e308}),
    ]
    found = {}
    for name, runs in (("many", many), ("seeds", many[:3]), ("odd", odd)):
        found[name] = folder / f"{name}.html"
        found[name].write_text(render(*gather(runs)), encoding="utf-8")
    return found


@pytest.mark.parametrize("name", ["many", "seeds", "odd"])
@pytest.mark.parametrize("size", [PHONE, TABLET, SCREEN], ids=["phone", "tablet", "screen"])
def test_everything_fits_and_can_be_read(browser, pages, name, size):
    browser.open(pages[name], *size)
    browser.ask("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert browser.ask("document.documentElement.scrollWidth") <= size[0]
    assert browser.ask("document.body.scrollWidth") <= size[0]
    # Every label of a chart lies in its figure, and is large enough.
    outside = browser.ask(
        f"{TEXTS}.filter(t => {{ const a = t.getBoundingClientRect(),"
        " b = t.closest('figure').getBoundingClientRect();"
        " return a.left < b.left - 1 || a.right > b.right + 1 || a.bottom > b.bottom + 1 })"
        ".map(t => t.textContent)"
    )
    assert outside == []
    smallest = browser.ask(
        f"Math.min(...{TEXTS}.map(t => t.getScreenCTM().a"
        " * parseFloat(getComputedStyle(t).fontSize)))"
    )
    assert smallest >= 9.0
    cards = "[...document.querySelectorAll('.card, .phase .label, figcaption, dl')]"
    assert not browser.ask(f"{cards}.filter(e => e.scrollWidth > e.clientWidth + 1).length")
    # Of the two sizes of a chart one is shown.
    shown = browser.ask(
        "[...document.querySelectorAll('figure')].map(f => [...f.querySelectorAll('svg')]"
        ".filter(s => s.getClientRects().length).length)"
    )
    assert shown
    assert set(shown) == {1}


def test_nothing_runs_and_nothing_is_loaded(browser, pages):
    browser.open(pages["odd"], *SCREEN)
    assert "owned" not in browser.ask("document.title").split(" ")
    assert browser.ask("document.scripts.length + document.images.length") == 0
    methods = [event["method"] for event in browser.seen]
    assert methods.count("Network.requestWillBeSent") == 1  # the page itself
    odd = [m for m in methods if m.startswith(("Log.", "Runtime.console", "Runtime.exception"))]
    assert odd == []


def test_colours_follow_the_scheme(browser, pages):
    looks = {}
    for dark in (False, True):
        browser.open(pages["many"], *SCREEN, dark=dark)
        looks[dark] = browser.ask(
            "['body', 'svg .line', 'svg text', '.card .what'].map(s => {"
            " const c = getComputedStyle(document.querySelector(s));"
            " return s == 'body' ? c.backgroundColor : c.stroke != 'none' ? c.stroke :"
            " s.startsWith('svg') ? c.fill : c.color })"
        )
    for light, dark in zip(looks[False], looks[True], strict=True):
        assert light != dark
    for page, *others in looks.values():
        for other in others:
            assert contrast(page, other) >= 3.0, (page, other)


def contrast(first, second):
    """Contrast of two colours `rgb(r, g, b)`, as WCAG 2 defines it."""

    def luminance(colour):
        parts = [int(p) / 255 for p in colour.removeprefix("rgb(").rstrip(")").split(",")]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    high, low = sorted((luminance(first), luminance(second)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_pictures_for_people(browser, pages, tmp_path):
    for name, size, dark in (("light", SCREEN, False), ("dark", PHONE, True)):
        browser.open(pages["many"], *size, dark=dark)
        browser.picture(tmp_path / f"{name}.png")
        found = (tmp_path / f"{name}.png").read_bytes()
        width, height = struct.unpack(">II", found[16:24])
        assert (width, found[1:4]) == (size[0], b"PNG")
        assert height > 2 * size[1]  # the whole page
