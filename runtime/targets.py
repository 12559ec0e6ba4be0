"""Which module of a bundle for several targets runs here, and why that one.

In order: a GPU's own architecture, code that such a GPU also runs, Vulkan on any GPU, then the
widest CPU level that this processor has. Vulkan that a CPU imitates comes last.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import platform
import re
import sys
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from runtime import manifest as mf
from runtime.cpu import host_flags
from runtime.errors import UserError
from runtime.manifest import Manifest, TargetInfo

IMITATED = ("llvmpipe", "lavapipe", "swiftshader")  # in the names of Vulkan devices that are CPUs
EMULATED = {"qemu-aarch64": "aarch64"}
GENERIC = {  # code for a family of AMD's GPUs → the architectures in it
    "gfx9-generic": "gfx90[0-9c]",
    "gfx9-4-generic": "gfx94[0-2]|gfx950",
    "gfx10-1-generic": "gfx101[0-3]",
    "gfx10-3-generic": "gfx103[0-6]",
    "gfx11-generic": "gfx110[0-3]|gfx115[0-3]",
    "gfx12-generic": "gfx120[01]",
}
_MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
_MAJOR, _MINOR = 75, 76  # CUdevice_attribute: compute capability
T = TypeVar("T")


@dataclass(frozen=True)
class Here:
    """What this machine can run. `machine` as the system says it (x86_64), `features` the words of
    /proc/cpuinfo (None: unknown), `cuda` compute capabilities (90 for 9.0), `hip` architectures
    (gfx942), `vulkan` names of devices, `metal` whether there is such a GPU. Of several GPUs of a
    kind only the one that would be opened counts: the driver's first, or the one asked for."""

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
    found, why = choose(manifest, here(manifest.targets, device), wanted, device)
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
    files = dataclasses.replace(manifest.files, module=manifest.modules[number], alternatives=())
    return dataclasses.replace(
        manifest,
        target=manifest.targets[number],
        files=files,
        proof=manifest.proofs[number],
        alternatives=(),
    )


def fit(target: TargetInfo, here: Here) -> Fit:
    """How well a target's module fits this machine."""
    if target.device == "cuda":
        return _cuda(target, here.cuda)
    if target.device == "hip":
        arch = _flag(target, "iree-rocm-target")
        return _hip(arch or "no architecture", here.hip)
    if target.device == "metal":
        return Fit((1, 0), "an Apple GPU") if here.metal else Fit(None, "no such GPU is here")
    if target.device == "vulkan":
        return _vulkan(here.vulkan)
    return _cpu(target, here)


def _hip(arch: str, gpus: Sequence[str]) -> Fit:
    """Code for an architecture, its features (`gfx90a:xnack-`) aside, or for a generic one."""
    name = arch.partition(":")[0]
    if name in gpus:
        return Fit((0, 0), f"compiled for this GPU's architecture, {name}")
    for gpu in gpus:
        if re.fullmatch(GENERIC.get(name, "-"), gpu):
            return Fit((1, 0), f"code of {name}, which this GPU ({gpu}) also runs")
    return Fit(None, f"for {name}, here is {', '.join(gpus) or 'no such GPU'}")


