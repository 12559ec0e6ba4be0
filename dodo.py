"""doit build model=mamba2 target=cuda-sm121 [shape=b4-p32+256] [weights=bf16] [params=none]

Wires stages to tasks. Stages, their keys and their results are in `artifacts/`; words become
recipes in `recipes/`. doit's own database is kept in memory: the action cache says what is done,
also after a kill and to several builds at once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

from doit import get_var
from doit.reporter import ConsoleReporter

from artifacts import gc, merge, plan
from artifacts.job import Job
from artifacts.looking import Looking
from artifacts.remote import from_environment
from artifacts.store import Store, default_root
from recipes import resolve, select
from runtime.errors import UserError, quiet_interrupt, report
from runtime.manifest import load

BUILD = Path("build")
WORDS = ("model", "target", "shape", "weights", "params", "proof", "max_size", "device",
         "bundle", "key", "to", "plain_http", "scheduler", "workers")  # fmt: skip
MANY = ("matrix", "farm")  # the tasks whose words may select several triples
NO_PROOF = {"name": "no_proof", "long": "no-proof", "type": bool, "default": False}
NO_PROOF["help"] = "do not compare the module with JAX; the manifest says so"


class Reporter(ConsoleReporter):
    """doit's progress on stderr, so that stdout is the tasks' own; a failure is one line."""

    def __init__(self, outstream: Any, options: dict[str, Any]) -> None:
        super().__init__(sys.stderr, options)

    def add_failure(self, task: Any, fail: Any) -> None:
        """A task that returned False has told why; anything else is told here."""
        self.failures.append({"task": task, "exception": fail})
        if fail.traceback:
            print(f"error: task {task.name}: {fail.traceback[-1].strip()}", file=sys.stderr)
        if fail.traceback and os.environ.get("SCANWRIGHT_DEBUG") == "1":
            print("".join(fail.traceback), file=sys.stderr)

    def complete_run(self) -> None:
        """Nothing to add."""


DOIT_CONFIG = {"default_tasks": ["build"], "reporter": Reporter, "verbosity": 2}
DOIT_CONFIG |= {"backend": "sqlite3", "dep_file": ":memory:"}


def make_job(given: dict[str, str | None]) -> Job:
    """The job that the words ask for. UserError for any that names nothing."""
    return Job(**select.parts(given, proof="--no-proof" not in sys.argv))


def make_jobs(given: dict[str, str | None]) -> list[Job]:
    """A job for each target: target=A,B is one bundle for both."""
    words = (given["target"] or resolve.DEFAULT_TARGET).split(",")
    if len(set(words)) != len(words):
        raise UserError(f"target={given['target']}: a target is named twice: name each once")
    jobs = [make_job({**given, "target": word}) for word in words]
    if len({job.target.name for job in jobs}) != len(jobs):
        raise UserError(f"target={given['target']}: two targets of one name: rename one's file")
    merge.check_jobs(jobs)
    return jobs


def place(jobs: list[Job]) -> Path:
    """The bundle of these jobs."""
    if len(jobs) == 1:
        return jobs[0].bundle(BUILD)
    names = [job.target.name for job in jobs]
    return merge.place(BUILD, jobs[0].model.name, names, jobs[0].shape.name)


quiet_interrupt()
try:
    resolve.check_words(sys.argv[1:], WORDS)
    GIVEN = {word: get_var(word, None) for word in WORDS}
    SEVERAL = select.several(GIVEN) and any(task in sys.argv for task in MANY)
    JOBS = make_jobs(GIVEN | select.triples(GIVEN)[0] if SEVERAL else GIVEN)
    JOB = JOBS[0]
    BUNDLE = place(JOBS)
except UserError as error:
    sys.exit(report(error))


def only_one_build() -> None:
    """UserError where the words select several."""
    if SEVERAL:
        raise UserError(f"the words select several builds; only {' and '.join(MANY)} take them")


@cache
def builder() -> plan.Plan:
    """The stages of this run. UserError where the words select several."""
    only_one_build()
    return plan.Plan(Store(default_root(), remote=from_environment()), JOB, BUILD)


@cache
def builders() -> list[plan.Plan]:
    """The stages of every target; those of the first are `builder`'s."""
    store = Store(default_root(), remote=from_environment())
    return [builder(), *(plan.Plan(store, job, BUILD) for job in JOBS[1:])]


