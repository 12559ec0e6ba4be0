"""Real builds in a directory of their own: `doit` as a user runs it, a cache, and what it did.

Every Python process of a build writes one line when it ends: the top-level modules it had imported
and the programs it had started. It gets there by a `sitecustomize` on PYTHONPATH.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.numpy

from artifacts.store import Store
from runtime import manifest as manifest_file
from runtime.manifest import Manifest

ROOT = Path(__file__).resolve().parent.parent
CHECKPOINT = Path(__file__).parent / "data" / "mamba2" / "checkpoint"
SHAPE = "b2-p8"
ENTRIES = ("prefill_8", "decode", "seed", "extract")
HEAVY = ("jax", "jaxlib", "numpy", "iree", "ml_dtypes", "huggingface_hub", "tokenizers")

_AUDIT = """
import atexit, json, os, signal, sys

STARTS = ("subprocess.Popen", "os.posix_spawn", "os.fork", "os.forkpty", "os.exec", "os.system")
CHANGES = ("os.rename", "os.link", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.chmod")
started, changed = [], 0
kill_at = int(os.environ.pop("TEST_KILL_AT", "0"))


def seen(event, args):
    global changed
    if event in STARTS:
        started.append([event, [str(a) for a in args[1]] if event == "subprocess.Popen" else []])
    elif kill_at and (event in CHANGES or (event == "open" and writes(args))) and inside(args):
        changed += 1
        if changed == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)


def inside(args):
    return any(str(a).startswith("build") or "work/build" in str(a) for a in args)


def writes(args):
    path, mode, flags = args
    if isinstance(flags, int) and flags & os.O_ACCMODE != os.O_RDONLY:
        return True
    return isinstance(mode, str) and any(c in mode for c in "wax+")


