"""RWKV-7's .pth files: read as torch reads them, refused where they hold more than tensors.

The files here are written by hand, instruction by instruction, as torch writes them; a test marked
`oracle` compares with torch itself.
"""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import references
from bundles import ROOT
from driver import Driver
from pth_files import DICT, archive, pickled, rebuilt, saved, storage, text
from safetensors.numpy import load_file
from test_rwkv7 import blinkdl

from emit.__main__ import main
from emit.entry import Model
from emit.errors import EmitError
from emit.pth import Pth
from emit.pth_rwkv7 import VOCABULARY, convert

BF16 = np.dtype(ml_dtypes.bfloat16)


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


def test_tensors_of_every_type_come_back(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    made = {
        name: rng.standard_normal((3, 5)).astype(dtype)
        for name, dtype in (("a", np.float32), ("b.c", np.float16), ("d", BF16))
    }
    opened = Pth(saved(tmp_path / "x.pth", made))
    assert list(opened.tensors) == list(made)
    assert all(same(opened.read(name), array) for name, array in made.items())


def test_views_of_one_storage_come_back(tmp_path: Path) -> None:
    whole = np.arange(24, dtype=np.float32)
    of = storage(b"FloatStorage", "0", 24)
    items = {
        "turned": rebuilt(of, (4, 3), strides=(1, 4)),
        "part": rebuilt(of, (2, 3), offset=7, strides=(6, 2)),
        "scalar": rebuilt(of, (), offset=23),
        "parameter": b"ctorch._utils\n_rebuild_parameter\n("
        + rebuilt(of, (24,)) + b"\x88" + DICT + b"tR",
    }  # fmt: skip
    opened = Pth(archive(tmp_path / "x.pth", pickled(items), {"0": whole.tobytes()}))
    assert same(opened.read("turned"), np.ascontiguousarray(whole[:12].reshape(3, 4).T))
    assert opened.read("part").tolist() == [[7, 9, 11], [13, 15, 17]]
    assert opened.read("scalar") == 23 and opened.read("parameter").tolist() == whole.tolist()


ONE = storage(b"FloatStorage", "0", 4)
GOOD = rebuilt(ONE, (4,))
AFTER, WIDE = pickled({"a": rebuilt(ONE, (4,), 1)}), pickled({"a": rebuilt(ONE, (9,), 0, (0,))})


@pytest.mark.parametrize(
    ("pickle", "words"),
    [
        (pickled({"a": b"cos\nsystem\n" + text("x") + b"\x85R"}), "calls 'os.system' with"),
        (pickled({"a": b"cbuiltins\neval\n" + text("1") + b"\x85R"}), "calls 'builtins.eval'"),
        (pickled({"a": b"cos\nsystem\n"}), "expected a tensor"),
        (pickled({"a": b"(" + text("x") + b"ios\nsystem\n"}), "holds the instruction INST"),
        (pickled({"a": b"(cos\nsystem\n" + text("x") + b"o"}), "holds the instruction OBJ"),
        (pickled({"a": b"cos\nsystem\n)\x81"}), "holds the instruction NEWOBJ"),
        (pickled({"a": b"\x82\x01"}), "holds the instruction EXT1"),
        (pickled({"a": b"cos\nsystem\n}b"}), "sets attributes of what is not a dict"),
        (pickled({"a": b"Pos.system\n"}), "holds the instruction PERSID"),
        (pickled({"a": b"N"}), "holds 'a': None, expected a tensor"),
        (pickled({"a": GOOD[:-2] + b"\x85R"}), "calls False with ({},)"),
        (pickled({"a": rebuilt(storage(b"LongStorage", "0", 4), (4,))}), "holds a 'torch.LongSt"),
        (pickled({"a": rebuilt(storage(b"FloatStorage", "../0", 4), (4,))}), "storage '../0'"),
        (pickled({"a": rebuilt(ONE, (4,), offset=-1)}), "calls 'torch._utils._rebuild_tensor_v2'"),
        (pickled({"a": rebuilt(ONE, (-4,))}), "calls 'torch._utils._rebuild_tensor_v2'"),
        (pickled({"a": rebuilt(ONE, (0,))}), "calls 'torch._utils._rebuild_tensor_v2'"),
        (pickled({"a": rebuilt(ONE, (2, 2), strides=(1,))}), "calls 'torch._utils._rebuild"),
        (b"\x80\x02(K\x01K\x02t.", "expected tensors by name"),
        (b"\x80\x02}(K\x01" + GOOD + b"u.", "sets items of what is not a dict of names"),
        (b"\x80\x02N(" + text("a") + GOOD + b"u.", "sets items of what is not a dict of names"),
        (pickled({"a": GOOD})[:-1], "is damaged"),
        (b"\x80\x02}(" + text("a") + b"u.", "is damaged"),
        (b"\x80\x02h\x07.", "is damaged"),
        (b"\x80\x02u.", "is damaged"),
        (b"\x80\x02\x85.", "takes more than it has"),
        (b"garbage", "is damaged"),
        (b"\x80\x02cos\nsystem\nN" + b"q\x00h\x00\x86" * 60 + b"R.", "calls 'os.system' with (((("),
        (b"\x80\x02)" + b"\x85" * 5000 + b")R.", "calls"),
        # A tuple of 2^40 parts, by reference: nobody may write it out.
        (b"\x80\x02N" + b"q\x00h\x00\x86" * 40 + text("x") + b"\x93.", "is not a text"),
        (b"\x80\x02)" + b"\x85" * 200_000 + text("x") + b"\x93.", "is not a text"),
    ],
)
def test_whatever_is_no_tensor_is_refused_in_one_line(
    pickle: bytes, words: str, tmp_path: Path
) -> None:
    path = archive(tmp_path / "x.pth", pickle, {"0": bytes(16)})
    with pytest.raises(EmitError) as caught:
        Pth(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: data.pkl ") and words in message
    assert "\n" not in message and len(message) < len(str(path)) + 400


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda p, of: archive(p, AFTER, of), "element 4 of data/0"),
        (lambda p, of: archive(p, WIDE, {}), "no file data/0"),
        (lambda p, of: archive(p, WIDE, of), "shape [9] of the 4 elements of data/0"),
        (lambda p, of: archive(p, pickled({}), of, byteorder=b"big"), "byteorder is not little"),
        (lambda p, of: archive(p, pickled({}), of, **{"x/data.pkl": b""}) and p, None),
        (lambda p, of: p.write_bytes(b"\x80\x02}."), "not a zip archive"),
        (lambda p, of: zipfile.ZipFile(p, "w").close(), "0 files are called <name>/data.pkl"),
    ],
)  # fmt: skip
def test_what_the_archive_lacks_is_named(spoil: Any, words: str | None, tmp_path: Path) -> None:
    path = tmp_path / "x.pth"
    spoil(path, {"0": bytes(16)})
    if words is None:
        assert len(Pth(path).tensors) in (0, 1)
        return
    with pytest.raises(EmitError) as caught:
        Pth(path)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_changed_byte_and_a_compressed_file_are_refused(tmp_path: Path) -> None:
    made = {"a": np.full(8, 7.25, np.float32)}
    path = saved(tmp_path / "x.pth", made)
    data = path.read_bytes()
    at = data.index(made["a"].tobytes())
    path.write_bytes(data[:at] + b"\x00\x00\x80\x3f" + data[at + 4 :])
    with pytest.raises(EmitError, match="data/0: Bad CRC-32"):
        Pth(path).read("a")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as squeezed:
        squeezed.writestr("model/data.pkl", b"\x80\x02" + b"N" * 100_000 + b".")
    with pytest.raises(EmitError, match="compressed or encrypted"):
        Pth(path)


