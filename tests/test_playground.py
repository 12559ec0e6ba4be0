"""The playground in headless Chromium: generate, watch the slots, stop. Needs chromium."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Browser
from server import Server, running, toy_bundle

pytestmark = [pytest.mark.iree, pytest.mark.slow]
TEXT = "document.querySelector('#output .text').textContent"
PHASES = "[...document.querySelectorAll('#slots .phase')].map((e) => e.textContent).join()"
QUIET = "document.querySelector('#output').getAttribute('aria-busy') === 'false'"
IDLE = "idle,idle,idle"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy with tokenizer and chat template."""
    return toy_bundle(tmp_path_factory.mktemp("playground") / "toy")


@pytest.fixture(scope="module")
def server(bundle: Path) -> Iterator[Server]:
    """A server without a key."""
    with running(bundle) as found:
        yield found


@pytest.fixture
def page(server: Server) -> Iterator[Browser]:
    """The playground, loaded. It must log nothing and ask no one but its server."""
    with Browser() as found:
        found.open(f"http://127.0.0.1:{server.port}/")
        found.until("document.querySelectorAll('#slots tr').length === 3")
        yield found
        assert found.messages == []
        assert len(found.requests) >= 2  # the page, and what its slots do
        own = (f"http://127.0.0.1:{server.port}/", "data:,")
        assert [url for url in found.requests if not url.startswith(own)] == []


def test_generate_and_stop(server: Server, page: Browser) -> None:
    assert page.run("document.querySelector('#model').textContent") == "toy · cpu · 3 slots"
    assert page.run(PHASES) == IDLE
    page.fill("#prompt", "abc")
    page.fill("#max_tokens", "900000")
    page.click("#ignore_eos")
    page.click("#generate")
    first = page.until(f"document.querySelector('#output .text') && {TEXT}")
    page.until(f"{TEXT}.length > {len(first) + 100}")  # more comes while the request runs
    page.until(f"{PHASES}.includes('decode')")
    assert page.run("document.querySelector('#stop').disabled") is False
    rate = page.until(
        "document.querySelector('#slots [data-phase=decode]').closest('tr').children[4].textContent"
    )
    assert float(rate) > 0
    assert "decode" in {slot["phase"] for slot in server.slots()["slots"]}
    page.click("#stop")
    page.until(f"{PHASES} === '{IDLE}'")
    assert server.busy() == 0
    status = page.until("document.querySelector('#status').textContent")
    assert re.fullmatch(r"\d+ tokens · first after \d+ ms · [\d.]+ tokens/s · stopped", status)
    drawn = (
        "(() => { const c = document.querySelector('#slots canvas'), p = c.getContext('2d')"
        ".getImageData(0, c.height - 2, c.width, 1).data; const seen = new Set();"
        "for (let i = 0; i < p.length; i += 4) seen.add([p[i], p[i+1], p[i+2]].join());"
        " return seen.size; })()"
    )
    assert page.run(drawn) > 1  # the lane shows more than its ground


def test_the_text_is_the_servers(server: Server, page: Browser) -> None:
    asked = {"prompt": "ab", "max_tokens": 20, "seed": 3, "temperature": 2, "top_p": 0.9}
    for name in ("max_tokens", "seed", "temperature", "top_p"):
        page.fill(f"#{name}", str(asked[name]))
    page.fill("#prompt", "ab")
    page.click("#generate")
    page.until(f"{QUIET} && document.querySelector('#output .text') !== null")
    want = server.complete(**asked).json()["choices"][0]
    assert page.run(TEXT) == want["text"]
    status = page.run("document.querySelector('#status').textContent")
    assert status.startswith("20 tokens") and status.endswith(want["finish_reason"])