def told():
    line = {
        "pid": os.getpid(),
        "argv": sys.argv,
        "modules": sorted(set(sys.modules)),
        "started": started,
    }
    fd = os.open(os.environ["TEST_AUDIT"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(fd, (json.dumps(line) + "\\n").encode())
    os.close(fd)


atexit.register(told)
sys.addaudithook(seen)
"""


@dataclass(frozen=True)
class Done:
    """A finished command: its exit code and output, and its Python processes, the first last."""

    code: int
    out: str
    err: str
    processes: list[dict[str, Any]] = field(default_factory=list)

    @property
    def errors(self) -> list[str]:
        """The `error: …` lines of stderr."""
        return [line for line in self.err.splitlines() if line.startswith("error: ")]

    @property
    def ran(self) -> set[str]:
        """The tasks that doit ran (its `.  name` lines; `-- name` is one that was up to date)."""
        return {line[3:] for line in self.err.splitlines() if line.startswith(".  ")}

    @property
    def started(self) -> list[str]:
        """Command lines of the programs that any process of the command started."""
        return [" ".join(argv) for process in self.processes for _, argv in process["started"]]


@dataclass(frozen=True)
class Place:
    """A working directory with a cache and a checkpoint named `tiny`."""

    home: Path

    @classmethod
    def new(cls, home: Path) -> Place:
        """An empty cache, no build, the tiny checkpoint."""
        (home / "work").mkdir(parents=True)
        (home / "audit").mkdir()
        (home / "audit" / "sitecustomize.py").write_text(_AUDIT)
        shutil.copytree(CHECKPOINT, home / "work" / "tiny")
        return cls(home)

    def copy(self, home: Path, build: bool = True) -> Place:
        """A copy with files of its own; the links between build/ and the cache stay links."""
        subprocess.run(["cp", "-a", self.home, home], check=True)
        other = Place(home)
        if not build:
            shutil.rmtree(other.build)
        return other

    @property
    def work(self) -> Path:
        return self.home / "work"

    @property
    def build(self) -> Path:
        return self.work / "build"

    @property
    def cache(self) -> Path:
        return self.home / "cache"

    @property
    def bundle(self) -> Path:
        """Of the words that `doit` adds."""
        return self.build / "tiny" / "cpu" / SHAPE

    def env(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        """This environment with the place's cache and the audit, without the user's settings."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SCANWRIGHT_", "HF_"))}
        return {
            **kept,
            "SCANWRIGHT_CACHE": str(self.cache),
            "PYTHONPATH": os.pathsep.join([str(self.home / "audit"), str(ROOT)]),
            "TEST_AUDIT": str(self.home / "audit.jsonl"),
            "HF_HUB_OFFLINE": "1",
            **(extra or {}),
        }

    def argv(self, task: str, *words: str) -> list[str]:
        """The command line of `doit task words`; for model, target and shape there are defaults."""
        given = {word.partition("=")[0] for word in words}
        own = {"model": "tiny", "target": "cpu", "shape": SHAPE}
        rest = [f"{k}={v}" for k, v in own.items() if k not in given]
        dodo = ["-f", str(ROOT / "dodo.py"), "-d", str(self.work)]
        return [sys.executable, "-m", "doit", *dodo, task, *words, *rest]

    def doit(self, task: str, *words: str, env: Mapping[str, str] | None = None) -> Done:
        """Run `doit task words` to its end."""
        return self.run(self.argv(task, *words), env)

    def scanwright(self, *argv: str | Path) -> Done:
        """Run the runtime's command line."""
        return self.run([sys.executable, "-m", "runtime", *map(str, argv)])

    def run(self, argv: list[str], env: Mapping[str, str] | None = None) -> Done:
        """Run a command in the working directory to its end."""
        log = self.home / "audit.jsonl"
        log.unlink(missing_ok=True)
        done = subprocess.run(
            argv,
            cwd=self.work,
            env=self.env(env),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=600,
        )
        lines = log.read_text().splitlines() if log.exists() else []
        return Done(done.returncode, done.stdout, done.stderr, [json.loads(x) for x in lines])

    def built(self, *words: str, env: Mapping[str, str] | None = None) -> Done:
        """`doit build words`, which must end well."""
        done = self.doit("build", *words, env=env)
        assert done.code == 0, done.err
        return done

    def start(self, *words: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """`doit build words` in the background, the leader of a process group."""
        return subprocess.Popen(
            self.argv("build", *words),
            cwd=self.work,
            env=self.env(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    @property
    def store(self) -> Store:
        return Store(self.cache)

    def blob(self, stage: str, name: str) -> Path:
        """The cached file `name` of the one result of `stage`."""
        found = [self.store.peek(key) for key in self.store.recent_keys()]
        paths = {
            self.store.path(record.outputs[name])
            for record in found
            if record is not None and record.stage == stage
        }
        assert len(paths) == 1, paths
        return paths.pop()

    def scale_weights(self, factor: float) -> None:
        """Other weights, the same config."""
        path = self.work / "tiny" / "model.safetensors"
        tensors = safetensors.numpy.load_file(path)
        scaled = {name: (t * factor).astype(t.dtype) for name, t in tensors.items()}
        path.unlink()
        safetensors.numpy.save_file(scaled, path, {"format": "pt"})


@functools.cache
def _cold(base: Path) -> tuple[Place, Done]:
    place = Place.new(base / "cold")
    return place, place.built()


def cold(base: Path) -> tuple[Place, Done]:
    """The place of one cold build and how it went; made once a session, to be copied only."""
    return _cold(base)


def contents(directory: Path) -> dict[str, str]:
    """Relative path → sha256 of every file under `directory` but the build logs."""
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name != "build.log.jsonl"
    }


def log_rows(bundle: Path) -> list[dict[str, Any]]:
    """The rows of the bundle's build log."""
    return [json.loads(line) for line in (bundle / "build.log.jsonl").read_text().splitlines()]


def bundles(build: Path) -> Iterator[Path]:
    """Every directory under `build`, also the hidden ones, that would open as a bundle."""
    if build.exists():
        yield from (path.parent for path in build.rglob("manifest.json"))


def assert_right(bundle: Path) -> Manifest:
    """The bundle opens, is proven, and every byte of it is what its manifest says."""
    manifest = manifest_file.load(bundle)
    refs = manifest.files.all()
    assert manifest.files.params and manifest.files.reference and manifest.files.sbom
    for ref in refs:
        data = (bundle / ref.path).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (ref.size, ref.sha256), ref.path
    assert (manifest.proof.status, manifest.proof.reason) == ("passed", None)
    return manifest


def assert_no_leftovers(place: Place) -> None:
    """Nothing under build/ but bundles that are right, and nothing in the cache's scratch."""
    for bundle in bundles(place.build):
        assert_right(bundle)
        names = {path.name for path in bundle.iterdir()}
        assert names <= {"manifest.json", "model.vmfb", "params.irpa", "reference.json",
                         "sbom.cdx.json", "build.log.jsonl"}, names  # fmt: skip
    if place.build.exists():
        hidden = [path for path in place.build.rglob(".*") if path != place.build / ".lock"]
        assert hidden == []
    scratch = place.cache / "scratch"
    assert not scratch.exists() or list(scratch.iterdir()) == []
