"""Train the Mamba2 that ships with the project, and write it as a transformers checkpoint.

Text: the King James Version of the Bible (1611), as carried by the Debian package bible-kjv-text
4.38 (bookworm) and printed, one verse a line, by the reader of the package bible-kjv 4.38:

    apt-get install bible-kjv
    bible -f 'gen1:1-rev22:21' > kjv.txt      # 31,102 lines, 4,404,412 bytes, sha256 in TEXT_SHA256
    python recipes/models/mamba2/train.py --text kjv.txt --out recipes/models/mamba2

It is in the public domain: a translation of 1611, whose copyright has expired, as the package's
copyright file says. (In the United Kingdom alone, printing it as a book is a prerogative of the
Crown.) The packages' program and data format have licences of their own; nothing of them is used
but the verses' words.

A document is a chapter: its verses one a line, without references, after an `<|endoftext|>`. Every
40th chapter is held out, of the tokenizer's training too. The model is trained in float32 through
the operations that graphs are emitted from; before the weights are written, as rounded to bfloat16,
their logits are compared with those of the emitted family's own forward. The same text, arguments,
library versions and thread count give the same checkpoint. Its files and train.log go to --out.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import Array
from safetensors.numpy import save
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from emit.blocks.block import under
from emit.families import mamba2
from emit.forms import depthwise_kernel
from emit.ops import conv, nn, ssd

TEXT_SHA256 = "cd45f0c9cedab8e4439bd6486c8952c77cc8b0ecc5d1f6ae3513f2039f47229d"
END = "<|endoftext|>"  # token 0: begins and ends every document
HELD_OUT = 40  # one chapter in so many
BATCH, WINDOW = 4, 256  # a step's windows, and the tokens of one, from a zero state
SCAN_CHUNK = 32  # the fastest here; the result does not depend on it

IDS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
CONFIG = IDS | {
    "architectures": ["Mamba2ForCausalLM"],
    "model_type": "mamba2",
    "dtype": "bfloat16",
    "vocab_size": 2048,
    "hidden_size": 192,
    "num_hidden_layers": 4,
    "expand": 2,
    "num_heads": 6,
    "head_dim": 64,
    "state_size": 64,
    "n_groups": 1,
    "conv_kernel": 4,
    "chunk_size": 64,
    "time_step_rank": 12,
    "tie_word_embeddings": True,
}
TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "clean_up_tokenization_spaces": False,
} | dict.fromkeys(("bos_token", "eos_token", "pad_token"), END)
RATE, WARMUP, DECAY, BETAS, CLIP = 3e-3, 100, 0.1, (0.9, 0.98), 1.0

Params = dict[str, Array]
Moments = tuple[Params, Params]  # running means of the gradients and of their squares


def chapters(path: Path) -> list[str]:
    """The verses of each chapter, one a line, without references such as `Ge1:1`."""
    raw = path.read_bytes()
    if (found := hashlib.sha256(raw).hexdigest()) != TEXT_SHA256:
        raise SystemExit(f"error: {path}: sha256 is {found}, expected {TEXT_SHA256}; see --help")
    grouped: dict[str, list[str]] = {}
    for line in raw.decode("ascii").splitlines():
        reference, verse = line.split(" ", 1)
        grouped.setdefault(reference.split(":")[0], []).append(verse.strip())
    return ["\n".join(verses) + "\n" for verses in grouped.values()]


def train_tokenizer(texts: list[str], size: int) -> Tokenizer:
    """Byte-level BPE of `size` tokens; any bytes can be encoded."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def initial(cfg: mamba2.Config, rng: np.random.Generator) -> Params:
    """Initial parameters by canonical name; decay and step size as in Mamba2's reference."""
    params: Params = {}
    for p in mamba2.weights(cfg).params:
        name = p.name.rpartition("mixer.")[2]
        if p.matrix:
            scale = 0.02 if name == "embeddings.weight" else p.scale
            depth = math.sqrt(2 * cfg.num_hidden_layers) if name == "out_proj.weight" else 1.0
            value = rng.standard_normal(p.shape) * scale / depth
        elif name == "conv1d.weight":
            value = rng.uniform(-p.scale, p.scale, p.shape)
        elif name == "A_log":
            value = np.log(rng.uniform(1.0, 16.0, p.shape))
        elif name == "dt_bias":
            step = np.exp(rng.uniform(math.log(1e-3), math.log(1e-1), p.shape))
            value = step + np.log(-np.expm1(-step))  # the inverse of softplus
        else:
            value = np.full(p.shape, 0.0 if name == "conv1d.bias" else 1.0)
        params[p.name] = jnp.asarray(value, jnp.float32)
    return params


