"""`scanwright serve`: from the command line to a running server, and its orderly end."""

from __future__ import annotations

import argparse
import asyncio
import logging
import math
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from runtime.errors import UserError, report

if TYPE_CHECKING:
    from runtime.manifest import Manifest
    from runtime.server.app import Server
    from runtime.server.model import Model
    from runtime.server.streams import Bridge
    from runtime.worker import Worker

# The engine's thread must get the interpreter back soon after each call of the device.
_SWITCH_S = 5e-4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `scanwright serve`."""
    from runtime import targets

    add = parser.add_argument
    add("bundle", metavar="BUNDLE", type=Path, help="bundle directory")
    add("--host", metavar="H", default="127.0.0.1", help="address to serve (default: 127.0.0.1)")
    add(
        "--port", metavar="P", type=_integer(0, 65535), default=8000,
        help="port, 0 for any free one (default: 8000)",
    )  # fmt: skip
    add("--device", metavar="URI", help="IREE device (default: the target's)")
    targets.add_argument(parser)
    keys = parser.add_argument_group("who may ask (anyone on this machine, unless told otherwise)")
    keys.add_argument(
        "--api-key-file", metavar="F", type=Path,
        help="file with one API key a line; clients must send one of them",
    )  # fmt: skip
    keys.add_argument(
        "--insecure", action="store_true", help="serve other machines without an API key"
    )
    _add_limits(parser.add_argument_group("limits"))


def _add_limits(group: Any) -> None:
    """What bounds a client. Sizes in tokens unless the help says otherwise."""

    def limit(
        flag: str, metavar: str, kind: Callable[[str], Any], default: Any, about: str
    ) -> None:
        shown = "" if default is None else f" (default: {default:.0f})"
        group.add_argument(flag, metavar=metavar, type=kind, default=default, help=about + shown)

    whole, seconds = _integer(1), _seconds
    limit("--queue", "N", _integer(0), 256, "sequences that may wait for a slot")
    limit("--max-body", "BYTES", whole, 2 << 20, "bytes of a request's body")
    limit("--max-prompt", "N", whole, 32768, "tokens of a prompt")
    limit("--max-tokens", "N", whole, 4096, "tokens that a request may generate")
    limit("--max-n", "N", whole, 16, "choices for one prompt")
    limit(
        "--max-chunk", "N", whole, None,
        "use no prefill chunk larger than N: a prompt holds running requests up for one chunk",
    )  # fmt: skip
    group.add_argument(
        "--priorities",
        action="store_true",
        help="clients may send priority: lower goes first, and takes a slot if none is idle",
    )
    limit("--request-timeout", "S", seconds, 600.0, "seconds until a request is ended with 504")
    limit(
        "--client-timeout", "S", seconds, 30.0,
        "seconds a client may take to send a request, or take nothing of its answer",
    )  # fmt: skip
    limit(
        "--drain-timeout", "S", seconds, None,
        "seconds that running requests have after SIGTERM or SIGINT (default: as long as a request"
        " may take); a second signal ends them at once",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Serve until a signal; everything that can be wrong is checked before the device is opened.

    Returns 0 when every request was answered, 1 when the drain timeout cut some off, 130 after a
    second signal. Raises UserError.
    """
    try:
        import runtime.server.app
        import runtime.server.protocol
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] in ("iree", "runtime"):
            raise
        raise UserError(
            f"serve: no package {error.name}, expected the extra `serve`; run"
            " pip install '.[serve]' where the project is, or pip install 'scanwright[serve]'"
        ) from error
    from runtime import targets
    from runtime.server import guard
    from runtime.server.model import Model
    from runtime.server.streams import Bridge

    keys = None if args.api_key_file is None else guard.load_keys(args.api_key_file)
    manifest = targets.load(args.bundle, args.target, args.device)
    chunks = _chunks(manifest, args.max_chunk)
    protected = keys is not None or args.insecure
    sockets = guard.bind(args.host, args.port, protected=protected)
    model = Model.open(args.bundle, _limits(args, manifest), manifest=manifest)
    sys.setswitchinterval(_SWITCH_S)
    bridge = Bridge()
    worker = _worker(args, manifest, chunks, bridge)
    local = all(guard.is_loopback(opened.getsockname()[0]) for opened in sockets)
    settings = runtime.server.app.Settings(
        keys, (args.host,) if local else None, args.max_body, args.client_timeout
    )
    server = runtime.server.app.Server(model, worker, bridge, settings)
    drain_s = args.request_timeout if args.drain_timeout is None else args.drain_timeout
    try:
        return asyncio.run(_serve(server, model, worker, bridge, sockets, drain_s, args))
    finally:
        worker.close()


