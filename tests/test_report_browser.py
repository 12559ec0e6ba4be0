"""The report in headless Chromium: on a phone and a desk, light and dark; and the README's picture.

Needs chromium.
"""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from browser import Browser
from test_playground import contrast
from test_report import PEERS, bench, made, write_bundle

from artifacts import report
from runtime.results import save

pytestmark = pytest.mark.slow
LONG = "a-model-whose-name-has-no-place-to-break-" * 5 + "W" * 120


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report with names and commands that are longer than a phone is wide."""
    build = tmp_path_factory.mktemp("report")
    for name in ("toy", LONG):
        manifest = made(name)
        write_bundle(build, f"{name[:200]}/cpu/b3", manifest, command="/" + LONG * 3)
        rows = [{"what": LONG, "ok": name == "toy", "detail": LONG}]
        kept = {"device": "local-task", "passed": name == "toy", "rows": rows}
        save(build / "results", "verify", manifest, kept)
        save(build / "results", "bench", manifest, bench(manifest, 1234567.0))
    (build / "results" / f"{'n' * 200}.json").write_text("[]")
    return report.write(build, PEERS)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1200])
def test_it_is_readable(page: Path, width: int, scheme: str) -> None:
    """Nothing is wider than the screen, also unfolded, nor drawn outside; text stands out from its
    ground (WCAG 2.2, 1.4.3); nothing but the file itself is asked for."""
    with Browser() as browser:
        browser.call("Emulation.setEmulatedMedia",
                     features=[{"name": "prefers-color-scheme", "value": scheme}])  # fmt: skip
        browser.call("Emulation.setDeviceMetricsOverride", width=width, height=800,
                     deviceScaleFactor=1, mobile=width == 360)  # fmt: skip
        browser.open(page.as_uri())
        browser.run("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
        assert browser.run("document.querySelectorAll('details').length") == 4
        outside = browser.run(
            "[...document.querySelectorAll('body :not(svg *)')].filter((e) => {"
            " const r = e.getBoundingClientRect(); return r.right > innerWidth || r.left < 0; })"
            ".map((e) => e.tagName + ' ' + e.textContent.slice(0, 60))"
        )
        assert outside == []
        assert browser.run("document.documentElement.scrollWidth") <= width
        assert browser.run("innerWidth") == width  # a wider page would zoom out on a phone
        pairs = [(name, "section") for name in ("h2", "h3", "td", "th", ".good", ".bad", ".soft")]
        for text, ground in [*pairs, ("h1", "body")]:
            colours = browser.run(
                f"[getComputedStyle(document.querySelector('{text}')).color,"
                f" getComputedStyle(document.querySelector('{ground}')).backgroundColor]"
            )
            assert contrast(*colours) >= 4.5, (text, colours)
        text, ground = browser.run(
            "[getComputedStyle(document.querySelector('svg text')).fill,"
            " getComputedStyle(document.querySelector('section')).backgroundColor]"
        )
        assert contrast(text, ground) >= 4.5
        small = browser.run(
            "Math.min(...[...document.querySelectorAll('svg')].map((e) =>"
            " e.getBoundingClientRect().width / e.viewBox.baseVal.width))"
        )
        assert small > 0.85  # letters of 12 units are at least 10 pixels
        assert browser.requests == [page.as_uri()] and browser.messages == []


def test_the_overview_breaks_no_word_of_ours(page: Path) -> None:
    """On a phone `passed` and sizes stay whole beside names of any length."""
    with Browser() as browser:
        browser.call("Emulation.setDeviceMetricsOverride", width=360, height=800,
                     deviceScaleFactor=1, mobile=True)  # fmt: skip
        browser.open(page.as_uri())
        heights = browser.run(
            "[...document.querySelectorAll('section:first-of-type .good,"
            " section:first-of-type td.n')].map((e) => e.getClientRects().length > 1"
            " || (e.matches('.good') && e.getBoundingClientRect().height > 24))"
        )
        assert len(heights) == 6 and not any(heights)


def test_the_picture_of_the_readme(page: Path, tmp_path: Path) -> None:
    out, script = tmp_path / "plots" / "report.png", PEERS.parent / "picture.py"
    command = [sys.executable, str(script), str(page), "--out", str(out), "--height", "700"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=180)
    assert done.returncode == 0, done.stderr
    data = out.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n" and struct.unpack(">II", data[16:24]) == (820, 700)
    assert done.stdout == f"{out} {len(data)}\n" and 10_000 < len(data) < 200_000
    done = subprocess.run([*command[:2], str(tmp_path / "no.html")], capture_output=True, text=True)
    assert done.returncode == 1 and "doit report writes it" in done.stderr
    assert json.dumps(done.stderr).count("\\n") == 1
