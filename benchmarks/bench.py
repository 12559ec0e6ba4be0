"""Build bundles, bench them, and print the figures with the machine they came from.

    python benchmarks/bench.py                               the demo model and mamba2-130m on cpu
    python benchmarks/bench.py --models mamba2-130m --weights f32 bf16 --targets cpu vulkan
    python benchmarks/bench.py --bundles build/mamba2/cpu/b4-p32+256

Models other than the one that ships with the project are built from their shapes alone and run
with seeded random parameters. Every bundle is benched in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from builds import ROOT, build, describe, machine, table

SHIPPED = "mamba2"


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=[SHIPPED, "mamba2-130m"], metavar="NAME")
    parser.add_argument("--targets", nargs="+", default=["cpu"], metavar="NAME")
    parser.add_argument("--weights", nargs="+", default=["bf16"], metavar="TYPE")
    parser.add_argument("--shapes", nargs="+", default=[None], metavar="SHAPE")
    parser.add_argument("--bundles", nargs="+", type=Path, metavar="DIR", help="bench only these")
    parser.add_argument("--device", metavar="URI", help="IREE device (default: the target's)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything there")
    return parser.parse_args()


def bundles(args: argparse.Namespace) -> Iterator[Path]:
    """The bundles to bench, each built just before it is needed."""
    if args.bundles:
        yield from args.bundles
        return
    for model in args.models:
        for target in args.targets:
            for weights in args.weights:
                for shape in args.shapes:
                    words = [f"model={model}", f"target={target}", f"weights={weights}"]
                    words += [f"shape={shape}"] if shape else []
                    words += [] if model == SHIPPED else ["params=none"]
                    yield build(words, ROOT)


def bench(bundle: Path, device: str | None, rounds: int) -> dict[str, Any]:
    """What `scanwright bench --json` says of a bundle. SystemExit if it fails."""
    manifest = json.loads((bundle / "manifest.json").read_text(encoding="utf-8"))
    command = [sys.executable, "-m", "runtime", "bench", str(bundle), "--json"]
    command += ["--rounds", str(rounds)]
    command += ["--device", device] if device else []
    command += [] if manifest["files"]["params"] else ["--random-params"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{bundle}: {done.stderr.strip()}")
    return json.loads(done.stdout)


def row(found: dict[str, Any]) -> dict[str, str]:
    """One line of the table."""
    low, high = found["spread"]["decode_tokens_per_s"]
    return {
        "model": found["model"],
        "target": found["target"],
        "weights": found["weights"],
        "shape": found["shape"],
        "open ms": f"{found['open_s'] * 1e3:.1f}",
        "first token ms": f"{found['first_token_s'] * 1e3:.1f}",
        "prefill tok/s": f"{found['prefill_tokens_per_s']:.0f}",
        "decode tok/s": f"{found['decode_tokens_per_s']:.1f} ({low:.1f} … {high:.1f})",
        "GB/s": f"{found['decode_bytes_per_s'] / 1e9:.2f}",
        "weights MB/step": f"{found['weight_bytes_per_token'] / 1e6:.1f}",
        "state MB/token": f"{found['state_bytes_per_token'] / 1e6:.1f}",
        "peak MB": f"{found['peak_rss_bytes'] / 1e6:.0f}",
    }


def main() -> None:
    """Print the machine, then the table."""
    args = arguments()
    host = machine()
    print(describe(host), flush=True)
    found = [bench(bundle, args.device, args.rounds) for bundle in bundles(args)]
    print(f"\n{table([row(figures) for figures in found])}")
    print(f"\nmedians of {args.rounds} rounds; decode with its smallest and largest")
    if args.json:
        content = {"machine": host, "benches": found}
        args.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
