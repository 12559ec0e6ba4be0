"""Which targets this machine can execute, found out without loading a driver."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from artifacts.cpu import Cpu, host_features, host_has
from artifacts.job import Target

EMULATORS = {"aarch64-unknown-linux-gnu": "qemu-aarch64"}
_ICD_PLACES = ("/usr/share/vulkan/icd.d", "/etc/vulkan/icd.d", "/usr/local/share/vulkan/icd.d")


def usable(target: Target, cpu: Cpu | None) -> tuple[str | None, str | None]:
    """(device to run the target's modules on, None), or (None, why there is none)."""
    if target.runs_here == "host" and cpu is not None:
        if host_has(cpu):
            return target.uri, None
        lacking = {f.removeprefix("+") for f in cpu.required} - host_features()
        return None, f"this machine's CPU lacks {', '.join(sorted(lacking)[:4])}"
    if target.runs_here == "driver" and target.device == "vulkan":
        if vulkan_drivers():
            return target.uri, None
        return None, "no Vulkan driver is installed"
    if target.runs_here == "emulator":
        emulator = EMULATORS.get(target.triple or "")
        if emulator and shutil.which(emulator) and emulated_runtime():
            return emulator, None
        return None, f"{emulator} or the runtime it would run is not installed"
    return None, f"no {target.device} device of this target is at hand to the build"


def vulkan_drivers() -> list[str]:
    """The driver manifests that a Vulkan loader would read, by path."""
    chosen = os.environ.get("VK_DRIVER_FILES") or os.environ.get("VK_ICD_FILENAMES")
    if chosen:
        return [path for path in chosen.split(os.pathsep) if Path(path).is_file()]
    return sorted(str(p) for place in _ICD_PLACES for p in Path(place).glob("*.json"))


def emulated_runtime() -> str | None:
    """SCANWRIGHT_AARCH64_RUNTIME, an unpacked aarch64 wheel of iree-base-runtime, if there."""
    place = os.environ.get("SCANWRIGHT_AARCH64_RUNTIME", "")
    return place if place and Path(place, "iree").is_dir() else None


def identity(device: str) -> str:
    """What a proof on `device` depends on besides its inputs: the drivers or the CPU's features."""
    if device == "vulkan":
        return " ".join(vulkan_drivers())
    if device in EMULATORS.values():
        return device
    return " ".join(sorted(host_features()))
