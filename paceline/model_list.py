"""The models on this machine: their sizes, and which drafters and heads fit them.

It reads configurations, tokenizers and headers, but no weights.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline import gguf_folder
from paceline.errors import ModelNotFound, PacelineError
from paceline.gguf_folder import folder_of, is_gguf
from paceline.model_names import DEMO_MODELS, PACKAGED_MODELS, SHIPPED_HEADS
from paceline.models.layouts import read_config
from paceline.tokenizer import vocabulary_fingerprint

if TYPE_CHECKING:
    from paceline.models.heads.published import Published

_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}
_LANGUAGE_MODEL = re.compile("CausalLM|LMHead|ConditionalGeneration")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry:
    """A model that has a name here.

    Attributes:
        name: what commands and configurations may call it.
        path: folder or GGUF file; None: it is not on this machine.
        num_bytes: on disk.
        model_type: for example ``llama``.
        dtype: of most weights, or how they are quantised, for example ``Q4_1``.
        num_parameters, context_length: 0 where the files do not say.
        tokenizer: fingerprint of the vocabulary; empty where only transformers could read it.
        drafters: names of smaller models with the same tokenizer.
        heads: kinds of the trained heads that are there for it and have its sizes.
        problem: why it cannot be used and what to do; empty if it can.
        fits: of a published drafter, names of the targets that have its sizes.
        misfits: of a published drafter, the other targets, with the reason.
    """

    name: str
    path: Path | None = None
    num_bytes: int = 0
    model_type: str = ""
    dtype: str = ""
    num_parameters: int = 0
    context_length: int = 0
    tokenizer: str = ""
    drafters: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    problem: str = ""
    fits: tuple[str, ...] = ()
    misfits: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """As JSON values."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        path = None if self.path is None else str(self.path)
        names = ("drafters", "heads", "fits", "misfits")
        return {**fields, "path": path, **{name: list(getattr(self, name)) for name in names}}


def list_models(folder: Path | None = None) -> list[ModelEntry]:
    """The demo pair, models of packages, those in the hub's cache, and those in ``folder``.

    Raises:
        ModelNotFound: ``folder`` does not exist.
    """
    found = [_entry(name, path) for name, path in DEMO_MODELS.items()]
    for name, model in PACKAGED_MODELS.items():
        file = model.find()
        missing = ModelEntry(name=name, problem=f"not here: paceline models get {name}")
        found.append(missing if file is None else _entry(name, file))
    found += [_entry(name, path) for name, path in _hub_cache()]
    if folder is not None:
        if not folder.is_dir():
            raise ModelNotFound(f"folder {str(folder)!r} does not exist")
        from paceline.models.heads.published import published_in

        published = list(published_in(folder))
        others = set(folder.iterdir()) - {drafter.folder for drafter in published}
        inside = sorted(path for path in others if is_gguf(path) or _is_model(path))
        found += [_entry(str(path), path) for path in inside]
        found += [_published_entry(drafter, found) for drafter in published]
    return [replace(entry, drafters=_drafters_of(entry, found)) for entry in found]


def _drafters_of(target: ModelEntry, models: list[ModelEntry]) -> tuple[str, ...]:
    return tuple(
        model.name
        for model in models
        if target.tokenizer
        and model.tokenizer == target.tokenizer
        and 0 < model.num_parameters < target.num_parameters
    )


def _hub_cache() -> Iterator[tuple[str, Path]]:
    """Names and folders of language models in the cache of the hub's client."""
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        # Its own default is what the constant was when its module was first imported.
        repos = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except CacheNotFound:
        return
    for repo in sorted(repos, key=lambda repo: repo.repo_id):
        if repo.repo_type != "model":
            continue
        prefix = "" if "/" in repo.repo_id else "hf:"
        for revision in sorted(repo.revisions, key=lambda revision: revision.commit_hash):
            if not _is_model(revision.snapshot_path):
                continue
            refs = sorted(revision.refs)
            which = "" if "main" in refs else f"@{refs[0] if refs else revision.commit_hash}"
            yield f"{prefix}{repo.repo_id}{which}", revision.snapshot_path


def _is_model(folder: Path) -> bool:
    """Whether a folder holds a language model with safetensors weights."""
    try:
        config = json.loads((folder / "config.json").read_text())
        kinds = config.get("architectures") or []
        known = not kinds or any(_LANGUAGE_MODEL.search(kind) for kind in kinds)
        return "model_type" in config and known and any(folder.glob("*.safetensors"))
    except (OSError, ValueError, AttributeError, TypeError):
        return False


