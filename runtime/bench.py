"""`scanwright bench`: how fast a bundle opens, prefills and decodes on this device.

Each figure is the median over rounds, with its smallest and largest beside it. Every measured call
ends with its argmax read on the host, as generating does.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime import manifest as mf
from runtime import targets
from runtime.errors import UserError
from runtime.results import save

if TYPE_CHECKING:
    from runtime.session import Session

ROUNDS = 5
ROUND_S = 1.0  # a round repeats its work for about this long
MAX_OPENINGS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `scanwright bench`."""
    parser.add_argument("bundle", metavar="BUNDLE", type=Path, help="bundle directory")
    parser.add_argument("--device", metavar="URI", help="IREE device (default: the target's)")
    targets.add_argument(parser)
    parser.add_argument(
        "--random-params",
        metavar="SEED",
        type=int,
        nargs="?",
        const=0,
        help="make the parameters up (a bundle without weights needs it; default seed 0)",
    )
    parser.add_argument("--rounds", metavar="N", type=int, default=ROUNDS, help="default: 5")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--save", metavar="DIR", type=Path, help="keep it there for doit report")


def run(args: argparse.Namespace) -> int:
    """`scanwright bench`. Raises UserError."""
    if args.rounds < 1:
        raise UserError(f"rounds: found {args.rounds}, expected 1 or more")
    if args.random_params is not None and args.random_params < 0:
        raise UserError(f"random-params: found seed {args.random_params}, expected 0 or more")
    found = bench(args.bundle, args.device, args.random_params, args.rounds, target=args.target)
    if args.save is not None:
        whole = mf.load(args.bundle)
        save(args.save, "bench", targets.named(args.bundle, found["target"]), found, whole)
    print(json.dumps(found, indent=1) if args.json else render(found))
    return 0


def bench(
    bundle: Path,
    device: str | None = None,
    random_params: int | None = None,
    rounds: int = ROUNDS,
    round_s: float = ROUND_S,
    target: str | None = None,
) -> dict[str, Any]:
    """Measure a bundle. Times are seconds, sizes bytes, rates tokens of all rows a second.

    `open_s` is manifest, module and parameters to a session ready to prefill (imports and the
    device driver's own start excluded by one opening before; with random parameters, making them
    is included, and one opening is all). `first_token_s` is a prompt of one chunk of the largest
    size to its first token. Raises UserError.
    """
    name = targets.load(bundle, target, device).target.name
    opened, session = _openings(bundle, name, device, random_params, rounds)
    manifest = session.manifest
    chunk, batch = manifest.shape.chunks[-1], session.slots
    prompt = _prompt(manifest, chunk)
    first = _rounds(lambda: _first_token(session, prompt), rounds, round_s)
    prefill = _rounds(_prefill_chunk(session, prompt), rounds, round_s)
    decode = _rounds(_decode_step(session, chunk), rounds, round_s)
    per_step = weight_bytes_per_step(manifest)
    state = 2 * manifest.state_bytes_per_slot
    moved = per_step + batch * state
    times = {
        "open_s": opened,
        "first_token_s": first,
        "prefill_tokens_per_s": [chunk / t for t in prefill],
        "decode_tokens_per_s": [batch / t for t in decode],
        "decode_step_s": decode,
        "decode_bytes_per_s": [moved / t for t in decode],
    }
    return {
        **{name: statistics.median(values) for name, values in times.items()},
        "spread": {name: [min(values), max(values)] for name, values in times.items()},
        "weight_bytes_per_token": per_step,
        "state_bytes_per_token": state,
        "peak_rss_bytes": peak_rss_bytes(),
        "batch": batch,
        "chunk": chunk,
        "rounds": rounds,
        "device": device or manifest.target.uri,
        "model": manifest.model.name,
        "target": manifest.target.name,
        "shape": manifest.shape.name,
        "weights": manifest.numerics.weights,
        "params": "file" if random_params is None else f"random seed {random_params}",
    }


def weight_bytes_per_step(manifest: mf.Manifest) -> int:
    """Bytes of parameters that one decode step reads, whatever the number of rows.

    Every parameter once, except an embedding table that is only looked up: where two matrices have
    the vocabulary as an axis (input and output embeddings untied), the one named after embeddings
    counts one row for each slot. A tied table is read whole by the output layer.
    """
    vocab, slots = manifest.model.vocab_size, manifest.shape.slots
    total = sum(spec.nbytes for spec in manifest.params)
    tables: dict[str, int] = {}  # a matrix as codes is more than one parameter
    for spec in manifest.params:
        if len(spec.shape) == 2 and spec.shape[0] == vocab:
            name = re.sub(r"\.(codes|scales|offsets)$", "", spec.name)
            tables[name] = tables.get(name, 0) + spec.nbytes
    lookups = [name for name in tables if "emb" in name]
    if len(tables) < 2 or not lookups:
        return total
    table = tables[lookups[0]]
    return total - table + min(slots, vocab) * table // vocab