def mixer(cfg: mamba2.Config, p: Params, x: Array) -> Array:
    """A whole window from a zero state: x f32[B, T, hidden_size] -> same."""
    B, T, _ = x.shape
    inner, N, H = cfg.intermediate_size, cfg.state_size, cfg.num_heads
    z, xbc, dt = jnp.split(
        nn.linear(x, p["in_proj.weight"]), [inner, inner + cfg.mixer.conv_dim], -1
    )
    tail = jnp.zeros((B, cfg.conv_kernel - 1, cfg.mixer.conv_dim))
    xbc, _ = conv.scan(xbc, jnp.full(B, T), p["conv1d.weight"], p["conv1d.bias"], tail)
    xs, Bm, Cm = jnp.split(jax.nn.silu(xbc), [inner, inner + N], -1)
    y, _ = ssd.scan(
        xs.reshape(B, T, H, cfg.head_dim),
        jax.nn.softplus(dt + p["dt_bias"]),
        -jnp.exp(p["A_log"]),
        Bm[:, :, None],
        Cm[:, :, None],
        p["D"],
        jnp.zeros((B, H, cfg.head_dim, N)),
        SCAN_CHUNK,
    )
    y = y.reshape(B, T, inner)
    y = nn.group_rms_norm(y * jax.nn.silu(z), p["norm.weight"], 1, cfg.layer_norm_epsilon)
    return nn.linear(y, p["out_proj.weight"])


def logits(cfg: mamba2.Config, params: Params, tokens: Array) -> Array:
    """Logits f32[B, T, V] at every position of tokens i32[B, T], from a zero state."""
    x = nn.embed(tokens, params["embeddings.weight"])
    for i in range(cfg.num_hidden_layers):
        p = under(f"layers.{i}.", params)
        x = x + mixer(
            cfg, under("mixer.", p), nn.rms_norm(x, p["norm.weight"], cfg.layer_norm_epsilon)
        )
    x = nn.rms_norm(x, params["norm_f.weight"], cfg.layer_norm_epsilon)
    return nn.linear(x, params["embeddings.weight"])


def loss(cfg: mamba2.Config, params: Params, windows: Array) -> Array:
    """Mean cross-entropy in nats a token of windows i32[B, T + 1]."""
    scores = jax.nn.log_softmax(logits(cfg, params, windows[:, :-1]))
    return -jnp.mean(jnp.take_along_axis(scores, windows[:, 1:, None], axis=-1))


def update(
    cfg: mamba2.Config, steps: int, params: Params, moments: Moments, windows: Array, t: Array
) -> tuple[Params, Moments, Array]:
    """Step `t` (from 1) of AdamW (arXiv:1711.05101): clipped gradients, warm-up, cosine to 0."""
    value, grads = jax.value_and_grad(partial(loss, cfg))(params, windows)
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in grads.values()))
    scale = jnp.minimum(1.0, CLIP / (norm + 1e-6))
    progress = jnp.clip((t - WARMUP) / max(steps - WARMUP, 1), 0.0, 1.0)
    rate = RATE * jnp.minimum(t / WARMUP, 0.5 * (1.0 + jnp.cos(jnp.pi * progress)))
    decayed = {p.name for p in mamba2.weights(cfg).params if p.matrix}
    new, mean, square = {}, {}, {}
    for name, param in params.items():
        grad = grads[name] * scale
        mean[name] = BETAS[0] * moments[0][name] + (1 - BETAS[0]) * grad
        square[name] = BETAS[1] * moments[1][name] + (1 - BETAS[1]) * grad * grad
        unbiased = jnp.sqrt(square[name] / (1 - BETAS[1] ** t)) + 1e-8
        step = mean[name] / (1 - BETAS[0] ** t) / unbiased
        new[name] = param - rate * (step + (DECAY * param if name in decayed else 0.0))
    return new, (mean, square), value


def optimise(
    cfg: mamba2.Config,
    params: Params,
    draw: Callable[[], Array],
    steps: int,
    held_out: Callable[[Params], float],
    say: Callable[[str], None],
) -> Params:
    """`steps` steps on windows from `draw`, reported every 100; the rate leaves out reports."""
    zeros = {name: jnp.zeros_like(p) for name, p in params.items()}
    moments, step = (zeros, zeros), jax.jit(partial(update, cfg, steps))
    seconds, recent = 0.0, []
    for t in range(1, steps + 1):
        windows = draw()
        start = time.perf_counter()
        params, moments, value = step(params, moments, windows, jnp.float32(t))
        recent.append(float(value))
        seconds += time.perf_counter() - start
        if t % 100 == 0 or t == steps:
            rate = t * BATCH * WINDOW / seconds
            line = f"step {t} {seconds:.0f} s {rate:.0f} tokens/s loss {np.mean(recent):.4f}"
            say(line if t % 500 and t < steps else f"{line} held out {held_out(params):.4f}")
            recent = []
    return params


