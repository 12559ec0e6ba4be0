"""Lower an entry to StableHLO text in which the weights are IREE parameters, not arguments."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import jax

from emit import kernels
from emit.entry import Entry
from emit.errors import EmitError
from emit.kernels.splice import splice

_MAIN = "func.func public @main("
_SYMBOL = re.compile(r"@([A-Za-z_][\w.$-]*)")
_HELPER = re.compile(r"  func\.func private @([\w.$-]+)")
_ARGUMENT = re.compile(r"(%arg\d+): (tensor<[^>]*>)")
_RESULT_INFO = re.compile(r' \{jax\.result_info = "[^"]*"\}')


def lower(entry: Entry, params: Mapping[str, Any], by_kernels: bool = False) -> str:
    """`module @<entry>` with one public function and its helpers, all named `@<entry>[.<helper>]`.

    Each parameter becomes a `util.global` that is `#flow.parameter.named<"model"::"NAME">`. The
    text holds no locations, so it depends on nothing but the entry. With `by_kernels`, what has a
    kernel is a dispatch to it, and the module compiles for CPUs only. Raises EmitError if the graph
    needs a custom call, which no target can compile.
    """
    used = params if entry.uses_params else {}

    def traced(*arguments: Any) -> Any:  # a function of its own: jit keeps traces by function
        with kernels.used(by_kernels):
            return entry.fn(*arguments)

    lowered = jax.jit(traced, keep_unused=True).lower(used, *(struct for _, struct in entry.inputs))
    text = lowered.as_text()
    if by_kernels:
        text = splice(text, entry.name)
    if "custom_call" in text:
        call = re.search(r"custom_call @?\S+", text)
        raise EmitError(f"{entry.name}: lowers to {call[0] if call else 'a custom call'}")
    return _with_parameters(text, entry, _names(used))


def _names(params: Mapping[str, Any]) -> list[str]:
    """What the archive calls the leaves of `params`, in the order that JAX takes them in."""
    paths, _ = jax.tree_util.tree_flatten_with_path(params)
    return [".".join(str(getattr(k, "key", getattr(k, "name", k))) for k in p) for p, _ in paths]


def _with_parameters(text: str, entry: Entry, params: list[str]) -> str:
    """Rename the symbols of `text` and turn its first `len(params)` arguments into globals.

    A consumed input is marked `iree.abi.consume`: the caller hands its memory over, the compiler
    updates it in place and gives it back as the result. The entry's storage follows its inputs as
    arguments that nothing reads, each marked with the result that is to be written there
    (`iree.abi.output`). So the caller owns the memory of every state: results that the module
    allocates are not reused by the runtime's pools on some devices. (JAX's donation marks an
    argument that is read like that, and the result is then written over it whether it is still
    read or not: wrong numbers.)
    """
    name = entry.name
    lines = text.rstrip().split("\n")
    main = next(i for i, line in enumerate(lines) if _MAIN in line)
    head, rest = lines[main].split(_MAIN)
    arguments, results = rest.split(") -> ", 1)
    given = re.split(r", (?=%arg\d+: )", arguments)
    globals_, loads = [], []
    for param, argument in zip(params, given, strict=False):
        match = _ARGUMENT.match(argument)
        assert match is not None, argument
        value, kind = match.groups()
        source = f'#flow.parameter.named<"model"::"{param}">'
        globals_.append(f'  util.global private @"{param}" = {source} : {kind}')
        loads.append(f'    {value} = util.global.load @"{param}" : {kind}')
    remaining = [
        argument + " {iree.abi.consume}" if input_name in entry.consumed else argument
        for (input_name, _), argument in zip(entry.inputs, given[len(params) :], strict=True)
    ]
    kinds = re.findall(r"tensor<[^>]*>", results)
    storage = [
        f"%out{i}: {kinds[output]} {{iree.abi.output = {output} : index}}"
        for i, (_, output) in enumerate(entry.storage)
    ]
    kept = ", ".join([*remaining, *storage])
    lines[main] = _RESULT_INFO.sub("", f"{head}func.func public @{name}({kept}) -> {results}")
    helpers = {m[1] for line in lines if (m := _HELPER.match(line))}
    renamed = [
        _SYMBOL.sub(lambda m: f"@{name}.{m[1]}" if m[1] in helpers else m[0], line)
        for line in lines[1:]
    ]
    body = [*renamed[:main], *loads, *renamed[main:]]
    return "\n".join([f"module @{name} {{", *globals_, *body]) + "\n"
