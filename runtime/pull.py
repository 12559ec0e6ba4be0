"""`scanwright pull`: brings a bundle here, checks every byte of it, and puts it in place whole.

The manifest comes first and says what else there is; files are shared with other bundles on this
disk (`runtime.blobs`), and what broke off goes on where it stopped.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

from runtime import manifest as mf
from runtime import place as places
from runtime import web
from runtime.blobs import Blobs, default_root, locked
from runtime.errors import UserError
from runtime.inspect import size as sized
from runtime.pack import MAX_MANIFEST, TarSource
from runtime.progress import progress

KINDS = "oci://HOST/NAME:TAG, https://…, hf://ORG/NAME, s3://BUCKET/PATH, a directory or a tar file"
_CHUNK = 1 << 20
_PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,99}")


class Source(Protocol):
    """Where a bundle comes from. All methods raise UserError."""

    where: str

    def manifest(self) -> bytes:
        """The bytes of manifest.json."""
        ...

    def check(self, manifest: mf.Manifest) -> None:
        """What can be told to be wrong before anything is brought here."""
        ...

    def unlisted(self) -> dict[str, bytes]:
        """The files of `place.UNLISTED` that are there."""
        ...

    def receive(self, ref: mf.FileRef, partial: Path, count: web.Count) -> None:
        """Append what is missing of a file to `partial`; `count` hears how much there is."""
        ...


class DirSource:
    """A bundle directory."""

    def __init__(self, directory: Path) -> None:
        self.where, self._directory = str(directory), directory

    def manifest(self) -> bytes:
        """The bytes of manifest.json."""
        path = self._directory / mf.FILE_NAME
        if not path.is_file():
            raise UserError(f"{self._directory}: no {mf.FILE_NAME} there, expected a bundle")
        return _small(path, MAX_MANIFEST)

    def check(self, manifest: mf.Manifest) -> None:
        """Every file is there and has its size."""
        for ref in manifest.files.all():
            path = self._directory / ref.path
            found = path.stat().st_size if path.is_file() else None
            if found != ref.size:
                what = "missing" if found is None else f"{found} bytes"
                raise UserError(f"{path}: {what}, expected {ref.size} bytes; get the bundle again")

    def unlisted(self) -> dict[str, bytes]:
        """Files that no manifest can list."""
        paths = {name: self._directory / name for name in places.UNLISTED}
        return {n: _small(p, places.MAX_UNLISTED) for n, p in paths.items() if p.is_file()}

    def receive(self, ref: mf.FileRef, partial: Path, count: web.Count) -> None:
        """Append the rest of a file to `partial`."""
        with (self._directory / ref.path).open("rb") as file, partial.open("ab") as out:
            have = min(out.tell(), ref.size)
            out.truncate(have)
            file.seek(have)
            while piece := file.read(_CHUNK):
                out.write(piece)
                count(out.tell())


def _small(path: Path, limit: int) -> bytes:
    with path.open("rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise UserError(f"{path}: more than {limit} bytes, expected a small file")
    return data


class WebSource:
    """A bundle's files below a URL. `authorization` goes to that host alone."""

    def __init__(self, client: web.Client, url: str, authorization: str | None = None) -> None:
        self.where, self._client, self._authorization = url, client, authorization
        self.headers: dict[str, str] = {}  # of the answer with the manifest

    def _url(self, name: str) -> str:
        return f"{self.where.rstrip('/')}/{web.urllib.parse.quote(name)}"

    def _get(self, name: str, limit: int) -> bytes:
        url = self._url(name)
        try:
            with self._client.open(url, authorization=self._authorization) as answer:
                self.headers = dict(answer.headers.items())
                return web.read_all(answer, url, limit)
        except web.BROKEN as error:
            web.broken(url, error)

    def manifest(self) -> bytes:
        """The bytes of manifest.json."""
        try:
            return self._get(mf.FILE_NAME, MAX_MANIFEST)
        except web.Refused as error:
            hint = f"; expected a bundle's files below {self.where}"
            raise web.refusal(self._url(mf.FILE_NAME), error, hint) from error

    def check(self, manifest: mf.Manifest) -> None:
        """Nothing is known before it is asked for."""

    def unlisted(self) -> dict[str, bytes]:
        """Files that no manifest can list; a server that refuses one does not have it."""
        found = {}
        for name in places.UNLISTED:
            try:
                found[name] = self._get(name, places.MAX_UNLISTED)
            except web.Refused as error:
                if error.status >= 500:
                    raise web.refusal(self._url(name), error, "; try again later") from error
        return found

    def receive(self, ref: mf.FileRef, partial: Path, count: web.Count) -> None:
        """Append the rest of a file to `partial`."""
        url = self._url(ref.path)

        def opener(headers: web.Headers) -> AbstractContextManager[web.Answer]:
            return self._client.open(url, headers, authorization=self._authorization)

        web.download(opener, url, partial, ref.size, count)


