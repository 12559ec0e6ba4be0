"""The `scanwright` command: generate, inspect, verify, bench.

Only the chosen command's module is imported, and NumPy and IREE only once its arguments are good.
Exit codes: 0 done, 1 a failure (one line on stderr), 2 wrong usage, 130 interrupted, 141 the reader
of stdout went away.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import io
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from runtime.errors import UserError, report

if TYPE_CHECKING:
    from runtime.sampling import SamplingParams
    from runtime.tokenizer import Tokenizer

# command: (module with add_arguments(parser) and run(args) -> exit code, what it does)
COMMANDS = {
    "generate": ("runtime.cli", "stream text from a bundle"),
    "inspect": ("runtime.inspect", "say what a bundle is"),
    "serve": ("runtime.server.run", "serve a bundle over HTTP"),
    "verify": ("runtime.verify", "check a bundle's digests and its reference on this device"),
    "selftest": ("runtime.selftest", "check that requests do not disturb each other here"),
    "bench": ("runtime.bench", "measure a bundle on this device"),
    "pull": ("runtime.pull", "bring a bundle here and check it"),
    "unpack": ("runtime.pack", "make a bundle of a packed one"),
}
_DESCRIPTION = "Run a Scanwright bundle."
# field of SamplingParams: default, placeholder, meaning
_SAMPLING = (
    ("temperature", 0.0, "T", "0 (greedy) or more"),
    ("top_k", 0, "K", "keep the K largest"),
    ("top_p", 1.0, "P", "keep this mass"),
    ("min_p", 0.0, "M", "keep M times the largest or more"),
    ("repetition_penalty", 1.0, "R", "above 1: make ids of the whole text less likely"),
    ("frequency_penalty", 0.0, "A", "subtract A for each time an id was generated"),
    ("presence_penalty", 0.0, "A", "subtract A from ids that were generated"),
    ("dry_multiplier", 0.0, "A", "DRY: above 0, make what would repeat a passage less likely"),
    ("dry_base", 1.75, "B", "DRY: penalty grows with B to the length of the passage"),
    ("dry_allowed_length", 2, "N", "DRY: passages up to N tokens may repeat"),
    ("dry_penalty_last_n", -1, "N", "DRY: look back N tokens, -1 for all"),
)


class UsageError(UserError):
    """Arguments that do not go together: exit code 2."""


class Parser(argparse.ArgumentParser):
    """argparse with one-line errors and no abbreviations."""

    def __init__(self, prog: str, description: str, epilog: str | None = None) -> None:
        super().__init__(
            prog=prog,
            description=description,
            epilog=epilog,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def error(self, message: str) -> NoReturn:
        """Print one line and exit with 2."""
        self.exit(2, f"error: {' '.join(message.split())} (see {self.prog} --help)\n")


def entry() -> NoReturn:
    """The console script."""
    code = main(sys.argv[1:])
    if code in (130, 141):  # whatever is left in the buffer has no reader
        _discard_stdout()
    sys.exit(code)


def main(argv: Sequence[str]) -> int:
    """Run one command line (without the program's name) and return its exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # a character that it cannot show is no failure
        sys.stdout.reconfigure(errors="replace")
    try:
        code = _dispatch(list(argv))
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except SystemExit as stop:  # argparse, after --help or an error
        return stop.code if isinstance(stop.code, int) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        _discard_stdout()
        return 141
    except UserError as error:
        return report(error) and (2 if isinstance(error, UsageError) else 1)
    except OSError as error:
        if error.filename is None:
            _discard_stdout()
        return report(UserError(f"{error.filename or 'stdout'}: {error.strerror or error}"))
    except Exception as error:
        return report(_unexpected(error))


def _dispatch(argv: list[str]) -> int:
    width = max(map(len, COMMANDS))
    listing = "\n".join(f"  {name:{width}}  {about}" for name, (_, about) in COMMANDS.items())
    top = Parser("scanwright", _DESCRIPTION, f"commands:\n{listing}")
    top.usage = "scanwright COMMAND … (scanwright COMMAND --help tells more)"
    if not argv or argv[0].startswith("-"):
        top.parse_args(argv)
        top.error(f"no command, expected one of {', '.join(COMMANDS)}")
    name = argv[0]
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=2) or list(COMMANDS)
        top.error(f"no command {name!r}, expected {' or '.join(near)}")
    module_name, about = COMMANDS[name]
    module = importlib.import_module(module_name)
    parser = Parser(f"scanwright {name}", about[0].upper() + about[1:] + ".")
    module.add_arguments(parser)
    return module.run(parser.parse_args(argv[1:]))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `scanwright generate`."""
    from runtime import targets

    parser.add_argument("bundle", metavar="BUNDLE", type=Path, help="bundle directory")
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", help="text to continue")
    prompt.add_argument(
        "--tokens", metavar="1,2,3", type=_token_ids, help="token ids to continue (no tokenizer)"
    )
    prompt.add_argument("--prompt-file", metavar="F", type=Path, help="UTF-8 file to continue")
    parser.add_argument(
        "--max-tokens", metavar="N", type=int, required=True, help="generate at most N tokens"
    )
    parser.add_argument("--device", metavar="URI", help="IREE device (default: the target's)")
    targets.add_argument(parser)
    group = parser.add_argument_group("sampling (greedy unless the temperature is above 0)")
    group.add_argument(
        "--seed", metavar="S", type=int, help="same seed, same tokens (default: fresh)"
    )
    for name, default, metavar, about in _SAMPLING:
        flag = "--" + name.replace("_", "-")
        kind = type(default)
        group.add_argument(flag, metavar=metavar, type=kind, default=default, help=about)
    parser.add_argument(
        "--stop", metavar="STR", action="append", default=[], help="end before this text; repeats"
    )
    parser.add_argument("--ignore-eos", action="store_true", help="go on after the end token")
    parser.add_argument(
        "--top-logits", metavar="K", type=int, default=0, help="report K logits a token (--json)"
    )
    parser.add_argument(
        "--session", metavar="F", type=Path, help="go on with a conversation saved in F"
    )
    parser.add_argument(
        "--save-session", metavar="F", type=Path, help="save the conversation to F at the end"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """`scanwright generate`: everything that can be wrong is checked before the module is opened.

    Raises UserError.
    """
    import time

    from runtime import saved as conversations
    from runtime import targets
    from runtime import tokenizer as tokenizers
    from runtime.request import Request
    from runtime.text import TextStream

    started = time.perf_counter()
    _check_usage(args)
    if args.top_logits and not args.json:
        raise UserError("top-logits: found without --json, expected --json beside it")
    if args.top_logits < 0:
        raise UserError(f"top-logits: found {args.top_logits}, expected 0 (off) or more")
    if args.save_session is not None:
        _check_writable(args.save_session)
    _check_directory(args.bundle)
    manifest = targets.load(args.bundle, args.target, args.device)
    tokenizer = tokenizers.load(args.bundle, manifest.files.tokenizer)
    sampling = _sampling(args, tokenizer)
    saved = None if args.session is None else conversations.load(args.session, manifest)
    request = Request(
        prompt=_prompt(args, tokenizer),
        max_tokens=args.max_tokens,
        sampling=sampling,
        ignore_eos=args.ignore_eos,
        logits=args.top_logits > 0,
        saved=saved,
        keep=args.save_session is not None,
    )
    request.check(manifest)
    if args.stop and tokenizer is None:
        raise UserError(f"stop: {_no_tokenizer(args.bundle)}; leave --stop out")
    before = (*(saved.tokens if saved else ()), *request.prompt)
    stream = None if tokenizer is None else TextStream(tokenizer.stream(before), args.stop)

    from runtime.engine import Engine
    from runtime.generate import generate
    from runtime.module import open_bundle
    from runtime.session import Session

    device = open_bundle(args.bundle, manifest, args.device)
    engine = Engine(Session(device, manifest), manifest)
    open_s = time.perf_counter() - started
    show = (lambda token, text: None) if args.json else _Printer(tokenizer is None)
    result = generate(engine, request, stream, show, args.top_logits)
    if args.json:
        import json

        print(json.dumps(result.to_json(open_s), allow_nan=False))
    else:
        print()
    if args.save_session is not None:
        assert result.saved is not None
        conversations.save(result.saved, manifest, args.save_session)
    return 0


class _Printer:
    """Prints text, or ids as --tokens takes them, as they come."""

    def __init__(self, ids: bool) -> None:
        self._ids = ids
        self._before = ""
        if sys.stdout is not None and hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(errors="replace")  # type: ignore[attr-defined]

    def __call__(self, token: int | None, text: str) -> None:
        if self._ids and token is not None:
            text, self._before = f"{self._before}{token}", ","
        if text:
            print(text, end="", flush=True)


def _check_usage(args: argparse.Namespace) -> None:
    given = (args.prompt, args.tokens, args.prompt_file, args.session)
    if all(value is None for value in given):
        raise UsageError(
            "one of the arguments --prompt --tokens --prompt-file --session is required"
            " (see scanwright generate --help)"
        )


def _check_writable(path: Path) -> None:
    """Raise UserError if a file cannot be made at `path`, before anything is generated."""
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise UserError(
            f"save-session: cannot write {path}, expected a file name in a directory that can be"
            " written"
        )


def _sampling(args: argparse.Namespace, tokenizer: Tokenizer | None) -> SamplingParams:
    """What the sampling flags ask for. Raises UserError."""
    import dataclasses

    from runtime.dry import DEFAULT_BREAKERS
    from runtime.sampling import SamplingParams

    fields = {name: getattr(args, name) for name, *_ in _SAMPLING}
    params = SamplingParams(**fields, seed=args.seed)
    if tokenizer is not None and params.dries:
        params = dataclasses.replace(params, dry_breakers=tokenizer.breakers(DEFAULT_BREAKERS))
    return params


def _prompt(args: argparse.Namespace, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Token ids of whichever prompt was given; a saved conversation needs none."""
    if args.tokens is not None:
        return args.tokens
    if args.prompt is None and args.prompt_file is None:
        return ()
    flag = "prompt" if args.prompt is not None else "prompt-file"
    if tokenizer is None:
        raise UserError(f"{flag}: {_no_tokenizer(args.bundle)}; give ids with --tokens 1,2,3")
    text = args.prompt if args.prompt is not None else _read_text(args.prompt_file)
    if not text:
        where = "prompt" if args.prompt is not None else str(args.prompt_file)
        raise UserError(f"{where}: found an empty prompt, expected some text")
    # what goes on with a conversation does not begin a text
    return tuple(tokenizer.encode(text, special=args.session is None))