# --- RWKV-7 ----------------------------------------------------------------------------------


def original(name: str, directory: Path, **added: np.ndarray) -> tuple[Path, Path]:
    """(BlinkDL's file of the checkpoint called `name`, the checkpoint)."""
    checkpoint = references.write_checkpoint(name, directory / "checkpoint")
    named = blinkdl(load_file(checkpoint / "model.safetensors"))
    for which in "v0", "v1", "v2":  # there, and not used
        named[f"blocks.0.att.{which}"] = np.full((8, 8), 3, np.float32)
    return saved(directory / "model.pth", {**named, **added}), checkpoint


def test_a_file_becomes_the_checkpoint_with_the_same_tensors(tmp_path: Path) -> None:
    path, checkpoint = original("rwkv7/handed", tmp_path)
    (tmp_path / VOCABULARY).write_text("1 '\\x00' 1\n")
    out = tmp_path / "out"
    command = [sys.executable, "-m", "emit", "pth", str(path), "--out", str(out)]
    subprocess.run(command, cwd=ROOT, check=True)
    names = {"config.json", "model.safetensors", VOCABULARY}
    assert {p.name for p in out.iterdir()} == names
    wanted = load_file(checkpoint / "model.safetensors")
    found = load_file(out / "model.safetensors")
    assert found.keys() == wanted.keys()
    assert all(same(found[name], array) for name, array in wanted.items())
    ours = Model.of(json.loads((out / "config.json").read_text()))
    assert ours.cfg == Model.of(json.loads((checkpoint / "config.json").read_text())).cfg
    row = references.recorded("rwkv7/handed")[1][0]
    assert Driver.load(out).greedy(row.prompt, 8, 8)[0] == row.tokens[:8]


def test_the_command_says_what_it_wrote_and_what_to_do_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, _ = original("rwkv7/one_layer", tmp_path)
    out = tmp_path / "out"
    assert main(["pth", str(path), "--out", str(out)]) == 0
    told = capsys.readouterr().out
    assert f"{out}: config.json, model.safetensors; build it: doit build model={out}" in told
    assert f"no {VOCABULARY} beside {path}" in told
    (tmp_path / VOCABULARY).write_text("1 '\\x00' 1\n")
    assert main(["pth", str(path), "--out", str(tmp_path / "again")]) == 0
    assert "beside" not in capsys.readouterr().out


