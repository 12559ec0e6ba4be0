"""The keys of a GGUF file that say what model it holds, read strictly."""

from __future__ import annotations

import re
from typing import Any

from emit.errors import EmitError
from emit.gguf_file import Gguf

ARCHITECTURE = "general.architecture"
# Keys that say nothing about the graph: lengths trained for, copies of tensors' sizes, how layers
# are dealt (the tensors say), and sizes that are 0 where a model has no such part.
FREE = frozenset(
    """vocab_size context_length token_shift_count attention.recurrent_layers ssm.group_count
    full_attention_interval rope.scaling.finetuned rope.dimension_sections wkv.token_shift_count
    attention.head_count attention.head_count_kv feed_forward_length expert_shared_count
    expert_gating_func expert_feed_forward_length expert_shared_feed_forward_length
    leading_dense_block_count expert_group_count attention.layer_norm_epsilon
    attention.layer_norm_rms_epsilon expert_used_count rope.dimension_count
    nextn_predict_layers""".split()
)
_BLOCK = re.compile(r"blk\.(\d{1,6})\.(.+)")


class Metadata:
    """A file's keys of its architecture, each of which must be read; and what tensors it has."""

    def __init__(self, file: Gguf) -> None:
        self.path = file.path
        arch = file.metadata.get(ARCHITECTURE)
        if not isinstance(arch, str):
            raise self.bad(f"{ARCHITECTURE} is missing; expected a model, not parts of one")
        self.arch = arch
        self.keys = {
            key.removeprefix(arch + "."): value
            for key, value in file.metadata.items()
            if key.startswith(arch + ".")
        }
        self.all = file.metadata
        self.read: set[str] = set()
        self.shapes = {name: tensor.shape for name, tensor in file.tensors.items()}

    def bad(self, message: str) -> EmitError:
        """An error that begins with the file."""
        return EmitError(f"{self.path}: {message}")

    def _given(self, key: str, default: Any) -> Any:
        self.read.add(key)
        if key in self.keys:
            return self.keys[key]
        if default is None:
            raise self.bad(f"the key {self.arch}.{key} is missing; convert the file again")
        return default

    def size(self, key: str, default: int | None = None) -> int:
        """A number of at least 1; a list must have only it, and zeros. `default` is for no number,
        or none but 0."""
        found = self._given(key, default)
        values = set(found if isinstance(found, list) else [found]) - {0}
        if not values and default is not None:
            return default
        number = values.pop() if len(values) == 1 else None
        if type(number) is not int or not 0 < number < 2**31:
            raise self.bad(
                f"{self.arch}.{key} = {str(found)[:80]}, expected one number of at least 1"
            )
        return number

    def number(self, key: str, default: float | None = None) -> float:
        """A floating-point number."""
        found = self._given(key, default)
        if isinstance(found, bool) or not isinstance(found, int | float):
            raise self.bad(f"{self.arch}.{key} = {str(found)[:80]}, expected a number")
        return found

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        found = self._given(key, default)
        if not isinstance(found, bool):
            raise self.bad(f"{self.arch}.{key} = {str(found)[:80]}, expected true or false")
        return found

    def epsilon(self) -> float:
        """That of RMS norms; conversion of some models writes the other key."""
        key = "attention.layer_norm_rms_epsilon"
        return self.number(key if key in self.keys else "attention.layer_norm_epsilon")

    def rows(self, pattern: str) -> int:
        """The rows of the first layer's tensor, or of the model's, that is called `pattern`."""
        for name, shape in self.shapes.items():
            match = _BLOCK.fullmatch(name)
            if (match[2] if match else name) == pattern:
                return shape[max(0, len(shape) - 2)]
        return 0

    def has(self, pattern: str) -> bool:
        """Whether a layer has a tensor `pattern`."""
        return self.rows(pattern) > 0

    def layers_with(self, pattern: str, count: int) -> list[bool]:
        """For each layer whether it has a tensor `pattern`."""
        return [f"blk.{i}.{pattern}" in self.shapes for i in range(count)]

    def finish(self) -> None:
        """EmitError for a key that nothing has read."""
        unread = sorted(self.keys.keys() - self.read - FREE)
        if unread:
            shown = ", ".join(f"{self.arch}.{k} = {str(self.keys[k])[:40]}" for k in unread[:5])
            raise self.bad(f"{shown} is not supported; it may change what the model computes")
