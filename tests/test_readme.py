"""The README says what is: its commands, tables and file tree are compared with the project.

(The support table is compared in test_recipes.)
"""

from __future__ import annotations

import dataclasses
import fnmatch
import importlib
import re
import shlex
import shutil
import subprocess
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from recipes import resolve, select
from runtime import cli
from runtime.manifest import (
    FileRef,
    Manifest,
    Proof,
    StateSpec,
    TargetInfo,
    TensorSpec,
    expected_functions,
)
from runtime.reference import Reference

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PACKAGES = ("artifacts", "emit", "recipes", "runtime")
SETUP = "python3.11 -m venv .venv && .venv/bin/pip install -q -e '.[{}]' && .venv/bin/doit {}"


def section(title: str) -> str:
    """The text under a heading, down to the next one of any level."""
    found = re.search(rf"^#+ {re.escape(title)}\n(.*?)(?=^#+ |\Z)", README, re.M | re.S)
    assert found, title
    return found[1]


def blocks(language: str) -> list[str]:
    """Code blocks of `language` ("" for those without)."""
    return [b for lang, b in re.findall(r"^```(\w*)\n(.*?)^```$", README, re.M | re.S)
            if lang == language]  # fmt: skip


def rows(text: str) -> list[list[str]]:
    """Cells of the table rows below a table's head."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def quoted(text: str) -> list[str]:
    """What stands between backticks."""
    return re.findall(r"`([^`]+)`", text)


# Commands ----------------------------------------------------------------------------------------


def commands() -> list[list[str]]:
    """Every command of the shell blocks as words, comments left out, `&&` split."""
    found = []
    for line in "".join(blocks("sh")).splitlines():
        words = shlex.split(line, comments=True)
        while "&&" in words:
            place = words.index("&&")
            found.append(words[:place])
            words = words[place + 1 :]
        if words:
            found.append(words)
    return [[Path(words[0]).name, *words[1:]] for words in found]


@pytest.fixture(scope="module")
def tasks() -> set[str]:
    """What `doit list` names."""
    done = subprocess.run(
        [sys.executable, "-m", "doit", "list", "-q"],
        cwd=ROOT, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    return {line.split()[0] for line in done.stdout.splitlines() if line}


def doit_problem(words: list[str], tasks: set[str]) -> str | None:
    """What is wrong with the arguments of a doit command."""
    if not words or words[0] not in tasks | {"list"}:
        return f"no task {words[:1]}"
    given = dict(word.split("=", 1) for word in words[1:] if "=" in word)
    for word in words[1:]:
        if "=" not in word and (word != "--no-proof" or words[0] not in ("compile", "build")):
            return f"no option {word}"
    accepted = re.search(r"^WORDS = \(([^)]*)\)", (ROOT / "dodo.py").read_text(), re.M)
    assert accepted
    if wrong := set(given) - set(re.findall(r'"(\w+)"', accepted[1])):
        return f"no words {wrong}"
    if words[0] in ("farm", "matrix"):
        given |= select.triples(given)[0]
    model = resolve.resolve_model(given.get("model"))
    resolve.resolve_shape(given.get("shape"), model)
    for word in given.get("target", resolve.DEFAULT_TARGET).split(","):
        target = resolve.resolve_target(word)
        resolve.resolve_weights(given.get("weights"), model, target)
    return None if given.get("params", "none") == "none" else "params"


def parse_scanwright(words: list[str]) -> None:
    """Parse a scanwright command; SystemExit if its parser refuses it."""
    module = importlib.import_module(cli.COMMANDS[words[0]][0])
    parser = cli.Parser(words[0], "")
    module.add_arguments(parser)
    parser.parse_args(words[1:])


def test_both_commands_do_all_their_set_up() -> None:
    lines = "".join(blocks("sh")).splitlines()
    for extras, task in (("build", "demo"), ("build,serve,test", "test")):
        assert lines.count(SETUP.format(extras, task)) == 1
        assert README.splitlines().count(SETUP.format(extras, task)) == 1  # .ci/run greps for it


def test_ci_runs_the_commands_of_the_readme() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    for extras, task in (("build", "demo"), ("build,serve,test", "test")):
        assert f"$(readme {task})" in script
        found = subprocess.run(
            ["bash", "-c", f"{readme_function(script)}; readme {task}"],
            cwd=ROOT, capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert found.stdout == SETUP.format(extras, task) + "\n"


def readme_function(script: str) -> str:
    """The shell function of .ci/run that finds a command in the README."""
    (line,) = (line for line in script.splitlines() if line.startswith("readme() "))
    return line


def test_every_command_is_one_the_project_has(tasks: set[str]) -> None:
    seen = {"doit": 0, "scanwright": 0}
    for program, *words in commands():
        if program == "doit":
            assert doit_problem(words, tasks) is None, words
        elif program == "scanwright":
            parse_scanwright(words)
        else:
            assert program in ("python3.11", "pip", "curl", "dask"), program
            continue
        seen[program] += 1
    assert min(seen.values()) > 4


@pytest.mark.parametrize(
    "line", ["buidl", "build modle=mamba2", "build --fast", "list --no-proof", "build params=some"]
)
def test_a_wrong_doit_command_would_be_found(line: str, tasks: set[str]) -> None:
    assert doit_problem(line.split(), tasks)


def test_a_wrong_scanwright_command_would_be_found(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["verify", "b", "--prompt", "x"], ["generate", "b"], ["bench"]):
        with pytest.raises(SystemExit):
            parse_scanwright(words)
    assert capsys.readouterr().err.count("error: ") == 3


def test_every_task_and_command_is_mentioned(tasks: set[str]) -> None:
    told = set(re.findall(r"\w+", section("Use") + section("Errors, environment, tests")))
    assert tasks | set(cli.COMMANDS) <= told


def test_flags_in_the_text_exist() -> None:
    own = {"--no-proof", "--out"}  # of `doit build`, of `python -m emit pth`
    for module_name, _ in cli.COMMANDS.values():
        parser = cli.Parser("", "")
        importlib.import_module(module_name).add_arguments(parser)
        own |= set(parser._option_string_actions)
    text = re.sub(r"^```.*?^```$", "", README, flags=re.M | re.S)
    assert set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text)) <= own


def test_python_scripts_of_the_text_exist() -> None:
    for module in re.findall(r"python -m ([\w.]+)", README):
        parts = ROOT / Path(*module.split("."))
        assert parts.with_suffix(".py").is_file() or (parts / "__main__.py").is_file(), module
    for path in re.findall(
        r"`?(?:python )?((?:benchmarks|tests|recipes|emit)/[\w/.-]+\.\w+)", README
    ):
        assert (ROOT / path).is_file(), path


# Files of a bundle -------------------------------------------------------------------------------


def leaves(cls: type, prefix: str = "") -> Iterator[str]:
    """Dotted names of the fields of a dataclass and of those inside it, as the tables have them."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        yield from named(hints[field.name], prefix + field.name)