def test_chat_keeps_the_conversation(page: Browser) -> None:
    page.click("#modes input[value=chat]")
    page.fill("#max_tokens", "4")
    page.fill("#temperature", "0")  # a sampled reply may be empty, and is then not kept
    for count in (2, 4):
        page.fill("#prompt", "abc")
        page.click("#generate")
        page.until(f"{QUIET} && document.querySelectorAll('#output p').length === {count}")
    said = "[...document.querySelectorAll('#output .who')].map((e) => e.textContent).join()"
    assert page.run(said) == "user,assistant,user,assistant"
    assert page.run("messages.length") == 4


def test_markup_in_a_prompt_is_text(page: Browser) -> None:
    page.fill("#prompt", "<img src=x onerror=console.log(1)><script>console.log(2)</script>a")
    page.fill("#max_tokens", "2")
    page.click("#generate")
    page.until("document.querySelector('#output').textContent.includes('<script>')")
    assert page.run("document.querySelectorAll('#output img, #output script').length") == 0


def test_the_policy_stops_what_is_not_the_pages_own(server: Server) -> None:
    with Browser() as page:
        page.open(f"http://127.0.0.1:{server.port}/")
        page.run("window.ran = 0; const s = document.createElement('script');"
                 "s.textContent = 'window.ran = 1'; document.body.append(s); 0")  # fmt: skip
        blocked = page.run("fetch('http://127.0.0.1:9/').then(() => 'sent', (e) => e.name)")
        assert blocked == "TypeError" and page.run("window.ran") == 0
        page.wait(lambda: len(page.messages) >= 2, "two violations")
        assert all("Content Security Policy" in message for message in page.messages)


def test_errors_are_shown(page: Browser) -> None:
    page.fill("#max_tokens", "2000000")
    page.click("#generate")
    page.until("!document.querySelector('#error').hidden")
    assert "max_tokens" in page.run("document.querySelector('#error').textContent")
    (message,) = page.messages  # the browser's own line about the 400
    assert "400" in message
    page.messages.clear()


def test_the_key_is_asked_for(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("the-key\n")
    options = ("--api-key-file", tmp_path / "keys")
    with Server(bundle, *options, key="the-key") as server, Browser() as page:
        page.open(f"http://127.0.0.1:{server.port}/")
        page.until("!document.querySelector('#key-field').hidden")
        page.fill("#key", "the-key")
        page.until("document.querySelectorAll('#slots tr').length === 3")
        for name, value in (("prompt", "ab"), ("max_tokens", "20"), ("seed", "3")):
            page.fill(f"#{name}", value)
        page.click("#generate")
        page.until(f"document.querySelector('#output .text') && {TEXT}")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1200, 360])
def test_it_is_readable(page: Browser, scheme: str, width: int) -> None:
    """Text and ground differ by the 4.5 to 1 that WCAG 2.2 (1.4.3) asks for; nothing overflows;
    every field has a label."""
    page.call("Emulation.setEmulatedMedia",
              features=[{"name": "prefers-color-scheme", "value": scheme}])  # fmt: skip
    page.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1,
              mobile=False)  # fmt: skip
    pairs = [(name, ".card") for name in ("label", "#status", "#error", "h2", "th", "dt", "td")]
    for text, ground in [*pairs, ("body", "body"), ("#generate", "#generate"), ("#stop", ".card")]:
        colours = page.run(
            f"[getComputedStyle(document.querySelector('{text}')).color,"
            f" getComputedStyle(document.querySelector('{ground}')).backgroundColor]"
        )
        assert contrast(*colours) >= 4.5, (scheme, text, colours)
    assert page.run("document.documentElement.scrollWidth") <= width
    unlabelled = "[...document.querySelectorAll('input, textarea')].filter((e) => !e.labels.length)"
    assert page.run(f"{unlabelled}.length") == 0


def contrast(one: str, other: str) -> float:
    """Contrast ratio of two rgb() colours."""
    lights = []
    for colour in (one, other):
        parts = [int(value) / 255 for value in re.findall(r"\d+", colour)[:3]]
        r, g, b = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
        lights.append(0.2126 * r + 0.7152 * g + 0.0722 * b)
    return (max(lights) + 0.05) / (min(lights) + 0.05)
