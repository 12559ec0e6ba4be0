"""Emit and compile full-size models from their shapes alone, and print what the build log says.

    python benchmarks/fullsize.py                      the largest of each family; the depth series
    python benchmarks/fullsize.py --models mamba2-2.7b --targets cpu --depths

Each row is one `doit build … params=none proof=none` from an empty cache: wall seconds and peak
resident memory of the emitting process and of the compiler, sizes of the text and of the module.
The depth series is one model at 24, 48 and 64 layers.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from builds import ROOT, build, describe, machine, stages, table

MODELS = (
    "mamba2-2.7b",
    "mamba-codestral-7b",
    "falcon-mamba-7b",
    "nemotron-3-super-120b-a12b",
    "jamba-1.7-large",
    "falcon-h1-34b",
    "plamo-2-8b",
)
TARGETS = ("cuda-sm121", "cpu")
DEPTHS = (24, 48, 64)
DEPTH_MODEL = "mamba2-2.7b"


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Raw)
    parser.add_argument("--models", nargs="*", default=MODELS, metavar="NAME")
    parser.add_argument("--targets", nargs="+", default=TARGETS, metavar="NAME")
    parser.add_argument("--weights", nargs="+", default=["bf16"], metavar="TYPE")
    parser.add_argument(
        "--shape",
        default="b4-p32+256",
        help="default: b4-p32+256, with -c4096 for models with a KV cache",
    )
    parser.add_argument("--depths", nargs="*", type=int, default=DEPTHS, metavar="LAYERS")
    return parser.parse_args()


class _Raw(argparse.RawDescriptionHelpFormatter):
    pass


def recipe_of_depth(layers: int, directory: Path) -> Path:
    """A copy of the `DEPTH_MODEL` recipe with another number of layers."""
    path = ROOT / "recipes" / "models" / f"{DEPTH_MODEL}.yaml"
    content: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    content["config"]["num_hidden_layers"] = layers
    out = directory / f"{DEPTH_MODEL}-{layers}-layers.yaml"
    out.write_text(yaml.safe_dump(content), encoding="utf-8")
    return out


def jobs(args: argparse.Namespace, directory: Path) -> Iterator[tuple[str, str, str]]:
    """(model word, target, weight type) of each row."""
    recipes = [str(recipe_of_depth(layers, directory)) for layers in args.depths]
    for model in [*args.models, *recipes]:
        for target in args.targets:
            for weights in args.weights:
                yield model, target, weights


def measure(model: str, target: str, weights: str, shape: str, directory: Path) -> dict[str, Any]:
    """Build one from an empty cache; a row of the table."""
    with tempfile.TemporaryDirectory(dir=directory) as cache:
        words = [f"model={model}", f"target={target}", f"weights={weights}", f"shape={shape}"]
        bundle = build([*words, "params=none", "proof=none"], directory, Path(cache))
        log = stages(bundle)
    emit, compiled = log["emit"], log["compile"]
    text = sum(size for name, size in emit["outputs"].items() if name.endswith(".mlir"))
    return {
        "model": bundle.parents[1].name,
        "target": target,
        "weights": weights,
        "shape": shape,
        "emit s": f"{emit['process_seconds']:.1f}",
        "emit MB": f"{emit['peak_rss_bytes'] / 1e6:.0f}",
        "text MB": f"{text / 1e6:.2f}",
        "compile s": f"{compiled['seconds']:.1f}",
        "compile MB": f"{compiled['peak_rss_bytes'] / 1e6:.0f}",
        "module MB": f"{compiled['outputs']['model.vmfb'] / 1e6:.2f}",
    }


def main() -> None:
    """Print the machine, then a row as each build ends, then the table."""
    args = arguments()
    print(describe(machine()), flush=True)
    rows = []
    with tempfile.TemporaryDirectory(prefix="fullsize-") as home:
        directory = Path(home)
        for model, target, weights in jobs(args, directory):
            rows.append(measure(model, target, weights, args.shape, directory))
            print(", ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    print(f"\n{table(rows)}")


if __name__ == "__main__":
    main()
