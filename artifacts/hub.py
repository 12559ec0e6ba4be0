"""The Hugging Face hub: what a revision holds, and downloads that resume and are checked.

huggingface_hub makes the requests (its token, proxy and retry rules hold) and is imported here
only when a request is needed. Files are downloaded over plain HTTP into a partial file that
survives a killed process, because the library's own download functions drop theirs; the digest
that the hub announced or the lock recorded is compared before a file gets its name.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, cast
from urllib.parse import quote

from artifacts.disk import hash_file, is_full, sync, user_error
from artifacts.lockfile import Digest, is_commit
from runtime.errors import UserError
from runtime.progress import Progress, progress

DEFAULT_ENDPOINT = "https://huggingface.co"
MAX_INFO = 32 << 20  # bytes of what the hub says of a repository: 100,000 files
TRIES = 4  # in a row without a new byte
_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Remote:
    """A file of a commit: `sha256` where the hub knows it (LFS), else its git object id."""

    name: str
    size: int
    sha256: str | None
    git_oid: str | None


class Hub:
    """Requests about one repository. Every method raises UserError, one line."""

    def __init__(self, repo: str, endpoint: str | None = None) -> None:
        self.repo = repo
        self.endpoint = (endpoint or os.environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT).rstrip("/")

    def resolve(self, revision: str) -> tuple[str, dict[str, Remote]]:
        """The commit that `revision` names now, and its files by path."""
        try:
            info = self._model_info(revision)
        except Exception as error:
            self._explain(error, revision)
        if not is_commit(info.sha):
            raise UserError(f"hf:{self.repo}: {self.endpoint} names no commit for revision "
                            f"{revision}; check HF_ENDPOINT")  # fmt: skip
        files = {}
        for item in info.siblings or []:
            sha = item.lfs.sha256 if item.lfs else None
            size = item.lfs.size if item.lfs else item.size
            if size is not None:
                remote = Remote(item.rfilename, size, sha, item.blob_id)
                self._check(remote)
                files[item.rfilename] = remote
        return str(info.sha), files

    def _model_info(self, revision: str) -> Any:
        """As huggingface_hub's, which reads an answer whatever its size, and unpacks it."""
        from huggingface_hub import ModelInfo
        from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

        headers = build_hf_headers(library_name="scanwright") | {"Accept-Encoding": "identity"}
        page = f"{self.endpoint}/api/models/{self.repo}/revision/{quote(revision, safe='')}"
        with get_session().stream(
            "GET", page, headers=headers, params={"blobs": True}, timeout=_TIMEOUT_S
        ) as answer:
            data = bytearray()
            for piece in answer.iter_raw(1 << 16):
                data += piece
                if len(data) > MAX_INFO:
                    raise UserError(
                        f"hf:{self.repo}: {self.endpoint} says more than {MAX_INFO} bytes about it,"
                        " expected a list of files; check HF_ENDPOINT"
                    )
            codes = ("content-encoding", "transfer-encoding")  # not undone, which has no bound
            told = {name: word for name, word in answer.headers.items() if name not in codes}
            whole = type(answer)(
                answer.status_code, headers=told, content=bytes(data), request=answer.request
            )
        hf_raise_for_status(whole)
        try:
            return ModelInfo(**json.loads(data))
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise UserError(
                f"hf:{self.repo}: {self.endpoint} gives no list of files ({str(error)[:80]}),"
                " expected JSON; check HF_ENDPOINT"
            ) from error

    def _check(self, remote: Remote) -> None:
        """UserError unless what the hub says of a file has the form of a size and of digests."""
        size = type(remote.size) is int and 0 <= remote.size < 2**62
        sha = remote.sha256 is None or _hexadecimal(remote.sha256, 64)
        oid = remote.git_oid is None or _hexadecimal(remote.git_oid, 40)
        if not (size and sha and oid):
            raise UserError(
                f"hf:{self.repo}: {ascii(remote.name)[:80]}: {self.endpoint} gives it size "
                f"{ascii(remote.size)[:40]}, sha256 {ascii(remote.sha256)[:80]} and id "
                f"{ascii(remote.git_oid)[:80]}, expected bytes and hex digits; check HF_ENDPOINT"
            )

    def download(self, commit: str, remote: Remote, dest: Path, partial: Path) -> Digest:
        """Bring `remote` to `dest`; returns its digest. Continues what `partial` already holds.

        The file appears under `dest` complete and checked or not at all. Bytes that arrived before
        a failure stay in `partial`, unless the disk is full or they proved wrong.
        """
        try:
            return self._download(commit, remote, dest, partial)
        except OSError as error:
            if is_full(error):
                with contextlib.suppress(OSError):
                    partial.unlink()
            raise user_error(error, dest, remote.size) from error

    def _download(self, commit: str, remote: Remote, dest: Path, partial: Path) -> Digest:
        partial.touch()
        if partial.stat().st_size > remote.size:
            os.truncate(partial, 0)
        resumed = partial.stat().st_size > 0
        while True:
            have, word = partial.stat().st_size, f"download {remote.name}"
            with progress(word, remote.size, done=have) as shown:
                self._receive(commit, remote, partial, shown)
            digest = hash_file(partial)
            wrong = differs(remote, partial, digest)
            if wrong is None:
                sync(partial)
                partial.replace(dest)
                sync(dest.parent)
                return digest
            partial.unlink()
            if not resumed:
                raise UserError(
                    f"hf:{self.repo}: {remote.name}: {wrong}; the download was damaged, or the "
                    "hub's file is not the one that was pinned: try again, or delete the lock to "
                    "accept what the hub has now"
                )
            partial.touch()
            resumed = False  # what an earlier run left was wrong: once more from the start

    def _receive(self, commit: str, remote: Remote, partial: Path, shown: Progress) -> None:
        """Append to `partial` until it has the expected size."""
        from huggingface_hub import hf_hub_url
        from huggingface_hub.file_download import http_get
        from huggingface_hub.utils import build_hf_headers

        url = hf_hub_url(self.repo, remote.name, revision=commit, endpoint=self.endpoint)
        headers = build_hf_headers(library_name="scanwright")
        _without_bars()
        headers["Accept-Encoding"] = "identity"  # ranges of the file, not of a compressed form
        size, failures = remote.size, 0
        while (have := partial.stat().st_size) != size:
            try:
                if have > size:
                    raise _TooLong
                with _Told(partial, shown) as file:
                    file.seek(have)
                    bounded = cast("BinaryIO", _Bounded(file, size))
                    http_get(url, bounded, resume_size=have, headers=headers, expected_size=size)
            except _TooLong as error:
                os.truncate(partial, 0)
                raise UserError(
                    f"hf:{self.repo}: {remote.name}: the hub sent more than the expected "
                    f"{size} bytes; try again, or delete the lock to accept what it has now"
                ) from error
            except Exception as error:
                progress = partial.stat().st_size > have
                failures = 0 if progress else failures + 1
                if not _transient(error) or failures >= TRIES:
                    self._explain(error, commit, remote.name)
                if not progress:
                    time.sleep(0.25 * 2**failures)

    def _explain(self, error: Exception, revision: str, name: str | None = None) -> NoReturn:
        """Raise `error` as one line; errors of this machine pass unchanged."""
        from huggingface_hub.errors import HfHubHTTPError

        where = f"hf:{self.repo}: {name}" if name else f"hf:{self.repo}"
        if isinstance(error, UserError):
            raise error
        if isinstance(error, HfHubHTTPError) and error.response.status_code < 500:
            raise UserError(f"{where}: {self._refusal(error, revision)}") from error
        network = isinstance(error, HfHubHTTPError) or _from_network(error)
        if not network and (not isinstance(error, OSError | ValueError) or _of_system(error)):
            raise error
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        began = "broke off in the download" if name else "cannot be reached"
        again = "go on from the bytes that are here" if name else "try again"
        raise UserError(
            f"{where}: the hub at {self.endpoint} {began} ({reason}); run the same command to "
            f"{again}, or build without weights, from a recipe that has the config (as mamba2-130m "
            "does): params=none"
        ) from error

    def _refusal(self, error: Any, revision: str) -> str:
        """What a 4xx answer means and what to do about it."""
        from huggingface_hub import errors, get_token

        page, sent = f"{self.endpoint}/{self.repo}", get_token() is not None
        if isinstance(error, errors.GatedRepoError):
            if sent:
                return (
                    "gated repository, and the account of the token that was sent has not been "
                    f"granted access; ask for it at {page}"
                )
            return (
                f"gated repository and no token was sent; accept its terms at {page}, then set "
                "HF_TOKEN or run `hf auth login`"
            )
        if isinstance(error, errors.RevisionNotFoundError):
            return f"no revision {revision}; expected a branch, tag or commit of {page}"
        status = error.response.status_code
        hidden = status in (401, 403) and not sent  # how the hub answers for a private repository
        if isinstance(error, errors.RepositoryNotFoundError) or hidden:
            hint = "" if sent else "; if it is private, set HF_TOKEN or run `hf auth login`"
            return f"no such repository at {self.endpoint}; check the name org/name{hint}"
        if isinstance(error, errors.RemoteEntryNotFoundError):
            return f"no such file at revision {revision}; the hub no longer has what was pinned"
        if status in (401, 403):
            return (
                f"the hub refused the token that was sent ({status}), from HF_TOKEN or "
                "`hf auth login`; make a valid one with read access at "
                f"{self.endpoint}/settings/tokens, or unset it for a public model"
            )
        reason = " ".join(str(error).split())[:200]
        return f"the hub at {self.endpoint} answered {status} ({reason}); try again later"


