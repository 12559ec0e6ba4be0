"""What a file from elsewhere may tell iree-compile: how to compile, and nothing else.

The compiler has flags that run commands, load libraries, and read and write files of any name.
"""

from __future__ import annotations

import re

_FORM = re.compile(r"--iree-[a-z0-9-]+(=[\w.,:+=-]*)?", re.ASCII)
_PIPELINE = re.compile(r"--iree-[a-z0-9-]+-pipeline=[\w.,:=(){} -]+", re.ASCII)
# Parts of the names of flags that take a command or a file.
_REACHING = re.compile(
    r"-(to|from|with)$|-(path|dir|file|filename|listing|library|bitcode|plugin|objects?|sources?"
    r"|configurations?|linker|ptxas|dump|export|import|splat|parameters?|spec|trace|print"
    r"|list|output|encoder|tool|command)(-|$)"
)
# Parts of the names of passes, and of their options, that do.
_REACHING_PASS = re.compile(
    "path|file|dir|command|tool|dump|librar|plugin|patterns|export|import|load|save|print|trace"
    "|output|stat|script|source|external"
)


def check(flag: str) -> None:
    """Raise ValueError for a flag that is none of iree-compile's own, or may reach outside."""
    if not flag.startswith("--iree-"):
        raise ValueError(f"{flag!r}: expected an iree-compile flag (--iree-…)")
    name, _, value = flag.partition("=")
    reaching = _REACHING.search(name.replace("-command-buffers", ""))
    if name.endswith("-pipeline"):
        form, reaching = _PIPELINE, reaching or _REACHING_PASS.search(value)
    else:
        form = _FORM
    if reaching or not form.fullmatch(flag):
        raise ValueError(f"{flag!r}: expected a flag that names no file and no command")
