"""CPU models: what the compiler is told, and which features the running machine must have.

"host" is resolved to an explicit CPU name and feature list before it reaches a compile, so that
cache keys and manifests say what a module really needs.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from artifacts.disk import explained
from artifacts.tools import versions
from runtime.errors import UserError

# LLVM feature -> its name in /proc/cpuinfo: the instructions that generated code may contain.
CPUINFO = {
    "x86_64": {
        "sse3": "pni", "ssse3": "ssse3", "sse4.1": "sse4_1", "sse4.2": "sse4_2",
        "sse4a": "sse4a",
        "popcnt": "popcnt", "cx16": "cx16", "lzcnt": "abm", "movbe": "movbe",
        "bmi": "bmi1", "bmi2": "bmi2", "adx": "adx", "f16c": "f16c", "fma": "fma",
        "avx": "avx", "avx2": "avx2", "avxvnni": "avx_vnni", "avxifma": "avx_ifma",
        "avx512f": "avx512f", "avx512bw": "avx512bw", "avx512cd": "avx512cd",
        "avx512dq": "avx512dq", "avx512vl": "avx512vl", "avx512ifma": "avx512ifma",
        "avx512vbmi": "avx512vbmi", "avx512vbmi2": "avx512_vbmi2", "avx512vnni": "avx512_vnni",
        "avx512bitalg": "avx512_bitalg", "avx512vpopcntdq": "avx512_vpopcntdq",
        "avx512bf16": "avx512_bf16", "avx512fp16": "avx512_fp16",
        "aes": "aes", "pclmul": "pclmulqdq", "gfni": "gfni", "vaes": "vaes",
        "vpclmulqdq": "vpclmulqdq", "sha": "sha_ni",
        "amx-tile": "amx_tile", "amx-bf16": "amx_bf16", "amx-int8": "amx_int8",
    },
    "aarch64": {
        "fp-armv8": "fp", "neon": "asimd", "crc": "crc32", "lse": "atomics", "rdm": "asimdrdm",
        "fullfp16": "asimdhp", "fp16fml": "asimdfhm", "dotprod": "asimddp", "bf16": "bf16",
        "i8mm": "i8mm", "complxnum": "fcma", "jsconv": "jscvt", "rcpc": "lrcpc",
        "sve": "sve", "sve2": "sve2", "aes": "aes", "sha2": "sha2", "sha3": "sha3",
    },
}  # fmt: skip
_BASELINE = {"aarch64": ("fp-armv8", "neon")}  # of every CPU of the architecture; never listed

_PROBE = """module @probe {
  func.func public @probe(%a: tensor<4xf32>) -> tensor<4xf32> {
    %b = stablehlo.add %a, %a : tensor<4xf32>
    return %b : tensor<4xf32>
  }
}
"""


@dataclass(frozen=True)
class Cpu:
    """A resolved CPU: LLVM `name`, target `triple`, LLVM `features` on top of the name ("+x"/"-y"),
    and `required`: "+" and the /proc/cpuinfo name of all that the running machine must have."""

    name: str
    triple: str
    features: tuple[str, ...]
    required: tuple[str, ...]

    @property
    def flags(self) -> tuple[str, ...]:
        """The iree-compile flags that select this CPU."""
        flags = (
            f"--iree-llvmcpu-target-triple={self.triple}",
            f"--iree-llvmcpu-target-cpu={self.name}",
        )
        if self.features:
            flags += (f"--iree-llvmcpu-target-cpu-features={','.join(self.features)}",)
        return flags


def resolve_cpu(name: str, triple: str | None, cache: Path, *, keep: bool = True) -> Cpu:
    """The CPU called `name` ("host" with `triple` None, or an LLVM name) as the compiler knows it.

    The compiler is asked once per name, compiler version and, for the host, CPU model and feature
    list; the JSON file `cache` remembers, if it may `keep` what is new. Raises UserError.
    """
    identity = _host_identity() if name == "host" else ""
    words = json.dumps(
        [name, triple, versions(["iree-base-compiler"]), identity, CPUINFO], sort_keys=True
    )
    key = hashlib.sha256(words.encode()).hexdigest()
    known = _load(cache)
    try:
        fields = known[key]
        cpu = Cpu(
            str(fields["name"]),
            str(fields["triple"]),
            tuple(map(str, fields["features"])),
            tuple(map(str, fields["required"])),
        )
        if fields["sum"] == _sum(key, cpu):
            return cpu
    except (KeyError, TypeError):
        pass
    cpu = _ask_compiler(name, triple)
    known[key] = {
        "name": cpu.name,
        "triple": cpu.triple,
        "features": cpu.features,
        "required": cpu.required,
        "sum": _sum(key, cpu),
    }
    if keep:
        _save(cache, known)
    return cpu


def _sum(key: str, cpu: Cpu) -> str:
    """Guards an entry of the cache file: a flipped bit in it would change what is compiled."""
    words = json.dumps([key, cpu.name, cpu.triple, cpu.features, cpu.required])
    return hashlib.sha256(words.encode()).hexdigest()


def host_cpu(cache: Path) -> Cpu:
    """The CPU of this machine; see resolve_cpu."""
    return resolve_cpu("host", None, cache)


def host_has(cpu: Cpu) -> bool:
    """Whether this machine's /proc/cpuinfo lists all that `cpu` requires (False without one)."""
    return {feature.removeprefix("+") for feature in cpu.required} <= host_features()


