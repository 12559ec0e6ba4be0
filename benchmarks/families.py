"""Each family beside its reference library: logits, and prefill and decode tokens a second.

    python benchmarks/families.py                                  all families, tiny and mid-size
    python benchmarks/families.py --families qwen3_next --sizes tiny

A tiny checkpoint is that of the tests; a mid-size one has random weights and 100-150 M parameters
(MIDDLE). Both sides read the same float32 checkpoint with all cores and take turns: a round is a
prompt of `--prompt` tokens and `--new` greedy tokens on one side, then on the other; medians with
quartiles over `--rounds`. Ours is what `doit build` makes for this CPU, driven through a session;
theirs is the library's own cached `generate`.

The largest difference of logits is over every step, each side fed with the reference's tokens, and
the smallest margin the least distance of the reference's two best logits.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from builds import ROOT, build, describe, machine, table
from family_sizes import BASE, MIDDLE

from runtime import manifest as manifests
from runtime.module import open_bundle
from runtime.session import Session


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--families", nargs="+", default=list(MIDDLE), metavar="NAME")
    parser.add_argument("--sizes", nargs="+", default=["tiny", "middle"], metavar="SIZE")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of the prompt")
    parser.add_argument("--new", type=int, default=33, help="new tokens")
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args()


class Ours:
    """The bundle of a checkpoint."""

    def __init__(self, checkpoint: Path, context: int, directory: Path):
        shape = "b1-p32+256"
        words = [f"model={checkpoint}", "target=cpu", "weights=f32"]
        kept = keeps_kv(checkpoint)
        shape += f"-c{context}" if kept else ""
        path = build([*words, f"shape={shape}"], directory, directory / "cache")
        self.manifest = manifests.load(path)
        self.device = open_bundle(path, self.manifest, None)

    def run(self, prompt: Sequence[int], forced: Sequence[int]) -> tuple[float, float, np.ndarray]:
        """Seconds of the prefill and of the decode steps that feed `forced`; all logits."""
        session, begin = Session(self.device, self.manifest), time.perf_counter()
        logits, argmax = session.prefill(prompt)
        self.device.to_host(argmax)
        prefilled = time.perf_counter()
        rows = [np.array(self.device.to_host(logits))[0]]
        session.admit(0)
        spent = 0.0
        for step, token in enumerate(forced[:-1]):
            start = time.perf_counter()
            logits, argmax = session.decode([token], [len(prompt) + step], [1])
            self.device.to_host(argmax)
            spent += time.perf_counter() - start
            rows.append(np.array(self.device.to_host(logits))[0])
        return prefilled - begin, spent, np.array(rows)


def keeps_kv(checkpoint: Path) -> bool:
    """Whether the checkpoint's shape needs a context."""
    from emit.checkpoint import read_config
    from emit.entry import Model

    return Model.of(read_config(checkpoint)).keeps_kv


def library() -> Any:
    """transformers, with RWKV-7 from the package rwkv7-hf among its models."""
    import transformers
    from rwkv7_hf.configuration_rwkv7 import RWKV7Config
    from rwkv7_hf.modeling_rwkv7 import RWKV7ForCausalLM

    transformers.logging.set_verbosity_error()
    transformers.AutoConfig.register("rwkv7", RWKV7Config, exist_ok=True)
    transformers.AutoModelForCausalLM.register(RWKV7Config, RWKV7ForCausalLM, exist_ok=True)
    return transformers


class Theirs:
    """The library's model."""

    def __init__(self, checkpoint: Path):
        import torch

        transformers = library()
        load = transformers.AutoModelForCausalLM.from_pretrained
        self.torch, self.model = torch, load(checkpoint, dtype=torch.float32).eval()
        self.model.generation_config.eos_token_id = None

    def run(self, prompt: Sequence[int], new: int) -> tuple[float, float, list[int], np.ndarray]:
        """Seconds to the first token and of the others; the greedy tokens; all logits."""
        for module in self.model.modules():  # state that outlives a call to generate
            if hasattr(module, "recurrent_states"):
                module.recurrent_states = None
        given, clock, begin = self.torch.tensor([list(prompt)]), _Clock(), time.perf_counter()
        out = self.model.generate(
            given,
            attention_mask=self.torch.ones_like(given),
            max_new_tokens=new,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            streamer=clock,
        )
        first, last = clock.times[1], clock.times[-1]
        logits = self.torch.cat(out.logits).numpy()
        return first - begin, last - first, out.sequences[0, len(prompt) :].tolist(), logits