# --- one model ------------------------------------------------------------------------------------


def _entry(name: str, path: Path) -> ModelEntry:
    try:
        return _gguf_entry(name, path) if is_gguf(path) else _folder_entry(name, path)
    except PacelineError as error:
        return ModelEntry(name=name, path=path, problem=str(error))
    except (OSError, ValueError, KeyError, AttributeError, TypeError, struct.error) as error:
        reason = f"its files are damaged: {type(error).__name__}: {error}"
        return ModelEntry(name=name, path=path, problem=reason)


def _published_entry(drafter: Published, models: list[ModelEntry]) -> ModelEntry:
    """A published drafter, and which of the models that are here it drafts for."""
    from paceline.models.heads.published import problem_with

    fits, misfits = [], []
    for model in models:
        if model.path is None or model.problem or not model.num_parameters:
            continue
        folder = folder_of(model.path) if is_gguf(model.path) else model.path
        reason = problem_with(drafter, read_config(folder))
        if reason:
            misfits.append(f"{model.name}: {reason}")
        else:
            fits.append(model.name)
    files = [file for file in drafter.folder.iterdir() if file.is_file()]
    return ModelEntry(
        name=str(drafter.folder),
        path=drafter.folder,
        model_type=f"{drafter.kind} head",
        num_bytes=sum(file.stat().st_size for file in files),
        fits=tuple(fits),
        misfits=tuple(misfits),
    )


def _gguf_entry(name: str, file: Path) -> ModelEntry:
    entry = _folder_entry(name, folder_of(file))
    return replace(entry, path=file, num_bytes=file.stat().st_size)


def _folder_entry(name: str, folder: Path) -> ModelEntry:
    config = json.loads((folder / "config.json").read_text())
    parameters: Counter[str] = Counter()
    for kind, shape in _tensors(folder):
        parameters[_DTYPES.get(kind, kind)] += math.prod(shape)
    quantised = (config.get("quantization_config") or {}).get("quant_method")
    own = folder / "heads"
    places = [own] if own.is_dir() else SHIPPED_HEADS
    return ModelEntry(
        name=name,
        path=folder,
        num_bytes=sum(file.stat().st_size for file in folder.iterdir() if file.is_file()),
        model_type=config["model_type"],
        dtype=quantised or _most(parameters),
        num_parameters=sum(parameters.values()),
        context_length=_context_length(config),
        tokenizer=_tokenizer(folder),
        heads=tuple(kind for place in places for kind in _heads(place, config)),
    )


def _tensors(folder: Path) -> Iterator[tuple[str, Sequence[int]]]:
    """Dtype and shape of each tensor, from headers alone."""
    if gguf_folder.is_folder(folder):
        yield from ((tensor.type, tensor.shape) for tensor in gguf_folder.tensors(folder).values())
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as source:
            (length,) = struct.unpack("<Q", source.read(8))
            header = json.loads(source.read(length))
        for name, tensor in header.items():
            if name != "__metadata__":
                yield tensor["dtype"], tensor["shape"]


def _context_length(config: Mapping[str, Any]) -> int:
    """Tokens, by whichever key has them; 0: the model has no limit, or names it otherwise."""
    text = config.get("text_config")  # where a model also sees or hears
    places = (config, text) if isinstance(text, dict) else (config,)
    names = ("max_position_embeddings", "n_positions")
    return next((int(each[name]) for each in places for name in names if each.get(name)), 0)


def _most(parameters: dict[str, int]) -> str:
    return max(parameters, key=lambda kind: parameters[kind], default="")


def _tokenizer(folder: Path) -> str:
    """Fingerprint of the tokenizer; empty where only transformers could read it."""
    import tokenizers

    file = folder / "tokenizer.json"
    if not file.is_file():
        return ""
    try:
        return vocabulary_fingerprint(tokenizers.Tokenizer.from_file(str(file)).get_vocab())
    except Exception as error:  # all that tokenizers raises
        raise ModelNotFound(f"{file} is damaged: {error}") from error


def _heads(folder: Path, config: dict[str, Any]) -> Iterator[str]:
    """Kinds of the heads in a folder whose target had these sizes."""
    sizes = {
        "hidden_size": config.get("hidden_size"),
        "num_layers": config.get("num_hidden_layers"),
        "vocab_size": config.get("vocab_size"),
    }
    for file in sorted(folder.glob("*/config.json")):
        trained = json.loads(file.read_text())
        target = trained.get("target") or {}
        if trained.get("kind") == file.parent.name and sizes.items() <= target.items():
            yield file.parent.name
