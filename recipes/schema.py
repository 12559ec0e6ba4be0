"""Model and target recipes: strict YAML files read into frozen dataclasses.

An unknown, missing or mistyped key is a UserError that starts with the file and line.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from recipes.shape import Shape, ShapeError
from recipes.strict import Fields, boolean, mapping, one_of, sequence, string, strings
from runtime.flags import check as check_flag

WEIGHT_TYPES = ("f32", "f16", "bf16", "int8", "int4")
RUNS_HERE = ("host", "driver", "emulator", "never")

# device -> the flags that select it, so that a recipe lists only what is its own
DEVICES: dict[str, tuple[str, ...]] = {
    "local": (
        "--iree-hal-target-device=local",
        "--iree-hal-local-target-device-backends=llvm-cpu",
    ),
    "cuda": ("--iree-hal-target-device=cuda",),
    "vulkan": ("--iree-hal-target-device=vulkan",),
    "metal": ("--iree-hal-target-device=metal",),
    "hip": ("--iree-hal-target-device=hip",),
}
LOCKS = Path(__file__).resolve().parent / "locks"
HUB_SOURCE = re.compile(r"hf:[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
URIS = ("local-task", "local-sync", "cuda", "vulkan", "metal", "hip")


@dataclass(frozen=True)
class ModelRecipe:
    """A checkpoint, the weight type to build it with and the batch shapes it is compiled for.

    `source` is what a manifest may say (`hf:org/name` or `dir:NAME`, never an absolute path);
    `location` is what to fetch. `weights` is one of WEIGHT_TYPES, or "auto" for a checkpoint
    without a recipe: its own type, known once it is opened. `config`, where given, is a
    transformers config with `model_type`, enough to build the graphs without the checkpoint.
    The first of `shapes` is the default. `lock` is where the digests of a download are kept.
    """

    name: str
    about: str
    family: str | None
    source: str
    revision: str | None
    weights: str
    shapes: tuple[str, ...]
    config: dict[str, Any] | None
    path: Path | None
    license: str | None
    directory: Path | None
    lock: Path

    @property
    def location(self) -> str:
        """`hf:org/name`, or `dir:` and the absolute path of the checkpoint directory."""
        return self.source if self.directory is None else f"dir:{self.directory}"


@dataclass(frozen=True)
class TargetRecipe:
    """What to compile for and how.

    `flags` are all iree-compile flags except those of the CPU model (see `cpu`); `safe_flags` are
    whole replacements, tried in order after a failed proof. `weights` are the supported types and
    `substitute` says what each other type is converted to. `cpu` (device "local" only) is "host"
    or an LLVM CPU name; `triple` is that CPU's target triple, None for the host's. With `kernels`
    (a CPU only) what has a C kernel is compiled to a call of it.
    """

    name: str
    about: str
    device: str
    uri: str
    flags: tuple[str, ...]
    safe_flags: tuple[tuple[str, ...], ...]
    weights: tuple[str, ...]
    substitute: dict[str, str]
    runs_here: str
    cpu: str | None
    triple: str | None
    kernels: bool


def load_model(path: Path) -> ModelRecipe:
    """The model recipe in the YAML file `path`; its name is the file's. Raises UserError."""
    fields = Fields(path)
    family = fields.take("family", string, None)
    source = fields.take("source", string)
    revision = fields.take("revision", string, None)
    config = fields.take("config", mapping, None)
    recipe = ModelRecipe(
        name=path.stem,
        about=fields.take("about", string),
        family=family,
        source=source,
        revision=revision,
        weights=fields.take("weights", one_of(WEIGHT_TYPES)),
        shapes=fields.take("shapes", shapes),
        config=None if config is None else {"model_type": family, **config},
        path=path.resolve(),
        license=fields.take("license", string, None),
        directory=None,
        lock=lock_path(path),
    )
    fields.finish()
    if config is not None and family is None:
        raise fields.fail_key("config", "needs the key family, the config's model_type")
    if config is not None and config.get("model_type", family) != family:
        found = config["model_type"]
        raise fields.fail_key(
            "config", f"model_type is {found!r} and family {family!r}: make them equal"
        )
    if source.startswith("dir:") and len(source) > len("dir:"):
        if revision is not None:
            raise fields.fail_key("revision", "only a hf: source has revisions: remove it")
        directory = (path.resolve().parent / source.removeprefix("dir:")).resolve()
        return replace(recipe, source=f"dir:{directory.name}", directory=directory)
    if not HUB_SOURCE.fullmatch(source):
        raise fields.fail_key("source", f"{source!r}: expected hf:ORG/NAME or dir:PATH")
    return recipe