def host_features() -> frozenset[str]:
    """Feature names in this machine's /proc/cpuinfo; empty where there is no such file."""
    match = re.search(r"^(?:flags|Features)\s*:(.*)$", _cpuinfo(), re.MULTILINE)
    return frozenset(match.group(1).split()) if match else frozenset()


def _ask_compiler(name: str, triple: str | None) -> Cpu:
    import tempfile  # here and not above: a warm build comes no further than the cache file

    from artifacts.compile import run_compiler

    flags = [
        "--iree-hal-target-device=local",
        "--iree-hal-local-target-device-backends=llvm-cpu",
        f"--iree-llvmcpu-target-cpu={name}",
        *([f"--iree-llvmcpu-target-triple={triple}"] if triple else []),
        *("--compile-to=executable-sources", "-o", "probe.mlir"),
    ]
    with tempfile.TemporaryDirectory(prefix="scanwright-cpu-") as work:
        try:
            run_compiler(_PROBE, flags, Path(work))
        except UserError as error:
            raise UserError(f"cpu {name}: the compiler refuses it: {error}") from error
        text = (Path(work) / "probe.mlir").read_text(encoding="utf-8")
    found = {
        field: match.group(1)
        for field in ("cpu", "cpu_features", "target_triple")
        if (match := re.search(rf'\b{field} = "([^"]*)"', text))
    }
    if len(found) != 3:
        raise UserError(f"cpu {name}: the compiler does not say what it is: use a named CPU level")
    return _parse(name, found["cpu"], found["cpu_features"], found["target_triple"])


def _parse(asked: str, cpu: str, features: str, triple: str) -> Cpu:
    """Sort out the compiler's list: first what the name implies, then what the machine says."""
    arch = triple.partition("-")[0]
    table = CPUINFO.get(arch)
    if table is None:
        raise UserError(
            f"cpu {asked}: architecture {arch} is unknown: expected {', '.join(CPUINFO)}"
        )
    last: dict[str, str] = {}
    contradicted: set[str] = set()
    for word in filter(None, features.split(",")):
        sign, feature = word[0], word[1:]
        if last.get(feature, sign) != sign:
            contradicted.add(feature)
        last[feature] = sign  # a later word wins, as in LLVM
    have = {feature for feature in table if last.get(feature) == "+"}
    have |= set(_BASELINE.get(arch, ()))
    on_top: tuple[str, ...] = ()
    if asked == "host":
        lacks = {feature for feature in contradicted if last[feature] == "-"}
        on_top = (*(f"+{f}" for f in sorted(have)), *(f"-{f}" for f in sorted(lacks)))
    required = tuple(sorted(f"+{table[feature]}" for feature in have))
    return Cpu(cpu or asked, f"{arch}-unknown-linux-gnu", on_top, required)


def _host_identity() -> str:
    """What tells this CPU from another: its model and features, or what the system says of it."""
    pattern = r"^(?:vendor_id|cpu family|model|model name|flags|Features|CPU \w+)\s*:.*$"
    first = _cpuinfo().partition("\n\n")[0]
    lines = re.findall(pattern, first, re.MULTILINE)
    return "\n".join(lines) or f"{platform.machine()} {platform.processor()}"


def _cpuinfo() -> str:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _load(cache: Path) -> dict[str, dict[str, Any]]:
    try:
        known = json.loads(cache.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _save(cache: Path, known: dict[str, dict[str, Any]]) -> None:
    part = cache.with_name(f".{cache.name}-{os.getpid()}")
    with explained(cache):
        cache.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(known, sort_keys=True, indent=1) + "\n", encoding="utf-8")
        part.replace(cache)