def _limits(args: argparse.Namespace, manifest: Manifest) -> Any:
    from runtime.server.model import Limits

    return Limits(
        choices=min(Limits.choices, args.queue + manifest.shape.slots),  # more never fit
        prompt_tokens=args.max_prompt,
        completion_tokens=args.max_tokens,
        n=args.max_n,
        deadline_s=args.request_timeout,
        priority=args.priorities,
    )


def _chunks(manifest: Manifest, largest: int | None) -> list[int]:
    compiled = manifest.shape.chunks
    if largest is not None and largest < compiled[0]:
        raise UserError(
            f"max-chunk: found {largest}, expected {compiled[0]} or more, the smallest chunk of"
            f" shape {manifest.shape.name}"
        )
    return [size for size in compiled if largest is None or size <= largest]


def _worker(
    args: argparse.Namespace, manifest: Manifest, chunks: list[int], bridge: Bridge
) -> Worker:
    """The engine on the bundle's device, on a thread that is not started yet."""
    from runtime.engine import Engine
    from runtime.module import open_bundle
    from runtime.session import Session
    from runtime.worker import Worker

    device = open_bundle(args.bundle, manifest, args.device)
    session = Session(device, manifest)
    engine = Engine(session, manifest, queue=args.queue, chunks=chunks)
    return Worker(engine, bridge.after_step)


async def _serve(
    server: Server,
    model: Model,
    worker: Worker,
    bridge: Bridge,
    sockets: Sequence[socket.socket],
    drain_s: float,
    args: argparse.Namespace,
) -> int:
    import uvicorn

    from runtime.server import guard, protocol

    bridge.attach(asyncio.get_running_loop())
    worker.start()
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # it tells of clients that went away
    config = uvicorn.Config(
        server.app(),
        http=protocol.bound(args.client_timeout),
        loop="asyncio",
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="critical",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=1,
    )
    slots = model.manifest.shape.slots
    words = f"{slots} slot{'s' if slots > 1 else ''}"
    line = f"serving {model.name} with {words} at {guard.url(sockets)}"
    return await _listener(config, server, worker, line, drain_s).listen(sockets)


def _listener(config: Any, server: Server, worker: Worker, line: str, drain_s: float) -> Any:
    """uvicorn's server with our signals."""
    import uvicorn

    class Listener(uvicorn.Server):
        signals = 0
        code = 0
        drain: asyncio.Task[None] | None = None

        async def listen(self, sockets: Sequence[socket.socket]) -> int:
            """Serve until the end; returns the exit code."""
            self.loop = asyncio.get_running_loop()
            await self.serve(list(sockets))
            return self.code

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            print(line, flush=True)

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            self.signals += 1
            server.draining = True
            if self.signals == 1:
                self.loop.call_soon_threadsafe(self._begin)
            else:
                self.code = 130 if sig == signal.SIGINT else 128 + sig
                self.should_exit = self.force_exit = True

        def _begin(self) -> None:
            self.drain = self.loop.create_task(self._drain())

        async def _drain(self) -> None:
            """Let what runs and waits finish, answers included, then stop listening."""
            ended = await asyncio.to_thread(worker.drain, drain_s)
            if not ended and not self.force_exit:
                self.code = 1
                report(UserError(
                    f"drain-timeout: requests still ran after {drain_s:g} s and were cancelled"
                ))  # fmt: skip
                await asyncio.to_thread(worker.close)
            await server.quiet(config.http.timeout_s)
            self.should_exit = True

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            if self.force_exit:
                await asyncio.to_thread(worker.close)
            await super().shutdown(sockets)

    return Listener(config)


def _integer(low: int, high: int = 2**31 - 1) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.strip().lstrip("-").isdigit() or not low <= int(text[:20]) <= high:
            upper = "" if high == 2**31 - 1 else f" to {high}"
            expected = f"{low}{upper}" if upper else f"{low} or more"
            raise argparse.ArgumentTypeError(f"found {text[:40]!r}, expected {expected}")
        return int(text)

    return number


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= 1e9:
        raise argparse.ArgumentTypeError(f"found {text[:40]!r}, expected seconds, more than 0")
    return value
