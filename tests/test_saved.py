"""Conversations in files: going on without prefill, across processes; damaged ones refused."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import bundles
import fake_device
import numpy as np
import pytest
import toy
from safetensors import safe_open
from safetensors.numpy import save_file
from test_engine import Rig, solo

from runtime import manifest as manifests
from runtime import saved as conversations
from runtime.errors import UserError
from runtime.request import Request
from runtime.sampling import SamplingParams
from runtime.saved import Saved

PROMPT = (3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5)
CASES = {
    "greedy": SamplingParams(),
    "sampled": SamplingParams(1.0, seed=11),
    "penalised": SamplingParams(
        1.0, seed=5, repetition_penalty=1.3, frequency_penalty=0.5, dry_multiplier=0.8
    ),
}


def kept(request: Request, rig: Rig | None = None) -> tuple[Saved, list[int]]:
    """The state after a request, and its tokens."""
    rig = rig or Rig()
    _, sink = rig.submit(replace(request, keep=True))
    rig.finish()
    saved = sink.endings[0].saved
    assert saved is not None
    return saved, sink.tokens


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("cut", [1, 2, 7])
def test_a_conversation_goes_on_as_if_it_had_never_stopped(
    tmp_path: Path, case: str, cut: int
) -> None:
    whole = Request(PROMPT, 12, CASES[case], ignore_eos=True)
    expected = solo(whole)
    saved, tokens = kept(replace(whole, max_tokens=cut))
    path = tmp_path / "conversation"
    conversations.save(saved, Rig().device.manifest, path)
    for seed in (whole.sampling.seed, None):  # the saved seed is used where none is given
        rig = Rig()
        saved = conversations.load(path, rig.device.manifest)
        assert saved.tokens == (*PROMPT, *tokens) and len(saved.pending) == 1
        rest = Request(
            (), 12 - cut, replace(whole.sampling, seed=seed), ignore_eos=True, saved=saved
        )
        _, sink = rig.submit(rest)
        rig.finish()
        assert tokens + sink.tokens == expected
        assert not any(call.startswith("prefill") for call in rig.device.calls)
        assert rig.device.fed[0][0] == len(PROMPT) + cut - 1


def test_a_new_turn_reads_only_what_is_new() -> None:
    saved, tokens = kept(Request(PROMPT, 4, ignore_eos=True))
    rig = Rig()
    turn = (7, 7, 8)
    again, more = kept(Request(turn, 3, ignore_eos=True, saved=saved), rig)
    places = [place for place, _ in rig.device.fed]
    assert places == list(range(len(PROMPT) + 3, len(PROMPT) + 3 + 1 + 3 + 2))
    assert more == solo(Request((*PROMPT, *tokens, *turn), 3, ignore_eos=True))
    assert again.tokens == (*PROMPT, *tokens, *turn, *more)
    assert again.prompt_tokens == len(again.tokens) - 3


def test_another_seed_starts_another_stream() -> None:
    saved, _ = kept(Request(PROMPT, 4, SamplingParams(1.5, seed=1), ignore_eos=True))
    streams = []
    for seed in (1, 2, 3):
        rig = Rig()
        rest = Request((), 9, SamplingParams(1.5, seed=seed), ignore_eos=True, saved=saved)
        streams.append(rig.submit(rest)[1])
        rig.finish()
    assert len({tuple(sink.tokens) for sink in streams}) == 3
    whole = solo(Request(PROMPT, 13, SamplingParams(1.5, seed=1), ignore_eos=True))
    assert streams[0].tokens == whole[4:]


def test_what_was_cut_short_can_be_saved_too() -> None:
    want = Request(tuple(range(20)), 6, ignore_eos=True, keep=True)
    for steps in (1, 2, 3, 6):
        rig = Rig(slots=1)
        ticket, sink = rig.submit(want)
        rig.steps(steps)
        rig.engine.cancel(ticket)
        rig.finish()
        saved = sink.endings[0].saved
        assert saved is not None and saved.fed < len(saved.tokens)
        _, rest = rig.submit(Request((), 6 - len(sink.tokens), ignore_eos=True, saved=saved))
        rig.finish()
        assert sink.tokens + rest.tokens == solo(want)
    rig = Rig(slots=1)
    rig.submit(replace(want, keep=False))
    ticket, sink = rig.submit(want)
    rig.engine.cancel(ticket)
    rig.finish()
    assert sink.endings[0].saved is None  # it never began


def test_nothing_to_go_on_with_is_refused() -> None:
    saved, _ = kept(Request(PROMPT, 0))
    assert saved.pending == ()
    with pytest.raises(UserError, match="prompt: found no tokens"):
        Request((), 1, saved=saved)
    with pytest.raises(UserError, match="score_prompt: found with a saved conversation"):
        Request((1,), 1, saved=saved, score_prompt=True)


def test_the_context_counts_what_was_said_before() -> None:
    saved, _ = kept(Request(PROMPT, 40, ignore_eos=True))
    rig = Rig()
    _, sink = rig.submit(Request((1, 2), 99, ignore_eos=True, saved=saved))
    rig.finish()
    assert len(sink.tokens) == fake_device.CONTEXT - len(PROMPT) - 40 - 2 + 1
    with pytest.raises(UserError, match="prompt: found 71 tokens, expected at most 64"):
        rig.submit(Request(tuple([1] * 20), 1, saved=saved))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "conversation"
    saved, _ = kept(Request(PROMPT, 4, ignore_eos=True))
    conversations.save(saved, Rig().device.manifest, path)
    return path


def test_every_changed_byte_is_seen(file: Path, tmp_path: Path) -> None:
    manifest = Rig().device.manifest
    body = file.read_bytes()
    bad = tmp_path / "bad"
    before = conversations.load(file, manifest)
    for place in range(len(body)):
        bad.write_bytes(body[:place] + bytes([body[place] ^ 1]) + body[place + 1 :])
        try:
            found = conversations.load(bad, manifest)
        except UserError as error:
            assert str(bad) in str(error) and "\n" not in str(error)
        else:  # a space of the header's padding
            assert found.tokens == before.tokens and body[place] == 0x20
    for size in (0, 7, 8, 100, len(body) - 1):
        bad.write_bytes(body[:size])
        with pytest.raises(UserError, match="not a whole saved conversation"):
            conversations.load(bad, manifest)
    bad.write_bytes(body + b"\0")
    with pytest.raises(UserError, match="not a whole saved conversation"):
        conversations.load(bad, manifest)


def rewritten(file: Path, to: Path, change: Any) -> Path:
    """A file with its facts and tensors changed, its digest made right again."""
    with safe_open(file, framework="np") as found:
        facts = json.loads(found.metadata()["scanwright"])
        tensors = {name: found.get_tensor(name) for name in found.keys()}  # noqa: SIM118
    change(facts, tensors)
    facts.pop("sha256")
    facts["sha256"] = conversations._digest(facts, tensors)
    save_file(tensors, to, metadata={"scanwright": json.dumps(facts)})
    return to


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda f, t: f.update(bundle="0" * 64), "made by bundle 000000000000…, expected"),
        (lambda f, t: f.update(schema=2), "schema 2"),
        (lambda f, t: f.update(fed=99), "fed 99"),
        (lambda f, t: f.update(draws=-1), "integers of 0 or more"),
        (lambda f, t: f.update(tokens=[True] * 15), "integers of 0 or more"),
        (lambda f, t: f.update(tokens=[99] * 15), "token id 99"),
        (lambda f, t: f.update(seed="x"), "seed 'x'"),
        (lambda f, t: f.pop("fed"), "KeyError: 'fed'"),
        (lambda f, t: t.pop("ids"), "not those of the manifest"),
        (lambda f, t: t.update(more=t["ids"]), "not those of the manifest"),
        (lambda f, t: t.update(ids=t["ids"].astype(np.float32)), "not those of the manifest"),
        (lambda f, t: t.update(ids=t["ids"][:1].copy()), "not those of the manifest"),
    ],
)
def test_a_file_that_is_whole_but_wrong_is_refused(
    file: Path, tmp_path: Path, change: Any, line: str
) -> None:
    bad = rewritten(file, tmp_path / "bad", change)
    with pytest.raises(UserError, match=line) as caught:
        conversations.load(bad, Rig().device.manifest)
    assert str(caught.value).startswith(str(bad))
    assert conversations.load(
        rewritten(file, tmp_path / "ok", lambda f, t: None), Rig().device.manifest
    )


def test_another_shape_of_the_same_model_is_another_bundle(file: Path) -> None:
    with pytest.raises(UserError, match=r"made by bundle .* a state is good for the bundle that"):
        conversations.load(file, fake_device.manifest(slots=2))
    saved = conversations.load(file, Rig().device.manifest)
    rig = Rig(slots=2)
    with pytest.raises(UserError, match="made by bundle"):
        rig.submit(Request((1,), 1, saved=saved))


def test_files_that_cannot_be_read_or_written(file: Path, tmp_path: Path) -> None:
    manifest = Rig().device.manifest
    for bad, line in ((tmp_path / "absent", "no such file"), (tmp_path, "not a file")):
        with pytest.raises(UserError, match=line):
            conversations.load(bad, manifest)
    save_file({"x": np.zeros(1, np.float32)}, tmp_path / "other")
    with pytest.raises(UserError, match="not a whole saved conversation"):
        conversations.load(tmp_path / "other", manifest)
    saved = conversations.load(file, manifest)
    with pytest.raises(UserError, match="cannot be written"):
        conversations.save(saved, manifest, tmp_path / "no" / "where")
    with pytest.raises(UserError, match="cannot be written"):
        conversations.save(saved, manifest, tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["other"]


def test_bfloat16_state_comes_back_to_the_bit(tmp_path: Path) -> None:
    import ml_dtypes

    plain = fake_device.manifest()
    spec = manifests.StateSpec("kv", "bf16", (1, 2, 5), 0, "per_position")
    functions = manifests.expected_functions(fake_device.V, 3, (4, 8), (spec,))
    manifest = replace(plain, state=(spec,), functions=functions)
    values = (np.arange(10).reshape(1, 2, 5) / 3).astype(ml_dtypes.bfloat16)
    saved = Saved(manifest.digest, (1, 2), 1, 1, None, 0, {"kv": values})
    conversations.save(saved, manifest, tmp_path / "f")
    found = conversations.load(tmp_path / "f", manifest).state["kv"]
    assert found.dtype == values.dtype and found.tobytes() == values.tobytes()


SCRIPT = """
import sys
from pathlib import Path
from runtime.cli import main
sys.exit(main(sys.argv[1:]))
"""


def scanwright(*words: object) -> dict:
    command = [sys.executable, "-c", SCRIPT, "generate", *map(str, words), "--json"]
    done = subprocess.run(
        command, cwd=bundles.ROOT, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.iree
def test_across_processes_on_a_compiled_module(tmp_path: Path) -> None:
    bundle = toy.bundle()
    words = ("--ignore-eos", "--temperature", "1.2")
    whole = scanwright(bundle, "--tokens", "3,1,4,1,5", "--max-tokens", 12, *words, "--seed", 5)
    first = scanwright(
        bundle, "--tokens", "3,1,4,1,5", "--max-tokens", 5, *words, "--seed", 5,
        "--save-session", tmp_path / "a",
    )  # fmt: skip
    rest = scanwright(bundle, "--session", tmp_path / "a", "--max-tokens", 7, *words)
    assert first["tokens"] + rest["tokens"] == whole["tokens"]
    turn = scanwright(
        bundle, "--session", tmp_path / "a", "--tokens", "7,8", "--max-tokens", 4, "--ignore-eos"
    )
    asked = ",".join(map(str, [3, 1, 4, 1, 5, *first["tokens"], 7, 8]))
    plain = scanwright(bundle, "--tokens", asked, "--max-tokens", 4, "--ignore-eos")
    assert turn["tokens"] == plain["tokens"]


@pytest.mark.iree
def test_the_command_refuses_what_does_not_belong(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    from runtime.cli import main

    bundle = str(toy.bundle())
    (tmp_path / "bad").write_bytes(b"x" * 99)
    for words, line in (
        (["--session", str(tmp_path / "bad")], "not a whole saved conversation"),
        (["--session", str(tmp_path / "absent")], "no such file"),
        ([], "one of the arguments --prompt --tokens --prompt-file --session is required"),
    ):
        assert main(["generate", bundle, "--max-tokens", "1", *words]) != 0
        assert line in capsys.readouterr().err


def test_no_tokens_may_be_asked_of_a_conversation() -> None:
    saved, _ = kept(Request(PROMPT, 4, ignore_eos=True))
    rig = Rig()
    _, sink = rig.submit(Request((), 0, saved=saved, keep=True))
    rig.finish()
    assert (sink.reason, sink.tokens, rig.device.calls.count("decode")) == ("length", [], 0)
    again = sink.endings[0].saved
    assert again is not None and again.tokens == saved.tokens and again.fed == saved.fed


def test_one_prompt_token_that_is_left_is_read_by_a_prefill() -> None:
    want = Request(tuple(range(9)), 3, ignore_eos=True, keep=True)
    rig = Rig(slots=1)
    ticket, sink = rig.submit(want)
    rig.steps(1)
    rig.engine.cancel(ticket)
    rig.finish()
    saved = sink.endings[0].saved
    assert saved is not None and saved.pending == (8,)
    rig.device.calls.clear()
    _, rest = rig.submit(Request((), 3, ignore_eos=True, saved=saved))
    rig.finish()
    assert rig.device.calls[0] == "prefill_4" and rest.tokens == solo(want)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"state": {}}, "its state tensors are not those of the manifest"),
        ({"seed": 1 << 70}, "seed 1180591620717411303424"),
    ],
)
def test_a_conversation_made_by_hand_is_checked(change: dict, line: str) -> None:
    saved, _ = kept(Request(PROMPT, 4, ignore_eos=True))
    rig = Rig()
    with pytest.raises(UserError, match=line):
        rig.submit(Request((1,), 1, saved=replace(saved, **change)))
    assert rig.engine.failed is None
