"""Command lines that are written down: a shell takes them, and no secret is in them."""

from __future__ import annotations

import shlex

import pytest

from artifacts.commands import command_line

SECRETS = {"HF_TOKEN": "abc123def456", "AWS_SECRET_ACCESS_KEY": "zzz/yyy+xxx", "PATH": "/usr/bin"}


@pytest.mark.parametrize(
    ("word", "shown"),
    [
        ("--header=Bearer abc123def456", "--header=Bearer ***"),
        ("s3://b/k?zzz/yyy+xxx", "s3://b/k?***"),
        ("https://me:pass@host/a@b", "https://***@host/a@b"),
        ("https://host/x?X-Amz-Signature=00ff&part=1", "https://host/x?X-Amz-Signature=***&part=1"),
        ("https://host/x?access_token=00ff", "https://host/x?access_token=***"),
        ("hf_abcdefghij", "***"),
        ("--password=p", "--password=***"),
    ],
)
def test_a_secret_is_not_shown(word: str, shown: str) -> None:
    assert shlex.split(command_line(["run", word], SECRETS)) == ["run", shown]


@pytest.mark.parametrize(
    "word",
    ["/usr/bin", "a b'c\"d", "", "--iree-llvmcpu-target-cpu=znver4", '{"a": ["x"]}', "hf:org/name",
     "/models/token/model.safetensors", "--new-tokens"],
)  # fmt: skip
def test_all_else_is_what_a_shell_reads(word: str) -> None:
    assert shlex.split(command_line(["run", word], SECRETS)) == ["run", word]


def test_a_short_value_hides_nothing() -> None:
    assert command_line(["cat", "a"], {"MY_TOKEN": "a"}) == "cat a"
