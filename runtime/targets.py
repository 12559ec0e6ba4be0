"""Which module of a bundle for several targets runs here, and why that one.

In order: a GPU's own architecture, code that such a GPU also runs, Vulkan on any GPU, then the
widest CPU level that this processor has. Vulkan that a CPU imitates comes last.
"""

from __future__ import annotations

import ctypes
import dataclasses
import platform
import re
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime import manifest as mf
from runtime.cpu import host_flags
from runtime.errors import UserError
from runtime.manifest import Manifest, TargetInfo

IMITATED = ("llvmpipe", "lavapipe", "swiftshader")  # in the names of Vulkan devices that are CPUs
EMULATED = {"qemu-aarch64": "aarch64"}
_MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
_MAJOR, _MINOR = 75, 76  # CUdevice_attribute: compute capability


@dataclass(frozen=True)
class Here:
    """What this machine can run. `machine` as the system says it (x86_64), `features` the words of
    /proc/cpuinfo (None: unknown), `cuda` compute capabilities (90 for 9.0), `hip` architectures
    (gfx942), `vulkan` names of devices, `metal` whether there is such a GPU."""

    machine: str
    features: frozenset[str] | None
    cuda: tuple[int, ...] = ()
    hip: tuple[str, ...] = ()
    vulkan: tuple[str, ...] = ()
    metal: bool = False


@dataclass(frozen=True)
class Fit:
    """How well a target fits, less is better, or None if it does not; and why, in words."""

    rank: tuple[int, int] | None
    why: str


def load(bundle: Path, wanted: str | None = None, device: str | None = None) -> Manifest:
    """The manifest of a bundle for the target that is best here, and a line on stderr that says so.

    `wanted` is the target's name, `device` the URI that is going to be used, if they were given.
    Raises UserError: a manifest that is wrong, no such target, or none that runs here.
    """
    return pick(mf.load(bundle), wanted, device)


def add_argument(parser: Any) -> None:
    """The argument `--target` of a command."""
    parser.add_argument(
        "--target", metavar="NAME", help="of a bundle for several targets (default: the best here)"
    )


def pick(manifest: Manifest, wanted: str | None = None, device: str | None = None) -> Manifest:
    """As `load`, of a manifest that was read."""
    if not manifest.alternatives and wanted in (None, manifest.target.name):
        return manifest
    found, why = choose(manifest, here(manifest.targets), wanted, device)
    others = ", ".join(t.name for t in manifest.targets if t.name != found.target.name)
    print(f"target {found.target.name}: {why} (there is also {others})", file=sys.stderr)
    return found


def named(bundle: Path, name: str) -> Manifest:
    """The manifest of a bundle for its target `name`, without a word."""
    manifest = mf.load(bundle)
    names = [target.name for target in manifest.targets]
    return view(manifest, names.index(name)) if manifest.alternatives else manifest


def choose(
    manifest: Manifest, here: Here, wanted: str | None = None, device: str | None = None
) -> tuple[Manifest, str]:
    """(the manifest as that of a bundle for one target alone, why that one). Raises UserError."""
    names = [target.name for target in manifest.targets]
    if wanted is not None:
        if wanted not in names:
            raise UserError(
                f"target: found {wanted!r}, expected one that the bundle has: {', '.join(names)}"
            )
        return view(manifest, names.index(wanted)), "as asked for"
    able = [i for i, target in enumerate(manifest.targets) if _on(target, device)]
    if not able:
        kinds = ", ".join(f"{t.name} ({t.device})" for t in manifest.targets)
        raise UserError(
            f"device {device!r} cannot run this bundle: it was compiled for {kinds}; choose a"
            f" device of these with --device, or build another target: {manifest.rebuild}"
        )
    fits = {i: fit(manifest.targets[i], here) for i in able}
    right = {i: found.rank for i, found in fits.items() if found.rank is not None}
    if right:
        best = min(right, key=lambda i: (right[i], names[i]))
        return view(manifest, best), fits[best].why
    if device is not None:  # it may know better; opening it tells what is wrong
        return view(manifest, able[0]), f"for device {device}"
    reasons = "; ".join(f"{names[i]}: {found.why}" for i, found in fits.items())
    raise UserError(
        f"no target of the bundle runs here ({reasons}); build one for this machine:"
        f" doit build model={manifest.model.name} target=…, or choose with --target"
    )


def view(manifest: Manifest, number: int) -> Manifest:
    """The manifest of the same bundle as if it were for the target `number` alone."""
    modules = (manifest.files.module, *manifest.files.alternatives)
    proofs = (manifest.proof, *(other.proof for other in manifest.alternatives))
    files = dataclasses.replace(manifest.files, module=modules[number], alternatives=())
    return dataclasses.replace(
        manifest,
        target=manifest.targets[number],
        files=files,
        proof=proofs[number],
        alternatives=(),
    )


