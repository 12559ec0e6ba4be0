"""The manifest is canonical, strict and self-consistent."""

from __future__ import annotations

import copy
import dataclasses
import json

import pytest
import toy

from runtime import manifest as mf
from runtime import strict
from runtime.errors import UserError

REF = mf.FileRef("model.vmfb", "a" * 64, 10)


def sample() -> mf.Manifest:
    tokenizer = (mf.FileRef("tokenizer/tokenizer.json", "b" * 64, 3),)
    other = mf.FileRef("model.v4.vmfb", "c" * 64, 11)
    files = mf.Files(REF, None, None, tokenizer, mf.FileRef("sbom.cdx.json", "d" * 64, 4), ())
    made = toy.make_manifest("local", toy.param_specs("local", 16), files, "17.0")
    recipe = mf.RecipeInfo(("--iree-a",), (("--iree-b",), ("--iree-c",)), ("f32",), "host", False)
    target = dataclasses.replace(made.target, recipe=recipe)
    wider = dataclasses.replace(target, name="cpu-v4")
    package, used = mf.Package("jax", "1"), mf.FileRef("config.json", "e" * 64, 5)
    return dataclasses.replace(
        made,
        target=target,
        files=dataclasses.replace(files, alternatives=(other,)),
        build=mf.BuildInfo("bf16", False, (used,), (package,)),
        alternatives=(mf.Alternative(wider, made.proof),),
    )


def refused(data, word):
    text = data if isinstance(data, str) else json.dumps(data)
    with pytest.raises(UserError) as caught:
        strict.parse(mf.Manifest, text, "manifest.json", "rebuild the bundle")
    message = str(caught.value)
    assert "\n" not in message and message.startswith("manifest.json: ")
    assert message.endswith("; rebuild the bundle")
    assert word in message
    return message


def test_text_is_canonical_and_reads_back(tmp_path):
    manifest = sample()
    text = mf.dumps(manifest)
    assert text.endswith("}\n") and text.isascii()
    assert text == json.dumps(json.loads(text), sort_keys=True, indent=1) + "\n"
    path = tmp_path / mf.FILE_NAME
    path.write_text(text)
    assert mf.load(tmp_path) == mf.load(path) == manifest
    assert mf.dumps(mf.load(tmp_path)) == text


