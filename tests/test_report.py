"""The report page: what it says of bundles, logs and measurements, and that all text stays text."""

from __future__ import annotations

import dataclasses
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import fake_device
import pytest

from artifacts import report
from artifacts.actions import Result
from artifacts.bars import Bar, chart, figure
from artifacts.buildlog import BuildLog
from artifacts.markup import document, tag
from artifacts.process import Usage
from artifacts.records import Blob
from runtime import manifest as mf
from runtime.errors import UserError
from runtime.results import file_name, save
from runtime.targets import view

PEERS = Path(__file__).resolve().parent.parent / "benchmarks" / "peers.json"
EVIL = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>&amp;\x00\ud800]]>"
SHA = "ab" * 32
VOID = {"meta", "img", "br", "hr", "input", "link"}


class Page(HTMLParser):
    """Text, elements and attributes of a page; its elements must be closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text, self.tags, self.attributes = "", set[str](), list[tuple[str, str | None]]()
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []
        self.text = re.sub(r"\s+", " ", self.text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += attrs
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag
        self.text += " "

    def handle_data(self, data: str) -> None:
        self.text += data if self._open[-1:] != ["style"] else ""


def made(name: str = "toy", weights: str = "bf16") -> mf.Manifest:
    """A manifest of two parameters and a proof that passed."""
    plain = fake_device.manifest()
    sizes = {"model.vmfb": 5 << 20, "params.irpa": 1 << 30, "reference.json": 2048}
    module, params, oracle = (mf.FileRef(path, SHA, size) for path, size in sizes.items())
    files = mf.Files(module, params, oracle, (), None, ())
    return dataclasses.replace(
        plain,
        model=dataclasses.replace(plain.model, name=name, source=f"dir:{name}"),
        files=files,
        params=(
            mf.ParamSpec("a", "bf16", (1000, 1000), 0.0, 1.0),
            mf.ParamSpec("b", "f32", (7,), 0.0, 1.0),
        ),
        numerics=mf.Numerics(weights, "f32", "f32", None),
        proof=mf.Proof("passed", None, "fast", mf.Tolerance(1e-5, 1e-5)),
    )


def reference(gap: float = 0.125) -> dict[str, Any]:
    """A reference.json of two prompts."""
    prompt = {"tokens": [1], "generated": [2, 3], "top_logits": [[[2, 1.0], [3, 0.5]]] * 2}
    prompts = [prompt | {"min_gap": gap}, prompt | {"min_gap": 0.5}]
    oracle = {"name": "jax", "version": "0"}
    return {"schema": 1, "oracle": oracle, "prompts": prompts, "entries": None}


def write_bundle(build: Path, path: str, manifest: mf.Manifest, command: str = "emit x") -> Path:
    """A bundle's manifest, reference and log under `build`; no code and no weights."""
    place = build / path
    place.mkdir(parents=True)
    (place / "manifest.json").write_text(mf.dumps(manifest))
    (place / "reference.json").write_text(json.dumps(reference()))
    log = BuildLog()
    log.add(Usage(2.0, 3 << 20, command))
    log.add(Usage(0.5, 2 << 20, command))
    log.result("convert", Result("k1", False, {"params": Blob(SHA, 1 << 30)}, None))
    with log.stage("emit"):
        log.result("emit", Result("k2", True, {}, None))
    worst = {
        "logits": {"function": "decode", "error": 2e-6, "tolerance": 1e-5},
        "argmax": {"function": "decode", "error": 0.0, "tolerance": 1e-5},
        "layers.0.h": {"function": "decode", "error": 1e-6, "tolerance": 1e-5},
        "layers.1.h": {"function": "prefill_8", "error": 4e-6, "tolerance": 1e-5},
    }
    measured = {"problem": None, "compared": 24, "worst": worst, "module": SHA, "params": SHA}
    log.result("proof", Result("k3", False, {}, None), measured)
    # Of what was here before, with other weights, and then in the log again.
    other = {"worst": {"logits": worst["logits"] | {"error": 9e-6}}, "params": "cd" * 32}
    log.result("proof", Result("k4", False, {}, None), measured | other)
    log.append_to(place)
    return place


def bench(manifest: mf.Manifest, rate: float) -> dict[str, Any]:
    """What `bench --json` prints, as far as it is shown."""
    figures = {"open_s": 0.01, "first_token_s": 0.02, "prefill_tokens_per_s": 10 * rate}
    spread = {"decode_tokens_per_s": [rate / 2, rate * 2]}
    words = {"model": manifest.model.name, "target": manifest.target.name, "shape": "b3"}
    words |= {"weights": manifest.numerics.weights, "device": "local-task"}
    return {**figures, "decode_tokens_per_s": rate, "spread": spread, **words}


def read(build: Path, peers: Path | None = None) -> Page:
    """The report of `build`."""
    assert report.write(build, peers) == build / "report.html"
    return Page((build / "report.html").read_text(encoding="utf-8"))


