"""One side of peers.py in a process of its own: what it is asked on stdin, a JSON line each.

A side holds one model at one type. It is stopped (SIGSTOP) while others measure, so that no thread
pool that waits by spinning takes their time. Every side is given the same tokens by number; none
draws any. Ours takes its greedy token to the host each step, as generating does; the others' logits
are waited for and not looked at.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from builds import ROOT
from peer_llama import Model, load
from peer_models import MODELS, PREFIX, TORCH, bundle, checkpoint
from peer_rates import THREADS, Machine

sys.path.insert(0, str(ROOT))

WARM = 2  # steps that are not counted, each turn
CHECKED = 40  # tokens of the prompt whose logits are compared, and
FORCED = 8  # tokens fed after it
PR_SET_PDEATHSIG = 1
Step = Callable[[], None]


class Side(Protocol):
    """What is measured of a side."""

    def decoder(self, rows: int) -> tuple[Step, int]:
        """A step of all rows after PREFIX tokens each, and how often it may be called."""
        ...

    def prefill(self, tokens: list[int]) -> None:
        """Reads a prompt; returns when its last logits are there."""
        ...

    def logits(self, tokens: list[int], forced: list[int]) -> np.ndarray[Any, Any]:
        """f32[1 + len(forced), V] after a prompt and after each forced token."""
        ...

    def facts(self) -> dict[str, Any]:
        """What the report needs to know."""
        ...


class Ours:
    """Bundles of one model at one type, opened when they are needed."""

    def __init__(self, name: str, kind: str, work: Path) -> None:
        from runtime import manifest as manifests

        self._paths = {rows: bundle(name, kind, rows, work) for rows in MODELS[name].shapes}
        self._manifests = {rows: manifests.load(path) for rows, path in self._paths.items()}
        self._length, self._config = MODELS[name].length, MODELS[name].config
        self._sessions: dict[int, Any] = {}

    def _session(self, rows: int) -> Any:
        from runtime.module import open_bundle
        from runtime.session import Session

        if rows not in self._sessions:
            manifest = self._manifests[rows]
            self._sessions[rows] = Session(open_bundle(self._paths[rows], manifest), manifest)
        return self._sessions[rows]

    def decoder(self, rows: int) -> tuple[Step, int]:
        """See Side."""
        session = self._session(rows)
        work = session.start(text(PREFIX, session.manifest.model.vocab_size))
        while not work.step():
            pass
        state = work.take()
        for slot in range(rows):
            session.seed(slot, state)
        tokens, active = np.ones(rows, np.int32), np.ones(rows, np.int32)
        positions = np.full(rows, PREFIX, np.int32)

        def step() -> None:
            nonlocal tokens
            _, argmax = session.decode(tokens, positions, active)
            tokens = session.device.to_host(argmax)
            positions[:] += 1

        return step, self._length - PREFIX

    def prefill(self, tokens: list[int]) -> None:
        """See Side."""
        session = self._session(1)
        session.device.to_host(session.prefill(tokens)[1])

    def logits(self, tokens: list[int], forced: list[int]) -> np.ndarray[Any, Any]:
        """See Side."""
        session = self._session(1)
        found = [np.array(session.device.to_host(session.prefill(tokens)[0]))[0]]
        session.admit(0)
        for i, token in enumerate(forced):
            given = session.decode([token], [len(tokens) + i], [1])[0]
            found.append(np.array(session.device.to_host(given))[0])
        return np.array(found)

    def facts(self) -> dict[str, Any]:
        """Bytes of a step, and what the bundle says of itself."""
        manifest = self._manifests[1]
        fixed = sum(state.nbytes for state in manifest.state if state.kind == "fixed")
        kept = manifest.state_bytes_per_slot - fixed
        return {
            "weights": read_bytes(manifest.params, self._config),
            "file": sum(spec.nbytes for spec in manifest.params),
            "state": 2 * fixed + kept * PREFIX // (manifest.shape.context or 1),
            "numerics": manifest.numerics.weights,
            "proof": f"{manifest.proof.status}, {manifest.proof.flags}",
        }


def read_bytes(params: Sequence[Any], config: dict[str, Any]) -> int:
    """Bytes of parameters that a step of one row reads: of the experts those it is given to, of
    embeddings that are not the output layer's too one row; codes with their scales."""
    count, active = config.get("num_experts", 0), config.get("num_experts_per_tok", 0)
    vocabulary = config["vocab_size"]
    output = any("head" in p.name for p in params if p.shape[0] == vocabulary)
    total = 0
    for p in params:
        if count and ".experts." in p.name and p.shape[0] == count:
            total += p.nbytes * active // count
        elif output and "emb" in p.name and p.shape[0] == vocabulary:
            total += p.nbytes // vocabulary
        else:
            total += p.nbytes
    return total