def peak_rss_bytes() -> int:
    """Largest resident memory of this process so far (mapped weights that were read included)."""
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _openings(
    bundle: Path, target: str, device: str | None, random_params: int | None, rounds: int
) -> tuple[list[float], Session]:
    """(seconds of each opening, the last session); one untimed opening goes first."""
    from runtime.hal import open_device
    from runtime.module import open_bundle
    from runtime.session import Session

    def one() -> Session:
        manifest = targets.named(bundle, target)
        return Session(open_bundle(bundle, manifest, device, random_params), manifest)

    if random_params is not None:
        open_device(device or targets.named(bundle, target).target.uri)
        count = 1
    else:
        one()
        count = min(rounds, MAX_OPENINGS)
    seconds, session = [], None
    for _ in range(count):
        del session  # one copy of the weights at a time on a device
        start = time.perf_counter()
        session = one()
        seconds.append(time.perf_counter() - start)
    assert session is not None
    return seconds, session


def _rounds(work: Callable[[], None], rounds: int, round_s: float) -> list[float]:
    """Seconds of one call of `work` in each round: warmed up, repeated for about `round_s`."""
    work()
    start = time.perf_counter()
    work()
    once = time.perf_counter() - start
    repeats = max(1, min(1000, int(round_s / max(once, 1e-6))))
    found = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(repeats):
            work()
        found.append((time.perf_counter() - start) / repeats)
    return found


def _prompt(manifest: mf.Manifest, length: int) -> list[int]:
    """Token ids spread over the vocabulary."""
    return [(7919 * i + 1) % manifest.model.vocab_size for i in range(length)]


def _first_token(session: Session, prompt: list[int]) -> None:
    _, argmax = session.prefill(prompt)
    session.device.to_host(argmax)


def _prefill_chunk(session: Session, prompt: list[int]) -> Callable[[], None]:
    """A chunk of a longer prompt: the state is carried on, and no state is made."""
    carried: list[Any] = [None]

    def work() -> None:
        chunk = session.start(prompt, state=carried[0], cuts=[(len(prompt), len(prompt))])
        chunk.step()
        session.device.to_host(chunk.argmax)
        carried[0] = chunk.take()

    return work


def _decode_step(session: Session, position: int) -> Callable[[], None]:
    """One step of all slots, feeding back its own tokens."""
    import numpy as np

    tokens = np.ones(session.slots, np.int32)
    positions = np.full(session.slots, position, np.int32)
    active = np.ones(session.slots, np.int32)

    def work() -> None:
        nonlocal tokens
        _, argmax = session.decode(tokens, positions, active)
        tokens = session.device.to_host(argmax)

    return work


def render(found: dict[str, Any]) -> str:
    """The figures as a table a person can read."""
    spread = found["spread"]

    def line(name: str, key: str, unit: str, scale: float = 1.0) -> str:
        low, high = (value * scale for value in spread[key])
        return f"{name:<22}{found[key] * scale:>12,.2f} {unit:<9} {low:,.2f} … {high:,.2f}"

    megabytes = {key: found[key] / 1e6 for key in
                 ("weight_bytes_per_token", "state_bytes_per_token", "peak_rss_bytes")}  # fmt: skip
    return "\n".join(
        [
            f"{found['model']} for {found['target']}, {found['shape']}, {found['weights']} weights"
            f" ({found['params']}) on {found['device']}; medians of {found['rounds']} rounds,"
            " smallest … largest",
            line("open", "open_s", "ms", 1e3),
            line(f"first token ({found['chunk']})", "first_token_s", "ms", 1e3),
            line(f"prefill (chunk {found['chunk']})", "prefill_tokens_per_s", "tokens/s"),
            line(f"decode (batch {found['batch']})", "decode_tokens_per_s", "tokens/s"),
            line("decode step", "decode_step_s", "ms", 1e3),
            line("decode memory rate", "decode_bytes_per_s", "GB/s", 1e-9),
            f"{'weights read a step':<22}{megabytes['weight_bytes_per_token']:>12,.2f} MB",
            f"{'state moved a token':<22}{megabytes['state_bytes_per_token']:>12,.2f} MB",
            f"{'peak resident memory':<22}{megabytes['peak_rss_bytes']:>12,.2f} MB",
        ]
    )
