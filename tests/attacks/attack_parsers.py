"""The readers of files that somebody else made, each as a function of the directory they are in.

Each reads files of fixed names, `FILES`, as the product does, and all that the result offers.
Only `ERRORS` may come out of them.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import model_signing.verifying  # noqa: F401  where first imported it looks at the network

from artifacts import reproduce
from artifacts.lockfile import Lock
from emit import irpa, pth
from emit.checkpoint import open_checkpoint, read_config
from emit.entry import Model
from emit.errors import EmitError
from emit.gguf_checkpoint import open_gguf
from emit.gguf_file import open_file
from emit.gguf_tokenizer import tokenizer_of
from emit.pth_rwkv7 import convert
from emit.state import DTYPES
from recipes.schema import load_model, load_target
from runtime import manifest, oci, reference, saved, tokenizer, trust
from runtime.blobs import Blobs
from runtime.errors import UserError
from runtime.manifest import FileRef
from runtime.pack import TarSource
from runtime.pull import pull
from runtime.server import template
from runtime.server.fields import ApiError
from runtime.tokenizer_plamo import PlamoTokenizer
from runtime.tokenizer_rwkv import WorldTokenizer
from runtime.tokenizer_tiktoken import TiktokenTokenizer

ERRORS = (UserError, EmitError, ApiError)
TALK = [{"role": "user", "content": "Hello, " * 20}, {"role": "assistant", "content": "hi"}]
TEXT = "In the beginning, <|x|> 1234 \u00e9\u3042\n\n  end"
REF = FileRef("model.vmfb", "a" * 64, 10)
TOKENIZER = FileRef("tokenizer/tokenizer.json", "b" * 64, 3)
IRPA = [irpa.Tensor("first", "f32", (3, 5)), irpa.Tensor("second", "bf16", (7,))]


def small_manifest() -> manifest.Manifest:
    """The manifest that saved conversations are of."""
    state = (manifest.StateSpec("h", "f32", (1, 8), 0, "fixed"),)
    params = (manifest.ParamSpec("embed", "f32", (16, 8), 0.0, 1.0),)
    return manifest.Manifest(
        manifest.SCHEMA,
        manifest.ModelInfo("toy", "toy", "dir:toy", None, None, "c" * 64, 16, (0,), None),
        manifest.TargetInfo("cpu", "local", "local-task", None, (), "3.13", "17.0", (), None, None),
        manifest.ShapeInfo("b2-p4", 2, (4,), None),
        manifest.Files(REF, None, None, (TOKENIZER,), None, ()),
        manifest.expected_functions(16, 2, (4,), state),
        state,
        params,
        manifest.Numerics("f32", "f32", "f32", None),
        False,
        manifest.Proof("not-run", "toy", "fast", manifest.Tolerance(1e-5, 1e-5)),
        None,
        (),
    )


MANIFEST = small_manifest()
KEY = Path(__file__).with_name("attack_key.pub")


def _checkpoint(root: Path) -> None:
    found = open_checkpoint(root)
    for name in found.tensors:
        found.read(name)


def _config(root: Path) -> None:
    model = Model.of(read_config(root))
    _ = model.weight_map, model.state


def _gguf(root: Path) -> None:
    found = open_gguf(root / "model.gguf")
    for name in found.tensors:
        found.read(name)


def _gguf_tokenizer(root: Path) -> None:
    tokenizer_of(open_file(root / "model.gguf"))


def _pth(root: Path) -> None:
    found = pth.Pth(root / "model.pth")
    for name in found.tensors:
        found.read(name)


def _pth_rwkv7(root: Path) -> None:
    convert(root / "model.pth", root / "out")


def _irpa(root: Path) -> None:
    for array in irpa.read(root / "params.irpa", IRPA).values():
        assert array.dtype in DTYPES.values()
        array.tobytes()


def _saved(root: Path) -> None:
    saved.load(root / "talk", MANIFEST)


def _manifest(root: Path) -> None:
    _ = manifest.load(root).digest


def _interface(root: Path) -> None:
    manifest.load_interface(root / "interface.json")


def _reference(root: Path) -> None:
    reference.load(root / "reference.json", "doit build")


def _model_recipe(root: Path) -> None:
    load_model(root / "mine.yaml")


def _target_recipe(root: Path) -> None:
    load_target(root / "mine.yaml")


def _lock(root: Path) -> None:
    Lock.load(root / "mine.lock.json")


def _words(root: Path, name: str, kind: Callable[[str, str, Path], tokenizer.Tokenizer]) -> None:
    """As a bundle's tokenizer is opened and used, with the config beside it if there is one."""
    config = root / tokenizer.CONFIG_NAME
    text = (root / name).read_bytes().decode(errors="replace")
    settings = config.read_bytes().decode(errors="replace") if config.exists() else "{}"
    found = kind(text, settings, root / name)
    found.decode(found.encode(TEXT))
    found.label(1)


def _tokenizer(root: Path) -> None:
    _words(root, "tokenizer.json", tokenizer.Tokenizer)


def _world(root: Path) -> None:
    _words(root, "rwkv_vocab_v20230424.txt", WorldTokenizer)


def _plamo(root: Path) -> None:
    _words(root, "tokenizer.jsonl", PlamoTokenizer)


def _tiktoken(root: Path) -> None:
    _words(root, "tiktoken.model", TiktokenTokenizer)


def _template(root: Path) -> None:
    text = (root / "chat_template.jinja").read_bytes().decode(errors="replace")
    template.ChatTemplate(text, {"bos_token": "<s>"}).render(TALK)


def _bundle_tokenizer(root: Path) -> None:
    """Through a manifest's file list, with the chat template."""
    files = manifest.load(root).files.tokenizer
    tokenizer.load(root, files)
    template.load(root, files)


def _tar(root: Path) -> None:
    """Unpacked as `scanwright unpack` does, and thrown away."""
    with TemporaryDirectory(dir=root) as place:
        made = Path(place) / "made"
        with contextlib.redirect_stderr(io.StringIO()):
            pull(TarSource(root / "b.tar"), made, None, Blobs(Path(place) / "cache"))
        for path in made.rglob("*"):
            assert not path.is_symlink()
            assert path.is_dir() or path.stat().st_mode & 0o7777 == 0o444


def _image(root: Path) -> None:
    oci.layers((root / "image.json").read_bytes(), "oci://host/name")


def _signature(root: Path) -> None:
    trust.check(root, KEY)


def _reproduced(root: Path) -> None:
    """What is looked at before anything is built."""
    reproduce.checked(root)


PARSERS: dict[str, Callable[[Path], Any]] = {
    "checkpoint": _checkpoint,
    "config": _config,
    "gguf": _gguf,
    "gguf tokenizer": _gguf_tokenizer,
    "pth": _pth,
    "pth of RWKV-7": _pth_rwkv7,
    "irpa": _irpa,
    "conversation": _saved,
    "manifest": _manifest,
    "interface": _interface,
    "reference": _reference,
    "model recipe": _model_recipe,
    "target recipe": _target_recipe,
    "lock": _lock,
    "tokenizer.json": _tokenizer,
    "rwkv vocabulary": _world,
    "tokenizer.jsonl": _plamo,
    "tiktoken.model": _tiktoken,
    "chat template": _template,
    "bundle's tokenizer": _bundle_tokenizer,
    "tar": _tar,
    "image manifest": _image,
    "signature": _signature,
    "reproduced": _reproduced,
}