def paths_of(value, at=()):
    """Every key of every object in the JSON value, as a path."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield (*at, key)
            yield from paths_of(inner, (*at, key))
    elif isinstance(value, list) and value:
        yield from paths_of(value[0], (*at, 0))


PLAIN = json.loads(mf.dumps(sample()))


def at(data, path):
    for key in path:
        data = data[key]
    return data


@pytest.mark.parametrize("path", sorted(set(paths_of(PLAIN)), key=str), ids=str)
def test_each_key_is_required_and_typed(path):
    *parent, key = path
    gone = copy.deepcopy(PLAIN)
    del at(gone, parent)[key]
    message = refused(gone, "")
    assert key in message or "functions" in message
    wrong = copy.deepcopy(PLAIN)
    at(wrong, parent)[key] = {"no": ["such"]}
    refused(wrong, "")
    extra = copy.deepcopy(PLAIN)
    at(extra, parent)["surprise"] = 1
    refused(extra, "surprise")


@pytest.mark.parametrize(
    ("path", "value", "word"),
    [
        (("schema",), 3, "schema 3, expected 4"),
        (("schema",), True, "schema: found true, expected an integer"),
        (("shape", "slots"), 3.0, "shape.slots: found 3.0"),
        (("shape", "slots"), 0, "slots 0"),
        (("shape", "slots"), 4, "functions.decode.inputs"),
        (("shape", "chunks"), [8, 4], "chunks [8, 4]"),
        (("shape", "chunks"), [4], "expected decode, extract, prefill_4, seed"),
        (("model", "vocab_size"), 17, "functions."),
        (("prefix_sharing",), True, "prefix_sharing"),
        (("state", 0, "slot_axis"), 1, "slot_axis 1"),
        (("state", 0, "slot_axis"), -1, "slot_axis -1"),
        (("state", 1, "name"), "h", "'h' is used twice"),
        (("params", 1, "name"), "embed", "'embed' is used twice"),
        (("params", 0, "dtype"), "f64", 'found "f64", expected'),
        (("params", 0, "shape"), [0, 8], "embed: shape [0, 8]"),
        (("target", "device"), "tpu", 'expected "local" or'),
        (("proof", "flags"), "slow", "expected fast or safe-<n>"),
        (("files", "module", "path"), "/etc/passwd", "relative path"),
        (("files", "module", "path"), "../model.vmfb", "relative path"),
        (("files", "module", "path"), "a/../../b", "relative path"),
        (("files", "module", "path"), "C:\\x", "relative path"),
        (("files", "module", "path"), ".", "relative path"),
        (("files", "module", "path"), "", "relative path"),
        (("files", "module", "path"), "manifest.json", "relative path"),
        (("files", "module", "path"), "tokenizer/tokenizer.json", "listed twice"),
        (("files", "module", "sha256"), "A" * 64, "64 lower-case hex"),
        (("files", "module", "size"), -1, "size -1"),
        (("files", "alternatives"), [], "files.alternatives: 0 files, expected 1"),
        (("alternatives", 0, "target", "name"), "cpu", "targets cpu, cpu, expected different"),
        (("files", "alternatives", 0, "path"), "model.vmfb", "listed twice"),
        (("build", "files", 0, "path"), "../config.json", "relative path"),
    ],
)
def test_values_are_checked(path, value, word):
    data = copy.deepcopy(PLAIN)
    at(data, path[:-1])[path[-1]] = value
    refused(data, word)


def test_another_schema_is_told_before_its_keys():
    older = copy.deepcopy(PLAIN) | {"schema": 3}
    del older["build"], older["alternatives"], older["files"]["sbom"]
    refused(older, "manifest.json: schema 3, expected 4")


def test_texts_that_are_not_a_manifest(tmp_path):
    text = mf.dumps(sample())
    refused(text.replace('"schema": 4', '"schema": 4, "schema": 4'), "schema: key appears twice")
    refused(text.replace("1e-05", "NaN", 1), "NaN")
    refused(text.replace("1e-05", "1e999", 1), "expected a number")
    refused(text[:-5], "not JSON")
    refused("[]", "expected an object")
    refused("[" * 100_000, "nested too deeply")
    refused('{"schema": ' + "1" * 5000 + "}", "")
    with pytest.raises(UserError, match=r"no manifest\.json"):
        mf.load(tmp_path)
    (tmp_path / mf.FILE_NAME).write_bytes(b"\xff\xfe{}")
    with pytest.raises(UserError, match="not UTF-8"):
        mf.load(tmp_path)


def test_interface_reads_the_same_parts(tmp_path):
    manifest = sample()
    interface = mf.Interface(
        "toy", 2, 16, None, (0,), None, manifest.functions, manifest.state, manifest.params,
        manifest.numerics,
    )  # fmt: skip
    path = tmp_path / "interface.json"
    path.write_text(strict.dumps(interface))
    assert mf.load_interface(path) == interface
    path.write_text(mf.dumps(manifest))
    with pytest.raises(UserError, match="unknown key"):
        mf.load_interface(path)


def test_sizes():
    manifest = sample()
    assert manifest.state_bytes_per_slot == 4 * (8 + 16)
    assert manifest.params[0].nbytes == 16 * 8 * 2
    assert manifest.state[1].batched(3) == (2, 3, 8)
    assert dataclasses.asdict(manifest.files.module) == {
        "path": "model.vmfb", "sha256": "a" * 64, "size": 10,
    }  # fmt: skip
