"""verify and inspect on a compiled toy bundle, whole and damaged in every way that matters."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import toy

from runtime import inspect as inspect_bundle
from runtime import manifest as mf
from runtime import probe
from runtime.cli import main
from runtime.errors import UserError
from runtime.module import Module
from runtime.perplexity import seeded, surprise
from runtime.verify import _largest, verify

pytestmark = pytest.mark.iree


@pytest.fixture
def bundle(tmp_path):
    return toy.copy(toy.bundle(), tmp_path / "bundle")


def rewrite(bundle: Path, name: str, data: bytes) -> None:
    """Change a file and its entry in the manifest, so that only its content is in question."""
    (bundle / name).write_bytes(data)
    path = bundle / mf.FILE_NAME
    manifest = json.loads(path.read_text())
    ref = {"path": name, "sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
    manifest["files"][name.split(".")[0]] = ref
    path.write_text(json.dumps(manifest))


def change_reference(bundle: Path, change) -> None:
    content = json.loads((bundle / "reference.json").read_text())
    change(content)
    rewrite(bundle, "reference.json", json.dumps(content).encode())


@pytest.mark.parametrize("device", ["local", pytest.param("vulkan", marks=pytest.mark.vulkan)])
def test_a_good_bundle_passes(device, capsys):
    assert verify(toy.bundle(device)) == 0
    out = capsys.readouterr().out
    for word in ("model.vmfb", "params.irpa", "reference.json", "prompt 1 (13 tokens)", "passed"):
        assert word in out
    assert "FAIL" not in out


@pytest.mark.parametrize("name", ["model.vmfb", "params.irpa", "reference.json"])
def test_every_file_is_checked(bundle, name, capsys):
    path = bundle / name
    whole = path.read_bytes()

    def failed(word):
        assert verify(bundle) == 1
        out = capsys.readouterr().out
        lines = [line for line in out.splitlines() if line.startswith("  FAIL")]
        assert len(lines) == 1 and name in lines[0] and word in lines[0]
        assert "rebuild it: doit build model=toy target=cpu" in out and "opened" not in out

    for place in (0, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        failed("sha256")
    path.write_bytes(whole[:-1])
    failed(f"{len(whole) - 1:,} bytes, expected {len(whole):,}")
    path.write_bytes(whole + b"\0")
    failed(f"{len(whole) + 1:,} bytes")
    path.unlink()
    failed("missing")
    path.mkdir()
    failed("not a file")
    path.rmdir()
    outside = bundle.parent / f"elsewhere-{name}"
    outside.write_bytes(whole)
    path.symlink_to(outside)
    failed("a link out of the bundle")
    path.unlink()
    path.symlink_to(path.name)
    failed("cannot be read")
    path.unlink()
    path.write_bytes(whole)
    assert verify(bundle) == 0


def test_paths_out_of_the_bundle_are_refused(bundle):
    shutil.copy(bundle / "reference.json", bundle.parent / "reference.json")
    path = bundle / mf.FILE_NAME
    text = path.read_text()
    path.write_text(text.replace('"reference.json"', '"../reference.json"'))
    with pytest.raises(UserError, match="relative path inside the bundle"):
        verify(bundle)


def test_a_wrong_token_fails(bundle, capsys):
    def change(content):
        prompt = content["prompts"][1]
        prompt["generated"][3] = (prompt["generated"][3] + 1) % toy.V

    change_reference(bundle, change)
    assert verify(bundle) == 1
    assert "token 3: " in capsys.readouterr().out


def test_wrong_logits_fail(bundle, capsys):
    def change(content):
        content["prompts"][0]["top_logits"][5][2][1] += 1e-3

    change_reference(bundle, change)
    assert verify(bundle) == 1
    assert "token 5: top logits off by" in capsys.readouterr().out


def test_a_near_tie_is_reported_not_failed(bundle, capsys):
    def change(content):
        top = content["prompts"][0]["top_logits"][7]
        top[1] = [top[1][0], top[0][1]]  # as if the oracle had seen both alike
        top[0][1], top[1][1] = top[0][1] - 1e-6, top[0][1] + 1e-6
        content["prompts"][0]["generated"][7] = top[1][0]

    change_reference(bundle, change)
    loose = mf.load(bundle)
    object.__setattr__(loose.proof.tolerance, "logits", 10.0)
    (bundle / mf.FILE_NAME).write_text(mf.dumps(loose))
    assert verify(bundle) == 0
    assert "7 tokens equal, 1 near ties" in capsys.readouterr().out


ROWS = [[1, 2, 3, 4], [5, 6], [7, 8, 9], [3, 3, 3], [1, 0]]  # more than the toy has slots


def test_perplexity_is_told_beside_that_of_the_source(bundle, capsys):
    """The toy's own by JAX, and what a source of half its loss makes of it."""
    params, losses = toy.jax_params(mf.load(bundle).params, 7), []
    for row in ROWS:
        for count in range(1, len(row)):
            (_, (logits, *_)) = toy.greedy(params, row[:count], 1)
            losses.append(surprise(logits, row[count]))
    own = math.fsum(losses) / len(losses)
    for share in (1.0, 0.5):
        change_reference(
            bundle, lambda c, s=share: c.update(perplexity={"rows": ROWS, "source_loss": s * own})
        )
        assert verify(bundle) == 0
        change = 100 * math.expm1(own * (1 - share))
        want = f"{math.exp(own):.3f}, of the source {math.exp(share * own):.3f} ({change:+.2f} %)"
        found = capsys.readouterr().out
        assert want.replace("+0.00", "") in found.replace("+0.00", "").replace("-0.00", "")
        assert f"{len(losses)} tokens" in found


