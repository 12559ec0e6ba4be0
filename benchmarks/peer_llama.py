"""llama.cpp as a peer: its conversion, its quantizer, its decode, from files that a user provides.

Two directories under WORK/llama (or a link to another place):

    source  a source tree of llama.cpp: its conversion and its headers; for example vendor/llama.cpp
            of `pip download --no-deps --no-binary :all: llama-cpp-python`, unpacked
    lib     its shared libraries: `build/bin` of the same version built for this machine, or those
            of the npm package @node-llama-cpp/linux-x64 (`npm pack`, then bins/linux-x64), which
            holds one library a kind of processor and takes the best at run time

Run as a script with a checkpoint, a file and a type, it converts.
"""

from __future__ import annotations

import ctypes
import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
FTYPES = {"q4_0": 2, "q4_1": 3, "q8_0": 7, "q4_K": 15}  # enum llama_ftype; q4_K is Q4_K_M
CONVERTED = ("f32", "bf16")  # by the conversion script; the others by the quantizer


class NoPeer(Exception):
    """What is missing, and how to get it."""


def check(home: Path) -> None:
    """Raises NoPeer unless both directories are there."""
    if not (home / "source" / "conversion").is_dir():
        raise NoPeer(f"llama.cpp: no source tree at {home / 'source'}: see {Path(__file__).name}")
    if not libraries(home):
        raise NoPeer(f"llama.cpp: no libraries at {home / 'lib'}: see {Path(__file__).name}")


def libraries(home: Path) -> list[Path]:
    """ggml-base, ggml and llama, in the order they need each other."""
    found = []
    for name in ("libggml-base", "libggml", "libllama"):
        files = sorted((home / "lib").glob(f"{name}.*so*"))
        found += files[:1]
    return found if len(found) == 3 else []


def shim(home: Path) -> Path:
    """peer_llama.c, compiled by ziglang against the source tree's headers."""
    out = home / "peer_llama.so"
    source = HERE / "peer_llama.c"
    if out.exists() and out.stat().st_mtime > source.stat().st_mtime:
        return out
    includes = [f"-I{home / 'source' / part}" for part in ("include", "ggml/include")]
    command = [sys.executable, "-m", "ziglang", "cc", "-O2", "-shared", "-fPIC", *includes]
    command += [str(source), *map(str, libraries(home)), "-o", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoPeer(f"llama.cpp: {source.name} does not compile: {done.stderr.strip()[:400]}")
    return out


def load(home: Path) -> ctypes.CDLL:
    """The functions of peer_llama.c. Raises NoPeer."""
    check(home)
    for path in libraries(home):
        ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
    lib = ctypes.CDLL(str(shim(home)))
    lib.peer_system.restype = ctypes.c_char_p
    lib.peer_open.restype = ctypes.c_void_p
    lib.peer_logits.restype = ctypes.POINTER(ctypes.c_float)
    number, pointer = ctypes.c_int, ctypes.c_void_p
    lib.peer_vocabulary.argtypes = lib.peer_clear.argtypes = [pointer]
    lib.peer_eval.argtypes = [pointer, pointer, number, number, number]
    lib.peer_logits.argtypes = [pointer, number]
    if not lib.peer_start(str(home / "lib").encode()):
        raise NoPeer(f"llama.cpp: {home / 'lib'} is of another version than {home / 'source'}")
    return lib


class Model:
    """A GGUF file opened for `sequences` independent texts of at most `length` tokens."""

    def __init__(
        self, lib: ctypes.CDLL, path: Path, length: int, sequences: int, wide: bool = False
    ) -> None:
        self._lib, self.sequences = lib, sequences
        self._peer = lib.peer_open(str(path).encode(), length, sequences, 2, int(wide))
        if not self._peer:
            raise NoPeer(f"llama.cpp: cannot open {path}")
        self._vocabulary: int = lib.peer_vocabulary(self._peer)

    def clear(self) -> None:
        """Forget every text."""
        self._lib.peer_clear(self._peer)

    def eval(self, tokens: np.ndarray[Any, Any], position: int) -> None:
        """Tokens i32[sequences, count], the first of each at `position`; returns once done."""
        count = tokens.shape[1]
        given = np.ascontiguousarray(tokens, np.int32)
        code = self._lib.peer_eval(self._peer, given.ctypes.data, count, position, len(given))
        if code:
            raise RuntimeError(f"llama_decode: {code}")
        self._lib.peer_logits(self._peer, count - 1)  # waits

    def logits(self, count: int) -> np.ndarray[Any, Any]:
        """Of the first sequence's last token, `count` having been given to it."""
        found = self._lib.peer_logits(self._peer, count - 1)
        return np.ctypeslib.as_array(found, (self._vocabulary,)).copy()


def make(home: Path, checkpoint: Path, kind: str, out: Path) -> None:
    """The GGUF file `out`/`kind`.gguf of a checkpoint, unless it is there. Raises NoPeer."""
    path, part = out / f"{kind}.gguf", out / f"{kind}.part"
    if path.exists():
        return
    out.mkdir(parents=True, exist_ok=True)
    if kind in CONVERTED:
        command = [sys.executable, __file__, str(home / "source"), str(checkpoint), str(part), kind]
    else:
        make(home, checkpoint, "f32", out)
        command = [sys.executable, __file__, str(home), str(out / "f32.gguf"), str(part), kind]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise NoPeer(f"llama.cpp: {checkpoint.name} as {kind}: {last}")
    part.rename(path)


def convert(source: Path, checkpoint: Path, out: Path, kind: str) -> None:
    """llama.cpp's own conversion, without a tokenizer: tokens are given by number."""
    sys.path[:0] = [str(source), str(source / "gguf-py")]
    import gguf
    import torch

    their: Any = importlib.import_module("conversion")
    config = their.ModelBase.load_hparams(checkpoint, False)
    made: Any = their.get_model_class(their.get_model_architecture(config, their.ModelType.TEXT))
    made.no_mtp = True

    def no_vocabulary(self: Any) -> None:
        self._set_vocab_none()
        self.gguf_writer.add_vocab_size(self.hparams["vocab_size"])

    made.set_vocab = no_vocabulary
    types = gguf.LlamaFileType
    kinds = {"f32": types.ALL_F32, "bf16": types.MOSTLY_BF16}
    with torch.inference_mode():
        made(checkpoint, kinds[kind], out, eager=True, model_name=checkpoint.name).write()


def quantize(home: Path, source: Path, out: Path, kind: str) -> None:
    """llama.cpp's own quantizer with its default choice of types for each tensor."""
    code = load(home).peer_quantize(str(source).encode(), str(out).encode(), FTYPES[kind], 2)
    if code:
        sys.exit(f"llama_model_quantize: {code}")


if __name__ == "__main__":
    first, second, third = map(Path, sys.argv[1:4])
    (convert if sys.argv[4] in CONVERTED else quantize)(first, second, third, sys.argv[4])
