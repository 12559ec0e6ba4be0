"""`scanwright verify`: every digest, then the oracle's results on this device.

The reference prompts are run with the reference's own tokens fed back, so one near tie does not
hide what comes after it: every step's choice and top logits are compared.
"""

from __future__ import annotations

import argparse
import hashlib
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime import manifest as mf
from runtime import reference as rf
from runtime import targets
from runtime.errors import UserError
from runtime.results import save

if TYPE_CHECKING:
    from runtime import perplexity
    from runtime.module import Device
    from runtime.probe import Check
    from runtime.session import Session

NEAR_TIE = 0.01  # logits; closer than this, the choice of the token is not decided by the model
_BLOCK = 1 << 22


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    what: str
    ok: bool
    detail: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `scanwright verify`."""
    parser.add_argument("bundle", metavar="BUNDLE", type=Path, help="bundle directory")
    parser.add_argument("--device", metavar="URI", help="IREE device (default: the target's)")
    targets.add_argument(parser)
    parser.add_argument(
        "--perplexity", action="store_true", help="measure that of float weights, too"
    )
    parser.add_argument("--save", metavar="DIR", type=Path, help="keep it there for doit report")
    parser.add_argument(
        "--trust", metavar="KEY", type=Path, help="refuse what the owner of this key has not signed"
    )


def run(args: argparse.Namespace) -> int:
    """`scanwright verify`: exit code 0 if everything agrees, 1 if not. Raises UserError."""
    signed = None
    if args.trust is not None:
        from runtime import trust

        signed = trust.check(args.bundle, args.trust)
        print(f"{args.bundle}: signed by the owner of {args.trust}")
    return verify(args.bundle, args.device, args.perplexity, args.target, args.save, signed)


def verify(
    bundle: Path,
    device: str | None = None,
    perplexity: bool = False,
    target: str | None = None,
    keep: Path | None = None,
    signed: str | None = None,
) -> int:
    """Print one row a check to stdout and return 0, or 1 if any failed.

    Nothing is run unless every file is what the manifest says. Raises UserError for a bundle that
    cannot be read, or opened on this device. Of several targets, the one that is best here is run.
    `keep`: a directory for the rows, see runtime.results. `signed`: the sha256 that manifest.json
    must have, and so all that is run.
    """
    whole = manifest = mf.load(bundle)
    if signed not in (None, manifest.digest):
        raise UserError(
            f"{bundle / mf.FILE_NAME}: sha256 {manifest.digest}, expected {signed} of its"
            " signature: it was replaced, or is not as doit build writes it: do not use it"
        )
    names = ", ".join(target.name for target in manifest.targets)
    print(f"{bundle}: {manifest.model.name} for {names}, {manifest.shape.name}")
    files = list(_printed(check_files(bundle, manifest)))
    if not all(row.ok for row in files):
        print(f"verify: FAILED: the bundle is damaged; rebuild it: {manifest.rebuild}")
        return 1
    manifest = targets.pick(manifest, target, device)
    rows = list(_printed(check_device(bundle, manifest, device, perplexity)))
    good = all(row.ok for row in rows)
    if keep is not None:
        kept = {"device": device or manifest.target.uri, "passed": good}
        save(keep, "verify", manifest, kept | {"rows": [asdict(row) for row in rows]}, whole)
    print(
        "verify: passed" if good else "verify: FAILED: this device does not agree with the oracle"
    )
    return 0 if good else 1


def _printed(rows: Iterable[Row]) -> Iterable[Row]:
    """The rows, printed as they come."""
    for row in rows:
        print(f"  {'ok  ' if row.ok else 'FAIL'}  {row.what:<28} {row.detail}", flush=True)
        yield row


def check_files(bundle: Path, manifest: mf.Manifest) -> Iterable[Row]:
    """A row for each file the manifest lists."""
    for ref in manifest.files.all():
        problem = _file_problem(bundle, ref)
        yield Row(ref.path, problem is None, problem or f"{ref.size:,} bytes, sha256 matches")


def _file_problem(bundle: Path, ref: mf.FileRef) -> str | None:
    path = bundle / ref.path
    try:
        if not path.resolve(strict=True).is_relative_to(bundle.resolve()):
            return "a link out of the bundle, expected a file in it"
        if not path.is_file():
            return "not a file"
        size = path.stat().st_size
        if size != ref.size:
            return f"{size:,} bytes, expected {ref.size:,}"
        found = sha256(path)
    except FileNotFoundError:
        return f"missing, expected {ref.size:,} bytes"
    except (OSError, RuntimeError) as error:
        return f"cannot be read ({getattr(error, 'strerror', None) or error})"
    return None if found == ref.sha256 else f"sha256 {found}, expected {ref.sha256}"


def sha256(path: Path) -> str:
    """Hex digest of a file, read in blocks."""
    digest = hashlib.sha256()
    buffer = bytearray(_BLOCK)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(view[:count])
    return digest.hexdigest()


def check_device(
    bundle: Path, manifest: mf.Manifest, device: str | None, perplexity: bool = False
) -> Iterable[Row]:
    """Run what reference.json holds. A bundle that says nothing to compare with fails.

    With `perplexity`, that of the bundle is measured also where its source's is not known.
    """
    from runtime import probe
    from runtime.module import open_bundle
    from runtime.session import Session

    if manifest.files.reference is None:
        yield Row("reference", False, "files.reference is null: nothing to compare with")
        return
    reference = rf.load(bundle / manifest.files.reference.path, manifest.rebuild)
    entries = reference.entries
    seed = None
    if manifest.files.params is None:
        if entries is None:
            yield Row("reference", False, "no weights and no entries to compare with")
            return
        seed = entries.seed
    elif not reference.prompts and entries is None:
        yield Row("reference", False, "no prompts and no entries to compare with")
        return
    module = open_bundle(bundle, manifest, device, random_params=seed)
    oracle = f"{reference.oracle.name} {reference.oracle.version}"
    yield Row("opened", True, f"on {module.uri}; oracle: {oracle}")
    if entries is not None:
        _known_outputs(bundle, manifest, entries)
        yield from _entry_rows(probe.check_entries(module, manifest, entries.plain()))
    if manifest.files.params is not None:
        session, limit = Session(module, manifest), _logits_bound(manifest, entries)
        for number, prompt in enumerate(reference.prompts):
            yield check_prompt(session, module, limit, number, prompt)
        source = reference.perplexity
        if source is not None:
            yield check_perplexity(session, manifest, source.rows, source.source_loss)
        elif perplexity:
            yield check_perplexity(session, manifest, _rows(bundle, manifest), None)


def _logits_bound(manifest: mf.Manifest, entries: rf.Entries | None) -> float:
    """The largest accepted error of logits of any call."""
    from runtime import probe

    tolerance = manifest.proof.tolerance
    calls = entries.sensitivity.values() if entries and entries.sensitivity else ()
    bounds = (probe.bound("logits", tolerance, asdict(moved)) for moved in calls)
    return max(bounds, default=tolerance.logits)


def _entry_rows(checks: list[Check]) -> Iterable[Row]:
    """One row for each entry that is right, one for each wrong tensor of the others."""

    def detail(check: Check) -> str:
        return f"within {check.error:.1e} (≤ {check.tolerance:.1e})"

    for function in dict.fromkeys(check.function for check in checks):
        mine = [check for check in checks if check.function == function]
        wrong = [check for check in mine if not check.ok]
        for check in wrong:
            yield Row(f"{function}: {check.tensor}", False, detail(check))
        if not wrong:
            worst = max(mine, key=lambda check: check.error / check.tolerance)
            yield Row(function, True, f"{len(mine)} tensors, {worst.tensor} {detail(worst)}")


def _known_outputs(bundle: Path, manifest: mf.Manifest, entries: rf.Entries) -> None:
    """Raise UserError unless every output of every entry is summarised, and nothing else."""
    from runtime import probe

    outputs = {name: [o.name for o in spec.outputs] for name, spec in manifest.functions.items()}
    want = {call: outputs[name] for call, name in probe.calls(outputs)}
    found = {call: [o.name for o in tensors] for call, tensors in entries.functions.items()}
    if want != found:
        raise UserError(
            f"{bundle / 'reference.json'}: entries.functions are not those of the manifest;"
            f" rebuild: {manifest.rebuild}"
        )


def check_prompt(
    session: Session, device: Device, limit: float, number: int, prompt: rf.Prompt
) -> Row:
    """Feed one reference prompt and its continuation; compare every choice and, within the relative
    error `limit`, every top logit."""
    what = f"prompt {number} ({len(prompt.tokens)} tokens)"
    worst, ties = 0.0, 0
    for step, (row, choice) in enumerate(_steps(session, device, prompt)):
        top = dict(prompt.top_logits[step])
        if any(not 0 <= token < len(row) for token in top):
            return Row(what, False, f"token {step}: a reference id outside the vocabulary")
        if choice != prompt.generated[step]:
            wanted = prompt.generated[step]
            gap = abs(top.get(wanted, math.inf) - top.get(choice, -math.inf))
            if not gap < NEAR_TIE:
                detail = f"token {step}: {choice}, expected {wanted} (ahead by {gap:.3g})"
                return Row(what, False, detail)
            ties += 1
        scale = max(1.0, *(abs(value) for value in top.values()))
        error = _largest(abs(float(row[token]) - value) for token, value in top.items()) / scale
        if error > limit:
            return Row(what, False, f"token {step}: top logits off by {error:.1e} (≤ {limit:.1e})")
        worst = max(worst, error)
    count = len(prompt.generated)
    equal = f"{count - ties} tokens equal" + (f", {ties} near ties" if ties else "")
    return Row(what, True, f"{equal}, top logits within {worst:.1e} (≤ {limit:.1e})")


def _rows(bundle: Path, manifest: mf.Manifest) -> perplexity.Rows:
    """Those that the reference of the same model with quantised weights has."""
    from runtime import perplexity

    length = min(perplexity.LENGTH, manifest.shape.context or perplexity.LENGTH)
    files, size = manifest.files.tokenizer, manifest.model.vocab_size
    return perplexity.rows_by(bundle, files, size, length)


def check_perplexity(
    session: Session, manifest: mf.Manifest, rows: perplexity.Rows, source: float | None
) -> Row:
    """The bundle's perplexity beside its source's: told, and wrong only where it is no number."""
    from runtime import perplexity

    size, context = manifest.model.vocab_size, manifest.shape.context
    if any(not 0 <= token < size for row in rows for token in row):
        return Row("perplexity", False, "a reference id outside the vocabulary")
    if context is not None and max(map(len, rows), default=0) > context:
        return Row("perplexity", False, f"a row of more tokens than the context of {context}")
    if not rows:
        return Row("perplexity", True, "none: a context of one token")
    own = perplexity.loss(session, rows)
    count = sum(len(row) - 1 for row in rows)
    if not math.isfinite(own):
        return Row("perplexity", False, f"a logit of {count} tokens is not a number")
    random = perplexity.is_random(rows, size)
    return Row("perplexity", True, perplexity.told(own, source, count, random))


def _largest(errors: Iterable[float]) -> float:
    """The largest error; a NaN counts as infinite."""
    return max(math.inf if math.isnan(error) else error for error in errors)


def _steps(session: Session, device: Device, prompt: rf.Prompt) -> Iterable[tuple[Any, int]]:
    """(logits f32[V], chosen token) after the prompt and each reference token but the last."""
    import numpy as np

    slot = session.slots - 1
    logits, argmax = session.prefill(prompt.tokens)
    session.admit(slot)
    yield device.to_host(logits)[0], int(device.to_host(argmax)[0])
    rows = np.zeros((3, session.slots), np.int32)
    rows[2, slot] = 1
    for place, token in enumerate(prompt.generated[:-1]):
        rows[:2, slot] = token, len(prompt.tokens) + place
        logits, argmax = session.decode(*rows)
        yield device.to_host(logits)[slot], int(device.to_host(argmax)[slot])
