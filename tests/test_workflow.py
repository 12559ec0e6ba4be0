"""docs/bundles.yml: read strictly, its conditions evaluated, its steps run as a runner would."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import building
import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "docs" / "bundles.yml"
EXPRESSION = re.compile(r"\$\{\{\s*(.*?)\s*\}\}")
CONTEXTS = ("github", "matrix", "needs", "secrets", "steps", "vars")
OWN = {
    "event_name": "push",
    "ref": "refs/heads/main",
    "ref_name": "main",
    "event": {"repository": {"default_branch": "main"}},
}
FORKED = {"repository": {"default_branch": "main"}, "pull_request": {"head": {"repo": {"fork": 1}}}}


class Strict(yaml.BaseLoader):
    """Every scalar a string, as a runner reads `on`; doubled keys and aliases are refused."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        assert not self.check_event(yaml.AliasEvent), "an alias"
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        assert len(set(keys)) == len(keys), f"a key twice: {keys}"
        return super().construct_mapping(node, deep)


def read(text: str | None = None) -> dict[str, Any]:
    return yaml.load(text or FILE.read_text(encoding="utf-8"), Loader=Strict)


def evaluate(expression: str, contexts: Mapping[str, Any]) -> Any:
    """The value of what stands in `${{ }}`: names, strings, `&& || ! == !=` and two functions."""

    def look(path: str) -> Any:
        place: Any = contexts
        for name in path.split("."):
            place = place.get(name, "") if isinstance(place, Mapping) else ""
        return place

    parts = re.split(r"('[^']*')", expression)  # text, string, text, …
    for at in range(0, len(parts), 2):
        part = re.sub(r"!(?!=)", " not ", parts[at].replace("&&", " and ").replace("||", " or "))
        parts[at] = re.sub(r"\b\w+(?:\.\w+)+", lambda m: f"look({m[0]!r})", part)
    code = "".join(parts).strip()
    names = {"look": look, "fromJSON": json.loads, "hashFiles": lambda pattern: "h"}
    return eval(code, {"__builtins__": {}}, names)


def filled(value: str, contexts: Mapping[str, Any]) -> Any:
    """`value` with its expressions evaluated; one that is nothing else keeps its type."""
    whole = EXPRESSION.fullmatch(value)
    if whole:
        return evaluate(whole[1], contexts)
    return EXPRESSION.sub(lambda match: str(evaluate(match[1], contexts)), value)


def strings(value: Any) -> list[str]:
    """Every string inside."""
    if isinstance(value, Mapping):
        return [text for item in value.values() for text in strings(item)]
    if isinstance(value, list):
        return [text for item in value for text in strings(item)]
    return [value]


def problems(flow: dict[str, Any]) -> list[str]:
    """What a runner would refuse, and what should not be."""
    found: list[str] = []

    def keys(what: str, given: Mapping[str, Any], known: str) -> None:
        found.extend(f"{what}: key {name}" for name in given.keys() - set(known.split()))

    keys("top", flow, "name on permissions concurrency defaults env jobs")
    if flow.get("permissions") != {"contents": "read"}:
        found.append("permissions")
    job_keys = "if needs runs-on timeout-minutes outputs strategy env steps"
    for name, job in flow["jobs"].items():
        keys(name, job, job_keys)
        if "if" not in job and job.get("needs") not in flow["jobs"]:
            found.append(f"{name}: runs without a condition")
        for step in job["steps"]:
            keys(name, step, "name id uses with env run")
            if ("uses" in step) == ("run" in step):
                found.append(f"{name}: a step that is not one of uses and run")
            if not re.fullmatch(r"[\w-]+/[\w-]+@v\d+", step.get("uses", "a/b@v1")):
                found.append(f"{name}: {step['uses']}: no version")
            if "${{" in step.get("run", ""):  # text of others would become part of a command
                found.append(f"{name}: an expression in a command")
    for text in strings(flow):
        for expression in EXPRESSION.findall(text):
            outside = re.sub(r"'[^']*'", "", expression)
            for path in re.findall(r"(?<![.\w])(\w+)\.\w", outside):
                if path not in CONTEXTS:
                    found.append(f"{expression}: context {path}")
            if "secrets." in expression and text not in strings(flow["jobs"]["build"]["env"]):
                found.append(f"{expression}: a secret outside the job that builds")
    return found


def test_it_is_what_a_runner_takes() -> None:
    assert problems(read()) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("contents: read", "contents: write"),
        ("    runs-on: ubuntu-latest", "    run-on: ubuntu-latest"),
        ('inspect "build/$MODEL', 'inspect "build/${{ matrix.model }}'),
        ("actions/checkout@v4", "actions/checkout@main"),
        ("    needs: matrix\n", ""),
        ("vars.SCANWRIGHT_REMOTE }}", "secrets.SCANWRIGHT_REMOTE }}"),
        ("matrix.shape }}\n      AWS", "matrx.shape }}\n      AWS"),
    ],
)
def test_a_planted_fault_is_found(old: str, new: str) -> None:
    text = FILE.read_text(encoding="utf-8")
    assert old in text and problems(read(text.replace(old, new)))


def test_a_key_twice_is_found() -> None:
    with pytest.raises(AssertionError, match="twice"):
        read("name: a\nname: b\n")