def test_the_page_says_what_is_known(tmp_path: Path) -> None:
    manifest = made()
    write_bundle(tmp_path, "toy/cpu/b3", manifest)
    for rate, weights in ((123.0, "bf16"), (456.0, "int8")):
        other = made(weights=weights)
        save(tmp_path / "results", "bench", other, bench(other, rate))
    rows = [
        {"what": "prompt 0 (1 tokens)", "ok": True, "detail": "48 tokens equal, within 3.1e-07"}
    ]
    kept = {"device": "local-task", "passed": True, "rows": rows}
    save(tmp_path / "results", "verify", manifest, kept)
    page = read(tmp_path)
    for words in (
        "1 bundle", "toy/cpu/b3 bf16 passed 1.00 GiB",
        "model.vmfb 5.00 MiB", "bf16 1 1,000,000 1.91 MiB", "f32 1 7 28 B",
        "convert 2.5", "3.00 MiB", "cache hits: 1 of 4",
        "proof passed , fast flags", "outputs compared 24",
        "max logit difference 2.0e-06, 20% of the bound 1.0e-05, in decode",
        "tokens all equal",
        "max state difference 4.0e-06, 40% of the bound 1.0e-05, in prefill_8, layers.1.h",
        "reference 4 tokens after 2 prompts", "smallest margin 0.125",
        "cpu int8 456", "cpu bf16 123", "cpu int8 4,560",
        "Verified on local-task (cpu): passed", "48 tokens equal", "emit x",
    ):  # fmt: skip
        assert words in page.text, (words, page.text)
    assert manifest.state_bytes_per_slot == 2 * 4 + 2 * fake_device.CONTEXT * 4
    assert f"one of 3 slots 2 {manifest.state_bytes_per_slot:,} B" in page.text


def test_a_verification_of_another_bundle_is_not_told(tmp_path: Path) -> None:
    write_bundle(tmp_path, "toy/cpu/b3", made())
    kept = {"device": "local-task", "passed": True, "rows": []}
    save(tmp_path / "results", "verify", made(weights="f16"), kept)
    assert "Verified" not in read(tmp_path).text


def test_of_several_targets_each_is_told(tmp_path: Path) -> None:
    one = made()
    gpu = dataclasses.replace(one.target, name="gpu", device="cuda", uri="cuda", cpu=None)
    proof = dataclasses.replace(one.proof, status="not-run", reason="no device")
    module = mf.FileRef("model.gpu.vmfb", "cd" * 32, 1)
    both = dataclasses.replace(
        one,
        files=dataclasses.replace(one.files, alternatives=(module,)),
        alternatives=(mf.Alternative(gpu, proof),),
    )
    (write_bundle(tmp_path, "toy/cpu+gpu/b3", both) / "build.log.jsonl").unlink()  # has none
    kept = {"device": "cuda://0", "passed": True, "rows": []}
    save(tmp_path / "results", "verify", view(both, 1), kept, both)
    assert "outputs compared" not in read(tmp_path).text
    write_bundle(tmp_path, "toy/cpu/b3", one)
    page = read(tmp_path)
    for words in (
        "toy/cpu+gpu/b3 bf16 cpu: passed gpu: not-run 1.00 GiB",
        "gpu: cuda; ",
        "proof, cpu passed , fast flags outputs compared 24",
        "proof, gpu not-run (no device), fast flags reference",
        "Verified on cuda://0 (gpu): passed",
    ):
        assert words in page.text, (words, page.text)
    assert "not there" not in page.text


