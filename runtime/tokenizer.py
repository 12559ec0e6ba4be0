"""The bundle's tokenizer.json, through the `tokenizers` library.

Encoding is what tokenizer.json says: its post-processor puts the begin and end tokens around a
text, whatever `add_bos_token` in tokenizer_config.json claims (as transformers 5 does); a text that
already has them, such as a rendered chat template, is encoded without. Truncation
and padding that tokenizer.json may carry are off: a prompt is never shortened without a word.
Special tokens have no text.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime import tokenizer_growth
from runtime.errors import UserError
from runtime.text import Detokenizer, PieceDetokenizer, WindowDetokenizer
from runtime.uncollected import UNCOLLECTED

if TYPE_CHECKING:
    from runtime.dry import Breakers
    from runtime.manifest import FileRef

FILE_NAME = "tokenizer.json"
CONFIG_NAME = "tokenizer_config.json"
MAX_BYTES = 64 << 20  # of one file; the largest known has 33 MB
MAX_OBJECT = 16 << 20  # characters of JSON that is read here: 25 times as much in memory
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def load(bundle: Path, files: Sequence[FileRef]) -> Tokenizer | None:
    """The tokenizer of a bundle from its manifest's `files.tokenizer`; None if it has none.

    A model's own format counts before tokenizer.json, which may be there besides.
    Raises UserError: a file is missing, is not what the manifest says, or cannot be read.
    """
    from runtime import tokenizer_plamo, tokenizer_rwkv, tokenizer_tiktoken

    found = {Path(ref.path).name: ref for ref in files}
    kinds = (
        (tokenizer_plamo.FILE_NAME, tokenizer_plamo.PlamoTokenizer),
        (tokenizer_tiktoken.FILE_NAME, tokenizer_tiktoken.TiktokenTokenizer),
        (tokenizer_rwkv.FILE_NAME, tokenizer_rwkv.WorldTokenizer),
        (FILE_NAME, Tokenizer),
    )
    for name, kind in kinds:
        if name in found:
            text = read_text(bundle, found[name])
            config = read_text(bundle, found[CONFIG_NAME]) if CONFIG_NAME in found else "{}"
            return kind(text, config, bundle / found[name].path)
    return None


class Tokenizer:
    """Text to ids and back. `path` only names the tokenizer in messages."""

    def __init__(self, text: str, config: str = "{}", path: Path = Path(FILE_NAME)) -> None:
        import tokenizers

        self._config = parse_object(config, path.with_name(CONFIG_NAME))
        self._path = path
        with self._library():
            self._inner = tokenizers.Tokenizer.from_str(text)
            tokenizer_growth.check(self._inner)
        self._inner.no_truncation()
        self._inner.no_padding()
        try:
            self._add_missing(path.with_name(CONFIG_NAME))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"{path.with_name(CONFIG_NAME)}: added_tokens_decoder is malformed"
                f" ({type(error).__name__}: {error}), expected an object of id: token"
            ) from error

    @contextlib.contextmanager
    def _library(self) -> Iterator[None]:
        """UserError for what goes wrong in the library, which raises plain Exception, and where it
        has not foreseen what a file says a BaseException of its own."""
        try:
            yield
        except BaseException as error:
            if isinstance(error, (KeyboardInterrupt, SystemExit, GeneratorExit)):
                raise
            import tokenizers

            raise UserError(
                f"{self._path}: {error}; expected a tokenizer.json that tokenizers"
                f" {tokenizers.__version__} reads"
            ) from error

    @property
    def size(self) -> int:
        """Number of tokens, added ones included."""
        return self._inner.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Ids of `text`; with `special`, also the tokens the tokenizer puts around a sequence.

        Raises UserError if the text is not Unicode (lone surrogates).
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UserError(
                f"prompt: not UTF-8 at character {error.start}, expected UTF-8 text"
            ) from error
        # the batch form lets other threads run meanwhile
        with self._library():
            return self._inner.encode_batch_fast([text], add_special_tokens=special)[0].ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of all of `ids` at once, special tokens left out."""
        with self._library():
            return self._inner.decode(list(ids), skip_special_tokens=True)

    def stream(self, prompt: Sequence[int] = ()) -> Detokenizer:
        """A detokenizer for text that continues `prompt`."""
        if self._replacements is None:
            return WindowDetokenizer(self.decode, prompt)
        return PieceDetokenizer(self.piece, prompt)

    def piece(self, token: int) -> bytes:
        """Bytes that `token` stands for in the middle of a text; none for special or unknown ids.

        Only for tokenizers with byte-level or sentencepiece-style decoders.
        """
        word = self._inner.id_to_token(token)
        if word is None or token in self._specials:
            return b""
        if self._byte_level:
            table = _byte_alphabet()
            if all(char in table for char in word):
                return bytes(table[char] for char in word)
            return word.encode()
        if self._byte_fallback and (match := _BYTE_TOKEN.fullmatch(word)):
            return bytes([int(match[1], 16)])
        for old, new in self._replacements or ():
            word = word.replace(old, new)
        return word.encode()

    @cached_property
    def pieces(self) -> tuple[bytes, ...]:
        """What every id stands for in the middle of a text; none for special ids."""
        return tuple(self.label(token)[1] or b"" for token in range(self.size))

    def breakers(self, strings: Iterable[str]) -> Breakers:
        """DRY's sequence breakers of this vocabulary. Walks it once for each string.

        Raises UserError that names the field.
        """
        from runtime.dry import Breakers

        return Breakers.of(strings, self.pieces, lambda text: self.encode(text, special=False))

    def label(self, token: int) -> tuple[str, bytes | None]:
        """What to call a token, and its bytes; None for special and unknown ids, which have none.

        The name is the text of the bytes, `bytes:` and hexadecimal escapes if they are no whole
        characters, the content of a special token, or `token_id:` and the number.
        """
        if token not in self._labels:
            self._labels[token] = self._label(token)
        return self._labels[token]

    def _label(self, token: int) -> tuple[str, bytes | None]:
        word = self._inner.id_to_token(token)
        if word is None:
            return f"token_id:{token}", None
        if token in self._specials:
            return word, None
        is_byte = self._byte_fallback and _BYTE_TOKEN.fullmatch(word)
        if self._replacements is None and not is_byte:
            return (text := self.decode([token])), text.encode()
        return named(data := self.piece(token)), data

    @cached_property
    def _labels(self) -> dict[int, tuple[str, bytes | None]]:
        return {}

    @cached_property
    def _specials(self) -> frozenset[int]:
        added = self._inner.get_added_tokens_decoder()
        return frozenset(i for i, token in added.items() if token.special)

    @cached_property
    def _stages(self) -> list[dict[str, Any]]:
        """The decoder of tokenizer.json as a flat list."""
        if self._inner.decoder is None:
            return []
        decoder = json.loads(self._inner.decoder.__getstate__())
        return decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]

    @cached_property
    def _byte_level(self) -> bool:
        return [stage["type"] for stage in self._stages if stage["type"] != "Fuse"] == ["ByteLevel"]

    @cached_property
    def _byte_fallback(self) -> bool:
        return any(stage["type"] == "ByteFallback" for stage in self._stages)

    @cached_property
    def _replacements(self) -> list[tuple[str, str]] | None:
        """Replacements that make a token's text; None if tokens do not stand alone.

        Stripping at the start of a text is left out: generated text continues a prompt.
        """
        if self._byte_level:
            return []
        pairs = []
        for stage in self._stages:
            kind = stage["type"]
            if kind == "Metaspace":
                pairs.append((stage["replacement"], " "))
            elif kind == "Replace" and "String" in stage["pattern"]:
                pairs.append((stage["pattern"]["String"], stage["content"]))
            elif kind == "Strip" and stage["stop"] == 0:
                continue
            elif kind not in ("ByteFallback", "Fuse"):
                return None
        return pairs or None

    def _add_missing(self, path: Path) -> None:
        """Tokens that only tokenizer_config.json lists (`added_tokens_decoder`)."""
        import tokenizers

        listed = self._config.get("added_tokens_decoder") or {}
        for key, fields in sorted(listed.items(), key=lambda item: int(item[0])):
            word = fields["content"]
            if self._inner.token_to_id(word) is None:
                flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
                chosen = {name: bool(fields[name]) for name in flags if name in fields}
                self._inner.add_tokens([tokenizers.AddedToken(word, **chosen)])
            if (found := self._inner.token_to_id(word)) != int(key):
                raise UserError(
                    f"{path}: added_tokens_decoder gives {word!r} the id {key}, expected {found}"
                    f" as in {FILE_NAME}; fix the checkpoint's tokenizer and rebuild"
                )