def named(kind: Any, name: str) -> Iterator[str]:
    """The names below a field `name` of type `kind`."""
    origin, inside = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        (kind,) = (k for k in inside if k is not type(None))
        yield from named(kind, name)
    elif origin is dict:
        yield from named(inside[1], f"{name}.*")
    elif origin is tuple and dataclasses.is_dataclass(inside[0]):
        yield from named(inside[0], f"{name}[]")
    elif kind in (FileRef, TensorSpec):
        yield name
    elif kind in (TargetInfo, Proof) and name.startswith("alternatives[]"):
        yield name  # as told of the first target
    elif dataclasses.is_dataclass(kind) and isinstance(kind, type):
        yield from leaves(kind, f"{name}.")
    else:
        yield name


def first_cells(title: str) -> list[str]:
    return [name for row in rows(section(title)) for name in quoted(row[0])]


def test_the_manifest_table_has_every_key_once() -> None:
    keys = [*leaves(Manifest), *leaves(FileRef, "file."), *leaves(TensorSpec, "tensor.")]
    assert sorted(first_cells("The manifest")) == sorted(keys)


def test_the_reference_table_has_every_key_once() -> None:
    assert sorted(first_cells("The reference")) == sorted(leaves(Reference))


def test_the_calling_convention_is_the_one_manifests_are_checked_against() -> None:
    letters = {7: "V", 3: "B", 5: "P", 1: "1"}  # sizes that stand for the letters
    state = (
        StateSpec("fixed", "f32", (1, 11), 0, "fixed"),
        StateSpec("kv", "f32", (1, 11), 0, "per_position"),
    )

    def word(tensor: TensorSpec) -> str:
        if tensor.name.endswith(("fixed", "kv")):
            return tensor.name + letters[tensor.shape[0]]
        return f"{tensor.name} {tensor.dtype}[{','.join(letters[n] for n in tensor.shape)}]"

    def words(tensors: tuple[TensorSpec, ...]) -> str:
        """Both kinds of state, one after the other, are the state."""
        text = ", ".join(map(word, tensors))
        return re.sub(r"((?:out|new)\.|)fixed(.), \1kv\2", r"\1state\2", text)

    want = [
        [f"`{name.replace('5', '<P>')}`", words(spec.inputs), words(spec.outputs)]
        for name, spec in expected_functions(7, 3, (5,), state).items()
    ]
    assert rows(section("Calling convention")) == want


# File tree ---------------------------------------------------------------------------------------


def tracked() -> set[str]:
    """Files of the project: what git knows, or without git all that .gitignore lets through."""
    if shutil.which("git") and (ROOT / ".git").exists():
        done = subprocess.run(
            ["git", "-c", f"safe.directory={ROOT}", "ls-files", "-z"],
            cwd=ROOT, capture_output=True, text=True, check=True,
        )  # fmt: skip
        return set(filter(None, done.stdout.split("\0")))
    ignored = [line.strip("/") for line in (ROOT / ".gitignore").read_text().split()]
    found = set()
    for path in ROOT.rglob("*"):
        parts = path.relative_to(ROOT).parts
        if ".git" not in parts and path.is_file():
            if not any(fnmatch.fnmatch(part, glob) for part in parts for glob in ignored):
                found.add("/".join(parts))
    return found


def tree() -> list[str]:
    """Paths of the file tree; a directory ends in /."""
    (block,) = (b for b in blocks("") if "dodo.py  " in b)
    found, top = [], ""
    for line in block.splitlines():
        indent, name, about = re.fullmatch(r"( *)(\S+) +(\S.*)", line).groups()  # type: ignore[union-attr]
        assert about
        if not indent:
            top = name
        found.append(top + name if indent else name)
    return found


def test_the_file_tree_is_complete_and_nothing_else() -> None:
    files = tracked()
    top = {f"{path.split('/')[0]}/" if "/" in path else path for path in files}
    modules = {
        path
        for path in files
        if path.split("/")[0] in PACKAGES and path.endswith(".py") and "__init__" not in path
    }
    data = {path for path in modules if path.startswith("recipes/models/")}
    folders = {"recipes/models/", "recipes/targets/", "recipes/locks/"}
    assert sorted(tree()) == sorted(top | (modules - data) | folders)
