"""Real servers on the loopback for the remote cache, each behind a proxy that can be told to fail.

S3 is moto's server, WebDAV is nginx. Both are processes of their own.
"""

from __future__ import annotations

import contextlib
import gc
import http.client
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from artifacts.remote import Remote

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
DAV_MODULE = Path("/usr/lib/nginx/modules/ngx_http_dav_ext_module.so")


@dataclass
class Fault:
    """What happens to requests of `methods` whose path has `part` in it; `seen` counts them.

    kind: `500`; `truncate` and `wrong`, of the answer's body; `stall` before the answer and
    `stall-body` in the middle of it; `down`, no answer; `cut`, half of what is sent arrives.
    """

    kind: str
    methods: str = "GET HEAD PUT PROPFIND MKCOL MOVE DELETE POST OPTIONS"
    part: str = ""
    seen: int = 0


@dataclass
class Proxy:
    """Hands HTTP requests on to `upstream`, but for those that meet `fault`."""

    upstream: tuple[str, int]
    fault: Fault | None = None
    released: threading.Event = field(default_factory=threading.Event)
    requests: list[str] = field(default_factory=list)
    port: int = 0

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        proxy = self

        class Handler(_Handler):
            pass

        Handler.proxy = proxy
        server = _Server(("127.0.0.1", 0), Handler)
        self.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self.released.set()
            server.shutdown()
            server.server_close()
            thread.join()

    @contextlib.contextmanager
    def failing(self, fault: Fault) -> Iterator[Fault]:
        """`fault` holds for the block, and until the threads that the clients left behind have
        given up; what stalled is let go, and fails."""
        self.released.clear()
        self.fault = fault
        try:
            yield fault
        finally:
            self.released.set()
            join_clients()
            self.fault = None


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is what the tests are about."""


class _Handler(BaseHTTPRequestHandler):
    proxy: Proxy
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else each body waits for the acknowledgement of its headers

    def log_message(self, format: str, *args: Any) -> None:
        """Not on the tests' stderr."""

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        found = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            found += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return found

    def _hand_on(self) -> None:
        proxy, body = self.proxy, self._body()
        proxy.requests.append(f"{self.command} {self.path}")
        fault = proxy.fault
        if fault and (self.command not in fault.methods.split() or fault.part not in self.path):
            fault = None
        kind = fault.kind if fault else ""
        if fault:
            fault.seen += 1
        if kind == "stall":
            proxy.released.wait(60)
        if kind in ("down", "stall"):
            self.close_connection = True
            return
        if kind == "500":
            self._answer(500, [], b"no")
            return
        if kind == "cut":
            body = body[: len(body) // 2]
        status, headers, content = self._ask(body)
        if kind == "wrong" and content:
            content = bytes([content[0] ^ 1]) + content[1:]
        self._answer(status, headers, content, kind)

    def _ask(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = http.client.HTTPConnection(*self.proxy.upstream, timeout=60)
        skipped = ("content-length", "transfer-encoding", "connection", "expect", "content-md5")
        try:
            connection.putrequest(
                self.command, self.path, skip_host=True, skip_accept_encoding=True
            )
            for name, value in self.headers.items():
                low = name.lower()
                if low not in skipped and not low.startswith("x-amz-checksum"):
                    connection.putheader(name, value)
            connection.putheader("Content-Length", str(len(body)))
            connection.endheaders(body)
            answer = connection.getresponse()
            content = answer.read()
            return answer.status, answer.getheaders(), content
        finally:
            connection.close()

    def _answer(
        self, status: int, headers: list[tuple[str, str]], content: bytes, kind: str = ""
    ) -> None:
        self.send_response_only(status)
        length = str(len(content))
        for name, value in headers:
            if name.lower() == "content-length" and self.command == "HEAD":
                length = value
            elif name.lower() not in ("content-length", "transfer-encoding", "connection"):
                self.send_header(name, value)
        if status != 204:
            self.send_header("Content-Length", length)
        self.end_headers()
        if self.command == "HEAD":
            return
        if kind in ("truncate", "stall-body"):
            self.wfile.write(content[: len(content) // 2])
            self.wfile.flush()
            if kind == "stall-body":
                self.proxy.released.wait(60)
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
        else:
            self.wfile.write(content)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do_OPTIONS = _hand_on
    do_PROPFIND = do_MKCOL = do_MOVE = do_COPY = _hand_on


@dataclass
class Server:
    """A running server behind its proxy."""

    proxy: Proxy
    url: str
    options: dict[str, Any]
    root: Path | None = None  # where its files are, if they are files
    clients: list[Remote] = field(default_factory=list)

    def remote(self, folder: str, *, write: bool = False, timeout: float = 60.0) -> Remote:
        """A new client of the folder `folder`."""
        url = f"{self.url}/{folder}"
        made = Remote(url, write=write, timeout=timeout, options=self.options)
        self.clients.append(made)
        return made

    def close_clients(self) -> None:
        """Close the connections of the clients that this server was asked for."""
        for client in self.clients:
            opened = client._files._opened
            if opened is not None and self.url.startswith("webdav"):
                opened[0].client.http.close()
        self.clients.clear()
        gc.collect()


def join_clients() -> None:
    """Wait for the threads of operations that took too long."""
    for thread in threading.enumerate():
        if thread.name == "remote-cache":
            thread.join(120)
            assert not thread.is_alive()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def _process(argv: list[str], port: int, log: Path) -> Iterator[None]:
    """A server process, from when it accepts connections on."""
    with log.open("wb") as sink, subprocess.Popen(argv, stdout=sink, stderr=sink) as process:
        try:
            deadline = time.monotonic() + 120
            while True:
                with contextlib.suppress(OSError):
                    socket.create_connection(("127.0.0.1", port), timeout=1).close()
                    break
                assert process.poll() is None and time.monotonic() < deadline, log.read_text()
                time.sleep(0.1)
            yield
        finally:
            process.terminate()


@contextlib.contextmanager
def s3(home: Path) -> Iterator[Server]:
    """moto's S3 with the bucket `bucket`."""
    port = free_port()
    argv = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with _process(argv, port, home / "moto.log"):
        proxy = Proxy(("127.0.0.1", port))
        with proxy.serving():
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            connection.request("PUT", "/bucket")
            assert connection.getresponse().status == 200
            connection.close()
            options: dict[str, Any] = {"endpoint_url": f"http://127.0.0.1:{proxy.port}"}
            options |= {"key": "k", "secret": "s"}
            options["config_kwargs"] = {"retries": {"max_attempts": 0}}  # s3fs has its own
            yield Server(proxy, "s3://bucket", options)


_NGINX = """
load_module {module}; {user}
daemon off; worker_processes 1; pid {home}/nginx.pid; error_log {home}/error.log;
events {{ worker_connections 64; }}
http {{
  access_log off;
  client_body_temp_path {home}/body; proxy_temp_path {home}/p; fastcgi_temp_path {home}/f;
  uwsgi_temp_path {home}/u; scgi_temp_path {home}/s;
  server {{
    listen 127.0.0.1:{port};
    location / {{
      root {home}/root; client_max_body_size 0;
      dav_methods PUT DELETE MKCOL COPY MOVE; dav_ext_methods PROPFIND OPTIONS;
      create_full_put_path on;
    }}
  }}
}}
"""


@contextlib.contextmanager
def webdav(home: Path) -> Iterator[Server]:
    """nginx with its WebDAV modules over `home`/root."""
    port = free_port()
    (home / "root").mkdir()
    user = "user root;" if os.geteuid() == 0 else ""  # else its worker may not read what is ours
    config = home / "nginx.conf"
    config.write_text(_NGINX.format(home=home, port=port, module=DAV_MODULE, user=user))
    argv = [str(NGINX), "-c", str(config), "-p", str(home), "-e", str(home / "start.log")]
    with _process(argv, port, home / "nginx.log"):
        proxy = Proxy(("127.0.0.1", port))
        with proxy.serving():
            options = {"base_url": f"http://127.0.0.1:{proxy.port}"}
            yield Server(proxy, "webdav://", options, home / "root")