class Llama:
    """A GGUF file; one context for each number of rows."""

    def __init__(self, name: str, kind: str, work: Path) -> None:
        self._lib, self._length = load(work / "llama"), MODELS[name].length
        self._path = work / "gguf" / name / f"{kind}.gguf"
        self._models: dict[int, Model] = {}
        self._vocabulary = int(MODELS[name].config["vocab_size"])

    def _model(self, rows: int) -> Model:
        if rows not in self._models:
            self._models[rows] = Model(self._lib, self._path, self._length, rows)
        return self._models[rows]

    def decoder(self, rows: int) -> tuple[Step, int]:
        """See Side."""
        model, position = self._model(rows), PREFIX
        model.clear()
        model.eval(np.array([text(PREFIX, self._vocabulary)] * rows, np.int32), 0)

        def step() -> None:
            nonlocal position
            model.eval(np.full((rows, 1), 1 + position, np.int32), position)
            position += 1

        return step, self._length - PREFIX

    def prefill(self, tokens: list[int]) -> None:
        """See Side."""
        self._model(1).clear()
        self._model(1).eval(np.array([tokens], np.int32), 0)

    def logits(self, tokens: list[int], forced: list[int]) -> np.ndarray[Any, Any]:
        """See Side; in f32 throughout: attention and its cache, which are f16 elsewhere."""
        model = Model(self._lib, self._path, self._length, 1, wide=True)
        model.eval(np.array([tokens], np.int32), 0)
        found = [model.logits(len(tokens))]
        for i, token in enumerate(forced):
            model.eval(np.array([[token]], np.int32), len(tokens) + i)
            found.append(model.logits(1))
        return np.array(found)

    def facts(self) -> dict[str, Any]:
        """The file's size, and which instructions the library uses."""
        system = self._lib.peer_system().decode()
        return {"file": self._path.stat().st_size, "system": system.strip(" |")}


class Torch:
    """transformers' model of the checkpoint."""

    def __init__(self, name: str, kind: str, work: Path) -> None:
        import torch
        import transformers

        transformers.logging.set_verbosity_error()
        torch.set_num_threads(THREADS)
        load_model = transformers.AutoModelForCausalLM.from_pretrained
        dtype = getattr(torch, TORCH[kind])
        self._torch, self._model = torch, load_model(checkpoint(name, work), dtype=dtype).eval()
        self._vocabulary: int = self._model.config.vocab_size

    def _call(self, tokens: Any, state: Any = None) -> tuple[Any, Any]:
        given = {} if state is None else {"cache": state}
        with self._torch.inference_mode():
            out = self._model(
                self._torch.as_tensor(tokens), use_cache=True, logits_to_keep=1, **given
            )
        return out.logits[:, -1].float().numpy(), out.cache

    def decoder(self, rows: int) -> tuple[Step, int]:
        """See Side."""
        state = self._call([text(PREFIX, self._vocabulary)] * rows)[1]

        def step() -> None:
            nonlocal state
            _, state = self._call([[1]] * rows, state)

        return step, 1 << 20

    def prefill(self, tokens: list[int]) -> None:
        """See Side."""
        self._call([tokens])

    def logits(self, tokens: list[int], forced: list[int]) -> np.ndarray[Any, Any]:
        """See Side."""
        logits, state = self._call([tokens])
        found = [logits[0]]
        for token in forced:
            logits, state = self._call([[token]], state)
            found.append(logits[0])
        return np.array(found)

    def facts(self) -> dict[str, Any]:
        """Versions."""
        return {"torch": self._torch.__version__}


SIDES: dict[str, Callable[[str, str, Path], Side]] = {
    "ours": Ours, "llama.cpp": Llama, "torch": Torch
}  # fmt: skip


def text(count: int, vocabulary: int) -> list[int]:
    """The same tokens for all, spread over the vocabulary."""
    return [(7919 * i + 1) % vocabulary for i in range(count)]


class Turns:
    """Answers what the measuring process asks of a side."""

    def __init__(self, side: Side, vocabulary: int) -> None:
        self._side, self._vocabulary = side, vocabulary
        self._decoders: dict[int, tuple[Step, int]] = {}

    def facts(self) -> dict[str, Any]:
        """See Side."""
        return self._side.facts()

    def decode(self, rows: int, seconds: float) -> float:
        """Median seconds of the steps of one turn, which lasts about `seconds`."""
        step, left = self._decoders.get(rows, (None, 0))
        if step is None or left < 128:
            step, left = self._side.decoder(rows)
        times: list[float] = []
        while len(times) < WARM + 3 or (sum(times) < seconds and len(times) < 96):
            begun = time.perf_counter()
            step()
            times.append(time.perf_counter() - begun)
        self._decoders[rows] = step, left - len(times)
        return statistics.median(times[WARM:])

    def prefill(self, tokens: int) -> float:
        """Seconds of one prompt."""
        prompt = text(tokens, self._vocabulary)
        begun = time.perf_counter()
        self._side.prefill(prompt)
        return time.perf_counter() - begun

    def logits(self, out: str) -> str:
        """Where the logits that are compared have been written."""
        tokens = text(CHECKED + FORCED, self._vocabulary)
        np.save(out, self._side.logits(tokens[:CHECKED], tokens[CHECKED:]))
        return out


def main() -> None:
    """Answer until stdin ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("side", choices=[*SIDES, "machine"])
    parser.add_argument("model")
    parser.add_argument("type")
    parser.add_argument("work", type=Path)
    args = parser.parse_args()
    if sys.platform == "linux":  # ends with its parent, stopped or not
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to the log
    asked: Any
    if args.side == "machine":
        asked = Machine(args.work)
    else:
        side = SIDES[args.side](args.model, args.type, args.work)
        asked = Turns(side, int(MODELS[args.model].config["vocab_size"]))
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        answer = getattr(asked, request.pop("do"))(**request)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
