"""A compiled module with its parameters on one device, called with buffers that stay there.

Code and parameters are mapped, not copied: opening a bundle on a CPU adds no resident anonymous
memory in proportion to its weights.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from runtime import cpu, emulated, vmfb
from runtime.errors import UserError
from runtime.hal import Buffer, Hal, device_class, instance, open_device, reason, rt
from runtime.manifest import FileRef, Manifest, ParamSpec
from runtime.params_random import MappedBlocks, can_map_blocks, dense

__all__ = ["Buffer", "Device", "Module", "runtime_bytecode_version", "runtime_version"]

PARAMETER_SCOPE = "model"
_HASHED_AT_OPEN_BYTES = 64 << 20


class Device(Protocol):
    """What sessions, checks and benchmarks need of a module on a device; `uri` names it."""

    uri: str

    def call(self, function: str, args: Sequence[Buffer]) -> list[Buffer]:
        """Run a function to the end; inputs and outputs in the manifest's order.

        The trailing `out.` arguments are storage: what they held is lost, and the state results
        are these buffers. Other arguments are only read.
        """
        ...

    def to_device(self, array: np.ndarray[Any, Any]) -> Buffer:
        """Copy an array (f32, bf16, f16, i32, i8; any shape) to the device."""
        ...

    def to_host(self, buffer: Buffer) -> np.ndarray[Any, Any]:
        """Copy a buffer to the host."""
        ...

    def rows(self, buffer: Buffer, indices: Sequence[int]) -> list[np.ndarray[Any, Any]]:
        """Some rows (along the first axis) of a buffer on the host, to be read only, and only
        while `buffer` is kept: they may be its own memory."""
        ...

    def zeros(self, dtype: str, shape: tuple[int, ...]) -> Buffer:
        """A zero-filled buffer; dtype is a manifest word."""
        ...

    def empty(self, dtype: str, shape: tuple[int, ...]) -> Buffer:
        """A buffer that is yet to be written: what is in it means nothing."""
        ...


def open_bundle(
    bundle: Path,
    manifest: Manifest,
    device: str | None = None,
    random_params: int | None = None,
) -> Device:
    """A bundle's module on `device`: an IREE URI, or `qemu-aarch64`; see Module.open."""
    if device != emulated.URI:
        return Module.open(bundle, manifest, device, random_params)
    code = _checked(bundle, manifest.files.module, manifest)
    if "aarch64" not in " ".join(manifest.target.flags):
        raise UserError(
            f"device {device!r} cannot run this bundle: it was compiled for target"
            f" {manifest.target.name}, expected one for aarch64 (target cpu-aarch64)"
        )
    if random_params is not None:
        raise UserError(f"device {device!r} has no random parameters: use a bundle with weights")
    params = _checked(bundle, _params_ref(bundle, manifest), manifest) if manifest.params else None
    return emulated.Emulated(code, params, manifest.functions)


class Module:
    """A loaded module; implements `Device`."""

    def __init__(
        self, hal: Hal, code: Any, provider: Any, functions: Iterable[str], keep: Any
    ) -> None:
        vm = instance()
        modules = [rt.create_io_parameters_module(vm, provider)] if provider else []
        modules += [rt.create_hal_module(vm, hal.device), code]
        self.uri = hal.uri
        self.to_device = hal.to_device
        self.to_host = hal.to_host
        self.rows = hal.rows
        self.zeros = hal.zeros
        self.empty = hal.empty
        self._keep = keep
        self._context = rt.VmContext(vm, modules)
        self._invoke = self._context.invoke
        self._functions = {name: code.lookup_function(name) for name in functions}
        if absent := sorted(n for n, f in self._functions.items() if f is None):
            raise ValueError(f"the module has no function {', '.join(absent)}")

    @classmethod
    def open(
        cls,
        bundle: Path,
        manifest: Manifest,
        device: str | None = None,
        random_params: int | None = None,
    ) -> Module:
        """Open a bundle's module on `device` (an IREE URI; the manifest's by default).

        `random_params` is a seed: parameters are then made up (see runtime.params_random) and
        the bundle's own, if any, are not read.
        Raises UserError: a file missing, damaged or of the wrong size; another bytecode version;
        a CPU feature or device that is not here; a device the module was not compiled for.
        """
        uri = device or manifest.target.uri
        code = _checked(bundle, manifest.files.module, manifest)
        _check_version(code, manifest)
        params = None
        if random_params is None and manifest.params:
            params = _checked(bundle, _params_ref(bundle, manifest), manifest)
        cpu.check(manifest)
        if device_class(uri) != manifest.target.device:
            raise UserError(
                f"device {uri!r} cannot run this bundle: it was compiled for"
                f" {manifest.target.device} (target {manifest.target.name}); choose a"
                f" {manifest.target.device} device with --device, or build another target:"
                f" doit build model={manifest.model.name} target=…"
            )
        if random_params is None:
            return cls.load(code, params, uri, manifest.functions)
        return cls.load_random(code, manifest.params, random_params, uri, manifest.functions)

    @classmethod
    def load(cls, code: Path, params: Path | None, uri: str, functions: Iterable[str]) -> Module:
        """Load a module file and an .irpa by their paths, without a manifest. Raises UserError."""
        index = rt.ParameterIndex()
        if params is not None:
            try:
                index.load(str(params), format="irpa")
            except (RuntimeError, ValueError) as error:
                raise UserError(
                    f"{params}: not a parameter archive ({reason(error)}); rebuild the bundle"
                ) from error
        return cls._build(code, index, uri, functions, None)

    @classmethod
    def load_random(
        cls,
        code: Path,
        specs: Sequence[ParamSpec],
        seed: int,
        uri: str,
        functions: Iterable[str],
    ) -> Module:
        """Load a module file with random parameters.

        For a CPU they are real memory, as weights are. For other devices the host side is a few
        megabytes mapped repeatedly and only the device holds them in full.
        """
        hal = open_device(uri)
        index = rt.ParameterIndex()
        shared = MappedBlocks(seed) if not hal.local and can_map_blocks() else None
        if shared is None:
            _check_memory(sum(spec.nbytes for spec in specs))
        for spec in specs:
            index.add_buffer(spec.name, shared.view(spec) if shared else dense(spec, seed))
        return cls._build(code, index, uri, functions, shared)

    @classmethod
    def _build(
        cls, code: Path, index: Any, uri: str, functions: Iterable[str], keep: Any
    ) -> Module:
        hal = open_device(uri)
        loaded = _map_code(code)
        provider = index.create_provider(scope=PARAMETER_SCOPE) if len(index) else None
        try:
            return cls(hal, loaded, provider, functions, keep)
        except (RuntimeError, ValueError) as error:
            raise UserError(
                f"{code}: cannot be loaded on device {uri!r} ({reason(error)});"
                " rebuild the bundle for this machine's target"
            ) from error

    def call(self, function: str, args: Sequence[Buffer]) -> list[Buffer]:
        """See Device.call. Raises UserError if the device fails, KeyError for another function."""
        inputs = rt.VmVariantList(len(args))
        for arg in args:
            inputs.push_ref(arg)
        outputs = rt.VmVariantList(len(args))
        try:
            self._invoke(self._functions[function], inputs, outputs)
        except (RuntimeError, ValueError) as error:
            raise UserError(
                f"{function} failed on device {self.uri!r} ({reason(error)});"
                " check the bundle with scanwright verify"
            ) from error
        take, kind = outputs.get_as_object, rt.HalBufferView
        return [take(i, kind) for i in range(len(outputs))]