def check_emitted(cfg: mamba2.Config, params: Params, window: Array) -> float:
    """Largest difference of a window's last logits to those of the emitted family's forward."""
    state = {s.name: jnp.zeros(s.shape) for s in mamba2.state(cfg, None)}
    length, position = jnp.full(1, window.shape[1]), jnp.zeros(1, jnp.int32)
    emitted, _ = mamba2.forward(cfg, params, window, length, position, state)
    error = float(jnp.abs(emitted - logits(cfg, params, window)[:, -1]).max())
    if not error < 1e-3:
        raise SystemExit(f"error: the emitted family's logits differ by {error}, expected < 1e-3")
    return error


def write(out: Path, cfg: mamba2.Config, params: Params, tokenizer: Tokenizer) -> None:
    """The checkpoint in the layout of transformers, weights in bfloat16."""
    tensors = {}
    for p in mamba2.weights(cfg).params:
        value = np.asarray(params[p.name]).astype(ml_dtypes.bfloat16)
        form = p.forms[0]
        value = value.T[:, None, :] if form.transform is depthwise_kernel else value
        tensors[form.names[0]] = np.ascontiguousarray(value)
    (out / "model.safetensors").write_bytes(save(tensors, metadata={"format": "pt"}))
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    files = {"config": CONFIG, "generation_config": IDS, "tokenizer_config": TOKENIZER_CONFIG}
    for name, value in files.items():
        (out / f"{name}.json").write_text(json.dumps(value, indent=2) + "\n")


def run(args: argparse.Namespace, say: Callable[[str], None]) -> None:
    """Read, train, check, write; `say` takes the lines of the log."""
    texts = chapters(args.text)
    seen, unseen = [t for i, t in enumerate(texts) if i % HELD_OUT], texts[::HELD_OUT]
    cfg = mamba2.Config.read(CONFIG)
    tokenizer = train_tokenizer(seen, cfg.vocab_size)
    tokens, held = (
        np.asarray([i for text in part for i in (0, *tokenizer.encode(text).ids)], np.int32)
        for part in (seen, unseen)
    )
    size = sum(map(len, unseen)) / len(held)
    windows = jnp.asarray(held[: len(held) // WINDOW * WINDOW].reshape(-1, 1, WINDOW))
    measure = jax.jit(partial(loss, cfg))

    rng = np.random.default_rng(args.seed)
    params = initial(cfg, rng)

    def held_out(params: Params) -> float:
        return float(np.mean([measure(params, w) for w in windows]))

    def draw() -> Array:
        starts = rng.integers(0, len(tokens) - WINDOW, BATCH)
        return jnp.asarray(tokens[starts[:, None] + np.arange(WINDOW + 1)])

    say(f"text: sha256 {TEXT_SHA256}, {len(texts)} chapters")
    say(", ".join(f"{p} {version(p)}" for p in ("jax", "numpy", "tokenizers", "safetensors")))
    say(f"parameters: {sum(p.size for p in params.values())} of {cfg}")
    say(f"tokens: {len(tokens)} to train on, {len(held)} held out, {size:.3f} bytes each")
    say(f"seed {args.seed}, {args.steps} steps of {BATCH} x {WINDOW} tokens, lr {RATE}")
    params = optimise(cfg, params, draw, args.steps, held_out, say)
    params = {name: p.astype(jnp.bfloat16).astype(jnp.float32) for name, p in params.items()}
    final = held_out(params)
    words = f"perplexity {math.exp(final):.2f}, {final / size / math.log(2):.3f} bits a byte"
    say(f"rounded to bfloat16: held out {final:.4f}, {words}")
    error = check_emitted(cfg, params, windows[0])
    say(f"largest difference of logits to the emitted family's forward: {error:.1e}")
    write(args.out, cfg, params, tokenizer)


def main() -> None:
    """Read the arguments, open the log, train."""
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("--text", type=Path, required=True, help="what `bible -f` printed")
    parser.add_argument("--out", type=Path, required=True, help="directory to write into")
    parser.add_argument("--steps", type=int, default=2700)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    with (args.out / "train.log").open("w", encoding="utf-8") as log:

        def say(line: str) -> None:
            print(line, flush=True)
            print(line, file=log, flush=True)

        run(args, say)


if __name__ == "__main__":
    main()