def run_stage(name: str) -> None:
    """Run a stage for every target; then `bundle` makes one of their bundles."""
    for one in builders():
        one.run(name)
    if name == "bundle" and len(JOBS) > 1:
        merge.merge([job.bundle(BUILD) for job in JOBS], BUILD)


def action(function: Callable[[], object]) -> Callable[[], bool]:
    """`function` as a doit action: False fails the task, and so does a UserError, in one line."""

    def run() -> bool:
        try:
            return function() is not False
        except UserError as error:
            report(error)
            return False

    return run


def command(*argv: str | Path) -> bool:
    """Run a program of this environment, which tells why if it fails; whether it ended well."""
    return subprocess.run([sys.executable, "-m", *map(str, argv)], check=False).returncode == 0


def ready(name: str) -> bool:
    """Whether the stage is done; what keeps it from being looked up is told when it runs."""
    try:
        merged = name == "bundle" and len(JOBS) > 1  # cheap, and looks at every byte
        return not merged and all(one.ready(name) for one in builders())
    except UserError:
        return False


def task_stages():
    """One task a stage, up to date when all its results are in the cache."""
    for name, before, doc in (
        ("fetch", [], "download or find the checkpoint and check it against its lock"),
        ("convert", ["fetch"], "checkpoint to canonical parameters in one aligned archive"),
        ("emit", ["fetch"], "config and shape to one StableHLO module an entry point"),
        ("compile", ["convert", "emit"], "compile the linked module and prove it against JAX"),
        ("bundle", ["compile"], "put the bundle together under build/MODEL/TARGET/SHAPE"),
    ):
        yield {
            "basename": name,
            "actions": [action(partial(run_stage, name))],
            "uptodate": [partial(ready, name)],
            "task_dep": before,
            "params": [NO_PROOF],
            "doc": doc,
        }


def task_build():
    """all of it: model=NAME|YAML|DIR|hf:ORG/NAME[@REV] target= [shape=] [weights=] [params=none]"""

    def show() -> None:
        print(f"bundle: {BUNDLE}")
        found = load(BUNDLE)
        for target, proof in zip(found.targets, found.proofs, strict=True):
            name = f"{target.name}: " if found.alternatives else ""
            why = f" ({proof.reason})" if proof.reason else ""
            check = ", check it there: scanwright verify" if proof.status == "not-run" else ""
            print(f"proof: {name}{proof.status}{why}{check}", file=sys.stderr)
        if not any(one.made for one in builders()):
            print("cached: no input changed, no stage had to run", file=sys.stderr)

    return {"actions": [action(show)], "task_dep": ["bundle"], "params": [NO_PROOF]}


def task_runtime():
    """What `scanwright` does, on the bundle that the words name."""
    device = ["--device", GIVEN["device"]] if GIVEN["device"] else []
    made_up = [] if JOB.params else ["--random-params"]
    keep = ["--save", BUILD / "results"]  # where the report looks
    for name, options, doc in (
        ("inspect", [], "say what the bundle is"),
        (
            "verify",
            [*device, *keep],
            "check digests and run the reference on a device [device=URI]",
        ),
        ("bench", [*device, *keep, *made_up], "measure the bundle on a device [device=URI]"),
    ):
        run = partial(command, "runtime", name, BUNDLE, *options)
        yield {"basename": name, "actions": [action(run)], "task_dep": ["bundle"], "doc": doc}


def task_demo():
    """build the model that ships with the project, and let it write"""
    prompt = "In the beginning"
    options = ("--max-tokens", "120", "--temperature", "0.7", "--top-p", "0.9", "--seed", "1")

    def run() -> bool:
        print(f"bundle: {BUNDLE}\n\n{prompt}", end="", flush=True)
        return command("runtime", "generate", BUNDLE, "--prompt", prompt, *options)

    return {"actions": [action(run)], "task_dep": ["bundle"]}


def task_explain():
    """say of every stage whether it is cached and which input made it run"""

    def show() -> None:
        for job, one in zip(JOBS, builders(), strict=True):
            if len(JOBS) > 1:
                print(f"target {job.target.name}")
            print("\n".join(one.explain()))

    return {"actions": [action(show)]}


def task_reproduce():
    """make a bundle again from its manifest alone, and compare every file: bundle=DIR [model=]"""

    def find(name: str) -> Any:
        return JOB.model if GIVEN["model"] else resolve.resolve_model(name)

    def run() -> bool:
        from artifacts import reproduce

        rows = []
        for row in reproduce.reproduce(named_bundle("reproduce"), find):
            print(row, flush=True)
            rows.append(row)
        different = sum(not row.same for row in rows)
        print(f"reproduce: {different} of {len(rows)} files differ" if different else "reproduced")
        return not different

    return {"actions": [action(run)]}


