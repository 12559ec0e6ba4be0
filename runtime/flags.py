"""What a file from elsewhere may tell iree-compile: how to compile, and nothing else.

The compiler has flags that run commands, load libraries, and read and write files of any name.
"""

from __future__ import annotations

import re

_FORM = re.compile(r"--iree-[a-z0-9-]+(=[\w.,:+=(){}-]*)?", re.ASCII)
# Parts of the names of flags that take a command or a file, with pipelines, whose passes do.
_REACHING = re.compile(
    r"-(to|from|with)$|-(path|dir|file|filename|listing|library|bitcode|plugin|objects?|sources?"
    r"|configurations?|linker|ptxas|dump|export|import|splat|parameters?|spec|trace|print|pipeline"
    r"|list|output|encoder|tool|command)(-|$)"
)


def check(flag: str) -> None:
    """Raise ValueError for a flag that is none of iree-compile's own, or may reach outside."""
    if not flag.startswith("--iree-"):
        raise ValueError(f"{flag!r}: expected an iree-compile flag (--iree-…)")
    reaching = _REACHING.search(flag.partition("=")[0].replace("-command-buffers", ""))
    if reaching or not _FORM.fullmatch(flag):
        raise ValueError(f"{flag!r}: expected a flag that names no file and no command")
