"""Make a pack: all that run.sh needs on a machine with a GPU and no network, in one folder.

    python benchmarks/gpu/prepare.py --python 3.12
    python benchmarks/gpu/prepare.py --target vulkan --models mamba2-130m=f32 --out build/gpu-vulkan

Builds the demo bundle and the weight-free bundles for one target, downloads the wheels for the
other machine's Python, and lays them beside the runtime package. Then, there: bash run.sh
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from builds import ROOT, build  # noqa: E402

LIMIT_BYTES = 60_000_000
DEMO = "mamba2"
PROMPT = "In the beginning"
MODELS = ("mamba2-130m=f32", "mamba2-130m=bf16", "mamba2-2.7b=f32", "mamba2-2.7b=bf16")
SCRIPTS = ("run.sh", "drive.py", "measure.py", "kernels.py")
PACKAGES = ("iree-base-runtime", "ml-dtypes", "numpy", "safetensors", "tokenizers")
CUPTI = "nvidia-cuda-cupti>=13.0,<13.1"  # of CUDA 13.0: newer ones refuse older drivers
TRACERS = "iree/_runtime_libs_tracy/"
PLATFORMS = tuple(f"manylinux{tag}" for tag in ("_2_28", "_2_27", "_2_25", "_2_17", "2014"))


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", default="3.12", help="of the other machine (default: 3.12)")
    parser.add_argument("--machine", default="x86_64", choices=["x86_64", "aarch64"])
    parser.add_argument("--target", default="cuda-sm90", help="default: cuda-sm90")
    parser.add_argument("--demo", default=DEMO, metavar="NAME[=TYPE[=SHAPE]]")
    parser.add_argument("--models", nargs="*", default=MODELS, metavar="NAME[=TYPE[=SHAPE]]")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu")
    parser.add_argument(
        "--no-wheels", action="store_true", help="the other machine has the runtime's packages"
    )
    return parser.parse_args()


def lay_bundle(spec: str, target: str, extra: Iterable[str], out: Path) -> Path:
    """Build NAME[=TYPE[=SHAPE]] and copy the bundle (not its log) into `out`; returns the copy."""
    model, weights, shape = (*spec.split("="), "", "")[:3]
    given = {"model": model, "target": target, "weights": weights, "shape": shape}
    words = [f"{word}={value}" for word, value in given.items() if value]
    with tempfile.TemporaryDirectory(prefix="pack-") as directory:
        bundle = build([*words, *extra], Path(directory))
        name = "-".join(filter(None, (Path(model).name, weights, shape)))
        shutil.copytree(bundle, out / name, ignore=shutil.ignore_patterns("build.log.jsonl"))
    print(f"built {name}", flush=True)
    return out / name


def download(python: str, machine: str, requirements: Iterable[str], out: Path) -> None:
    """Wheels of these packages, without what they need, for another machine's Python."""
    platforms = [f"--platform={name}_{machine}" for name in PLATFORMS]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--implementation=cp", f"--python-version={python}"]
    subprocess.run([*command, *platforms, "--dest", str(out), *requirements], check=True)


def lay_wheels(python: str, machine: str, out: Path) -> None:
    """The runtime's packages; IREE in the version that compiled the bundles, without its tracers.

    They are unpacked, not installed, there, so what is left out of a wheel is not missed.
    """
    version = metadata.version("iree-base-compiler")
    pinned = [f"{name}=={version}" if name.startswith("iree") else name for name in PACKAGES]
    download(python, machine, pinned, out)
    (wheel,) = out.glob("iree_base_runtime-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        kept = [name for name in archive.namelist() if not name.startswith(TRACERS)]
        repack(archive, {name: name for name in kept}, wheel.with_suffix(".zip"))
    wheel.unlink()


def lay_cupti(machine: str, out: Path) -> None:
    """The one library that lists a GPU's kernels, for machines that have no CUDA toolkit."""
    with tempfile.TemporaryDirectory() as directory:
        download("3.12", machine, [CUPTI], Path(directory))
        (wheel,) = Path(directory).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (name,) = (n for n in archive.namelist() if "/libcupti.so." in n)
            repack(archive, {name: f"lib/{Path(name).name}"}, out / "cupti.zip")


def repack(archive: zipfile.ZipFile, names: dict[str, str], out: Path) -> None:
    """Copy some members of an archive, old name → new name, into a new one."""
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as slim:
        for old, new in names.items():
            slim.writestr(new, archive.read(old))


def lay_code(out: Path) -> None:
    """The runtime package and the scripts."""
    shutil.copytree(ROOT / "runtime", out / "runtime", ignore=shutil.ignore_patterns("__pycache__"))
    for name in SCRIPTS:
        shutil.copy2(HERE / name, out / name)


def sizes(out: Path) -> dict[str, int]:
    """Bytes of each entry of the folder."""
    found = {}
    for entry in sorted(out.iterdir()):
        files = [entry] if entry.is_file() else [p for p in entry.rglob("*") if p.is_file()]
        found[entry.name] = sum(path.stat().st_size for path in files)
    return found


def main() -> int:
    """Make the pack; 1 if it is too big to carry."""
    args = arguments()
    out: Path = args.out
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    bundles = out / "bundles"
    demo = lay_bundle(args.demo, args.target, [], bundles)
    benched = [lay_bundle(spec, args.target, ["params=none"], bundles) for spec in args.models]
    manifest = json.loads((demo / "manifest.json").read_text(encoding="utf-8"))
    if not args.no_wheels:
        lay_wheels(args.python, args.machine, out / "wheels")
    if manifest["target"]["device"] == "cuda" and not args.no_wheels:
        lay_cupti(args.machine, out / "wheels")
    lay_code(out)
    plan = {
        "python": args.python,
        "device": manifest["target"]["uri"],
        "verify": demo.name,
        "prompt": PROMPT if manifest["files"]["tokenizer"] else None,
        "bench": [bundle.name for bundle in benched],
    }
    (out / "pack.json").write_text(json.dumps(plan, indent=1) + "\n", encoding="utf-8")
    found = sizes(out)
    total = sum(found.values())
    print(f"{out}: {total / 1e6:.1f} MB")
    for name, size in found.items():
        print(f"  {size / 1e6:>6.1f} MB {name}")
    if total > LIMIT_BYTES:
        print(f"error: {out}: {total} bytes, expected at most {LIMIT_BYTES}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