def test_a_refused_file_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "no.pth").write_text("text")
    assert main(["pth", str(tmp_path / "no.pth"), "--out", str(tmp_path / "out")]) == 1
    assert not (tmp_path / "out").exists()


def test_a_single_layer_of_bf16_heads(tmp_path: Path) -> None:
    path, checkpoint = original("rwkv7/one_layer", tmp_path)
    narrow = {n: Pth(path).read(n).astype(BF16) for n in Pth(path).tensors}
    convert(saved(path, narrow), tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    wanted = load_file(checkpoint / "model.safetensors")
    assert all(same(found[name], array.astype(BF16)) for name, array in wanted.items())
    assert Driver.load(tmp_path / "out", "bf16").model.cfg.num_hidden_layers == 1


def test_any_flipped_byte_is_read_or_refused_in_one_line(tmp_path: Path) -> None:
    """Of the archive's directory and of everything else; nothing but EmitError comes out."""
    good = saved(tmp_path / "x.pth", {"a": np.ones((2, 3), np.float32)}).read_bytes()
    path, refused = tmp_path / "y.pth", 0
    for at in range(len(good)):
        path.write_bytes(good[:at] + bytes([good[at] ^ 0x80]) + good[at + 1 :])
        try:
            opened = Pth(path)
            for name in opened.tensors:
                opened.read(name)
        except EmitError as error:
            refused += 1
            assert str(path) in str(error) and "\n" not in str(error)
    assert refused > len(good) // 2
    with pytest.raises(EmitError, match=r"none\.pth: no such file"):
        Pth(tmp_path / "none.pth")


def test_other_models_are_refused(tmp_path: Path) -> None:
    path, _ = original("rwkv7/one_layer", tmp_path)
    tensors = {name: Pth(path).read(name) for name in Pth(path).tensors}
    out = tmp_path / "out"

    def refused(words: str, changed: Mapping[str, np.ndarray]) -> None:
        with pytest.raises(EmitError) as caught:
            convert(saved(path, changed), out)
        assert words in str(caught.value) and "\n" not in str(caught.value)
        assert not out.exists()

    extra = {"blocks.0.ffn.s_emb.weight": np.ones(4, np.float32)}
    refused("1 tensors are none of RWKV-7's: blocks.0.ffn.s_emb.weight", {**tensors, **extra})
    refused("1 tensors are none", {**tensors, "blocks.1.ln0.weight": np.ones(64, np.float32)})
    without = {n: t for n, t in tensors.items() if n != "emb.weight"}
    refused("emb.weight is missing or no matrix", without)
    other = {**tensors, "blocks.0.att.r_k": np.ones((2, 32), np.float32)}
    refused("blocks.0.att.r_k has heads of 32, expected 64", other)


def test_the_refusal_of_pickles_says_what_to_do(tmp_path: Path) -> None:
    from artifacts.lockfile import select
    from emit.checkpoint import open_checkpoint
    from runtime.errors import UserError

    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.pth").write_bytes(b"")
    with pytest.raises(EmitError, match=r"python -m emit pth FILE --out DIRECTORY"):
        open_checkpoint(tmp_path)
    with pytest.raises(UserError, match=r"python -m emit pth FILE --out DIRECTORY"):
        select("here", ["config.json", "model.pth"], lambda: b"")
    with pytest.raises(UserError, match=r"here: no config.json; .*python -m emit pth FILE"):
        select("here", ["model.pth"], lambda: b"")


@pytest.mark.oracle
@pytest.mark.filterwarnings("default")
def test_torch_writes_such_files(tmp_path: Path) -> None:
    import torch

    whole = torch.randn(6, 8)
    made = torch.nn.Linear(3, 5).to(torch.bfloat16).state_dict()
    made |= {"view": whole[1:4, ::2], "turned": whole.T, "half": whole.half()}
    made["parameter"] = torch.nn.Parameter(whole)
    for given in (made, dict(made)):
        torch.save(given, tmp_path / "x.pth")
        opened = Pth(tmp_path / "x.pth")
        assert list(opened.tensors) == list(given)
        for name, tensor in given.items():
            want = tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()
            assert opened.read(name).tobytes() == want
            assert opened.read(name).shape == tuple(tensor.shape)
    torch.save({"model": made, "step": 3}, tmp_path / "x.pth")
    with pytest.raises(EmitError, match="expected a tensor"):
        Pth(tmp_path / "x.pth")
    torch.save(made, tmp_path / "x.pth", _use_new_zipfile_serialization=False)
    with pytest.raises(EmitError, match="not a zip archive"):
        Pth(tmp_path / "x.pth")