class _Told(io.BufferedRandom):
    """A file that is written from some place on, and tells how far it has come."""

    def __init__(self, path: Path, shown: Progress) -> None:
        super().__init__(io.FileIO(path, "r+"))
        self._shown = shown

    def write(self, data: Any, /) -> int:
        """As of any file."""
        count = super().write(data)
        self._shown.reach(self.tell())
        return count


def _without_bars() -> None:
    """huggingface_hub's own bar is not drawn beside ours, unless the user's settings ask for it."""
    from huggingface_hub.constants import HF_HUB_DISABLE_PROGRESS_BARS
    from huggingface_hub.utils import disable_progress_bars

    if HF_HUB_DISABLE_PROGRESS_BARS is None:
        disable_progress_bars("huggingface_hub.http_get")


class _TooLong(Exception):
    """A body goes on behind its end."""


class _Bounded:
    """A file that takes no byte behind `size`; all else is the file's own."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._size = file, size

    def write(self, data: bytes) -> int:
        """As the file's. Raises _TooLong for more bytes, of which it writes none."""
        if self._file.tell() + len(data) > self._size:
            raise _TooLong
        return self._file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def _hexadecimal(value: object, digits: int) -> bool:
    return isinstance(value, str) and re.fullmatch(rf"[0-9a-f]{{{digits}}}", value) is not None


