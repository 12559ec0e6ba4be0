"""Words of the command line to recipes: model=, target=, shape=, weights=."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from recipes.schema import (
    HUB_SOURCE,
    LOCKS,
    WEIGHT_TYPES,
    ModelRecipe,
    Shape,
    TargetRecipe,
    load_model,
    load_target,
)
from recipes.shape import ShapeError
from recipes.strict import nearest
from runtime.errors import UserError

HOME = Path(__file__).resolve().parent
DEFAULT_MODEL = "mamba2"
DEFAULT_TARGET = "cpu"
DEFAULT_SHAPE = "b1-p32+256"  # of a checkpoint without a recipe
_LATER_PART = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$")


def names(kind: str) -> list[str]:
    """Sorted recipe names of `kind`, "models" or "targets"."""
    return sorted(path.stem for path in (HOME / kind).glob("*.yaml"))


def check_words(arguments: Iterable[str], known: Iterable[str]) -> None:
    """UserError for a `name=value` among the `arguments` whose name is not one of `known`."""
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if equals and not argument.startswith("-") and name not in known:
            raise UserError(f"{argument}: no such word: {nearest(name, known)}")


def resolve_model(word: str | None) -> ModelRecipe:
    """The model named by `word`: recipe name, YAML path, checkpoint or hf:org/name[@rev].

    A checkpoint is a directory or a GGUF file. A recipe name wins over a directory of the same name
    (`./NAME` is the directory). Raises UserError with the nearest names.
    """
    word = DEFAULT_MODEL if word is None else word
    if word.startswith("hf:"):
        return _from_hub(word)
    if word in names("models"):
        return load_model(HOME / "models" / f"{word}.yaml")
    path = Path(word).expanduser()
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise UserError(f"model={word}: no such file: give a recipe YAML that exists")
        return load_model(path)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise UserError(f"model={word}: no such file: give a GGUF file that exists")
        return _from_gguf(path)
    if word and path.is_dir():
        return _from_directory(word, path)
    raise UserError(
        f"model={word}: no recipe or directory of that name: {nearest(word, names('models'))}"
        " (or a YAML path, a checkpoint directory, a GGUF file, hf:ORG/NAME[@REVISION])"
    )


def resolve_target(word: str | None) -> TargetRecipe:
    """The target named by `word`: recipe name or YAML path. Raises UserError with nearest names."""
    word = DEFAULT_TARGET if word is None else word
    if word in names("targets"):
        return load_target(HOME / "targets" / f"{word}.yaml")
    path = Path(word).expanduser()
    if path.suffix in (".yaml", ".yml") and path.is_file():
        return load_target(path)
    raise UserError(f"target={word}: no such target: {nearest(word, names('targets'))}")


def resolve_shape(word: str | None, model: ModelRecipe) -> Shape:
    """The shape named by `word`, the model's default for None. Raises UserError."""
    try:
        return Shape.parse(model.shapes[0] if word is None else word)
    except ShapeError as error:
        raise UserError(
            f"shape={word}: {error}; {model.name} lists {', '.join(model.shapes)}"
        ) from error


def resolve_weights(
    word: str | None, model: ModelRecipe, target: TargetRecipe
) -> tuple[str, str | None]:
    """(weight type to build, notice): `word`, or the model's own type for None.

    Where the target lacks the type, the substitute its recipe names is returned with a line that
    says so. "auto" (a checkpoint without a recipe) comes back as it is: ask again with the
    checkpoint's type once that is known. Raises UserError.
    """
    kind = model.weights if word is None else word
    if kind == "auto":
        return kind, None
    if kind not in WEIGHT_TYPES:
        raise UserError(f"weights={kind}: no such weight type: {nearest(kind, WEIGHT_TYPES)}")
    if kind in target.weights:
        return kind, None
    used = target.substitute[kind]
    return used, f"target {target.name} has no {kind} weights: converting to {used} instead"


def weight_chooser(
    word: str | None, model: ModelRecipe, target: TargetRecipe
) -> Callable[[str | None], str]:
    """A function from the checkpoint's own type (None if it is not known) to the type to build.

    It returns "auto" where that is needed and not known, and says once on stderr what the target
    uses instead of a type that it lacks.
    """

    @functools.cache
    def choose(own: str | None) -> str:
        kind, notice = resolve_weights(word, model, target)
        if kind == "auto" and own is not None:
            kind, notice = resolve_weights(own, model, target)
        if notice:
            print(notice, file=sys.stderr)
        return kind

    return choose


def every_model() -> Iterable[ModelRecipe]:
    """The model recipes that ship with the project, by name."""
    return (resolve_model(name) for name in names("models"))


def every_target() -> Iterable[TargetRecipe]:
    """The target recipes that ship with the project, by name."""
    return (resolve_target(name) for name in names("targets"))


def _from_hub(word: str) -> ModelRecipe:
    source, at, revision = word.partition("@")
    if not HUB_SOURCE.fullmatch(source) or (at and not re.fullmatch(r"[\w./-]+", revision)):
        raise UserError(f"model={word}: expected hf:ORG/NAME or hf:ORG/NAME@REVISION")
    # the name holds organisation and revision, so that no two words share a bundle or a lock
    name = _file_name(
        source.removeprefix("hf:").replace("/", "--") + (f"--{revision}" if at else "")
    )
    return _bare(name, source, revision or None, None)


def _from_directory(word: str, path: Path) -> ModelRecipe:
    directory = path.resolve()
    if not any(directory.glob("*.safetensors*")):
        found = sorted(p for p in directory.glob("*.gguf") if not _LATER_PART.search(p.name))
        if len(found) == 1:
            return _from_gguf(found[0])
        if found:
            shown = ", ".join(p.name for p in found[:5])
            raise UserError(f"model={word}: holds {shown}: give one of these files as the model")
    if not (directory / "config.json").is_file():
        raise UserError(
            f"model={word}: {directory}/config.json is missing: give a directory that holds a "
            "transformers-layout checkpoint (config.json and *.safetensors)"
        )
    name = _file_name(directory.name)
    return _bare(name, f"dir:{name}", None, directory)


def _from_gguf(path: Path) -> ModelRecipe:
    file = path.resolve()
    return _bare(_file_name(file.stem), f"dir:{_file_name(file.name)}", None, file)


def _bare(name: str, source: str, revision: str | None, directory: Path | None) -> ModelRecipe:
    return ModelRecipe(
        name=name,
        about=f"checkpoint {source}",
        family=None,
        source=source,
        revision=revision,
        weights="auto",
        shapes=(DEFAULT_SHAPE,),
        config=None,
        path=None,
        license=None,
        directory=directory,
        lock=LOCKS / f"{name}.lock.json",
    )


def _file_name(word: str) -> str:
    """`word` as one safe path component: runs of other characters become a dash."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", word).strip(".-") or "checkpoint"