class HubSource(WebSource):
    """A bundle in a repository of the Hugging Face hub: `hf://ORG/NAME[@REVISION][/PATH]`."""

    def __init__(self, client: web.Client, url: str) -> None:
        match = re.fullmatch(r"hf://([\w.-]+/[\w.-]+?)(?:@([\w.-]+))?(/[\w./+-]+)?", url)
        if match is None or ".." in url:
            raise UserError(f"{url}: expected hf://ORG/NAME[@REVISION][/PATH]")
        endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
        base = f"{endpoint.rstrip('/')}/{match[1]}/resolve/"
        self._ends = base, (match[3] or "").rstrip("/")
        token = os.environ.get("HF_TOKEN")
        where = f"{base}{match[2] or 'main'}{self._ends[1]}"
        super().__init__(client, where, f"Bearer {token}" if token else None)

    def manifest(self) -> bytes:
        """The bytes of manifest.json; all else comes from the commit that has it."""
        text = super().manifest()
        commit = self.headers.get("X-Repo-Commit") or self.headers.get("x-repo-commit") or ""
        if re.fullmatch(r"[0-9a-f]{40}", commit):
            self.where = f"{self._ends[0]}{commit}{self._ends[1]}"
        return text


@contextmanager
def source(url: str, client: web.Client, blobs: Blobs) -> Iterator[Source]:
    """What `url` names. Raises UserError for anything that names no bundle."""
    scheme = url.partition("://")[0] if "://" in url else ""
    if scheme == "oci":
        from runtime.oci import OciSource, Registry, parse

        reference = parse(url)
        yield OciSource(Registry(client, reference), reference)
    elif scheme in ("http", "https"):
        web.check_url(url, client.plain)
        if url.endswith(".tar"):
            with _fetched(url, client, blobs) as path:
                yield TarSource(path)
        else:
            yield WebSource(client, url)
    elif scheme == "hf":
        yield HubSource(client, url)
    elif scheme == "s3":
        from runtime.s3 import S3Source

        yield S3Source(url)
    elif scheme:
        raise UserError(f"{url}: no such kind of place, expected {KINDS}")
    else:
        path = Path(url)
        if not path.exists():
            raise UserError(f"{url}: no such file or directory, expected {KINDS}")
        yield TarSource(path) if path.is_file() else DirSource(path)


@contextmanager
def _fetched(url: str, client: web.Client, blobs: Blobs) -> Iterator[Path]:
    """A tar file from the web, removed after the block unless the block was interrupted."""
    name = hashlib.sha256(url.encode()).hexdigest()
    path = blobs.root / "partial" / f"{name}.tar"
    with locked(path.with_suffix(".lock")):
        web.download(lambda headers: client.open(url, headers), url, path, None, int)
        try:
            yield path
        except UserError:
            path.unlink(missing_ok=True)
            raise
        path.unlink(missing_ok=True)


# Pulling ------------------------------------------------------------------------------------------


