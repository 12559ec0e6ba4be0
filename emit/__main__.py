"""`python -m emit COMMAND`: the stages that need JAX or read a checkpoint.

Run as processes by the build, so that a warm build never imports JAX.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from emit.errors import EmitError
from emit.machine import pin
from runtime.errors import shown

if TYPE_CHECKING:
    from emit.storage import Storage
    from emit.weights import WeightMap

FLOATS = ("f32", "bf16", "f16")  # as in emit.storage, which imports JAX
TYPES = (*FLOATS, "int8", "int4")


@contextlib.contextmanager
def _named(origin: object) -> Iterator[None]:
    """Begin an EmitError of the block with what it is about, unless it does so already."""
    try:
        yield
    except EmitError as error:
        if str(error).startswith(str(origin)):
            raise
        raise EmitError(f"{origin}: {error}") from error


def _convert(args: argparse.Namespace) -> None:
    from emit.convert import convert
    from emit.dequant import dequantized
    from emit.entry import Model
    from emit.gguf_checkpoint import opened

    checkpoint = opened(args.checkpoint)
    if args.expect_config:
        _check_config(json.loads(args.expect_config), checkpoint.config, args.checkpoint)
    with _named(args.checkpoint):
        weight_map = Model.of(checkpoint.config).weight_map
        source = dequantized(checkpoint, checkpoint.config)
        convert(weight_map, source, _storage(args, weight_map), args.out, args.key)


def _storage(args: argparse.Namespace, weight_map: WeightMap) -> Storage:
    """What --storage holds, or the plan for --weights."""
    from emit.storage import Storage, plan

    if args.storage is None:
        return plan(weight_map, args.weights, words=args.words.split(","))
    return Storage.from_json(args.storage.read_text(encoding="utf-8"))


def _storage_of(args: argparse.Namespace) -> None:
    from emit.dequant import dequantized
    from emit.entry import Model
    from emit.gguf_checkpoint import opened
    from emit.storage import plan
    from emit.weights import resolve

    checkpoint = opened(args.checkpoint)
    with _named(args.checkpoint):
        weight_map = Model.of(checkpoint.config).weight_map
        source = dequantized(checkpoint, checkpoint.config)
        chosen = resolve(weight_map, source)
        words = args.words.split(",")
        found = plan(weight_map, args.weights, source, chosen, words, args.own)
    (args.out / "storage.json").write_text(found.to_json(), encoding="utf-8")


def _type(args: argparse.Namespace) -> None:
    from emit.dequant import dequantized
    from emit.entry import Model
    from emit.gguf_checkpoint import opened
    from emit.storage import own_type
    from emit.weights import resolve

    checkpoint = opened(args.checkpoint)
    with _named(args.checkpoint):
        weight_map = Model.of(checkpoint.config).weight_map
        source = dequantized(checkpoint, checkpoint.config)
        word = own_type(weight_map, source, resolve(weight_map, source))
    (args.out / "type.txt").write_text(word + "\n")


def _perplexity(args: argparse.Namespace) -> None:
    from emit.dequant import dequantized
    from emit.gguf_checkpoint import opened
    from emit.perplexity import of_source

    checkpoint = opened(args.checkpoint)
    rows = json.loads(args.rows.read_text(encoding="utf-8"))
    with _named(args.checkpoint), tempfile.TemporaryDirectory(dir=args.out) as scratch:
        source = dequantized(checkpoint, checkpoint.config)
        loss = of_source(checkpoint.config, source, rows, Path(scratch))
    content = json.dumps({"rows": rows, "source_loss": loss})
    (args.out / "perplexity.json").write_text(content + "\n", encoding="utf-8")


def _pth(args: argparse.Namespace) -> None:
    from emit.pth_rwkv7 import VOCABULARY, convert

    convert(args.file, args.out)
    names = ", ".join(sorted(path.name for path in args.out.iterdir()))
    print(f"{args.out}: {names}; build it: doit build model={args.out} target=cpu")
    if not (args.out / VOCABULARY).is_file():
        print(f"no {VOCABULARY} beside {args.file}: the bundle will read token ids only, no text")


def _gguf(args: argparse.Namespace) -> None:
    from emit.gguf_config import config_of
    from emit.gguf_file import open_file
    from emit.gguf_tokenizer import tokenizer_of

    file = open_file(args.file)
    content = json.dumps(config_of(file), indent=2, sort_keys=True) + "\n"
    files, notes = ({}, []) if args.config_only else tokenizer_of(file)
    for name, text in {**files, "config.json": content}.items():
        (args.out / name).write_text(text, encoding="utf-8", newline="\n")
    for note in notes:
        print(f"warning: {note}", file=sys.stderr)
    (args.out / "notes.json").write_text(json.dumps(notes) + "\n", encoding="utf-8")


def _check_config(wanted: dict[str, Any], found: dict[str, Any], directory: Path) -> None:
    """EmitError unless both configs describe the same graph."""
    from emit.entry import Model

    ours, theirs = Model.of(wanted), Model.of(found)
    if ours.cfg == theirs.cfg:
        return
    differing = [
        f"{name} = {theirs_value!r} (recipe: {ours_value!r})"
        for name, ours_value in vars(ours.cfg).items()
        if (theirs_value := getattr(theirs.cfg, name)) != ours_value
    ]
    raise EmitError(
        f"{directory / 'config.json'}: differs from the recipe's config: {'; '.join(differing)}; "
        "correct the recipe or its revision"
    )


def _graphs(args: argparse.Namespace) -> None:
    from emit.checkpoint import read_config_file
    from emit.config import token_ids
    from emit.entry import Model, entries, interface, param_structs
    from emit.shape import Shape
    from emit.stablehlo import lower

    shape = Shape.parse(args.shape)
    with _named(args.origin):
        model = Model.of(read_config_file(args.config), shape.context)
        keeps_kv = model.keeps_kv
    if shape.context is not None and not keeps_kv:
        raise EmitError(
            f"shape {shape.name}: {model.name} keeps no KV cache, so there is no context to bound; "
            f"leave out -c{shape.context}"
        )
    storage = _storage(args, model.weight_map)
    params = param_structs(model, storage)
    eos: tuple[int, ...] = ()
    if args.generation_config:
        eos = token_ids(read_config_file(args.generation_config).get("eos_token_id"))
    for entry in entries(model, shape):
        text = lower(entry, params, by_kernels=args.kernels)
        (args.out / f"{entry.name}.mlir").write_text(text, encoding="utf-8")
    content = json.dumps(interface(model, shape, storage, eos), indent=1, sort_keys=True)
    (args.out / "interface.json").write_text(content + "\n")


def _objects(args: argparse.Namespace) -> None:
    from emit.kernels.objects import build

    build(args.level, args.out)


def _expect(args: argparse.Namespace) -> None:
    from emit import expect
    from emit.checkpoint import read_config_file
    from emit.entry import Model
    from emit.shape import Shape

    model = Model.of(read_config_file(args.config), Shape.parse(args.shape).context)
    stored = expect.load_params(model, _storage(args, model.weight_map), args.params)
    params = expect.widened(stored)
    if args.inputs:
        shape = Shape.parse(args.shape)
        expect.expected(model, shape, params, args.inputs, args.out, args.seed)
    content = expect.reference(model, params, args.seed, args.new_tokens)
    expect.write_reference(args.out / "prompts.json", content)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m emit", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    pth = commands.add_parser("pth", help="RWKV-7's own .pth file → a checkpoint directory")
    pth.add_argument("file", type=Path)
    pth.set_defaults(run=_pth)
    gguf = commands.add_parser("gguf", help="GGUF file → config.json, tokenizer files, notes.json")
    gguf.add_argument("file", type=Path)
    gguf.add_argument("--config-only", action="store_true", help="leave out the tokenizer")
    gguf.set_defaults(run=_gguf)
    convert = commands.add_parser("convert", help="checkpoint → params.irpa, params.json")
    convert.add_argument("checkpoint", type=Path)
    convert.add_argument("--expect-config", help="JSON the checkpoint's config must agree with")
    convert.add_argument("--key", help="go on with what was killed under the same key in --out")
    convert.set_defaults(run=_convert)
    loss = commands.add_parser("perplexity", help="checkpoint → perplexity.json, its own loss")
    loss.add_argument("checkpoint", type=Path)
    loss.add_argument("--rows", type=Path, required=True, help="JSON, rows of token ids")
    loss.set_defaults(run=_perplexity)
    kind = commands.add_parser("type", help="checkpoint directory → type.txt, its weight type")
    kind.add_argument("checkpoint", type=Path)
    kind.set_defaults(run=_type)
    storage = commands.add_parser("storage", help="checkpoint → storage.json, how each is stored")
    storage.add_argument("checkpoint", type=Path)
    storage.add_argument("--own", action="store_true", help="round nothing that is in floats")
    storage.set_defaults(run=_storage_of)
    graphs = commands.add_parser("graphs", help="config and shape → <entry>.mlir, interface.json")
    graphs.add_argument("--generation-config", type=Path, help="generation_config.json, for eos")
    graphs.add_argument("--origin", default="config", help="what to call the config in errors")
    graphs.add_argument("--kernels", action="store_true", help="for CPUs, with kernels of our own")
    graphs.set_defaults(run=_graphs)
    objects = commands.add_parser("objects", help="the kernels' C sources → kernels.o")
    objects.add_argument("--level", required=True)
    objects.set_defaults(run=_objects)
    wanted = commands.add_parser("expect", help="inputs → what JAX computes from them")
    wanted.add_argument("--params", type=Path, required=True)
    wanted.add_argument("--inputs", type=Path, help="directory of <call>.npz")
    wanted.add_argument("--seed", type=int, default=0)
    wanted.add_argument("--new-tokens", type=int, default=0, help="greedy tokens a prompt")
    wanted.set_defaults(run=_expect)
    for sub in (graphs, wanted):
        sub.add_argument("--config", type=Path, required=True)
        sub.add_argument("--shape", required=True)
    for sub in (convert, graphs, wanted):
        sub.add_argument("--storage", type=Path, help="storage.json; of the shapes alone if absent")
    for sub in (convert, storage, graphs, wanted):
        sub.add_argument("--weights", required=True, choices=TYPES)
        sub.add_argument("--words", default=",".join(FLOATS), help="float types of the target")
    for sub in (pth, gguf, loss, kind, convert, storage, graphs, objects, wanted):
        sub.add_argument("--out", type=Path, required=True)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run one stage; a failure the user can act on is one line on stderr and exit code 1."""
    args = _parser().parse_args(argv)
    pin(os.environ)
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        args.run(args)
    except (EmitError, OSError) as error:
        if os.environ.get("SCANWRIGHT_DEBUG") == "1":
            traceback.print_exc()
        print("error: " + shown(error), file=sys.stderr)
        with contextlib.suppress(OSError):  # not empty: it was there before
            args.out.rmdir()
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
