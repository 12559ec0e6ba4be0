"""doit build model=mamba2 target=cuda-sm121 [shape=b4-p32+256] [weights=bf16] [params=none]

Wires stages to tasks. Stages, their keys and their results are in `artifacts/`; words become
recipes in `recipes/`. doit's own database is kept in memory: the action cache says what is done,
also after a kill and to several builds at once.
"""

from __future__ import annotations

import difflib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from doit import get_var
from doit.reporter import ConsoleReporter

from artifacts import gc, plan
from artifacts.job import Job, Target
from artifacts.store import Store, default_root
from recipes import resolve
from runtime.errors import UserError, report

BUILD = Path("build")
WORDS = ("model", "target", "shape", "weights", "params", "proof", "max_size", "device", "oracle")
NO_PROOF = {
    "name": "no_proof",
    "long": "no-proof",
    "type": bool,
    "default": False,
    "help": "do not compare the module with JAX; the manifest says so",
}


class Reporter(ConsoleReporter):
    """doit's progress on stderr, so that stdout is the tasks' own; a failure is one line."""

    def __init__(self, outstream: Any, options: dict[str, Any]) -> None:
        super().__init__(sys.stderr, options)

    def add_failure(self, task: Any, fail: Any) -> None:
        """A task that returned False has told why; anything else is told here."""
        self.failures.append({"task": task, "exception": fail})
        if fail.traceback:
            print(f"error: task {task.name}: {fail.traceback[-1].strip()}", file=sys.stderr)
            if os.environ.get("SCANWRIGHT_DEBUG") == "1":
                print("".join(fail.traceback), file=sys.stderr)

    def complete_run(self) -> None:
        """Nothing to add."""


DOIT_CONFIG = {
    "default_tasks": ["build"],
    "reporter": Reporter,
    "backend": "sqlite3",
    "dep_file": ":memory:",
    "verbosity": 2,
}


def words() -> dict[str, str | None]:
    """The name=value words of the command line. UserError for a name that is not one of them."""
    for word in sys.argv[1:]:
        name = word.partition("=")[0]
        if "=" in word and not word.startswith("-") and name not in WORDS:
            close = difflib.get_close_matches(name, WORDS, n=1)
            hint = f", did you mean {close[0]}=" if close else ""
            raise UserError(f"{word}: no such word{hint}; there are {', '.join(WORDS)}")
    return {name: get_var(name, None) for name in WORDS}


def make_job(given: dict[str, str | None]) -> Job:
    """The job that the words ask for. UserError for any that names nothing."""
    model = resolve.resolve_model(given["model"])
    recipe = resolve.resolve_target(given["target"])
    shape = resolve.resolve_shape(given["shape"], model)
    for name in ("params", "proof"):
        if given[name] not in (None, "none"):
            raise UserError(f"{name}={given[name]}: expected none, or leave the word out")

    @cache
    def weights(own: str | None) -> str:
        word, notice = resolve.resolve_weights(given["weights"], model, recipe)
        if word == "auto" and own is not None:
            word, notice = resolve.resolve_weights(own, model, recipe)
        if notice:
            print(notice, file=sys.stderr)
        return word

    weights(None)  # a wrong type is refused before any work
    target = Target(**{name: getattr(recipe, name) for name in Target.__dataclass_fields__})
    return Job(
        model=model.name,
        source=model.source,
        location=model.location,
        revision=model.revision,
        lock=model.lock,
        config=model.config,
        weights=weights,
        shape=shape.name,
        slots=shape.slots,
        chunks=shape.chunks,
        context=shape.context,
        target=target,
        params=given["params"] is None,
        proof=given["proof"] is None and "--no-proof" not in sys.argv,
    )


try:
    GIVEN = words()
    JOB = make_job(GIVEN)
except UserError as error:
    sys.exit(report(error))


@cache
def builder() -> plan.Plan:
    """The stages of this run."""
    return plan.Plan(Store(default_root()), JOB, BUILD)


def action(function: Callable[[], object]) -> Callable[[], bool]:
    """`function` as a doit action: a UserError is one line and fails the task."""

    def run() -> bool:
        try:
            function()
        except UserError as error:
            report(error)
            return False
        return True

    return run