@pytest.mark.parametrize("hybrid", [False, True])
def test_perplexity_of_float_weights_is_told_if_it_is_asked_for(hybrid, capsys):
    bundle = toy.bundle(hybrid=hybrid)
    assert main(["verify", str(bundle)]) == 0
    assert "perplexity" not in capsys.readouterr().out
    assert main(["verify", str(bundle), "--perplexity"]) == 0
    (line,) = [row for row in capsys.readouterr().out.splitlines() if "perplexity" in row]
    rows = seeded(toy.V, toy.CONTEXT if hybrid else 64)
    assert (
        line.endswith(f", {sum(len(row) - 1 for row in rows)} random tokens")
        and "source" not in line
    )
    assert 2 < float(line.split()[2].rstrip(",")) < 1e6


def test_perplexity_that_cannot_be_compared_fails(bundle, capsys):
    change_reference(
        bundle, lambda c: c.update(perplexity={"rows": [[1, toy.V]], "source_loss": 1.0})
    )
    assert verify(bundle) == 1
    assert "perplexity                   a reference id outside" in capsys.readouterr().out


def test_other_weights_fail(bundle, capsys):
    from runtime.params_random import write_archive

    write_archive(mf.load(bundle).params, 8, bundle / "params.irpa")
    rewrite(bundle, "params.irpa", (bundle / "params.irpa").read_bytes())
    assert verify(bundle) == 1
    assert "this device does not agree" in capsys.readouterr().out


def test_nan_weights_fail(bundle, capsys):
    data = (bundle / "params.irpa").read_bytes()
    end = len(data.rstrip(b"\0")) // 4 * 4
    rewrite(bundle, "params.irpa", data[: end - 128] + b"\xff" * 128 + data[end:])
    assert verify(bundle) == 1
    assert "this device does not agree" in capsys.readouterr().out
    assert _largest([1.0, math.nan, 2.0]) == math.inf


