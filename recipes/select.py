"""Words of the command line to the parts of one job, and words with patterns to many triples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from recipes import resolve
from recipes.strict import nearest
from runtime.errors import UserError

PATTERN = frozenset("*?[")
Words = Mapping[str, str | None]


def parts(words: Words, *, proof: bool = True) -> dict[str, Any]:
    """The fields of a job that model=, target=, shape=, weights= and params= ask for.

    `words` need not have them all; `proof` False, or proof=none, leaves the proof out. Raises
    UserError for a word that names nothing, before any work.
    """
    model = resolve.resolve_model(words.get("model"))
    target = resolve.resolve_target(words.get("target"))
    shape = resolve.resolve_shape(words.get("shape"), model)
    for name in ("params", "proof"):
        if words.get(name) not in (None, "none"):
            raise UserError(f"{name}={words[name]}: expected none, or leave the word out")
    weights = resolve.weight_chooser(words.get("weights"), model, target)
    weights(None)  # a wrong type is refused before any work
    return {
        "model": model,
        "target": target,
        "shape": shape,
        "weights": weights,
        "params": words.get("params") is None,
        "proof": proof and words.get("proof") is None,
        "kernels": target.kernels,
    }


def several(words: Words) -> bool:
    """Whether model=, target= or shape= is a list or a pattern, which names more than one."""
    return any(_is_several(words.get(name)) for name in ("model", "target", "shape"))


def _is_several(word: str | None) -> bool:
    return word is not None and ("," in word or not PATTERN.isdisjoint(word))


def triples(words: Words) -> list[dict[str, str]]:
    """Every (model, target, shape) that the words select, sorted as the recipes are; no doubles.

    Each word is a list with commas of names and of patterns such as `mamba2-*`, which are matched
    with the recipes' names; without it, all that ship with the project. A model may also be a path
    or `hf:ORG/NAME`; a shape that is no pattern need not be one that the recipe lists. Raises
    UserError for a name or pattern that selects nothing.
    """
    models = _chosen("model", words.get("model"), resolve.names("models"))
    targets = _chosen("target", words.get("target"), resolve.names("targets"))
    for target in targets:
        resolve.resolve_target(target)
    shapes = {model: list(_shapes(model, words.get("shape"))) for model in models}
    found = dict.fromkeys((m, t, s) for m in models for t in targets for s in shapes[m])
    if not found:
        raise UserError(f"shape={words.get('shape')}: no shape of {', '.join(models[:5])} matches")
    return [dict(zip(("model", "target", "shape"), triple, strict=True)) for triple in found]


def absolute(row: Mapping[str, str]) -> dict[str, str]:
    """The triple with paths that hold in another directory, for a process that runs elsewhere."""
    found = dict(row)
    for word, kind in (("model", "models"), ("target", "targets")):
        if row[word] not in resolve.names(kind) and not row[word].startswith("hf:"):
            found[word] = str(Path(row[word]).expanduser().resolve())
    return found


def _chosen(word: str, value: str | None, names: list[str]) -> list[str]:
    if value is None:
        return names
    found: dict[str, None] = {}
    for name in value.split(","):
        matching = [name]
        if not PATTERN.isdisjoint(name):
            matching = [known for known in names if fnmatchcase(known, name)]
            if not matching:
                raise UserError(f"{word}={name}: matches no recipe: {nearest(name, names)}")
        found |= dict.fromkeys(matching)
    return list(found)


def _shapes(model: str, value: str | None) -> Iterable[str]:
    recipe = resolve.resolve_model(model)
    if value is None:
        return recipe.shapes
    found: list[str] = []
    for name in value.split(","):
        if PATTERN.isdisjoint(name):
            found.append(resolve.resolve_shape(name, recipe).name)
        else:
            found += [shape for shape in recipe.shapes if fnmatchcase(shape, name)]
    return found