def _read_text(path: Path) -> str:
    """A UTF-8 file as it is, line ends included."""
    try:
        return path.read_bytes().decode()
    except OSError as error:
        raise UserError(
            f"{path}: {error.strerror or error}, expected a UTF-8 text file as --prompt-file"
        ) from error
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: byte {error.start} is not UTF-8, expected UTF-8 text; convert the file"
        ) from error


def _token_ids(text: str) -> tuple[int, ...]:
    if not text.strip():
        return ()
    if not re.fullmatch(r" *-?[0-9]{1,19} *(, *-?[0-9]{1,19} *)*", text):
        shown = text if len(text) <= 40 else text[:40] + "…"
        raise argparse.ArgumentTypeError(
            f"found {shown!r}, expected token ids separated by commas, as in 1,2,3"
        )
    return tuple(map(int, text.split(",")))


def _check_directory(bundle: Path) -> None:
    if not bundle.is_dir():
        what = "a file" if bundle.exists() else "no such directory"
        raise UserError(f"{bundle}: {what}, expected a bundle directory; build one with doit build")


def _no_tokenizer(bundle: Path) -> str:
    return f"{bundle} has no tokenizer.json or other tokenizer file, which text needs"


def _unexpected(error: Exception) -> UserError:
    line = UserError(
        f"unexpected {type(error).__name__}: {error} (a defect of scanwright; run again with"
        " SCANWRIGHT_DEBUG=1 for the traceback)"
    )
    line.__cause__ = error
    return line


def _discard_stdout() -> None:
    """Send what is still buffered for stdout nowhere, so that exiting does not fail on it."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (AttributeError, OSError, ValueError):
        return
