"""What serving costs beside the device: host overhead, throughput by slots, time to first token.

    python benchmarks/serving.py --model mamba2-130m --weights f32 bf16 --slots 1 2 4 8 16

Bundles are built from their shapes and given seeded random parameters and a byte-pair tokenizer of
50,000 tokens. All bundles of a weight type map one parameter file, and rounds are interleaved, so
that what else the machine does falls on all of them alike. Figures are medians with quartiles.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from builds import ROOT, build, describe, machine, table

sys.path.insert(0, str(ROOT))

from runtime import manifest as manifests
from runtime.engine import Engine
from runtime.manifest import FileRef
from runtime.module import Module
from runtime.params_random import write_archive
from runtime.request import Choice, Ending, Request
from runtime.sampling import SamplingParams
from runtime.session import Session
from runtime.text import TextStream
from runtime.tokenizer import Tokenizer

KINDS = {
    "greedy": SamplingParams(),
    "temperature": SamplingParams(0.8, seed=1),
    "top-k 40, top-p 0.95": SamplingParams(0.8, top_k=40, top_p=0.95, seed=1),
    "top-p 0.95": SamplingParams(0.8, top_p=0.95, seed=1),
    "with penalties": SamplingParams(
        0.8, top_k=40, seed=1, repetition_penalty=1.1, frequency_penalty=0.2, dry_multiplier=0.8
    ),
}
CHILD = """
import time
marks = [("interpreter", time.monotonic())]
def mark(name): marks.append((name, time.monotonic()))
import sys, json
from pathlib import Path
import numpy
mark("import numpy")
import iree.runtime
mark("import iree.runtime")
from runtime import manifest as manifests, tokenizer
from runtime.engine import Engine
from runtime.generate import generate
from runtime.module import open_bundle
from runtime.request import Request
from runtime.session import Session
mark("import runtime")
bundle = Path(sys.argv[1])
manifest = manifests.load(bundle)
mark("manifest")
words = tokenizer.load(bundle, manifest.files.tokenizer)
prompt = tuple(words.encode("In the beginning God created the heaven and the earth"))[:32]
mark("tokenizer")
device = open_bundle(bundle, manifest)
mark("open module, map parameters")
engine = Engine(Session(device, manifest), manifest)
mark("zero state")
generate(engine, Request(prompt, 1), None, lambda token, text: mark("prefill, first token"))
print(json.dumps([m for i, m in enumerate(marks) if m[0] not in [n for n, _ in marks[:i]]]))
"""


class Text:
    """A sink that does what a server's does on the engine's thread: text and stop strings."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._stream = TextStream(tokenizer.stream(), ["\u0001never"])

    def token(self, choice: Choice) -> bool:
        """See Sink.token."""
        self._stream.push(choice.token)
        return self._stream.stopped

    def finish(self, ending: Ending) -> None:
        """See Sink.finish."""


class Timed:
    """A module whose calls are timed; everything else is passed on."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def call(self, function: str, args: Sequence[Any]) -> list[Any]:
        """As Device.call."""
        begun = time.perf_counter()
        found = self._module.call(function, args)
        self.seconds += time.perf_counter() - begun
        return found


def tokenizer(out: Path) -> None:
    """Write a byte-level tokenizer of 256 bytes and 50,000 pairs of them."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [(a, b) for a in letters for b in letters][:50_000]
    vocabulary = {word: i for i, word in enumerate([*letters, *map("".join, merges)])}
    made = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.save(str(out))