def _cuda(target: TargetInfo, gpus: Sequence[int]) -> Fit:
    """PTX runs on its own architecture and all later ones; `sm_90a` and its like on one only,
    `sm_100f` on the later ones of its family, 10."""
    word = re.fullmatch(r"sm_(\d+)([a-z]*)", _flag(target, "iree-cuda-target") or "")
    if word is None:
        return Fit(None, "its flags name no architecture")
    if not gpus:
        return Fit(None, "no NVIDIA GPU is here")
    code, meant = int(word[1]), re.search(r"sm_?(\d+)$", target.name)
    own = {code, int(meant[1])} if meant and not word[2] else {code}
    for gpu in gpus:
        if gpu in own and gpu >= code:
            return Fit((0, -code), f"compiled for this GPU's architecture, sm_{gpu}")
    for gpu in gpus:
        alike = not word[2] or (word[2] == "f" and gpu // 10 == code // 10)
        if gpu > code and alike:
            return Fit((1, -code), f"PTX of sm_{code}, which this GPU (sm_{gpu}) also runs")
    return Fit(None, f"for sm_{code}{word[2]}, here is {', '.join(f'sm_{gpu}' for gpu in gpus)}")


def _vulkan(names: Sequence[str]) -> Fit:
    if not names:
        return Fit(None, "no Vulkan device is here")
    if any(word in names[0].lower() for word in IMITATED):
        return Fit((4, 0), f"Vulkan runs on {names[0]}, which is a CPU")
    return Fit((2, 0), f"Vulkan runs on {names[0]}")


def _cpu(target: TargetInfo, here: Here) -> Fit:
    machine = _MACHINES.get(here.machine.lower(), here.machine)
    triple = _flag(target, "iree-llvmcpu-target-triple") or machine
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


def here(targets: Collection[TargetInfo], device: str | None = None) -> Here:
    """This machine, as far as these targets make it matter. `device`: the URI that was asked for;
    without it, the targets' own say which GPU would be opened."""
    uris = {target.device: target.uri for target in targets}
    if device is not None and device.partition("://")[0] in uris:
        uris[device.partition("://")[0]] = device
    cpuinfo = Path("/proc/cpuinfo")
    words = host_flags(cpuinfo.read_text(errors="replace")) if cpuinfo.exists() else None
    nodes = Path("/sys/class/kfd/kfd/topology/nodes")
    return Here(
        machine=platform.machine(),
        features=None if words is None else frozenset(words),
        cuda=opened(_cuda_gpus(), uris["cuda"]) if "cuda" in uris else (),
        hip=opened(visible(hip_gpus(nodes), os.environ), uris["hip"]) if "hip" in uris else (),
        vulkan=opened(_vulkan_devices(), uris["vulkan"]) if "vulkan" in uris else (),
        metal=sys.platform == "darwin",
    )


def opened(found: Sequence[tuple[str, T]], uri: str) -> tuple[T, ...]:
    """Of GPUs as (path, fact), in the driver's order, the one that a URI such as `cuda`, `cuda://1`
    or `cuda://GPU-…` opens; none if it is not there."""
    path = uri.partition("://")[2].partition("?")[0].lower()
    if path.isdecimal() and all(path != name.lower() for name, _ in found):
        return tuple(fact for _, fact in found[int(path) : int(path) + 1])
    right = [fact for name, fact in found if not path or name.lower() == path]
    return tuple(right[:1])


def visible(
    found: Sequence[tuple[str, str]], environ: Mapping[str, str]
) -> tuple[tuple[str, str], ...]:
    """The AMD GPUs that a process sees, in its order, by the variables of ROCm."""
    for name in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        words = environ.get(name, "").split(",")
        if words != [""]:
            numbers = {path.lower(): i for i, (path, _) in enumerate(found)}
            picks = [int(w) if w.isdecimal() else numbers.get(w.strip().lower(), -1) for w in words]
            found = [found[i] for i in picks if 0 <= i < len(found)]
    return tuple(found)


def _cuda_gpus() -> tuple[tuple[str, int], ...]:
    """(path in a device URI, compute capability) of the GPUs that NVIDIA's driver sees."""
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
        name = (ctypes.c_ubyte * 16)()
        failed = driver.cuDeviceGet(ctypes.byref(device), number)
        failed |= driver.cuDeviceGetAttribute(ctypes.byref(major), _MAJOR, device)
        failed |= driver.cuDeviceGetAttribute(ctypes.byref(minor), _MINOR, device)
        failed |= driver.cuDeviceGetUuid(name, device)
        if not failed:
            path = f"GPU-{uuid.UUID(bytes=bytes(name))}"
            found.append((path, 10 * major.value + minor.value))
    return tuple(found)


def hip_gpus(nodes: Path) -> tuple[tuple[str, str], ...]:
    """(path in a device URI, architecture) of the GPUs that AMD's kernel driver lists, in the order
    of their numbers: 90402 is gfx942."""
    found = []
    for path in sorted(nodes.glob("*/properties"), key=lambda path: (len(path.parent.name), path)):
        try:
            facts = dict(re.findall(r"^(\w+) (\d+)$", path.read_text(), re.MULTILINE))
        except OSError:
            continue
        if version := int(facts.get("gfx_target_version", 0)):
            major, rest = divmod(version, 10000)
            name = f"GPU-{int(facts.get('unique_id', 0)):016x}"
            found.append((name, f"gfx{major}{rest // 100:x}{rest % 100:x}"))
    return tuple(found)


def _vulkan_devices() -> tuple[tuple[str, str], ...]:
    """(path in a device URI, URI and name) of the devices that Vulkan's loader lists."""
    from runtime.hal import available

    uris = [uri for uri in available() if uri.startswith("vulkan")]
    return tuple((uri.partition("://")[2].partition(" ")[0], uri) for uri in uris)
