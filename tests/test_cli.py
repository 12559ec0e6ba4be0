"""The command line from the outside: output, exit codes, one-line errors."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import toy
from tokenizers import decoders, models, pre_tokenizers, processors

from runtime import cli
from runtime import manifest as mf

ROOT = Path(__file__).parents[1]
WORDS = ["<end>", *"abcdefghij", "k", "Ġ", "Ã", "©", "m"]  # é is the two tokens 13, 14
PROMPT = "1,2,3,4,5,6,7,8,9"


def with_tokenizer(bundle: Path) -> Path:
    """Give a bundle a byte-level tokenizer of its 16 ids."""
    inner = tokenizers.Tokenizer(models.BPE({w: i for i, w in enumerate(WORDS)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<end>"])
    path = bundle / "tokenizer.json"
    path.write_text(inner.to_str(), "utf-8")
    data = path.read_bytes()
    ref = mf.FileRef(path.name, hashlib.sha256(data).hexdigest(), len(data))
    edit(bundle, lambda m: dataclasses.replace(m.files, tokenizer=(ref,)), "files")
    return bundle


def edit(bundle: Path, change: Any, field: str) -> None:
    """Replace one field of a bundle's manifest."""
    manifest = mf.load(bundle)
    manifest = dataclasses.replace(manifest, **{field: change(manifest)})
    (bundle / mf.FILE_NAME).write_text(mf.dumps(manifest))


@pytest.fixture(scope="module")
def bare() -> Path:
    """The toy bundle, without a tokenizer."""
    return toy.bundle()