def command(*argv: str | Path) -> None:
    """Run a program of this environment; UserError if it fails."""
    code = subprocess.run([sys.executable, "-m", *map(str, argv)], check=False).returncode
    if code:
        raise UserError(f"{argv[0]} {argv[1] if len(argv) > 1 else ''}: exit code {code}")


def stage(name: str, before: list[str], doc: str, **extra: Any) -> dict[str, Any]:
    """A task that is up to date when its stage's results are all in the cache."""
    return {
        "actions": [action(lambda: builder().run(name))],
        "uptodate": [lambda: builder().ready(name)],
        "task_dep": before,
        "doc": doc,
        **extra,
    }


def task_fetch():
    """download or find the checkpoint and check it against its lock"""
    return stage("fetch", [], task_fetch.__doc__ or "")


def task_convert():
    """checkpoint to canonical parameters in one aligned archive"""
    return stage("convert", ["fetch"], task_convert.__doc__ or "")


def task_emit():
    """config and shape to one StableHLO module an entry point"""
    return stage("emit", ["fetch"], task_emit.__doc__ or "")


def task_compile():
    """compile the linked module and prove every entry against JAX"""
    doc = task_compile.__doc__ or ""
    return stage("compile", ["convert", "emit"], doc, params=[NO_PROOF])


def task_bundle():
    """put the bundle together under build/MODEL/TARGET/SHAPE"""
    return stage("bundle", ["compile"], task_bundle.__doc__ or "", params=[NO_PROOF])


def task_build():
    """all of it: model=NAME|YAML|DIR|hf:ORG/NAME[@REV] target= [shape=] [weights=] [params=none]"""
    show = action(lambda: print(f"bundle: {JOB.bundle(BUILD)}"))
    return {"actions": [show], "task_dep": ["bundle"], "params": [NO_PROOF]}


def task_inspect():
    """say what the bundle is, building it if need be"""
    run = action(lambda: command("runtime", "inspect", JOB.bundle(BUILD)))
    return {"actions": [run], "task_dep": ["bundle"]}


def task_verify():
    """check the bundle's digests and run its reference on a device [device=URI]"""
    device = ["--device", GIVEN["device"]] if GIVEN["device"] else []
    run = action(lambda: command("runtime", "verify", JOB.bundle(BUILD), *device))
    return {"actions": [run], "task_dep": ["bundle"]}


def task_bench():
    """measure the bundle on a device [device=URI]"""
    options = ["--device", GIVEN["device"]] if GIVEN["device"] else []
    options += [] if JOB.params else ["--random-params"]
    run = action(lambda: command("runtime", "bench", JOB.bundle(BUILD), *options))
    return {"actions": [run], "task_dep": ["bundle"]}


def task_explain():
    """say of every stage whether it is cached and which input made it run"""
    return {"actions": [action(lambda: print("\n".join(builder().explain())))]}


def task_matrix():
    """JSON of all recipe triples, for a CI matrix"""
    return {"actions": [action(lambda: print(json.dumps(resolve.triples())))]}


def task_gc():
    """bound the cache [max_size=10G], oldest first, never what a bundle in build/ uses"""

    def run() -> None:
        size = gc.parse_size(GIVEN["max_size"] or "10G")
        print(gc.collect(Store(default_root()), size, BUILD))

    return {"actions": [action(run)]}


def task_demo():
    """build the model that ships with the project, and let it write"""
    prompt = "In the beginning"

    def run() -> None:
        print(f"bundle: {JOB.bundle(BUILD)}\n", flush=True)
        options = ("--max-tokens", "120", "--temperature", "0.7", "--top-p", "0.9", "--seed", "1")
        command("runtime", "generate", JOB.bundle(BUILD), "--prompt", prompt, *options)

    return {"actions": [action(run)], "task_dep": ["bundle"]}


def task_test():
    """the tests that need no network and no GPU"""
    return {"actions": [action(lambda: command("pytest"))]}


def task_lint():
    """ruff and pyright"""

    def run() -> None:
        command("ruff", "check", ".")
        command("ruff", "format", "--check", ".")
        command("pyright")

    return {"actions": [action(run)]}
