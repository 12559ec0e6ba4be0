"""Run a stage once for each set of its inputs, and say why it had to run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from artifacts.disk import explained, is_full, user_error
from artifacts.records import Blob, Record, action_key, is_digest
from artifacts.store import Store

_ABSENT = "(absent)"


@dataclass(frozen=True)
class Action:
    """A stage and every input that can change its result.

    `fields` (JSON) make the key. `about` says in words what it is for (`model`, `target`,
    `shape`, …): it is shown, and `explain` compares with the last action of the same words, but
    two actions with the same fields are the same action.
    """

    stage: str
    fields: Mapping[str, Any]
    about: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def key(self) -> str:
        """sha256 hex of the canonical JSON of {"stage", "fields"}; ValueError if not JSON."""
        return action_key(self.stage, self.fields)

    @property
    def label(self) -> str:
        """`compile (model=mamba2, target=cpu)`, for messages."""
        words = ", ".join(f"{name}={word}" for name, word in self.about.items())
        return f"{self.stage} ({words or self.key[:12]})"


@dataclass(frozen=True)
class Result:
    """The outputs of an action, in the store. `hit` if they were there already, or came from the
    remote cache, which `remote` says."""

    key: str
    hit: bool
    outputs: dict[str, Blob]
    meta: Any
    remote: bool = False


def remote_record(store: Store, action: Action) -> Record | None:
    """The record of an action that this cache lacks, brought into it from the remote one."""
    return None if store.remote is None else store.remote.pull(store, action)


def share(store: Store) -> None:
    """Offer what lookups found in this cache to the remote one, if this run may write there."""
    if store.remote is None or not store.remote.write:
        return
    with store.using():
        for key, stage in list(store.found.items()):
            store.remote.offer(store, key, stage)
    store.found.clear()


def run(
    store: Store,
    action: Action,
    produce: Callable[[Path], Mapping[str, Path]],
    meta: Any | Callable[[], Any] = None,
    *,
    resumed: bool = False,
) -> Result:
    """The result of `action`, from the store, the remote cache or made now by `produce`.

    `produce` gets an empty directory on the store's filesystem and returns output name -> file;
    files inside the directory are moved into the store, others copied. With `resumed` it is one of
    the action's own, which holds what a killed process left there; what `produce` leaves there when
    it fails stays, too. `meta` is JSON kept with
    the result, or a function called after `produce` that returns it; on a hit the stored one is
    returned. Two processes with the same action make it once. Whatever ends this process, nothing
    is visible unless it is complete. What `produce` raises goes to the caller with nothing
    stored; a full disk becomes a UserError.
    """
    with store.using():
        record = store.lookup(action.key)
        if record is not None:
            return Result(action.key, True, record.outputs, record.meta)
        with store.key_lock(action.key, action.label):
            record = store.lookup(action.key, report=False)
            if record is not None:
                return Result(action.key, True, record.outputs, record.meta)
            record = remote_record(store, action)
            if record is not None:
                return Result(action.key, True, record.outputs, record.meta, remote=True)
            with store.work(action.key) if resumed else store.scratch() as scratch:
                try:
                    files = dict(produce(scratch))
                except OSError as error:
                    if is_full(error):
                        raise user_error(error, Path(error.filename or scratch)) from error
                    raise
                outputs = _put_all(store, action, files, scratch)
            made = store.record(
                action.key,
                action.fields,
                outputs,
                meta() if callable(meta) else meta,
                stage=action.stage,
                about=action.about,
            )
        if store.remote is not None:
            store.remote.push(store, made)
    return Result(action.key, False, made.outputs, made.meta)


def _put_all(
    store: Store, action: Action, files: Mapping[str, Path], scratch: Path
) -> dict[str, Blob]:
    if not files:
        raise ValueError(f"{action.label}: produced no files")
    stored: dict[Path, Blob] = {}
    outputs: dict[str, Blob] = {}
    # The largest last: a kill that comes after it is in the store takes it from who would go on.
    for name, path in sorted(files.items(), key=lambda item: (_size(item[1]), item[0])):
        if path not in stored:  # two names may share a file, which is moved only once
            stored[path] = store.put_file(path, move=path.is_relative_to(scratch))
        outputs[name] = stored[path]
    return outputs


def _size(path: Path) -> int:
    with explained(path):
        return path.stat().st_size


def explain(store: Store, action: Action) -> list[str]:
    """Lines that say whether `action` is cached and, if not, which of its fields made the miss.

    It is compared with the last used record of the same stage, by preference one with the same
    model and target words. Nothing is changed, and no large file is read if its stamp holds.
    """
    record = store.peek(action.key)
    if record is not None:
        broken = [
            f"  {name}: {store.path(blob)} {trouble}"
            for name, blob in sorted(record.outputs.items())
            if (trouble := store.problem(blob)) is not None
        ]
        if broken:
            return [f"{action.label}: will run, its cached files are not all right", *broken]
        size = sum(blob.size for blob in record.outputs.values())
        outputs = "1 file" if len(record.outputs) == 1 else f"{len(record.outputs)} files"
        return [f"{action.label}: cached ({outputs}, {size} bytes, key {action.key[:12]})"]
    if store.remote is not None and (record := store.remote.peek(action)) is not None:
        size = sum(blob.size for blob in record.outputs.values())
        return [f"{action.label}: in the remote cache {store.remote.url} ({size} bytes)"]
    other = _nearest(store, action)
    if other is None:
        return [f"{action.label}: will run, no {action.stage} is in the cache yet"]
    changes = list(differences(other.fields, action.fields))
    width = max((len(path) for path, _, _ in changes), default=0)
    words = ", ".join(f"{name}={word}" for name, word in sorted(other.about.items()))
    return [
        f"{action.label}: will run, {len(changes)} of its inputs differ from the last cached "
        f"{action.stage} ({words or other.key[:12]})",
        *(f"  {path:<{width}}  {old} -> {new}" for path, old, new in changes),
    ]


def _nearest(store: Store, action: Action) -> Record | None:
    def words(source: Mapping[str, Any], fields: Mapping[str, Any]) -> list[Any]:
        return [source.get(name, fields.get(name)) for name in ("model", "target", "shape")]

    wanted = words(action.about, action.fields)
    best: tuple[list[bool], Record] | None = None
    for key in store.recent_keys():  # the last used first, which wins among equals
        record = store.peek(key)
        if record is None or record.stage != action.stage:
            continue
        have = words(record.about, record.fields)
        same = [a == b for a, b in zip(wanted, have, strict=True)]
        if best is None or same > best[0]:
            best = (same, record)
        if all(same):
            break
    return best[1] if best else None


def differences(old: Any, new: Any, path: str = "") -> Iterator[tuple[str, str, str]]:
    """(path, old text, new text) of every place where two JSON values differ, sorted by path.

    Paths read `tools.jax` and `flags[2]`; long texts are cut.
    """
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for name in sorted(old.keys() | new.keys()):
            inner = f"{path}.{name}" if path else name
            yield from differences(old.get(name, _Absent), new.get(name, _Absent), inner)
    elif isinstance(old, list | tuple) and isinstance(new, list | tuple):
        for index in range(max(len(old), len(new))):
            a = old[index] if index < len(old) else _Absent
            b = new[index] if index < len(new) else _Absent
            yield from differences(a, b, f"{path}[{index}]")
    elif type(old) is not type(new) or old != new:
        yield path, _text(old), _text(new)


class _Absent:
    """Stands for a value that is not there (null is one that is)."""


def _text(value: Any) -> str:
    if value is _Absent:
        return _ABSENT
    if is_digest(value):
        return f"{value[:12]}…"
    return _cut(json.dumps(value))


def _cut(text: str) -> str:
    return text if len(text) <= 80 else text[:79] + "…"