def test_who_may_run_and_who_may_write() -> None:
    flow = read()
    condition, write = flow["jobs"]["matrix"]["if"], flow["env"]["SCANWRIGHT_REMOTE_WRITE"]
    remote = {"SCANWRIGHT_REMOTE": "s3://b/c"}
    branch = OWN | {"ref_name": "topic"}
    pull = OWN | {"event_name": "pull_request"}
    for github, variables, runs, writes in (
        (OWN, remote, True, "1"),
        (branch, remote, True, ""),
        (pull, remote, True, ""),  # a branch of the repository that is called as the default one
        (pull | {"event": FORKED}, remote, False, ""),
        (OWN, {}, False, "1"),  # a fork: it has no variables, so its jobs are skipped
    ):
        contexts = {"github": github, "vars": variables}
        assert bool(filled(condition, contexts)) is runs, github
        assert filled(write, contexts) == writes, github


# The steps, run ----------------------------------------------------------------------------------


def checkout(place: Path) -> Path:
    """A clean working copy whose only model is a tiny one."""
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("artifacts", "emit", "recipes", "runtime"):
        shutil.copytree(ROOT / name, place / name, ignore=ignored)
    for name in ("dodo.py", "pyproject.toml"):
        shutil.copy(ROOT / name, place / name)
    models = place / "recipes" / "models"
    shutil.copytree(building.CHECKPOINT, models / "tiny")
    text = "about: tiny\nfamily: mamba2\nsource: dir:tiny\nweights: f32\nshapes: [b1-p8]\n"
    (models / "tiny.yaml").write_text(text)
    return place


def tools(place: Path) -> Path:
    """A directory with the programs that the step `Install` would bring."""
    place.mkdir()
    for name, module in (("doit", "doit"), ("scanwright", "runtime")):
        path = place / name
        path.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m {module} "$@"\n')
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return place


class Runner:
    """Runs the jobs of the workflow in a clean working copy, as pushed to the default branch."""

    def __init__(self, home: Path, settings: Mapping[str, str]) -> None:
        self.work, self.bin = checkout(home / "work"), tools(home / "bin")
        self.files, self.flow = home, read()
        variables = {"BUNDLE_MODEL": "tin*", "BUNDLE_TARGET": "cuda-sm9*", **settings}
        self.contexts: dict[str, Any] = {"github": OWN, "vars": variables, "steps": {}}
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SCANWRIGHT_", "HF_"))}
        self.environment = kept | {
            "PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(self.work),
            "HF_HUB_OFFLINE": "1",
            "HOME": str(home),  # so the cache is a new one, too
        }

    def job(self, name: str, extra: Mapping[str, Any] | None = None) -> dict[str, str]:
        """Run the steps of a job that are commands; what each wrote, by the step's name."""
        job, said = self.flow["jobs"][name], {}
        contexts = self.contexts | dict(extra or {})
        for step in job["steps"]:
            if "run" not in step or step["name"] == "Install":
                continue
            given = self.flow["env"] | job.get("env", {}) | step.get("env", {})
            output = self.files / "output"
            output.write_text("")
            environment = self.environment | {k: str(filled(v, contexts)) for k, v in given.items()}
            environment |= {"GITHUB_OUTPUT": str(output), "GITHUB_STEP_SUMMARY": os.devnull}
            done = subprocess.run(
                ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
                cwd=self.work, env=environment, capture_output=True, text=True,
                stdin=subprocess.DEVNULL, timeout=300,
            )  # fmt: skip
            assert done.returncode == 0, (step["name"], done.stdout, done.stderr)
            said[step["name"]] = done.stdout + done.stderr
            if "id" in step:
                lines = [line.split("=", 1) for line in output.read_text().splitlines()]
                contexts["steps"][step["id"]] = {"outputs": dict(lines)}
        return said

    def triples(self) -> list[dict[str, str]]:
        """What the job `matrix` chooses, as the matrix of the job `build` gets it."""
        self.job("matrix")
        outputs = self.flow["jobs"]["matrix"]["outputs"]
        needs = {"matrix": {"outputs": {k: filled(v, self.contexts) for k, v in outputs.items()}}}
        return filled(self.flow["jobs"]["build"]["strategy"]["matrix"]["include"], {"needs": needs})


@pytest.mark.iree
@pytest.mark.slow
def test_its_steps_build_once_and_are_then_cached(tmp_path: Path) -> None:
    remote = tmp_path / "remote"
    remote.mkdir()
    settings = {"SCANWRIGHT_REMOTE": str(remote), "SCANWRIGHT_REMOTE_WEIGHTS": "1"}
    digests = []
    for turn in ("first", "second"):
        runner = Runner(tmp_path / turn, settings)
        (triple,) = runner.triples()
        assert triple == {"model": "tiny", "target": "cuda-sm90", "shape": "b1-p8"}
        began = time.monotonic()
        said = runner.job("build", {"matrix": triple})
        seconds = time.monotonic() - began
        built = building.contents(runner.work / "build")
        assert "tiny/cuda-sm90/b1-p8/model.vmfb" in built
        digests.append(built)
        assert "proof" in said["Check"]
        assert ("cached: no input changed" in said["Build"]) is (turn == "second"), said["Build"]
        assert ("compile: will run" in said["Plan"]) is (turn == "first"), said["Plan"]
    assert seconds < 30
    assert digests[0] == digests[1]