def _params_ref(bundle: Path, manifest: Manifest) -> FileRef:
    if manifest.files.params is None:
        raise UserError(
            f"{bundle / 'manifest.json'}: files.params is null: this bundle has no weights,"
            " expected a params.irpa; bench it with --random-params, or rebuild it without"
            f" params=none: {manifest.rebuild}"
        )
    return manifest.files.params


def _checked(bundle: Path, ref: FileRef, manifest: Manifest) -> Path:
    """The file's path, after its size and, up to 64 MiB, its digest."""
    path = bundle / ref.path
    if not path.is_file():
        raise UserError(f"{path}: missing, expected {ref.size} bytes; rebuild: {manifest.rebuild}")
    size = path.stat().st_size
    if size != ref.size:
        raise UserError(f"{path}: {size} bytes, expected {ref.size}; rebuild: {manifest.rebuild}")
    if size <= _HASHED_AT_OPEN_BYTES:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != ref.sha256:
            raise UserError(
                f"{path}: sha256 {found[:12]}…, expected {ref.sha256[:12]}…: the file is damaged;"
                f" rebuild: {manifest.rebuild}"
            )
    return path


def _check_version(code: Path, manifest: Manifest) -> None:
    wanted = {manifest.target.bytecode_version, vmfb.bytecode_version(code)}
    own = runtime_bytecode_version(code)
    if wanted != {own}:
        raise UserError(
            f"{code}: made for IREE bytecode version {' and '.join(sorted(wanted - {own}))}"
            f" (compiler {manifest.target.compiler}), but this runtime ({runtime_version()})"
            f" reads version {own}; rebuild it: doit build model={manifest.model.name}"
            f" target={manifest.target.name} shape={manifest.shape.name}"
        )


def runtime_version() -> str:
    """The IREE runtime package's version, "unknown" if it carries no metadata."""
    try:
        return metadata.version("iree-base-runtime")
    except metadata.PackageNotFoundError:
        return "unknown"


def runtime_bytecode_version(code: Path) -> str:
    """The bytecode version this runtime reads, "major.minor".

    The binding does not tell, but its refusal does: so it is shown `code` with an impossible
    version written into it. "unknown" if the refusal reads otherwise.
    """
    try:
        rt.VmModule.copy_buffer(instance(), vmfb.with_version(code.read_bytes(), 0xFFFF, 0xFFFF))
    except (RuntimeError, ValueError) as error:
        found = re.search(r"runtime supports (\d+\.\d+)", str(error))
        return found[1] if found else "unknown"
    return "unknown"


def _map_code(code: Path) -> Any:
    try:
        return rt.VmModule.mmap(instance(), str(code))
    except (RuntimeError, ValueError) as error:
        raise UserError(
            f"{code}: cannot be loaded by runtime {runtime_version()} ({reason(error)});"
            " rebuild the bundle: doit build model=… target=…"
        ) from error


def _check_memory(needed: int) -> None:
    """Raise UserError if random parameters would not fit in memory (Linux; else no check)."""
    info = Path("/proc/meminfo")
    if not info.exists():
        return
    found = re.search(r"MemAvailable:\s+(\d+) kB", info.read_text())
    if found and needed > int(found[1]) * 1024:
        raise UserError(
            f"random parameters need {needed} bytes, {int(found[1]) * 1024} are available;"
            " use a smaller model, a narrower weight type or a machine with more memory"
        )