def fit(target: TargetInfo, here: Here) -> Fit:
    """How well a target's module fits this machine."""
    if target.device == "cuda":
        return _cuda(target, here.cuda)
    if target.device == "hip":
        arch = _flag(target, "iree-rocm-target")
        known = ", ".join(here.hip) or "no such GPU"
        if arch in here.hip:
            return Fit((0, 0), f"compiled for this GPU's architecture, {arch}")
        return Fit(None, f"for {arch}, here is {known}")
    if target.device == "metal":
        return Fit((1, 0), "an Apple GPU") if here.metal else Fit(None, "no such GPU is here")
    if target.device == "vulkan":
        return _vulkan(here.vulkan)
    return _cpu(target, here)


def _cuda(target: TargetInfo, gpus: Sequence[int]) -> Fit:
    """PTX runs on its own architecture and all later ones; `sm_90a` and its like on one only."""
    word = re.fullmatch(r"sm_(\d+)([a-z]*)", _flag(target, "iree-cuda-target") or "")
    if word is None:
        return Fit(None, "its flags name no architecture")
    if not gpus:
        return Fit(None, "no NVIDIA GPU is here")
    code, meant = int(word[1]), re.search(r"sm_?(\d+)$", target.name)
    own = {code, int(meant[1])} if meant else {code}
    for gpu in gpus:
        if gpu in own and gpu >= code:
            return Fit((0, -code), f"compiled for this GPU's architecture, sm_{gpu}")
    for gpu in gpus:
        if gpu > code and not word[2]:
            return Fit((1, -code), f"PTX of sm_{code}, which this GPU (sm_{gpu}) also runs")
    return Fit(None, f"for sm_{code}{word[2]}, here is {', '.join(f'sm_{gpu}' for gpu in gpus)}")


def _vulkan(names: Sequence[str]) -> Fit:
    real = [name for name in names if not any(word in name.lower() for word in IMITATED)]
    if real:
        return Fit((2, 0), f"Vulkan runs on {real[0]}")
    if names:
        return Fit((4, 0), f"Vulkan runs on {names[0]}, which is a CPU")
    return Fit(None, "no Vulkan device is here")


def _cpu(target: TargetInfo, here: Here) -> Fit:
    triple = _flag(target, "iree-llvmcpu-target-triple") or here.machine
    machine = _MACHINES.get(here.machine.lower(), here.machine)
    if triple.partition("-")[0] != machine:
        return Fit(None, f"for {triple.partition('-')[0]}, here is {machine}")
    wanted = {feature.removeprefix("+") for feature in target.features}
    if here.features is None:  # unknown: the least that is asked for
        return Fit((3, len(wanted)), "the CPU level that asks for least")
    if lacks := sorted(wanted - here.features):
        return Fit(None, f"this CPU lacks {', '.join(lacks[:4])}")
    return Fit((3, -len(wanted)), "the widest CPU level that this processor has")


def _flag(target: TargetInfo, name: str) -> str | None:
    pairs = (flag.partition("=") for flag in target.flags)
    return next((value for flag, _, value in pairs if flag == f"--{name}"), None)


def _on(target: TargetInfo, device: str | None) -> bool:
    """Whether a device of this URI is of the kind that the target is for."""
    if device is None:
        return True
    if device in EMULATED:
        triple = _flag(target, "iree-llvmcpu-target-triple") or ""
        return triple.partition("-")[0] == EMULATED[device]
    driver = device.partition("://")[0]
    return target.device == ("local" if driver.startswith("local") else driver)


# This machine ------------------------------------------------------------------------------------


def here(targets: Collection[TargetInfo]) -> Here:
    """This machine, as far as these targets make it matter."""
    kinds = {target.device for target in targets}
    cpuinfo = Path("/proc/cpuinfo")
    words = host_flags(cpuinfo.read_text(errors="replace")) if cpuinfo.exists() else None
    return Here(
        machine=platform.machine(),
        features=None if words is None else frozenset(words),
        cuda=_cuda_gpus() if "cuda" in kinds else (),
        hip=hip_gpus(Path("/sys/class/kfd/kfd/topology/nodes")) if "hip" in kinds else (),
        vulkan=_vulkan_devices() if "vulkan" in kinds else (),
        metal=sys.platform == "darwin",
    )


def _cuda_gpus() -> tuple[int, ...]:
    """Compute capabilities of the GPUs that NVIDIA's driver sees."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ()
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return ()
    found = []
    for number in range(count.value):
        device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        failed = driver.cuDeviceGet(ctypes.byref(device), number)
        failed |= driver.cuDeviceGetAttribute(ctypes.byref(major), _MAJOR, device)
        failed |= driver.cuDeviceGetAttribute(ctypes.byref(minor), _MINOR, device)
        if not failed:
            found.append(10 * major.value + minor.value)
    return tuple(found)


def hip_gpus(nodes: Path) -> tuple[str, ...]:
    """Architectures of the GPUs that AMD's kernel driver lists: 90402 is gfx942."""
    found = []
    for path in sorted(nodes.glob("*/properties")):
        try:
            word = re.search(r"^gfx_target_version (\d+)$", path.read_text(), re.MULTILINE)
        except OSError:
            continue
        if word and int(word[1]):
            major, rest = divmod(int(word[1]), 10000)
            found.append(f"gfx{major}{rest // 100:x}{rest % 100:x}")
    return tuple(found)


def _vulkan_devices() -> tuple[str, ...]:
    from runtime.hal import available

    return tuple(uri for uri in available() if uri.startswith("vulkan"))
