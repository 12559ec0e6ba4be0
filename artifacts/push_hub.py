"""Pushes a bundle to a repository of the Hugging Face hub, in one commit."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from artifacts.hub import DEFAULT_ENDPOINT
from runtime.errors import UserError
from runtime.progress import progress


def push_hub(bundle: Path, names: list[str], to: str) -> str:
    """Commit the files to `hf://ORG/NAME[@BRANCH][/PATH]`, made if it is not there (private).

    Returns the place with its commit. Raises UserError.
    """
    match = re.fullmatch(r"hf://([\w.-]+/[\w.-]+?)(?:@([\w.-]+))?((?:/[\w.+-]+)*)/?", to)
    if match is None or ".." in to:
        raise UserError(f"to={to}: expected hf://ORG/NAME[@BRANCH][/PATH]")
    repo, branch, below = match[1], match[2], match[3]
    endpoint = (os.environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT).rstrip("/")
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()  # which are for terminals alone
    api = HfApi(endpoint=endpoint, library_name="scanwright")
    try:
        api.create_repo(repo, private=True, exist_ok=True)
        if branch is not None:
            api.create_branch(repo, branch=branch, exist_ok=True)
        adds = [
            CommitOperationAdd(f"{below[1:]}/{name}".lstrip("/"), str(bundle / name))
            for name in names
        ]
        for name, add in zip(names, adds, strict=True):
            with progress(f"upload {name}", add.upload_info.size) as told:
                api.preupload_lfs_files(repo, [add], revision=branch)
                told.done = add.upload_info.size
        done = api.create_commit(repo, adds, commit_message="A bundle", revision=branch)
    except Exception as error:
        raise _told(to, endpoint, error) from error
    return f"hf://{repo}@{done.oid}{below}"


def _told(to: str, endpoint: str, error: Exception) -> UserError:
    reason = " ".join(str(error).split())[:200] or type(error).__name__
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403):
        hint = f"set HF_TOKEN to a token with write access ({endpoint}/settings/tokens)"
    else:
        hint = "run the same command to try again"
    return UserError(f"to={to}: the hub at {endpoint} did not take it ({reason}); {hint}")