def named(data: bytes) -> str:
    """What to call a token of these bytes: their text, or `bytes:` and hexadecimal escapes."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def read_object(bundle: Path, ref: FileRef) -> dict[str, Any]:
    """The JSON object in one of the bundle's files. Raises UserError naming the file."""
    return parse_object(read_text(bundle, ref), bundle / ref.path)


def read_text(bundle: Path, ref: FileRef) -> str:
    """A text file of the bundle, if it is the one the manifest lists. Raises UserError."""
    path = bundle / ref.path
    try:
        facts = path.stat()
        if not stat.S_ISREG(facts.st_mode) or facts.st_size > MAX_BYTES:
            raise UserError(
                f"{path}: no regular file of at most {MAX_BYTES} bytes, expected one of {ref.size};"
                " rebuild the bundle"
            )
        data = path.read_bytes()
    except OSError as error:
        raise UserError(
            f"{path}: {error.strerror or error}, expected a file of {ref.size} bytes;"
            " rebuild the bundle"
        ) from error
    digest = hashlib.sha256(data).hexdigest()
    if digest != ref.sha256:
        raise UserError(
            f"{path}: sha256 {digest}, expected {ref.sha256} as in manifest.json;"
            " rebuild the bundle"
        )
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 at byte {error.start}, expected JSON text") from error


def parse_object(text: str, path: Path) -> dict[str, Any]:
    """The JSON object `text`. Raises UserError naming `path`."""
    if len(text) > MAX_OBJECT:
        raise UserError(f"{path}: {len(text)} characters, expected {MAX_OBJECT} at most")
    try:
        with UNCOLLECTED:
            value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON ({error}), expected an object") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: found {type(value).__name__}, expected a JSON object")
    return value


@cache
def _byte_alphabet() -> dict[str, int]:
    """Character to byte of the byte-level alphabet: printable Latin-1 stands for itself, the other
    bytes for U+0100 upwards in order (the GPT-2 tokenizer's bytes_to_unicode)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + i): byte for i, byte in enumerate(others)}
