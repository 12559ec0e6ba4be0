"""Whether this processor has the features a module was compiled for, before any code is loaded."""

from __future__ import annotations

from pathlib import Path

from runtime.errors import UserError
from runtime.manifest import Manifest

# LLVM's word -> the kernel's, where they differ by more than "-" and "." for "_".
_X86 = {
    "64bit": "lm",
    "avx512bf16": "avx512_bf16",
    "avx512bitalg": "avx512_bitalg",
    "avx512fp16": "avx512_fp16",
    "avx512vbmi2": "avx512_vbmi2",
    "avx512vnni": "avx512_vnni",
    "avx512vp2intersect": "avx512_vp2intersect",
    "avx512vpopcntdq": "avx512_vpopcntdq",
    "avxvnni": "avx_vnni",
    "bmi": "bmi1",
    "crc32": "sse4_2",
    "fsgsbase": "fsgsbase",
    "lzcnt": "abm",
    "pclmul": "pclmulqdq",
    "prfchw": "3dnowprefetch",
    "rdrnd": "rdrand",
    "sahf": "lahf_lm",
    "sha": "sha_ni",
    "shstk": "user_shstk",
    "sse3": "pni",
}
_ARM = {
    "bf16": "bf16",
    "crc": "crc32",
    "dotprod": "asimddp",
    "fp-armv8": "fp",
    "fullfp16": "asimdhp",
    "lse": "atomics",
    "neon": "asimd",
    "rcpc": "lrcpc",
    "rdm": "asimdrdm",
}
# Words that steer code generation only, or name a level made of other words.
_NO_HARDWARE = (
    "allow-", "branch", "evex512", "ermsb", "false-deps", "fast-", "idiv", "macrofusion",
    "nopl", "prefer-", "reserve-", "sbb-dep", "slow-", "tuning", "use-", "v8", "v9", "vzeroupper",
)  # fmt: skip


def host_flags(cpuinfo: str) -> set[str] | None:
    """The first processor's feature words in the text of /proc/cpuinfo; None if it lists none."""
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return set(value.split())
    return None


def missing_features(wanted: tuple[str, ...], flags: set[str]) -> list[str]:
    """The words of `wanted` (LLVM's, "+avx512f") that `flags` (the kernel's) lack."""
    names = _ARM if "asimd" in flags else _X86
    missing = []
    for word in wanted:
        bare = word.removeprefix("+")
        if word.startswith("-") or bare.startswith(_NO_HARDWARE):
            continue
        plain = bare.replace("-", "_").replace(".", "_")
        if not {names.get(bare, plain), plain} & flags:
            missing.append(bare)
    return missing


def check(manifest: Manifest, cpuinfo: Path = Path("/proc/cpuinfo")) -> None:
    """Raise UserError if a module for a CPU needs features this one lacks.

    Systems without /proc/cpuinfo are not checked.
    """
    if manifest.target.device != "local" or not cpuinfo.exists():
        return
    flags = host_flags(cpuinfo.read_text(errors="replace"))
    if flags is None:
        return
    if lacks := missing_features(manifest.target.features, flags):
        raise UserError(
            f"manifest.json: target.features: this CPU lacks {', '.join(lacks)}, which the module"
            f" for target {manifest.target.name} uses; build one for this machine:"
            f" doit build model={manifest.model.name} target=cpu"
        )
