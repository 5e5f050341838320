"""Generate the Python stubs of ``rpc/proto`` into ``rpc/gen``: ``python -m rpc.generate``.

``--check`` writes nothing and fails when the committed stubs are not what the protos give.
Needs ``grpcio-tools`` and ``mypy-protobuf`` (in the extra ``dev``).
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent
PROTO = ROOT / "proto"
GEN = ROOT / "gen"

# protoc derives Python imports from proto paths, so `import "paceline/v1/common.proto"` becomes an
# import from the library package `paceline`. The stubs live in `rpc.gen` instead.
_IMPORT = re.compile(r"^(from|import) paceline\.v1\b", re.MULTILINE)


def _site(package: str) -> Path:
    """The folder that holds ``google/...`` protos of an installed package."""
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"rpc.generate needs {package}: pip install -e '.[dev]'")
    return Path(next(iter(spec.submodule_search_locations)))


def render() -> dict[str, str]:
    """What the stubs should be: path relative to ``rpc/gen`` -> content."""
    protos = sorted(str(path.relative_to(PROTO)) for path in PROTO.rglob("*.proto"))
    scripts = Path(sys.executable).parent
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "grpc_tools.protoc",
            f"-I{PROTO}",
            f"-I{_site('google.rpc').parent.parent}",
            f"-I{_site('grpc_tools') / '_proto'}",
            f"--plugin=protoc-gen-mypy={scripts / 'protoc-gen-mypy'}",
            f"--plugin=protoc-gen-mypy_grpc={scripts / 'protoc-gen-mypy_grpc'}",
            f"--python_out={folder}",
            f"--grpc_python_out={folder}",
            f"--mypy_out=quiet:{folder}",
            f"--mypy_grpc_out=quiet:{folder}",
            *protos,
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"protoc failed:\n{done.stderr}")
        return {
            str(path.relative_to(folder)): _IMPORT.sub(r"\1 rpc.gen.paceline.v1", path.read_text())
            for path in sorted(Path(folder).rglob("*.py*"))
        }


def stale() -> list[str]:
    """Committed stubs that differ from what the protos give, or should not be there."""
    wanted = render()
    present = {
        str(path.relative_to(GEN)): path.read_text()
        for path in GEN.rglob("*_pb2*.py*")
        if "__pycache__" not in path.parts
    }
    return sorted(
        name for name in wanted.keys() | present.keys() if wanted.get(name) != present.get(name)
    )


def write() -> None:
    """Replace the stubs."""
    wanted = render()
    for path in GEN.rglob("*_pb2*.py*"):
        if "__pycache__" not in path.parts:
            path.unlink()
    for name, content in wanted.items():
        target = GEN / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(content)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m rpc.generate", description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail when the stubs are stale")
    if parser.parse_args().check:
        different = stale()
        if different:
            sys.exit(
                "stale stubs in rpc/gen, run `python -m rpc.generate`:\n  " + "\n  ".join(different)
            )
        print("rpc/gen is up to date")
    else:
        write()
        print(f"wrote {GEN}")


if __name__ == "__main__":
    main()
