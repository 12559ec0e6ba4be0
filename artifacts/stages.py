"""The stages of a build: fetch, convert, emit, compile (with its proof), and the keys of each.

Every stage is an `Action` whose fields are all that can change its result, so a stage runs only if
one of them changed, whoever ran it before and wherever. The stages that need JAX, a checkpoint
reader or a device run as processes (`python -m emit`, `python -m runtime.probe`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from artifacts import metadata, process
from artifacts.actions import Action, Result, remote_record, run
from artifacts.buildlog import BuildLog
from artifacts.fetch import Checkpoint, NotHere, fetch
from artifacts.job import Job
from artifacts.perplexity import part as perplexity_part
from artifacts.perplexity import source_perplexity
from artifacts.records import Blob, Record
from artifacts.sources import source_digest
from artifacts.store import Store
from artifacts.tools import versions
from runtime.errors import UserError
from runtime.manifest import byte_size

Produce = Callable[[Path], Mapping[str, Path]]

FLOATS = ("f32", "bf16", "f16")  # weight types that are not codes
SEED = 20240531  # of every seeded input and random parameter; the date of the SSD paper
REFERENCE_TOKENS = 48
LONG_REFERENCE_BYTES = 1 << 30  # a model with more parameter bytes gets a shorter reference
RANDOM_PARAMS_LIMIT = 2 << 30  # a weight-free bundle with more of them is not run by the build


class Miss(Exception):
    """A stage would have to run; `action` is the first that would, None for the fetch or bundle."""

    def __init__(self, action: Action | None) -> None:
        super().__init__("not cached")
        self.action = action


@dataclass(frozen=True)
class Stages:
    """The stages of one job, each run at most once; a property runs what it needs before.

    With `dry` nothing is run, downloaded or written: what is not there raises Miss.
    """

    store: Store
    job: Job
    log: BuildLog
    dry: bool = False

    def run_action(
        self,
        action: Action,
        produce: Produce,
        meta: Callable[[], Any] | None = None,
        resumed: bool = False,
    ) -> Result:
        """The result of `action`, made by `produce` if it is not cached."""
        if not self.dry:
            return run(self.store, action, produce, meta, resumed=resumed)
        record = self.look(action)
        if record is None:
            raise Miss(action)
        return Result(action.key, True, record.outputs, record.meta)

    def look(self, action: Action) -> Record | None:
        """The record of `action` if it is cached, here or (unless dry) in the remote cache."""
        record = self.store.lookup(action.key, report=not self.dry)
        if record is None and self.dry:
            return self.store.foreseen(action)
        return record or remote_record(self.store, action)

    # Checkpoint

    @cached_property
    def checkpoint(self) -> Checkpoint | None:
        """The model's files, in place and verified; None where the recipe alone is enough."""
        job, model = self.job, self.job.model
        if not job.params and model.config is not None:
            return None
        root = self.store.root / "hub"
        try:
            return fetch(
                model.location,
                model.revision,
                root,
                model.lock,
                weights=job.params,
                offline=self.dry,
            )
        except NotHere:
            raise Miss(None) from None

    @cached_property
    def config(self) -> str:
        """The model's config.json as canonical JSON text."""
        if self.checkpoint is None:
            raw: Any = self.job.model.config
        elif self.checkpoint.gguf is not None:
            blob = self.gguf.outputs["config.json"]
            raw = json.loads(self.store.path(blob).read_text(encoding="utf-8"))
        else:
            raw = self._json("config.json")
        return json.dumps(raw, sort_keys=True)

    @cached_property
    def gguf(self) -> Result:
        """What the metadata of the checkpoint's GGUF file say."""
        assert self.checkpoint is not None
        return metadata.of_gguf(self, self.checkpoint)

    @cached_property
    def tokenizer(self) -> dict[str, tuple[Path, str]]:
        """The tokenizer's files by name: where each is, and its sha256."""
        return metadata.tokenizer(self)

    @property
    def family(self) -> str:
        """`model_type` of the config; UserError if it names none."""
        name = json.loads(self.config).get("model_type")
        if not isinstance(name, str) or not name.isidentifier():
            raise UserError(f"config.json: model_type: found {name!r}, expected a family name")
        return name

    def _file(self, name: str) -> Path:
        assert self.checkpoint is not None
        path = self.checkpoint.dir / name
        if not path.is_file():
            raise UserError(f"{path}: not there; a checkpoint directory needs it")
        return path

    def _text(self, name: str) -> str:
        try:
            return self._file(name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{name}: cannot be read ({error}), expected JSON text") from error

    def _json(self, name: str) -> dict[str, Any]:
        """A JSON object of the checkpoint. The stage that uses it reads it more strictly."""
        try:
            content = json.loads(self._text(name))
        except (ValueError, RecursionError) as error:
            raise UserError(f"{name}: not JSON ({error}); download the checkpoint again") from error
        if not isinstance(content, dict):
            raise UserError(f"{name}: found a {type(content).__name__}, expected a JSON object")
        return content

    def weight_files(self) -> dict[str, str]:
        assert self.checkpoint is not None
        return {
            name: digest[0]
            for name, digest in self.checkpoint.files.items()
            if ".safetensors" in name
            or name in ("config.json", "hf_quant_config.json")
            or name.endswith(".gguf")
        }

    def readers(self) -> list[str]:
        """Packages that read these weights alone."""
        coded = "quantization_config" in json.loads(self.config)
        return ["gguf"] if coded and self.checkpoint and self.checkpoint.gguf else []

    def sources(self, *modules: str) -> str:
        """Digest of our own source files behind these modules and the family's."""
        try:
            return source_digest([*modules, f"emit.families.{self.family}"])
        except ValueError:
            raise UserError(
                f"config.json: model_type = {self.family!r} is not a supported family"
            ) from None

    @cached_property
    def weights(self) -> str:
        """The weight type to build: the recipe's, or the checkpoint's own."""
        if not self.job.params or self.checkpoint is None:
            raw = json.loads(self.config)
            names = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
            # Of a config without a type it is float32, as in transformers.
            word = names.get(str(raw.get("dtype", raw.get("torch_dtype"))), "f32")
            return self.job.weights(word)
        known = self.job.weights(None)
        if known != "auto":
            return known
        action = Action(
            "weight-type",
            {"files": self.weight_files(), "source": self.sources("emit.__main__")},
            self.job.about,
        )

        def produce(scratch: Path) -> dict[str, Path]:
            assert self.checkpoint is not None
            out = scratch / "out"
            arguments: list[str | Path] = ["type", self.checkpoint.place, "--out", out]
            self.log.add(process.run_module("emit", arguments, scratch))
            return {"type": out / "type.txt"}

        result = self.run_action(action, produce)
        self.log.result("weight-type", result)
        return self.job.weights(self.store.path(result.outputs["type"]).read_text().strip())

    @cached_property
    def storage(self) -> str | None:
        """How each parameter of a checkpoint is stored as codes, the text of storage.json.

        None where the weight type, the target and the shapes say it.
        """
        if not self.job.params or self.checkpoint is None or self.weights in FLOATS:
            return None
        fields = {
            "files": self.weight_files(),
            "weights": self.weights,
            "words": self._words,
            "own": self.job.weights(None) == "auto",
            "source": self.sources("emit.__main__", "emit.storage"),
            "tools": versions(self.readers()),
        }

        def produce(scratch: Path) -> dict[str, Path]:
            assert self.checkpoint is not None
            out = scratch / "out"
            arguments = ["storage", self.checkpoint.place, "--weights", self.weights]
            arguments += ["--own"] if fields["own"] else []
            arguments += ["--words", self._words, "--out", out]
            self.log.add(process.run_module("emit", arguments, scratch))
            return {"storage": out / "storage.json"}

        result = self.run_action(Action("storage", fields, self.job.about), produce)
        self.log.result("storage", result)
        return self.store.path(result.outputs["storage"]).read_text(encoding="utf-8")

    @property
    def _words(self) -> str:
        """The float types that the target stores."""
        return ",".join(word for word in FLOATS if word in self.job.target.weights)

    @property
    def _stored(self) -> dict[str, Any]:
        """The fields of a key that say how parameters are stored."""
        if self.weights in FLOATS:
            return {"weights": self.weights}
        return {"weights": self.weights, "words": self._words, "storage": self.storage}

    def _storage_arguments(self, scratch: Path) -> list[str | Path]:
        arguments: list[str | Path] = ["--weights", self.weights, "--words", self._words]
        if self.storage is not None:
            (scratch / "storage.json").write_text(self.storage, encoding="utf-8")
            arguments += ["--storage", scratch / "storage.json"]
        return arguments

    # Convert

    @cached_property
    def convert(self) -> Result | None:
        """`params` (.irpa) and `report` (.json); None for a weight-free bundle."""
        if not self.job.params or self.checkpoint is None:
            return None
        wanted = (
            None
            if self.job.model.config is None
            else json.dumps(self.job.model.config, sort_keys=True)
        )
        fields = {
            "files": self.weight_files(),
            **self._stored,
            "recipe_config": wanted,
            "source": self.sources("emit.__main__", "emit.checkpoint", "emit.convert"),
            "tools": versions(["numpy", "ml-dtypes", *self.readers()]),
        }

        action = Action("convert", fields, self.job.about)

        def produce(work: Path) -> dict[str, Path]:
            assert self.checkpoint is not None
            out = work / "out"
            with self.store.scratch() as scratch:
                arguments = ["convert", self.checkpoint.place, *self._storage_arguments(scratch)]
                arguments += ["--key", action.key, "--out", out]
                arguments += [] if wanted is None else ["--expect-config", wanted]
                self.log.add(process.run_module("emit", arguments, scratch, progress=True))
            return {"params": out / "params.irpa", "report": out / "params.json"}

        with self.log.stage("convert"):
            result = self.run_action(action, produce, resumed=True)
            self.log.result("convert", result)
            return result

    # Emit

    @cached_property
    def emit(self) -> Result:
        """One StableHLO file an entry point (`<entry>.mlir`) and `interface.json`."""
        generation = None
        if self.checkpoint and "generation_config.json" in self.checkpoint.files:
            generation = self._text("generation_config.json")
        fields = {
            "config": self.config,
            "generation_config": generation,
            **self._stored,
            "shape": self.job.shape.name,
            "kernels": self.job.kernels,
            "source": self.sources("emit.__main__", "emit.stablehlo"),
            "tools": versions(["jax", "jaxlib", "numpy"]),
        }

        def produce(scratch: Path) -> dict[str, Path]:
            out = scratch / "out"
            arguments = ["graphs", *self._config_arguments(scratch), "--out", out]
            arguments += ["--origin", self.checkpoint.place if self.checkpoint else "the recipe"]
            arguments += ["--kernels"] if self.job.kernels else []
            if generation is not None:
                (scratch / "generation_config.json").write_text(generation, encoding="utf-8")
                arguments += ["--generation-config", scratch / "generation_config.json"]
            self.log.add(process.run_module("emit", arguments, scratch))
            return {path.name: path for path in sorted(out.iterdir())}

        with self.log.stage("emit"):
            return self._run("emit", fields, produce)

    @cached_property
    def without_kernels(self) -> Stages:
        """The stages of the same job with no kernels in its graphs."""
        job = dataclasses.replace(self.job, kernels=False)
        return dataclasses.replace(self, job=job)

    def _config_arguments(self, scratch: Path) -> list[str | Path]:
        path = scratch / "config.json"
        path.write_text(self.config, encoding="utf-8")
        return ["--config", path, "--shape", self.job.shape.name, *self._storage_arguments(scratch)]

    @property
    def interface(self) -> dict[str, Any]:
        """interface.json, parsed."""
        return json.loads(self.store.path(self.emit.outputs["interface.json"]).read_text())

    @property
    def graphs(self) -> dict[str, Blob]:
        """Entry name → its StableHLO text."""
        outputs = self.emit.outputs
        return {name[:-5]: blob for name, blob in outputs.items() if name.endswith(".mlir")}

    # Expect

    @cached_property
    def params(self) -> Result | None:
        """The parameters to run with: converted, or random ones of a small weight-free bundle."""
        if self.convert is not None:
            return self.convert
        specs = self.interface["params"]
        if sum(byte_size(p["dtype"], p["shape"]) for p in specs) > RANDOM_PARAMS_LIMIT:
            return None
        fields = {
            "interface": self.emit.outputs["interface.json"].sha256,
            "seed": SEED,
            "source": source_digest(["runtime.params_random"]),
            "tools": versions(["numpy"]),
        }

        def produce(scratch: Path) -> dict[str, Path]:
            interface = self._named(scratch, "interface.json", self.emit)
            out = scratch / "params.irpa"
            arguments = [interface, "--seed", str(SEED), "--out", out]
            self.log.add(process.run_module("runtime.params_random", arguments, scratch))
            return {"params": out}

        return self._run("random-params", fields, produce)

    def _named(self, scratch: Path, name: str, result: Result, key: str | None = None) -> Path:
        """An output of `result` under its own name in `scratch`."""
        self.store.link(result.outputs[key or name], scratch / name)
        return scratch / name

    @cached_property
    def expect(self) -> Result | None:
        """What JAX computes: `reference.json` and `<call>.npz`, whole output tensors.

        None where a weight-free bundle is too big to run here.
        """
        params = self.params
        if params is None:
            return None
        blob = params.outputs["params"]
        source = source_perplexity(self)
        tokens = REFERENCE_TOKENS // (3 if blob.size > LONG_REFERENCE_BYTES else 1)
        fields = {
            "interface": self.emit.outputs["interface.json"].sha256,
            "config": self.config,
            "shape": self.job.shape.name,
            **self._stored,
            "params": blob.sha256,
            **({"perplexity": source.sha256} if source else {}),
            "seed": SEED,
            "tokens": tokens if self.job.params else 0,
            "source": self.sources("emit.__main__", "emit.expect", "runtime.probe"),
            "tools": versions(["jax", "jaxlib", "numpy"]),
        }

        def produce(scratch: Path) -> dict[str, Path]:
            part = perplexity_part(self, source)
            return self._produce_expected(scratch, params, int(fields["tokens"]), part)

        with self.log.stage("expect"):
            return self._run("expect", fields, produce)

    def _produce_expected(
        self, scratch: Path, params: Result, tokens: int, more: Mapping[str, Any]
    ) -> dict[str, Path]:
        interface = self._named(scratch, "interface.json", self.emit)
        archive = self._named(scratch, "params.irpa", params, "params")
        given, out = scratch / "inputs", scratch / "out"
        probe = "runtime.probe"
        arguments: list[str | Path] = ["inputs", interface, "--seed", str(SEED), "--out", given]
        self.log.add(process.run_module(probe, arguments, scratch))
        arguments = ["expect", *self._config_arguments(scratch), "--params", archive]
        arguments += ["--inputs", given, "--seed", str(SEED), "--new-tokens", str(tokens)]
        arguments += ["--out", out]
        self.log.add(process.run_module("emit", arguments, scratch, progress=True))
        entries = scratch / "entries.json"
        arguments = ["summarize", interface, "--seed", str(SEED), "--expected", out]
        self.log.add(process.run_module(probe, [*arguments, "--out", entries], scratch))
        content: dict[str, Any] = json.loads((out / "prompts.json").read_text())
        content |= {"schema": 1, "entries": json.loads(entries.read_text()), **more}
        (out / "prompts.json").unlink()
        text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
        (out / "reference.json").write_text(text + "\n")
        return {path.name: path for path in sorted(out.iterdir())}

    def _run(self, stage: str, fields: Mapping[str, Any], produce: Produce) -> Result:
        result = self.run_action(Action(stage, fields, self.job.about), produce)
        self.log.result(stage, result)
        return result

    @cached_property
    def config_sha256(self) -> str:
        """Digest of the canonical config, for the manifest."""
        return hashlib.sha256(self.config.encode()).hexdigest()
