"""`python -m emit.count config.json`: how many numbers a model has, from its config alone."""

from __future__ import annotations

import json
import os
import sys

from emit.errors import EmitError


def count(raw: dict[str, object]) -> dict[str, int]:
    """`matrix`: numbers stored in the weight type; `other`: those in float32; `layers`."""
    from emit.entry import Model

    params = Model.of(raw).weight_map.params
    matrix = sum(param.size for param in params if param.matrix)
    layers = raw.get("num_hidden_layers")
    return {
        "matrix": matrix,
        "other": sum(param.size for param in params) - matrix,
        "layers": layers if isinstance(layers, int) else 0,
    }


def main() -> int:
    """Read a config, write the counts as JSON; a wrong config is one line on stderr."""
    from emit.checkpoint import read_config_file

    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    try:
        print(json.dumps(count(read_config_file(sys.argv[1]))))
    except (EmitError, OSError) as error:
        print("error: " + " ".join(str(error).split()), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