@pytest.fixture(scope="module")
def bundle(bare: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy bundle with a tokenizer."""
    return with_tokenizer(toy.copy(bare, tmp_path_factory.mktemp("cli") / "toy"))


def generate(capsys: pytest.CaptureFixture[str], *words: Any) -> str:
    """Stdout of a generate that must succeed without a word on stderr."""
    assert cli.main(["generate", *map(str, words)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def refused(capsys: pytest.CaptureFixture[str], code: int, *words: Any) -> str:
    """The one line of a command that must fail with nothing on stdout."""
    assert cli.main([str(w) for w in words]) == code
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1 and err[-1] == "\n"
    return err


@pytest.mark.iree
def test_json_is_the_reference_generation(bundle: Path, capsys: Any) -> None:
    params = toy.jax_params(toy.param_specs("local", toy.V), 7)
    prompt = [int(x) for x in PROMPT.split(",")]
    want, rows = toy.greedy(params, prompt, 12)
    out = generate(
        capsys, bundle, "--tokens", PROMPT, "--max-tokens", 12, "--ignore-eos", "--top-logits", 3,
        "--json",
    )  # fmt: skip
    assert out.count("\n") == 1
    found = json.loads(out)
    assert list(found) == [
        "prompt_tokens", "tokens", "text", "finish_reason", "timings", "top_logits",
    ]  # fmt: skip
    assert found["prompt_tokens"] == prompt and found["tokens"] == want
    assert found["finish_reason"] == "length"
    assert found["text"] == "".join(WORDS[i] for i in want if i).replace("Ġ", " ").encode(
        "latin-1"
    ).decode("utf-8", "replace")
    for row, top in zip(rows, found["top_logits"], strict=True):
        assert [i for i, _ in top] == np.argsort(-row, kind="stable")[:3].tolist()
        assert [x for _, x in top] == pytest.approx(np.sort(row)[::-1][:3].tolist(), rel=1e-5)
    timings = found["timings"]
    assert list(timings) == [
        "open_s", "prefill_s", "decode_s", "prefill_tokens_per_s", "decode_tokens_per_s",
    ]  # fmt: skip
    assert timings["prefill_tokens_per_s"] == pytest.approx(9 / timings["prefill_s"])
    assert timings["decode_tokens_per_s"] == pytest.approx(11 / timings["decode_s"])


@pytest.mark.iree
def test_plain_output_is_the_text_and_stops_before_a_stop(bundle: Path, capsys: Any) -> None:
    words = (bundle, "--prompt", "abé", "--max-tokens", 40, "--ignore-eos", "--temperature", 3,
             "--seed", 4)  # fmt: skip
    full = json.loads(generate(capsys, *words, "--json"))
    assert full["prompt_tokens"] == [1, 2, 13, 14] and "top_logits" not in full
    assert generate(capsys, *words) == full["text"] + "\n"
    stop = full["text"][6:9]
    cut = full["text"][: full["text"].index(stop)]
    found = json.loads(generate(capsys, *words, "--stop", "no such", "--stop", stop, "--json"))
    assert (found["text"], found["finish_reason"]) == (cut, "stop")
    assert found["tokens"] == full["tokens"][: len(found["tokens"])]
    assert len(found["tokens"]) < 40
    assert generate(capsys, *words, "--stop", stop) == cut + "\n"


@pytest.mark.iree
def test_the_end_token_stops(bundle: Path, capsys: Any) -> None:
    words = (bundle, "--tokens", "3", "--max-tokens", 64, "--temperature", 8, "--json")
    for seed in range(20):
        found = json.loads(generate(capsys, *words, "--seed", seed))
        if found["finish_reason"] == "stop":
            break
    assert found["tokens"][-1] == 0 and 0 not in found["tokens"][:-1]
    longer = json.loads(generate(capsys, *words, "--seed", seed, "--ignore-eos"))
    assert longer["finish_reason"] == "length" and len(longer["tokens"]) == 64
    assert longer["tokens"][: len(found["tokens"])] == found["tokens"]


@pytest.mark.iree
def test_without_a_tokenizer_ids_come_out(bare: Path, capsys: Any) -> None:
    words = (bare, "--tokens", PROMPT, "--max-tokens", 5, "--ignore-eos")
    found = json.loads(generate(capsys, *words, "--json"))
    assert found["text"] == "" and len(found["tokens"]) == 5
    assert generate(capsys, *words) == ",".join(map(str, found["tokens"])) + "\n"
    empty = json.loads(generate(capsys, bare, "--tokens", "3", "--max-tokens", 0, "--json"))
    assert empty["tokens"] == [] and empty["finish_reason"] == "length"
    assert generate(capsys, bare, "--tokens", "3", "--max-tokens", 0) == "\n"


@pytest.mark.iree
def test_a_prompt_file_is_read_as_it_is(bundle: Path, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "prompt"
    path.write_bytes("é ab".encode())
    out = generate(capsys, bundle, "--prompt-file", path, "--max-tokens", 1, "--json")
    assert json.loads(out)["prompt_tokens"] == [13, 14, 12, 1, 2]


@pytest.mark.iree
@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--tokens", "1,16"], "prompt: found token id 16 at place 1, expected 0 to 15"),
        (["--tokens=-1,2"], "prompt: found token id -1"),
        (["--tokens", "9999999999999"], "prompt: found token id 9999999999999"),
        (["--tokens", ""], "prompt: found no tokens"),
        (["--prompt", ""], "prompt: found an empty prompt"),
        (["--prompt", "a\udcff"], "prompt: not UTF-8 at character 1"),
        (["--prompt-file", "{tmp}/latin"], "{tmp}/latin: byte 1 is not UTF-8"),
        (["--prompt-file", "{tmp}/empty"], "{tmp}/empty: found an empty prompt"),
        (["--prompt-file", "{tmp}/none"], "{tmp}/none: No such file"),
        (["--prompt-file", "{tmp}"], "{tmp}: Is a directory"),
        (["--tokens", "1", "--max-tokens", "-1"], "max-tokens: found -1"),
        (["--tokens", "1", "--temperature", "-1"], "temperature: found -1.0"),
        (["--tokens", "1", "--temperature", "nan"], "temperature: found nan"),
        (["--tokens", "1", "--top-k", "-2"], "top-k: found -2"),
        (["--tokens", "1", "--top-p", "1.5"], "top-p: found 1.5"),
        (["--tokens", "1", "--min-p", "-0.1"], "min-p: found -0.1"),
        (["--tokens", "1", "--seed", "-1"], "seed: found -1"),
        (["--tokens", "1", "--stop", ""], "stop: found an empty string"),
        (["--tokens", "1", "--top-logits", "-3", "--json"], "top-logits: found -3"),
        (["--tokens", "1", "--top-logits", "3"], "top-logits: found without --json"),
        (["--tokens", "1", "--device", "warp"], "device 'warp'"),
    ],
)
def test_bad_values_are_one_line(
    bundle: Path, tmp_path: Path, capsys: Any, words: list[str], line: str
) -> None:
    (tmp_path / "latin").write_bytes(b"a\xe9b")
    (tmp_path / "empty").touch()
    words = [word.replace("{tmp}", str(tmp_path)) for word in words]
    err = refused(capsys, 1, "generate", bundle, "--max-tokens", 4, *words)
    assert line.replace("{tmp}", str(tmp_path)) in err


@pytest.mark.iree
def test_text_needs_a_tokenizer(bare: Path, capsys: Any) -> None:
    for words in (["--prompt", "a"], ["--prompt-file", "f"], ["--tokens", "1", "--stop", "a"]):
        err = refused(capsys, 1, "generate", bare, "--max-tokens", 4, *words)
        assert f"{bare} has no tokenizer.json" in err


@pytest.mark.iree
def test_a_prompt_longer_than_the_context(bare: Path, tmp_path: Path, capsys: Any) -> None:
    short = toy.copy(bare, tmp_path / "short")
    edit(short, lambda m: dataclasses.replace(m.shape, context=8), "shape")
    err = refused(capsys, 1, "generate", short, "--max-tokens", 1, "--tokens", PROMPT)
    assert "prompt: found 9 tokens, expected at most 8" in err


@pytest.mark.iree
def test_a_bundle_that_is_not_one(bundle: Path, tmp_path: Path, capsys: Any) -> None:
    tail = ("--max-tokens", 1, "--tokens", "1")
    assert "no such directory" in refused(capsys, 1, "generate", tmp_path / "none", *tail)
    assert "manifest.json" in refused(capsys, 1, "generate", tmp_path, *tail)
    assert "a file" in refused(capsys, 1, "generate", bundle / "manifest.json", *tail)
    damaged = toy.copy(bundle, tmp_path / "damaged")
    with (damaged / "tokenizer.json").open("ab") as file:
        file.write(b" ")
    assert "tokenizer.json: sha256" in refused(capsys, 1, "generate", damaged, *tail)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([], "no command, expected one of generate, inspect, serve, verify, selftest, bench"),
        (["genrate"], "no command 'genrate', expected generate"),
        (["zzz"], "expected generate or inspect or serve or verify or selftest or bench"),
        (["--wrong"], "unrecognized arguments: --wrong"),
        (["generate"], "the following arguments are required: BUNDLE"),
        (["generate", "b", "--tokens", "1"], "required: --max-tokens"),
        (
            ["generate", "b", "--max-tokens", "1"],
            "--prompt --tokens --prompt-file --session is required",
        ),
        (["generate", "b", "--max-tokens", "x", "--tokens", "1"], "invalid int value: 'x'"),
        (["generate", "b", "--max-tokens", "1", "--tokens", "1,x"], "found '1,x', expected token"),
        (["generate", "b", "--max-tokens", "1", "--tokens", "1,,2"], "found '1,,2'"),
        (["generate", "b", "--max-tokens", "1", "--tokens", "1", "--prompt", "a"], "not allowed"),
        (["generate", "b", "--max", "1", "--tokens", "1"], "--max-tokens"),
    ],
)
def test_wrong_usage_is_one_line_and_2(capsys: Any, words: list[str], line: str) -> None:
    assert line in refused(capsys, 2, *words)


def test_a_defect_is_one_line_and_debug_shows_more(
    capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(cli.COMMANDS, "inspect", ("runtime.no_such_module", "fail"))
    err = refused(capsys, 1, "inspect")
    assert "unexpected ModuleNotFoundError" in err and "SCANWRIGHT_DEBUG=1" in err
    monkeypatch.setenv("SCANWRIGHT_DEBUG", "1")
    assert cli.main(["inspect"]) == 1
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--help"], ["generate", "--help"]])
def test_help_is_quick_and_loads_nothing_heavy(words: list[str]) -> None:
    code = (
        f"import sys; from runtime.cli import main; assert main({words}) == 0;"
        " assert not {'numpy', 'iree', 'tokenizers', 'jax'} & set(sys.modules)"
    )
    spent = []
    for _ in range(4):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert "usage: scanwright" in done.stdout
    assert min(spent) < 0.15


@contextlib.contextmanager
def endless(bundle: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A generate that streams until it is stopped, after its first bytes came."""
    command = [sys.executable, "-m", "runtime", "generate", str(bundle), "--tokens", "1,2",
               "--max-tokens", "100000000", "--ignore-eos"]  # fmt: skip
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        try:
            assert process.stdout is not None
            assert len(os.read(process.stdout.fileno(), 8)) > 0
            yield process
        finally:
            process.kill()


@pytest.mark.iree
def test_a_closed_pipe_ends_quietly(bundle: Path) -> None:
    with endless(bundle) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.wait(20) == 141
        assert process.stderr.read() == b""


@pytest.mark.iree
def test_ctrl_c_ends_quietly(bundle: Path) -> None:
    with endless(bundle) as process:
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=20)
        assert (process.returncode, err) == (130, b"")


