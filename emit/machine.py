"""JAX computes the same bits on every machine: what XLA takes from the processor or from the
environment is set before it is imported.

By default products go by the vector units, the sizes of the caches and the number of cores. The
two flags cost no time: products then add in one order, and other loops are compiled for AVX2
whatever else there is. Arm machines agree with each other, not with x86-64 ones to the last bit.
"""

from __future__ import annotations

import platform
from collections.abc import MutableMapping

FLAGS = "--xla_cpu_enable_platform_dependent_math=false"
X86_FLAGS = "--xla_cpu_max_isa=AVX2"
X86 = ("x86_64", "amd64")


def pin(environ: MutableMapping[str, str]) -> None:
    """Set what JAX reads in `environ`, and take the rest of its variables out of it."""
    for name in [name for name in environ if name.startswith(("JAX_", "XLA_", "JAXLIB_"))]:
        del environ[name]
    environ["JAX_PLATFORMS"] = "cpu"
    flags = [FLAGS, X86_FLAGS] if platform.machine().lower() in X86 else [FLAGS]
    environ["XLA_FLAGS"] = " ".join(flags)