def test_the_measurements_beside_other_runtimes(tmp_path: Path) -> None:
    """Of the JSON file that the project has."""
    page, found = read(tmp_path, PEERS), json.loads(PEERS.read_text())
    assert "No bundle is here yet" in page.text
    model = found["models"]["mamba2-130m"]
    assert "mamba2-130m: decode, 1 sequence, tokens/s" in page.text
    seconds = sorted(model["decode"]["1"]["ours int8"])
    middle = (seconds[(len(seconds) - 1) // 2], seconds[len(seconds) // 2])
    rate = figure((1 / middle[0] + 1 / middle[1]) / 2)
    assert f"int8 Scanwright: {rate} tokens/s" in page.text
    titles = re.findall(r"[\w-]+: (?:decode|prefill), \d+ [a-z ]+, tokens/s(?=:)", page.text)
    parts = [m.get(part, {}) for m in found["models"].values() for part in ("decode", "prefill")]
    assert len(titles) == sum(map(len, parts)) > 4


def check_is_text(text: str, page: Page) -> None:
    """The page runs nothing and asks no one, whatever it tells of."""
    assert page.tags.isdisjoint({"script", "img", "link", "iframe", "object", "base", "form", "a"})
    names = {name for name, _ in page.attributes}
    assert not any(name.startswith("on") for name in names)
    assert names.isdisjoint({"src", "href", "style", "xlink:href", "srcset", "action"})
    assert "url(" not in text and "@import" not in text and "http://" not in text
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'") in page.attributes


def test_all_that_is_told_stays_text(tmp_path: Path) -> None:
    name = EVIL.replace("\x00", "").replace("\ud800", "")
    manifest = made(name)
    place = write_bundle(tmp_path, "a&b<i>/cpu/b3", manifest, command=EVIL)
    row = {"stage": EVIL, "cached": False, "seconds": 1, "commands": [{"command": EVIL}]}
    with (place / "build.log.jsonl").open("a") as log:
        log.write(json.dumps(row) + "\n")
    rows = [{"what": EVIL, "ok": False, "detail": EVIL}]
    save(tmp_path / "results", "verify", manifest, {"device": EVIL, "passed": 1, "rows": rows})
    save(tmp_path / "results", "bench", manifest, bench(manifest, 5.0) | {"target": EVIL})
    (tmp_path / "results" / "<b>.json").write_text("no JSON")
    (tmp_path / "peers").write_text(
        json.dumps({"models": {EVIL: {"decode": {"1": {"ours f32": [1]}}}}})
    )
    page = read(tmp_path, tmp_path / "peers")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    check_is_text(text, page)
    assert page.text.count("<script>alert(1)</script>") >= 6  # as text
    assert "a&b<i>/cpu/b3" in page.text and "<b>.json: not JSON" in page.text


def test_what_cannot_be_read_is_told(tmp_path: Path) -> None:
    """A damaged manifest, a log that was cut off, results that are none: the page is still made."""
    place = write_bundle(tmp_path, "toy/cpu/b3", made())
    with (place / "build.log.jsonl").open("a") as log:
        log.write('{"stage": "cut o\n[]\n{"stage": 7}\n{"stage": "x", "seconds": "NaN"}\n')
    broken = write_bundle(tmp_path, "toy/cpu/b4", made())
    (broken / "manifest.json").write_text("{}")
    (broken / "build.log.jsonl").unlink()
    hidden = write_bundle(tmp_path, "toy/cpu/.b5-new", made())
    assert hidden.is_dir()
    results = tmp_path / "results"
    results.mkdir()
    for name, text in (
        ("list", "[]"), ("deep", "[" * 99_999), ("empty", "{}"),
        ("rate", json.dumps(bench(made(), 1.0) | {"open_s": float("inf")})),
        ("rows", json.dumps({**bench(made(), 1.0), "kind": "verify", "rows": [1]})),
    ):  # fmt: skip
        (results / f"{name}.json").write_text(text)
    (results / "folder.json").mkdir()
    page = read(tmp_path, tmp_path / "no peers")
    for words in (
        "build.log.jsonl: lines that are no rows: 3", "manifest.json", "no times are known",
        "list.json: found a list", "deep.json: not JSON", "rate.json: open_s: not as",
        "rows.json: rows: not as", "folder.json: cannot be read", "2 bundles",
    ):  # fmt: skip
        assert words in page.text, (words, page.text)
    assert "b5" not in page.text


def test_where_nothing_can_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "build").write_text("a file")
    with pytest.raises(UserError) as caught:
        report.write(tmp_path / "build")
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="cannot be written"):
        save(tmp_path / "build" / "results", "bench", made(), {})


def test_a_name_of_a_result_stays_in_its_directory() -> None:
    name = file_name("bench", made("../../" + "x" * 300))
    assert "/" not in name and name.startswith("bench-.._.._xx") and len(name) < 255


def test_markup_is_escaped_and_closed() -> None:
    made = tag(
        "p", "a<b", tag("b", EVIL, title=EVIL), ["c", 1, None, "&"], class_=None, data_x=0.25
    )
    page = Page(document(made))
    assert page.tags == {"p", "b"} and {name for name, _ in page.attributes} == {"title", "data-x"}
    assert page.text.strip().startswith("a<b<script>") and page.text.strip().endswith("c1&")
    assert "\x00" not in document(made) and document(made).encode("utf-8")


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.00123, "0.00123"), (1.234, "1.23"), (99.95, "100.0"), (12345.6, "12,346")],
)
def test_figures_have_three_digits(value: float, text: str) -> None:
    assert figure(value) == text


def test_bars_are_to_scale_and_inside() -> None:
    bars = [Bar("one", 100.0, 50.0, 200.0, "a"), Bar("two", 50.0, 50.0, 50.0, "b")]
    svg = chart("t", {"g": bars, "h": [Bar("none", 0.0, 0.0, 0.0, "a")]}, "s")
    wide = [float(part.get("width") or 0) for part in svg.iter("rect")]
    assert wide[0] == pytest.approx(2 * wide[1], rel=0.01) and wide[2] == 0
    (spread,) = svg.iter("line")  # a bar without spread has no line
    low, high = float(spread.get("x1") or 0), float(spread.get("x2") or 0)
    assert high - low == pytest.approx(3 * wide[1], abs=0.2) and high <= 340
    assert len({part.get("fill") for part in svg.iter("rect")}) == 2
