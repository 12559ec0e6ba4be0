"""Bundles in an S3 bucket, by the package s3fs: AWS_ENDPOINT_URL and the usual credentials hold."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from runtime import manifest as mf
from runtime import place as places
from runtime import web
from runtime.errors import UserError
from runtime.pack import MAX_MANIFEST


def prefix(url: str) -> str:
    """`bucket/path` of `s3://bucket/path`. Raises UserError."""
    match = re.fullmatch(r"s3://([a-z0-9][a-z0-9.-]{1,62}(?:/[\w.+=-]+)+)/?", url)
    if match is None or ".." in url:
        raise UserError(f"{url}: expected s3://BUCKET/PATH")
    return match[1]


def filesystem(url: str) -> Any:
    """The bucket's files. Raises UserError without s3fs."""
    try:
        import s3fs
    except ImportError as error:
        raise UserError(
            f"{url}: needs the package s3fs, found none; pip install 'scanwright[remote]'"
        ) from error
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    return s3fs.S3FileSystem(endpoint_url=endpoint, use_listings_cache=False)


def put_file(files: Any, path: Path, dest: str, count: web.Count) -> None:
    """Upload a file; `count` hears how many bytes are there, a part at a time."""
    from fsspec.callbacks import Callback

    callback: Any = Callback(hooks={"count": lambda size, value, **_: count(value)})
    files.put_file(str(path), dest, callback=callback)


def read(files: Any, path: str, first: int, size: int) -> bytes:
    """`size` bytes of an object from byte `first` on, or those that there are, or one more if the
    server sends on, which s3fs would read whatever it is. Raises as s3fs does."""
    from fsspec.asyn import sync

    async def receive() -> bytes:
        bucket, key, _ = files.split_path(path)
        wanted = f"bytes={first}-{first + size - 1}"
        answer = await files._call_s3("get_object", Bucket=bucket, Key=key, Range=wanted)
        data = bytearray()
        async with answer["Body"] as body:
            while len(data) <= size and (piece := await body.read(size + 1 - len(data))):
                data += piece
        return bytes(data)

    received: Any = sync(files.loop, receive)
    return received


def explained(where: str, error: Exception) -> UserError:
    """A failure of S3 as one line."""
    text = " ".join(str(error).split())[:160] or type(error).__name__
    hint = "run the same command to try again"
    if isinstance(error, FileNotFoundError):
        text, hint = "is not there", "check the bucket and the path"
    elif isinstance(error, PermissionError) or "credential" in text.lower():
        hint = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
    return UserError(f"{where}: {text}; {hint}")


class S3Source:
    """A bundle in a bucket, to be pulled."""

    def __init__(self, url: str) -> None:
        self.where, self._prefix = url.rstrip("/"), prefix(url)
        self._files = filesystem(url)

    def _small(self, name: str, limit: int) -> bytes:
        data = read(self._files, f"{self._prefix}/{name}", 0, limit + 1)
        if len(data) > limit:
            raise UserError(f"{self.where}/{name}: more than {limit} bytes, expected a small file")
        return data

    def manifest(self) -> bytes:
        """The bytes of manifest.json."""
        try:
            return self._small(mf.FILE_NAME, MAX_MANIFEST)
        except UserError:
            raise
        except Exception as error:
            raise explained(f"{self.where}/{mf.FILE_NAME}", error) from error

    def check(self, manifest: mf.Manifest) -> None:
        """Nothing is known before it is asked for."""

    def unlisted(self) -> dict[str, bytes]:
        """Files that no manifest can list."""
        found = {}
        for name in places.UNLISTED:
            try:
                found[name] = self._small(name, places.MAX_UNLISTED)
            except FileNotFoundError:
                continue
            except UserError:
                raise
            except Exception as error:
                raise explained(f"{self.where}/{name}", error) from error
        return found

    def receive(self, ref: mf.FileRef, partial: Path, count: web.Count) -> None:
        """Append the rest of a file to `partial`; s3fs tries again what breaks off."""
        where = f"{self.where}/{ref.path}"
        with partial.open("ab") as out:
            have = min(out.tell(), ref.size)
            out.truncate(have)
            while have < ref.size:
                try:
                    end = min(have + (32 * web.CHUNK), ref.size)
                    piece = read(self._files, f"{self._prefix}/{ref.path}", have, end - have)
                except Exception as error:
                    raise explained(where, error) from error
                if len(piece) != end - have:
                    raise UserError(
                        f"{where}: found {len(piece)} bytes from byte {have} on, expected"
                        f" {end - have} at least; push it again"
                    )
                out.write(piece)
                have += len(piece)
                count(have)