def reference(path: Path) -> FileRef:
    """What a manifest says of a file that lies in the bundle's directory."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return FileRef(path.name, digest, path.stat().st_size)


def furnish(bundle: Path, params: FileRef, words: FileRef, out: Path) -> Path:
    """A copy of a weight-free bundle with the parameters and the tokenizer that lie beside `out`,
    all hard links."""
    out.mkdir()
    manifest = manifests.load(bundle)
    for ref in manifest.files.all():
        (out / ref.path).hardlink_to((bundle / ref.path).resolve())
    for ref in (params, words):
        (out / ref.path).hardlink_to(out.parent / ref.path)
    files = dataclasses.replace(manifest.files, params=params, tokenizer=(words,))
    text = manifests.dumps(dataclasses.replace(manifest, files=files))
    (out / manifests.FILE_NAME).write_text(text)
    return out


def spread(values: Sequence[float], scale: float = 1.0) -> str:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles([v * scale for v in values], n=4)
    return f"{middle:.3g} ({low:.3g}-{high:.3g})"


class Rig:
    """An engine on a bundle, every slot busy."""

    def __init__(self, bundle: Path) -> None:
        self.manifest = manifests.load(bundle)
        self.device: Any = Timed(Module.open(bundle, self.manifest))
        self.words = Tokenizer((bundle / "tokenizer.json").read_text())
        self.engine: Any = None

    def fill(self, sampling: SamplingParams) -> None:
        """Give every slot a request that never ends, past its prefill."""
        session = Session(self.device, self.manifest)
        self.engine = Engine(session, self.manifest)
        for slot in range(session.slots):
            request = Request((slot + 1, 5, 9), 1 << 20, sampling, ignore_eos=True)
            self.engine.submit(request, Text(self.words))
        while any(view.phase != "decode" for view in self.engine.snapshot().slots):
            self.engine.step()
        self.engine.step()

    def steps(self, count: int) -> list[tuple[float, float]]:
        """(whole, device) seconds of `count` steps."""
        found = []
        for _ in range(count):
            before, begun = self.device.seconds, time.perf_counter()
            self.engine.step()
            found.append((time.perf_counter() - begun, self.device.seconds - before))
        return found


def overhead(bundle: Path, steps: int) -> list[dict[str, str]]:
    """Rows of the overhead table, kinds of sampling interleaved."""
    rigs = {name: Rig(bundle) for name in KINDS}
    for name, rig in rigs.items():
        rig.fill(KINDS[name])
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in KINDS}
    for _ in range(5):
        for name, rig in rigs.items():
            found[name] += rig.steps(max(1, steps // 5))
    rows = []
    for name, times in found.items():
        host = [whole - device for whole, device in times]
        share = statistics.median(host) / statistics.median(whole for whole, _ in times)
        device = spread([device for _, device in times], 1e3)
        rows.append(
            {
                "sampling": name,
                "device call": device,
                "everything else": spread(host, 1e3),
                "share": f"{share:.1%}",
            }
        )
    return rows


def throughput(bundles: dict[int, Path], rounds: int) -> list[dict[str, str]]:
    """Rows of the throughput table: tokens a second of decode, rounds interleaved."""
    rigs = {slots: Rig(bundle) for slots, bundle in bundles.items()}
    for rig in rigs.values():
        rig.fill(SamplingParams())
    rates: dict[int, list[float]] = {slots: [] for slots in rigs}
    for _ in range(rounds):
        for slots, rig in rigs.items():
            whole = statistics.median(whole for whole, _ in rig.steps(5))
            rates[slots].append(slots / whole)
    first = min(rigs)
    rows = []
    for slots, found in rates.items():
        ratios = [a / b for a, b in zip(found, rates[first], strict=True)]
        step = spread([slots / rate for rate in found], 1e3)
        rows.append(
            {
                "slots": str(slots),
                "step ms": step,
                "tokens/s": spread(found),
                f"ratio to {first}": spread(ratios),
            }
        )
    return rows


def first_token(bundle: Path, rounds: int) -> list[dict[str, str]]:
    """Rows of the time-to-first-token table: milliseconds from the start of a process."""
    parts: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        begun = time.monotonic()
        command = [sys.executable, "-c", CHILD, str(bundle)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        if number:  # the first run warms the page cache
            for name, at in json.loads(done.stdout):
                parts.setdefault(name, []).append(at - begun)
                begun = at if name != "total" else begun
            parts.setdefault("total", []).append(
                sum(v[-1] for k, v in parts.items() if k != "total")
            )
    whole = statistics.median(parts["total"])
    return [
        {"part": name, "ms": spread(v, 1e3), "share": f"{statistics.median(v) / whole:.0%}"}
        for name, v in parts.items()
    ]


def main() -> None:
    """Build, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="mamba2-130m")
    parser.add_argument("--weights", nargs="+", default=["f32", "bf16"])
    parser.add_argument("--slots", nargs="+", type=int, default=[1, 2, 4, 8, 16])
    parser.add_argument("--chunk", type=int, default=32)
    parser.add_argument("--target", default="cpu")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--builds", type=Path, default=ROOT)
    args = parser.parse_args()
    print(describe(machine()))
    for weights in args.weights:
        with tempfile.TemporaryDirectory(dir=args.builds) as folder:
            bundles = furnished(args, weights, Path(folder))
            largest = 8 if 8 in bundles else max(bundles)
            print(f"\n{args.model} {weights}, {args.target}: a decode step of {largest} slots, ms")
            print(table(overhead(bundles[largest], 100)))
            print("\ndecode, greedy, every slot busy")
            print(table(throughput(bundles, args.rounds)))
            print("\nfirst token of a 32-token prompt, ms from the start of the process")
            print(table(first_token(bundles[min(bundles)], args.rounds)))


def furnished(args: argparse.Namespace, weights: str, folder: Path) -> dict[int, Path]:
    """The bundles by slots, built and furnished under `folder`."""
    tokenizer(folder / "tokenizer.json")
    words_ref, params_ref = reference(folder / "tokenizer.json"), None
    found = {}
    for slots in args.slots:
        words = [f"model={args.model}", f"target={args.target}", f"weights={weights}"]
        words += [f"shape=b{slots}-p{args.chunk}", "params=none"]
        bundle = build(words, args.builds)
        if params_ref is None:
            write_archive(manifests.load(bundle).params, 0, folder / "params.irpa")
            params_ref = reference(folder / "params.irpa")
        found[slots] = furnish(bundle, params_ref, words_ref, folder / f"b{slots}")
    return found


if __name__ == "__main__":
    main()
