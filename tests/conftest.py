"""What every test runs under: no user settings, and, if asked for, no test passed over."""

from __future__ import annotations

import os
import re
import shutil
import signal
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

OURS = ("SCANWRIGHT_DEBUG", "SCANWRIGHT_CACHE")


# No test is about time: a busy machine must not fail one.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

SHARED_CACHE = "SCANWRIGHT_TESTS_CACHE"  # of builds, for all processes of a run


def pytest_configure(config: pytest.Config) -> None:
    """Make the cache of builds, in the process that starts the others."""
    if SHARED_CACHE not in os.environ:
        os.environ[SHARED_CACHE] = directory = tempfile.mkdtemp(prefix="scanwright-tests-cache-")
        config.add_cleanup(lambda: shutil.rmtree(directory, ignore_errors=True))


# Files of long tests that need not follow each other in one process.
SPLIT = frozenset({"test_exact", "test_exact_devices", "test_fullsize", "test_selftest"})


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep the tests of a file in one process; of a long file, those of one family."""
    import cases
    from xdist.scheduler import LoadScopeScheduling

    class Files(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file, _, test = nodeid.partition("::")
            if Path(file).stem not in SPLIT:
                return file
            words = re.split(r"[^a-z0-9_]+", test)
            family = [name for name in cases.FAMILIES if name in words]
            return f"{file}::{family[0]}" if family else nodeid

    return Files(config, log)


@pytest.fixture(scope="session", autouse=True)
def no_user_settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test reads or fills the user's cache, sees the debug setting, or asks a real hub; and
    Ctrl-C reaches the processes that tests start, however the tests were started."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [n for n in os.environ if n in OURS or n.startswith("HF_")]:
            patch.delenv(name)
        patch.setenv("SCANWRIGHT_CACHE", str(tmp_path_factory.getbasetemp() / "unset-cache"))
        patch.setenv("JAX_PLATFORMS", "cpu")
        if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a shell's background job
            signal.signal(signal.SIGINT, signal.default_int_handler)
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--no-skips",
        action="store_true",
        help="a skipped test is a failure: for machines that have all that the tests need",
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """With --no-skips, turn a skip (not an expected failure) into a failure with its reason."""
    report = yield
    if item.config.getoption("--no-skips") and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.longrepr = f"skipped, with --no-skips: {reason}"
    return report