class TheirRwkv(Theirs):
    """rwkv7-hf: its own `generate` reads the whole text again for each token."""

    def run(self, prompt: Sequence[int], new: int) -> tuple[float, float, list[int], np.ndarray]:
        """As `Theirs.run`, a call of the model a token."""
        tokens: list[int] = []
        rows: list[np.ndarray] = []
        state, given, times = None, list(prompt), [time.perf_counter()]
        with self.torch.no_grad():
            for _ in range(new):
                out = self.model(self.torch.tensor([given]), past_key_values=state, use_cache=True)
                state = out.past_key_values
                rows.append(out.logits[0, -1].numpy())
                tokens.append(int(np.argmax(rows[-1])))
                given = tokens[-1:]
                times.append(time.perf_counter())
        return times[1] - times[0], times[-1] - times[1], tokens, np.array(rows)


class _Clock:
    """When `generate` had its prompt, and each token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        """Called with the prompt, then with each token."""
        del value
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Called after the last."""


def middle(family: str, directory: Path) -> Path:
    """A mid-size checkpoint of random weights, of variance 1/inputs, written by the library."""
    import torch

    transformers = library()
    config = transformers.AutoConfig.for_model(family, **BASE, **MIDDLE[family])
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and name.endswith(("weight", "_proj")):
                # Tied embeddings of a larger size would repeat the last token for ever.
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    model.save_pretrained(directory)
    return directory


def figures(family: str, size: str, options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """One row of the table."""
    checkpoint = ROOT / "tests" / "data" / family / "checkpoint"
    if size == "middle":
        checkpoint = middle(family, directory / f"{family}-middle")
    vocabulary = json.loads((checkpoint / "config.json").read_text())["vocab_size"]
    prompt = np.random.default_rng(0).integers(0, vocabulary, options.prompt).tolist()
    ours = Ours(checkpoint, options.prompt + options.new, directory / f"{family}-{size}")
    theirs = (TheirRwkv if family == "rwkv7" else Theirs)(checkpoint)
    spent: list[list[float]] = []
    difference, margin = 0.0, float("inf")
    for _ in range(options.rounds):
        first, rest, tokens, wanted = theirs.run(prompt, options.new)
        prefill, decode, found = ours.run(prompt, tokens)
        difference = max(difference, float(np.abs(found - wanted).max()))
        best = np.sort(wanted, axis=1)[:, -2:]
        margin = min(margin, float((best[:, 1] - best[:, 0]).min()))
        spent.append([prefill, decode, first, rest])
    counts = (options.prompt, options.new - 1) * 2
    rates = [[n / row[i] for row in spent] for i, n in enumerate(counts)]
    elements = sum(int(np.prod(p.shape)) for p in ours.manifest.params)
    return {
        "family": family,
        "M parameters": f"{elements / 1e6:.3g}",
        "max logit difference": f"{difference:.2g}",
        "smallest margin": f"{margin:.2g}",
        "prefill tok/s": spread(rates[0]),
        "theirs": spread(rates[2]),
        "prefill ratio": spread([a / b for a, b in zip(rates[0], rates[2], strict=True)]),
        "decode tok/s": spread(rates[1]),
        "their decode": spread(rates[3]),
        "decode ratio": spread([a / b for a, b in zip(rates[1], rates[3], strict=True)]),
    }


def spread(values: Sequence[float]) -> str:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:.3g} ({low:.3g}-{high:.3g})"


def main(show: Callable[[str], None] = print) -> None:
    """Print the machine and the table."""
    options = arguments()
    show(describe(machine()))
    rows = []
    with tempfile.TemporaryDirectory(prefix="scanwright-families-") as scratch:
        for family in options.families:
            for size in options.sizes:
                rows.append(figures(family, size, options, Path(scratch)))
                show(", ".join(f"{key} {value}" for key, value in rows[-1].items()))
    show("\n" + table(rows))


if __name__ == "__main__":
    main()
