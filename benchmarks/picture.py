"""The README's picture of a report: the top of build/report.html, by headless Chromium.

doit report && python benchmarks/picture.py          to benchmarks/plots/report.png
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
MOST_BYTES = 200_000
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
         "--hide-scrollbars", "--no-first-run", "--force-device-scale-factor=1")  # fmt: skip


def picture(page: Path, out: Path, width: int, height: int) -> None:
    """Write the top left `width` times `height` pixels of the page `page` as the PNG `out`.

    SystemExit in one line where there is no Chromium, no page, or the picture is too large.
    """
    names = ("chromium", "chromium-browser", "google-chrome")
    program = next(filter(None, map(shutil.which, names)), None)
    if program is None:
        sys.exit(f"error: no {' or '.join(names)} in PATH; apt-get install chromium")
    if not page.is_file():
        sys.exit(f"error: {page}: not there; doit report writes it")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        made = Path(home) / "page.png"
        command = [program, *FLAGS, f"--user-data-dir={home}/profile", f"--screenshot={made}"]
        command += [f"--window-size={width},{height}", page.resolve().as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        if not made.is_file():
            sys.exit(f"error: {program} made no picture: {done.stderr.strip()[-300:]}")
        size = made.stat().st_size
        if size >= MOST_BYTES:
            sys.exit(
                f"error: {size} bytes, expected fewer than {MOST_BYTES}; give a lower --height"
            )
        out.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(made, out)
    print(out, size)


def main() -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("page", type=Path, nargs="?", default=HERE.parent / "build/report.html")
    parser.add_argument("--out", type=Path, default=HERE / "plots" / "report.png", metavar="FILE")
    parser.add_argument("--width", type=int, default=820)
    parser.add_argument("--height", type=int, default=1180)
    args = parser.parse_args()
    picture(args.page, args.out, args.width, args.height)


if __name__ == "__main__":
    main()