@pytest.mark.iree
def test_text_streams_and_survives_a_narrow_terminal(bundle: Path) -> None:
    command = [sys.executable, "-m", "runtime", "generate", str(bundle), "--prompt", "a",
               "--max-tokens", "60", "--temperature", "3", "--seed", "1"]  # fmt: skip
    run = {"cwd": ROOT, "capture_output": True, "check": True}
    wide = subprocess.run([*command], env=os.environ | {"PYTHONIOENCODING": "utf-8"}, **run)
    narrow = subprocess.run([*command], env=os.environ | {"PYTHONIOENCODING": "ascii"}, **run)
    assert wide.stderr == narrow.stderr == b""
    assert narrow.stdout.decode() == "".join(
        c if c.isascii() else "?" for c in wide.stdout.decode()
    )


@pytest.mark.iree
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_under_stdout_is_one_line(bundle: Path) -> None:
    command = [sys.executable, "-m", "runtime", "generate", str(bundle), "--tokens", "1",
               "--max-tokens", "2", "--json"]  # fmt: skip
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 1
    assert done.stderr == b"error: stdout: No space left on device\n"


@pytest.mark.iree
def test_a_prompt_that_goes_on_begins_no_text(tmp_path: Path, capsys: Any) -> None:
    """The tokenizer's begin token is for the first turn alone."""
    made = with_tokenizer(toy.copy(toy.bundle(), tmp_path / "bos"))
    path = made / "tokenizer.json"
    inner = tokenizers.Tokenizer.from_file(str(path))
    end = inner.token_to_id("<end>")
    inner.post_processor = processors.TemplateProcessing(
        single="<end> $A", special_tokens=[("<end>", end)]
    )
    path.write_text(inner.to_str(), "utf-8")
    data = path.read_bytes()
    ref = mf.FileRef(path.name, hashlib.sha256(data).hexdigest(), len(data))
    edit(made, lambda m: dataclasses.replace(m.files, tokenizer=(ref,)), "files")
    saved = tmp_path / "talk"
    words = ["generate", str(made), "--prompt", "a", "--max-tokens", "2", "--ignore-eos", "--json"]
    prompts = []
    for more in (["--save-session", str(saved)], ["--session", str(saved)]):
        assert cli.main([*words, *more]) == 0
        prompts.append(json.loads(capsys.readouterr().out)["prompt_tokens"])
    assert prompts[0] == [end, *prompts[1]] and len(prompts[1]) == 1
    for bad in (tmp_path, tmp_path / "no" / "where"):
        assert cli.main([*words, "--save-session", str(bad)]) == 1
        assert "save-session: cannot write" in capsys.readouterr().err


@pytest.mark.parametrize("package", ["uvicorn", "httptools", "starlette"])
def test_a_server_without_its_packages_is_one_line(
    package: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    for name in [n for n in sys.modules if n.startswith(("runtime.server", package))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    assert cli.main(["serve", "bundle"]) == 1
    err = capsys.readouterr().err
    assert package in err and "the extra `serve`" in err and err.count("\n") == 1
