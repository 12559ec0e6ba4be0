"""The bundle's manifest: what is in it, how to call it, what it needs (schema 4).

This module both reads and writes manifest.json. Canonical form: sorted keys, indent 1, ASCII,
trailing newline; no times, hosts or absolute paths, so that the same inputs give the same bytes.
"""

import functools
import hashlib
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from runtime import strict
from runtime.errors import UserError
from runtime.origin import MANIFEST, UNLISTED, BuildInfo, FileRef, Package, RecipeInfo

__all__ = ["UNLISTED", "BuildInfo", "FileRef", "Package", "RecipeInfo"]

SCHEMA = 4
FILE_NAME = MANIFEST
DTYPE_BYTES = {"f32": 4, "bf16": 2, "f16": 2, "i32": 4, "i8": 1}
Dtype = Literal["f32", "bf16", "f16", "i32", "i8"]
_ADVICE = "rebuild the bundle with doit build model=… target=…"


def _twice(words: Iterable[str]) -> str | None:
    """The first word, in their order, that is there more than once."""
    return min((word for word, count in Counter(words).items() if count > 1), default=None)


def byte_size(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a dense tensor of `shape`."""
    return DTYPE_BYTES[dtype] * math.prod(shape)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, dtype and shape: an argument or result of a function."""

    name: str
    dtype: Dtype
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        _check_shape(self.name, self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return byte_size(self.dtype, self.shape)


@dataclass(frozen=True, slots=True)
class FunctionSpec:
    """Inputs and outputs in the order they were compiled in."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


@dataclass(frozen=True, slots=True)
class StateSpec:
    """One named state tensor of ONE slot: `shape[slot_axis]` is 1 and becomes B in decode."""

    name: str
    dtype: Dtype
    shape: tuple[int, ...]
    slot_axis: int
    kind: Literal["fixed", "per_position"]

    def __post_init__(self) -> None:
        _check_shape(self.name, self.shape)
        if not 0 <= self.slot_axis < len(self.shape) or self.shape[self.slot_axis] != 1:
            raise ValueError(
                f"state {self.name}: slot_axis {self.slot_axis} of shape {list(self.shape)},"
                " expected an axis of size 1"
            )

    @property
    def nbytes(self) -> int:
        """Bytes of one slot."""
        return byte_size(self.dtype, self.shape)

    def batched(self, slots: int) -> tuple[int, ...]:
        """Shape of the tensor that holds `slots` slots."""
        return (*self.shape[: self.slot_axis], slots, *self.shape[self.slot_axis + 1 :])


@dataclass(frozen=True, slots=True)
class ParamSpec(TensorSpec):
    """One parameter; random values of it are `offset + scale * standard normal`."""

    offset: float
    scale: float


@dataclass(frozen=True)
class Files:
    """The bundle's files; `params` is null in a weight-free bundle, `sbom` in one made by hand.

    `alternatives` are the modules of the manifest's alternatives, in their order.
    """

    module: FileRef
    params: FileRef | None
    reference: FileRef | None
    tokenizer: tuple[FileRef, ...]
    sbom: FileRef | None
    alternatives: tuple[FileRef, ...]

    def __post_init__(self) -> None:
        paths = [ref.path for ref in self.all()]
        if twice := _twice(paths):
            raise ValueError(f"path {twice!r} is listed twice")
        folders = {str(parent) for path in paths for parent in PurePosixPath(path).parents}
        if both := sorted(folders.intersection(paths)):
            raise ValueError(f"path {both[0]!r} is a file and a directory, expected one of them")

    def all(self) -> list[FileRef]:
        """Every file the manifest lists."""
        single = (self.module, *self.alternatives, self.params, self.reference, self.sbom)
        return [*(ref for ref in single if ref is not None), *self.tokenizer]


@dataclass(frozen=True)
class ModelInfo:
    """Where the model came from, its licence as the recipe has it, and its vocabulary."""

    name: str
    family: str
    source: str
    revision: str | None
    license: str | None
    config_sha256: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None

    def __post_init__(self) -> None:
        if self.vocab_size < 1 or any(i < 0 for i in self.eos_token_ids):
            raise ValueError("vocab_size and eos_token_ids, expected positive sizes and ids")


@dataclass(frozen=True)
class KernelsInfo:
    """The CPU level of the C kernels in the module, and the functions that call them."""

    level: str
    functions: tuple[str, ...]


@dataclass(frozen=True)
class TargetInfo:
    """What the module was compiled for, and by what; `kernels` is null where it has none,
    `recipe` where the bundle was made by hand."""

    name: str
    device: Literal["local", "cuda", "vulkan", "metal", "hip"]
    uri: str
    cpu: str | None
    features: tuple[str, ...]
    compiler: str
    bytecode_version: str
    flags: tuple[str, ...]
    kernels: KernelsInfo | None
    recipe: RecipeInfo | None


@dataclass(frozen=True)
class ShapeInfo:
    """Compiled batch shape: decode slots, prefill chunk sizes (tokens), context (tokens)."""

    name: str
    slots: int
    chunks: tuple[int, ...]
    context: int | None

    def __post_init__(self) -> None:
        if self.slots < 1:
            raise ValueError(f"slots {self.slots}, expected 1 or more")
        if not self.chunks or self.chunks[0] < 1 or list(self.chunks) != sorted(set(self.chunks)):
            raise ValueError(f"chunks {list(self.chunks)}, expected ascending positive integers")
        if self.context is not None and self.context < 1:
            raise ValueError(f"context {self.context}, expected null or 1 or more")


@dataclass(frozen=True)
class Numerics:
    """Types of the arithmetic."""

    weights: str
    accumulate: str
    activations: str
    quantization: str | None


@dataclass(frozen=True)
class Tolerance:
    """Largest accepted difference from the oracle, relative to each tensor's scale."""

    logits: float
    state: float


@dataclass(frozen=True)
class Proof:
    """Whether every entry was run against the JAX graph at build time."""

    status: Literal["passed", "not-run", "disabled"]
    reason: str | None
    flags: str
    tolerance: Tolerance

    def __post_init__(self) -> None:
        if not re.fullmatch(r"fast|safe-\d+", self.flags):
            raise ValueError(f"flags {self.flags!r}, expected fast or safe-<n>")


@dataclass(frozen=True)
class Alternative:
    """Another target of the same bundle; its module is in `files.alternatives`."""

    target: TargetInfo
    proof: Proof


@dataclass(frozen=True)
class Interface:
    """interface.json: what the emitter knows of a module; a subset of the manifest."""

    family: str
    num_layers: int
    vocab_size: int
    context: int | None
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    functions: dict[str, FunctionSpec]
    state: tuple[StateSpec, ...]
    params: tuple[ParamSpec, ...]
    numerics: Numerics


@dataclass(frozen=True)
class Manifest:
    """manifest.json."""

    schema: int
    model: ModelInfo
    target: TargetInfo
    shape: ShapeInfo
    files: Files
    functions: dict[str, FunctionSpec]
    state: tuple[StateSpec, ...]
    params: tuple[ParamSpec, ...]
    numerics: Numerics
    prefix_sharing: bool
    proof: Proof
    build: BuildInfo | None
    alternatives: tuple[Alternative, ...]

    @classmethod
    def check_first(cls, value: dict[str, Any]) -> None:
        """Raise ValueError for another schema, whose keys would be others, too."""
        found = value.get("schema")
        if type(found) is int and found != SCHEMA:
            raise ValueError(f"schema {found}, expected {SCHEMA}")

    def __post_init__(self) -> None:
        names = [target.name for target in self.targets]
        if len(self.files.alternatives) != len(self.alternatives):
            found = f"{len(self.files.alternatives)} files"
            raise ValueError(f"files.alternatives: {found}, expected {len(self.alternatives)}")
        if len(set(names)) != len(names):
            raise ValueError(f"targets {', '.join(names)}, expected different ones")
        if self.prefix_sharing and any(s.kind == "fixed" for s in self.state):
            raise ValueError("prefix_sharing true, expected false for a model with fixed state")
        for group in (self.state, self.params):
            if twice := _twice(spec.name for spec in group):
                raise ValueError(f"name {twice!r} is used twice")
        _check_functions(self)

    @property
    def targets(self) -> tuple[TargetInfo, ...]:
        """All targets that there is a module for."""
        return (self.target, *(other.target for other in self.alternatives))

    @property
    def proofs(self) -> tuple[Proof, ...]:
        """The proof of each of `targets`."""
        return (self.proof, *(other.proof for other in self.alternatives))

    @property
    def modules(self) -> tuple[FileRef, ...]:
        """The module of each of `targets`."""
        return (self.files.module, *self.files.alternatives)

    @property
    def state_bytes_per_slot(self) -> int:
        """Bytes of state of one slot, all tensors."""
        return sum(spec.nbytes for spec in self.state)

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of the canonical manifest, and so of everything in the bundle."""
        return hashlib.sha256(dumps(self).encode()).hexdigest()

    @property
    def rebuild(self) -> str:
        """The command that makes this bundle again."""
        targets = ",".join(target.name for target in self.targets)
        return f"doit build model={self.model.name} target={targets} shape={self.shape.name}"


def load(bundle: Path) -> Manifest:
    """Read the manifest of a bundle directory (or a manifest.json itself).

    Raises UserError: not a bundle, not JSON, or a field that is unknown, missing or wrong.
    """
    path = bundle if bundle.suffix == ".json" else bundle / FILE_NAME
    if not path.is_file():
        raise UserError(
            f"{bundle}: no {FILE_NAME} there, expected a bundle directory;"
            " build one with doit build model=… target=…"
        )
    return strict.read(Manifest, path, _ADVICE)


def loads(text: str) -> Manifest:
    """A manifest from its JSON text. Raises UserError."""
    return strict.parse(Manifest, text, FILE_NAME, _ADVICE)


def load_interface(path: Path) -> Interface:
    """Read an interface.json. Raises UserError."""
    return strict.read(Interface, path, "run doit emit again")


def dumps(manifest: Manifest) -> str:
    """The manifest as canonical JSON text."""
    return strict.dumps(manifest)


def prefill_name(chunk: int) -> str:
    """Name of the entry point for a chunk of `chunk` tokens."""
    return f"prefill_{chunk}"


def expected_functions(
    vocab: int, slots: int, chunks: tuple[int, ...], state: tuple[StateSpec, ...]
) -> dict[str, FunctionSpec]:
    """The entry points of a module of this shape, by the calling convention of schema 4."""

    def i32(name: str, *shape: int) -> TensorSpec:
        return TensorSpec(name, "i32", shape)

    fixed = [s for s in state if s.kind == "fixed"]
    one = tuple(TensorSpec(s.name, s.dtype, s.shape) for s in state)
    new = tuple(TensorSpec(f"new.{s.name}", s.dtype, s.shape) for s in state)
    full = tuple(TensorSpec(s.name, s.dtype, s.batched(slots)) for s in state)
    copy_out = tuple(TensorSpec(f"out.{s.name}", s.dtype, s.shape) for s in state)
    one_out = tuple(TensorSpec(f"out.{s.name}", s.dtype, s.shape) for s in fixed)
    full_out = tuple(TensorSpec(f"out.{s.name}", s.dtype, s.batched(slots)) for s in fixed)

    def results(rows: int) -> tuple[TensorSpec, ...]:
        return (TensorSpec("logits", "f32", (rows, vocab)), i32("argmax", rows))

    found = {
        prefill_name(p): FunctionSpec(
            (i32("tokens", 1, p), i32("length", 1), i32("position", 1), *one, *one_out),
            (*results(1), *one),
        )
        for p in chunks
    }
    rows = (i32("tokens", slots), i32("positions", slots), i32("active", slots))
    found["decode"] = FunctionSpec((*rows, *full, *full_out), (*results(slots), *full))
    found["seed"] = FunctionSpec((i32("slot"), *full, *new, *full_out), full)
    found["extract"] = FunctionSpec((i32("slot"), *full, *copy_out), one)
    return found


def _check_functions(manifest: Manifest) -> None:
    shape = manifest.shape
    expected = expected_functions(
        manifest.model.vocab_size, shape.slots, shape.chunks, manifest.state
    )
    if set(expected) != set(manifest.functions):
        raise ValueError(
            f"functions {', '.join(sorted(manifest.functions))}, expected"
            f" {', '.join(sorted(expected))}"
        )
    for name, want in expected.items():
        found = manifest.functions[name]
        for side in ("inputs", "outputs"):
            if getattr(found, side) != getattr(want, side):
                raise ValueError(
                    f"functions.{name}.{side} {_show(getattr(found, side))},"
                    f" expected {_show(getattr(want, side))}"
                )


def _show(specs: tuple[TensorSpec, ...]) -> str:
    words = [f"{s.name}:{s.dtype}{list(s.shape)}" for s in specs]
    return " ".join(words[:6]) + (f" … ({len(words)} in all)" if len(words) > 6 else "")


def _check_shape(name: str, shape: tuple[int, ...]) -> None:
    if any(size < 1 for size in shape):
        raise ValueError(f"{name}: shape {list(shape)}, expected positive sizes")