def lock_path(recipe: Path) -> Path:
    """Where the digests of what `recipe` downloads are kept: recipes/locks/, or beside it."""
    path = recipe.resolve()
    home = LOCKS if path.is_relative_to(LOCKS.parent) else path.parent
    return home / f"{path.stem}.lock.json"


def load_target(path: Path) -> TargetRecipe:
    """The target recipe in the YAML file `path`; its name is the file's. Raises UserError."""
    fields = Fields(path)
    device = fields.take("device", one_of(DEVICES))
    select = DEVICES[device]
    recipe = TargetRecipe(
        name=path.stem,
        about=fields.take("about", string),
        device=device,
        uri=fields.take("uri", one_of(URIS)),
        flags=select + fields.take("flags", flag_list),
        safe_flags=tuple(select + flags for flags in fields.take("safe_flags", flag_lists, ())),
        weights=fields.take("weights", weight_types),
        substitute=fields.take("substitute", mapping, {}),
        runs_here=fields.take("runs_here", one_of(RUNS_HERE)),
        cpu=fields.take("cpu", string, None),
        triple=fields.take("triple", string, None),
        kernels=fields.take("kernels", boolean, False),
    )
    fields.finish()
    _check_target(fields, recipe)
    return recipe


def _check_target(fields: Fields, recipe: TargetRecipe) -> None:
    local = recipe.device == "local"
    if local != (recipe.cpu is not None):
        fault = (
            "missing: name an LLVM CPU, or host" if local else "only for device local: remove it"
        )
        raise fields.fail_key("cpu", fault)
    if recipe.kernels and not local:
        raise fields.fail_key("kernels", "only for device local: remove it")
    if (recipe.triple is not None) != (local and recipe.cpu != "host"):
        fault = "only for a named CPU: remove it" if recipe.triple else "missing for a named CPU"
        raise fields.fail_key("triple", fault)
    if recipe.uri.startswith("local-") != local or not (local or recipe.uri == recipe.device):
        raise fields.fail_key("uri", f"{recipe.uri!r} is no URI of device {recipe.device!r}")
    for kind in WEIGHT_TYPES:
        used = recipe.substitute.get(kind)
        if (used is None) == (kind not in recipe.weights):
            raise fields.fail_key(
                "substitute", f"{kind} must be in exactly one of weights, substitute"
            )
        if used is not None and used not in recipe.weights:
            raise fields.fail_key(
                "substitute", f"{kind}: {used!r} is not one of this target's weights"
            )
    for kind in recipe.substitute:
        if kind not in WEIGHT_TYPES:
            raise fields.fail_key(
                "substitute", f"{kind!r}: expected one of {', '.join(WEIGHT_TYPES)}"
            )


def weight_types(fields: Fields, key: str, node: yaml.Node) -> tuple[str, ...]:
    """A list of distinct weight types, at least one."""
    read = one_of(WEIGHT_TYPES)
    found = tuple(read(fields, name, item) for name, item in sequence(fields, key, node))
    if not found or len(set(found)) != len(found):
        raise fields.fail(node, f"{key}: expected distinct types out of {', '.join(WEIGHT_TYPES)}")
    return found


def flag_lists(fields: Fields, key: str, node: yaml.Node) -> tuple[tuple[str, ...], ...]:
    """A list of flag lists."""
    return tuple(flag_list(fields, name, item) for name, item in sequence(fields, key, node))


def shapes(fields: Fields, key: str, node: yaml.Node) -> tuple[str, ...]:
    found: list[str] = []
    for name, item in sequence(fields, key, node):
        word = string(fields, name, item)
        try:
            canonical = Shape.parse(word).name
        except ShapeError as error:
            raise fields.fail(item, f"{name}: {error}") from error
        if canonical != word:
            raise fields.fail(item, f"{name}: shape {word!r}: write it as {canonical!r}")
        if word in found:
            raise fields.fail(item, f"{name}: shape {word!r} is listed twice: remove one")
        found.append(word)
    if not found:
        raise fields.fail(node, f"{key}: the list is empty: name at least the default shape")
    return tuple(found)


def flag_list(fields: Fields, key: str, node: yaml.Node) -> tuple[str, ...]:
    """iree-compile flags; those that the schema derives itself are refused."""
    flags = strings(fields, key, node)
    for (_, item), flag in zip(sequence(fields, key, node), flags, strict=True):
        try:
            check_flag(flag)
        except ValueError as error:
            raise fields.fail(item, f"{key}: {error}") from error
        if re.match(r"--iree-(hal-(local-)?target-|llvmcpu-target-(cpu|triple))", flag):
            raise fields.fail(item, f"{key}: {flag!r}: set by the keys device, cpu and triple")
    return flags