def test_nothing_to_compare_with_fails(bundle, capsys):
    change_reference(bundle, lambda content: content.update(prompts=[]))
    assert verify(bundle) == 1
    assert "no prompts and no entries" in capsys.readouterr().out
    manifest = json.loads((bundle / mf.FILE_NAME).read_text())
    manifest["files"]["reference"] = None
    (bundle / mf.FILE_NAME).write_text(json.dumps(manifest))
    assert verify(bundle) == 1
    assert "files.reference is null" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda c: c.update(schema=2), "schema 2"),
        (lambda c: c.update(more=1), "unknown key more"),
        (lambda c: c["prompts"][0].pop("min_gap"), "prompts[0]: missing key min_gap"),
        (lambda c: c["prompts"][0]["generated"].pop(), "with one top_logits for each"),
        (lambda c: c["prompts"][0].update(tokens=[]), "expected some"),
        (lambda c: c["prompts"][0].update(tokens=[99]), "token id 99"),
        (lambda c: c["prompts"][1]["top_logits"][0].pop(), ""),
        (lambda c: c.update(perplexity={"rows": [[1]], "source_loss": 1.0}), "two tokens each"),
        (lambda c: c.update(perplexity={"rows": [[1, 2]]}), "missing key source_loss"),
        (lambda c: c.update(entries={"seed": 1, "functions": {}}), "entries.functions"),
    ],
)
def test_damaged_references_are_refused(bundle, change, word):
    change_reference(bundle, change)
    if not word:  # fewer logits than usual are still a reference
        assert verify(bundle) == 0
        return
    with pytest.raises(UserError) as caught:
        verify(bundle)
    assert word in str(caught.value) and "\n" not in str(caught.value)


def summaries(module: Module, manifest: mf.Manifest, seed: int) -> dict:
    """Entries of a reference computed on a device itself."""
    functions, run = {}, probe.Runs(module)
    for call, name in probe.calls(manifest.functions):
        spec = manifest.functions[name]
        given = probe.inputs(call, spec, manifest.model.vocab_size, manifest.shape.context, seed)
        found = run(name, spec, given)
        functions[call] = [
            probe.summarize(call, tensor.name, found[tensor.name], seed) for tensor in spec.outputs
        ]
    return {"seed": seed, "functions": functions}


def test_entries_of_a_weight_free_bundle(tmp_path, capsys):
    bundle = toy.copy(toy.bundle("local", toy.V, True), tmp_path / "free")
    manifest = mf.load(bundle)
    entries = summaries(Module.open(bundle, manifest, random_params=5), manifest, 5)
    content = {
        "schema": 1,
        "oracle": {"name": "jax", "version": "0"},
        "prompts": [],
        "entries": entries,
    }
    rewrite(bundle, "reference.json", json.dumps(content).encode())
    assert verify(bundle) == 0
    assert "decode                       4 tensors" in capsys.readouterr().out
    entries["functions"]["seed"][0]["samples"][3][1] += 0.01
    rewrite(bundle, "reference.json", json.dumps(content).encode())
    assert verify(bundle) == 1
    out = capsys.readouterr().out
    assert "FAIL  seed: h" in out and out.count("  FAIL") == 1


def test_inspect_tells_what_it_is(capsys):
    bundle = toy.bundle()
    assert main(["inspect", str(bundle), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    manifest = mf.load(bundle)
    assert found == json.loads(json.dumps(inspect_bundle.summary(bundle)))
    assert found["state_bytes_per_slot"] == 96 and found["state_bytes"] == 288
    assert found["weight_bytes"] == sum(math.prod(p.shape) * (4 - 2 * (p.dtype == "bf16"))
                                        for p in manifest.params)  # fmt: skip
    assert found["model"]["parameters"] == 384
    assert main(["inspect", str(bundle)]) == 0
    out = capsys.readouterr().out
    for word in ("toy", "3 slots", "96 B a slot", "h: f32[1, 8]", "fixed", "bytecode 17.0",
                 "prefill_8 (7 → 4)", "model.vmfb", manifest.files.module.sha256[:16]):  # fmt: skip
        assert word in out
    assert not any(line.endswith(" ") for line in out.splitlines())


def test_sizes_for_readers():
    found = [inspect_bundle.size(n) for n in (0, 1023, 1536, 5 << 30)]
    assert found == ["0 B", "1023 B", "1.5 KiB", "5.0 GiB"]
    assert np.isfinite(float(found[2].split()[0]))