def task_sign():
    """sign a bundle with an EC key, for scanwright verify --trust: bundle=DIR key=PEM"""

    def run() -> None:
        from runtime import trust

        bundle = named_bundle("sign")
        if not GIVEN["key"]:
            raise UserError("key: missing, expected doit sign bundle=DIR key=PEM")
        print(f"signed: {trust.sign(bundle, Path(GIVEN['key']))}")

    return {"actions": [action(run)]}


def named_bundle(task: str) -> Path:
    """The directory after bundle=. UserError without the word."""
    if not GIVEN["bundle"]:
        raise UserError(f"bundle: missing, expected doit {task} bundle=DIR")
    return Path(GIVEN["bundle"])


def task_plan():
    """say what a build would run, why, how big it gets and how long it takes; run nothing"""

    def show() -> None:
        from artifacts import estimate

        only_one_build()
        with Looking(default_root(), remote=from_environment()) as cache:
            for job in JOBS:
                print("\n".join(estimate.report(plan.Plan(cache, job, BUILD), cache)))
        if len(JOBS) > 1:
            print("what several targets have in common runs once; their bundle only links files")

    return {"actions": [action(show)]}


def task_matrix():
    """JSON of recipe triples, for a CI matrix [model=NAME,PATTERN,… target= shape=]"""
    return {"actions": [action(lambda: print(json.dumps(select.triples(GIVEN))))]}


def task_farm():
    """compile all that model=, target= and shape= select on a Dask cluster [scheduler=tcp://…]"""

    def run() -> bool:
        from artifacts.farm import Farm  # the extra `farm`

        workers = GIVEN["workers"]
        if workers is not None and not (workers.isdecimal() and int(workers) > 0):
            raise UserError(f"workers={workers}: expected a number of processes, 1 or more")
        chosen = {"model": GIVEN["model"] or resolve.DEFAULT_MODEL}
        chosen |= {"target": GIVEN["target"] or resolve.DEFAULT_TARGET, "shape": GIVEN["shape"]}
        fixed = {word: GIVEN[word] for word in ("weights", "params", "proof")}
        words = [fixed | select.absolute(row) for row in select.triples(chosen)]
        proof = "--no-proof" not in sys.argv
        store = Store(default_root(), remote=from_environment())
        farm = Farm(store, words, select.parts, proof)
        good = farm.run(GIVEN["scheduler"], workers and int(workers))
        print("\n".join(farm.table()))
        return good

    return {"actions": [action(run)], "params": [NO_PROOF]}


def task_report():
    """one page about all bundles in build/: sizes, state, times, parity, speed"""
    peers = Path(__file__).resolve().parent / "benchmarks" / "peers.json"

    def run() -> None:
        from artifacts.report import write

        print(write(BUILD, peers))

    return {"actions": [action(run)]}


def task_gc():
    """bound the cache [max_size=10G], oldest first, never what a bundle in build/ uses"""
    size = GIVEN["max_size"] or "10G"
    collect = partial(gc.collect, build_dir=BUILD)
    run = action(lambda: print(collect(Store(default_root()), gc.parse_size(size))))
    return {"actions": [run]}


def task_push():
    """bring a bundle elsewhere: bundle=DIR to=oci://HOST/NAME:TAG|hf://ORG/NAME|s3://…|DIR"""

    def run() -> None:
        from artifacts import push

        plain = GIVEN["plain_http"] not in (None, "", "0")
        print(push.push(Path(GIVEN["bundle"] or BUNDLE), GIVEN["to"], plain))

    return {"actions": [action(run)]}


def task_pack():
    """write a bundle to one tar file, the same bytes each time: bundle=DIR to=FILE.tar"""

    def run() -> None:
        from artifacts import push

        print(push.pack(Path(GIVEN["bundle"] or BUNDLE), GIVEN["to"]))

    return {"actions": [action(run)]}


def task_test():
    """the tests that need no network and no GPU"""
    side_by_side = ("-n", "auto", "--maxprocesses", "4")
    return {"actions": [action(partial(command, "pytest", *side_by_side))]}


def task_lint():
    """ruff and pyright"""
    types = ("pyright", "--pythonpath", sys.executable)  # the environment need not be active
    checks = (("ruff", "check", "."), ("ruff", "format", "--check", "."), types)
    return {"actions": [action(partial(command, *check)) for check in checks]}