def differs(remote: Remote, path: Path, digest: Digest) -> str | None:
    """How the bytes at `path` differ from what was announced; None if they do not."""
    sha, size = digest
    if remote.sha256 is not None:
        return None if sha == remote.sha256 else f"sha256 is {sha}, expected {remote.sha256}"
    if remote.git_oid is not None:
        oid = hashlib.sha1(b"blob %d\0" % size + path.read_bytes()).hexdigest()
        return None if oid == remote.git_oid else f"git id is {oid}, expected {remote.git_oid}"
    return None


def _from_network(error: Exception) -> bool:
    """True for errors of the HTTP client that huggingface_hub uses."""
    return any(kind.__module__.startswith(("httpx", "httpcore")) for kind in type(error).__mro__)


def _transient(error: Exception) -> bool:
    """True if the same request may succeed soon (http_get has already waited for a connection)."""
    from huggingface_hub.errors import HfHubHTTPError

    if isinstance(error, HfHubHTTPError):
        return error.response.status_code >= 500
    if _from_network(error):
        return type(error).__name__ != "ConnectError"
    return isinstance(error, OSError) and not _of_system(error)  # fewer bytes than expected


def _of_system(error: Exception) -> bool:
    """True for an error that this machine's kernel gave: a full disk, a denied write."""
    return isinstance(error, OSError) and error.errno is not None