def pull(
    found: Source, directory: Path | None, digest: str | None = None, blobs: Blobs | None = None
) -> Path:
    """Make the bundle of `found` at `directory` (None: named after what it is); returns where.

    digest: the sha256 that manifest.json must have. Raises UserError; then what was at `directory`
    is as it was.
    """
    blobs = blobs or Blobs(default_root())
    text = found.manifest()
    _check_digest(found.where, text, digest)
    try:
        manifest = mf.loads(text.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(f"{found.where}: {mf.FILE_NAME} is not UTF-8 text, expected a bundle's"
                        " manifest") from error  # fmt: skip
    except UserError as error:
        raise UserError(f"{found.where}: {error}") from error
    directory = directory or _default(manifest)
    places.check_destination(directory)
    found.check(manifest)
    listed = {ref.path for ref in manifest.files.all()}
    with _on_disk(blobs), blobs.using(), places.alone(directory, blobs.root / "partial"):
        _check_space(manifest, blobs)
        for ref in manifest.files.all():
            _bring(found, ref, blobs)
        unlisted = {n: data for n, data in found.unlisted().items() if n not in listed}
        places.place(directory, manifest, text, unlisted, blobs.link)
    return directory


def _bring(found: Source, ref: mf.FileRef, blobs: Blobs) -> None:
    """Have the blob of a file, telling how far it is."""

    def receive(partial: Path) -> None:
        with progress(ref.path, ref.size, done=partial.stat().st_size) as told:
            found.receive(ref, partial, told.reach)

    new = blobs.ensure(ref, f"{found.where}: {ref.path}", receive)
    came = "received" if new else "already on this disk"
    name = "".join(char if char.isprintable() else "?" for char in ref.path)
    print(f"  {name:<24} {sized(ref.size):>10}  {came}", file=sys.stderr, flush=True)


@contextmanager
def _on_disk(blobs: Blobs) -> Iterator[None]:
    """Tell of a full disk as one line; other OSErrors name their file."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise UserError(
            f"{blobs.root}: {error.strerror or error}; free some space, or set SCANWRIGHT_CACHE to"
            " a directory on another disk"
        ) from error


def _check_digest(where: str, text: bytes, digest: str | None) -> None:
    got = hashlib.sha256(text).hexdigest()
    if digest is not None and got != digest.removeprefix("sha256:").lower():
        raise UserError(
            f"{where}: {mf.FILE_NAME} has the sha256 {got}, expected {digest}; this is another"
            " bundle than the one that is wanted"
        )


def _default(manifest: mf.Manifest) -> Path:
    targets = "+".join(target.name for target in manifest.targets)
    words = (manifest.model.name, targets, manifest.shape.name)
    if not all(_PLAIN_NAME.fullmatch(word) for word in words):
        raise UserError(f"manifest.json: model, target and shape {words!a} make no file name;"
                        " name a directory after the URL")  # fmt: skip
    return Path("-".join(words))


def _check_space(manifest: mf.Manifest, blobs: Blobs) -> None:
    """Raise UserError if what is missing does not fit on the disk."""
    need = 0
    for ref in {ref.sha256: ref for ref in manifest.files.all()}.values():
        if not blobs.path(ref).exists():
            partial = blobs.partial(ref)
            need += max(0, ref.size - (partial.stat().st_size if partial.exists() else 0))
    free = shutil.disk_usage(blobs.root).free
    if need > free:
        raise UserError(
            f"{blobs.root}: {need} bytes needed, {free} bytes free; free some space"
            " (scanwright pull --prune drops what no bundle uses), or set SCANWRIGHT_CACHE to a"
            " directory on another disk"
        )


# Command ------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `scanwright pull`."""
    parser.add_argument("url", metavar="URL", nargs="?", help=KINDS)
    parser.add_argument(
        "directory", metavar="DIR", nargs="?", type=Path, help="default: MODEL-TARGET-SHAPE here"
    )
    parser.add_argument("--digest", metavar="SHA256", help="what its manifest.json must have")
    parser.add_argument(
        "--plain-http", action="store_true", help="allow http to another machine than this one"
    )
    parser.add_argument(
        "--prune", action="store_true", help="drop cached files that no bundle uses, at the end"
    )


def run(args: argparse.Namespace) -> int:
    """`scanwright pull`. Raises UserError."""
    if args.url is None and not args.prune:
        raise UserError(f"URL: found none, expected {KINDS}")
    blobs = Blobs(default_root())
    if args.url is not None:
        with source(args.url, web.Client(args.plain_http), blobs) as found:
            print(f"bundle: {pull(found, args.directory, args.digest, blobs)}")
    if args.prune:
        print(f"pruned {sized(blobs.prune())}")
    return 0
