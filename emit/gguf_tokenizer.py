"""The tokenizer's files of the model in a GGUF file, made of what the file itself says.

Keys are those of `gguf.constants.Keys.Tokenizer`, written by the set_vocab of llama.cpp's
conversion/. What the file does not say for sure gives no tokenizer, and a line that says why.
"""

from __future__ import annotations

import json
from typing import Any

from emit import gguf_bpe, gguf_pieces
from emit.errors import EmitError
from emit.gguf_file import Gguf
from emit.gguf_vocabulary import FIX, PREFIX, Unknown, Vocabulary, read

JSON, CONFIG = "tokenizer.json", "tokenizer_config.json"
PLAMO, WORLD, TIKTOKEN = "tokenizer.jsonl", "rwkv_vocab_v20230424.txt", "tiktoken.model"
TEMPLATE = "tokenizer.chat_template"
MODELS = ("gpt2", "llama", "plamo2", "rwkv")
NONE = ("none", "no_vocab")


def tokenizer_of(file: Gguf) -> tuple[dict[str, str], list[str]]:
    """Files by their names, and lines that say what has been left out and what to do.

    Raises EmitError, one line naming file and key, for anything malformed.
    """
    try:
        files, config, notes = _files(file)
    except Unknown as reason:
        return {}, [
            f"{file.path}: {reason}; the bundle has no tokenizer and takes token ids only: put the"
            " model's own tokenizer files beside the file for text"
        ]
    template = file.metadata.get(TEMPLATE)
    if template is not None:
        if not isinstance(template, str) or not _is_text(template):
            raise EmitError(f"{file.path}: {TEMPLATE}: found {ascii(template)[:80]}, expected text")
        if "messages" in template:
            config["chat_template"] = template
        else:
            shown = ascii(template)[:80]
            notes.append(f"{file.path}: {TEMPLATE} = {shown} is no template; the bundle has none:"
                         " put chat_template.jinja beside the file for chats")  # fmt: skip
    text = json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    return {**files, CONFIG: text}, notes


def _files(file: Gguf) -> tuple[dict[str, str], dict[str, Any], list[str]]:
    """The files, the content of tokenizer_config.json, and lines for the user."""
    model = file.metadata.get(PREFIX + "model")
    if model is None or model in NONE:
        raise Unknown("it holds no tokenizer")
    if model not in MODELS:
        raise Unknown(f"{PREFIX}model = {ascii(model)[:80]} is none of {', '.join(MODELS)}")
    found = read(file)
    config: dict[str, Any] = {
        f"{role}_token": found.tokens[i] for role, i in sorted(found.roles.items())
    }
    if model == "plamo2":
        notes = [] if PREFIX + "add_bos_token" in file.metadata else [
            f"{file.path}: {PREFIX}add_bos_token is missing, so no begin token is put before a"
            " text: put the model's own tokenizer files beside the file if it wants one"
        ]  # fmt: skip
        return {PLAMO: gguf_pieces.plamo_jsonl(found)}, config | _edges(found), notes
    if model == "rwkv":
        text, added = gguf_pieces.world_text(found)
        config = dict.fromkeys(("bos_token", "eos_token"), gguf_pieces.WORLD_END)
        return {WORLD: text}, {**config, "added_tokens_decoder": added}, []
    if model == "gpt2" and found.text("pre") == gguf_bpe.KIMI:
        text, config = gguf_bpe.tiktoken_model(found)
        return {TIKTOKEN: text}, config, []
    made = gguf_bpe if model == "gpt2" else gguf_pieces
    content = made.tokenizer_json(found)
    _check(found, text := json.dumps(content, ensure_ascii=False))
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    return {JSON: text}, config | _edges(found), []


def _edges(found: Vocabulary) -> dict[str, bool]:
    """What tokenizer_config.json says of tokens around a sequence, where the file says it."""
    keys = [key for key in ("add_bos_token", "add_eos_token") if PREFIX + key in found.metadata]
    return {key: found.flag(key, False) for key in keys}


def _check(found: Vocabulary, text: str) -> None:
    """EmitError if the library that will read it cannot."""
    import tokenizers

    try:
        tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises plain Exception
        words = " ".join(str(error).split())[:200]
        raise EmitError(f"{found.path}: {PREFIX}tokens make no tokenizer: {words}; {FIX}") from None


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
