"""Generate the Python stubs of ``rpc/proto`` into ``rpc/gen``: ``python -m paceline.rpc.generate``.

The message ``Speculation`` is derived from :class:`paceline.config.SpeculationConfig`: a field for
each knob, with its help as the comment. A field keeps its number for ever; a new knob gets the next
one, and the number of a knob that is gone stays reserved. ``--check`` writes nothing and fails when
the committed files are not what this would write. It needs ``grpcio-tools`` and ``mypy-protobuf``
(in the extra ``dev``).
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import textwrap
import types
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from paceline.config import SpeculationConfig
from paceline.methods_table import bounds_in_words

ROOT = Path(__file__).resolve().parent
PROTO = ROOT / "proto"
GEN = ROOT / "gen"
COMMON = PROTO / "paceline" / "v1" / "common.proto"

_SPECULATION = re.compile(r"message Speculation \{\n.*?\n\}\n", re.DOTALL)
_FIELD = re.compile(r"^  (?:optional|repeated) \w+ (\w+) = (\d+);$", re.MULTILINE)
_RESERVED = re.compile(r"^  reserved ([\d, ]+);$", re.MULTILINE)
_SCALARS = {bool: "bool", int: "int32", float: "double", str: "string"}

# protoc derives Python imports from proto paths, so `import "paceline/v1/common.proto"` becomes an
# import from the library package `paceline`. The stubs live in `paceline.rpc.gen` instead.
_IMPORT = re.compile(r"^(from|import) paceline\.v1\b", re.MULTILINE)


def with_all_knobs(proto: str, schema: type[BaseModel] = SpeculationConfig) -> str:
    """``common.proto`` with the message Speculation that ``schema`` asks for."""
    found = _SPECULATION.search(proto)
    if found is None:
        raise SystemExit(f"{COMMON} has no message Speculation")
    message = found.group()
    numbers = {name: int(number) for name, number in _FIELD.findall(message)}
    gone = {int(n) for line in _RESERVED.findall(message) for n in line.split(",")}
    gone |= {numbers.pop(name) for name in numbers.keys() - schema.model_fields.keys()}
    following = max({*numbers.values(), *gone}, default=0) + 1
    for name in schema.model_fields:
        if name not in numbers:
            numbers[name] = following
            following += 1
    lines = ["message Speculation {"]
    if gone:
        lines.append(f"  reserved {', '.join(map(str, sorted(gone)))};")
    for name, number in sorted(numbers.items(), key=lambda item: item[1]):
        field = schema.model_fields[name]
        text = f"{field.description or name} {bounds_in_words(field.metadata)}".strip()
        lines += [f"  // {line}" for line in textwrap.wrap(text, 95)]
        lines.append(f"  {_proto_type(name, field.annotation)} {name} = {number};")
    return proto.replace(message, "\n".join([*lines, "}\n"]))


def _proto_type(knob: str, annotation: Any) -> str:
    """``optional int32`` for ``int | None``, ``repeated string`` for ``tuple[str, ...] | None``.

    A knob that can be a text or a list is a string: see
    :func:`paceline.rpc.messages.speculation_to_message`.
    """
    if get_origin(annotation) in (Union, types.UnionType):
        kinds = [kind for kind in get_args(annotation) if kind is not type(None)]
        annotation = str if str in kinds else kinds[0] if len(kinds) == 1 else annotation
    label = "optional"
    if get_origin(annotation) is tuple:
        label, annotation = "repeated", get_args(annotation)[0]
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) is Literal:
        annotation = type(get_args(annotation)[0])
    if annotation not in _SCALARS:
        raise SystemExit(f"knob {knob}: no proto type for {annotation}")
    return f"{label} {_SCALARS[annotation]}"


def _site(package: str) -> Path:
    """The folder that holds ``google/...`` protos of an installed package."""
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"paceline.rpc.generate needs {package}: pip install -e '.[dev]'")
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
            str(path.relative_to(folder)): _IMPORT.sub(
                r"\1 paceline.rpc.gen.paceline.v1", path.read_text()
            )
            for path in sorted(Path(folder).rglob("*.py*"))
        }


def stale() -> list[str]:
    """Committed files that :func:`write` would change or delete."""
    wanted = render()
    present = {
        str(path.relative_to(GEN)): path.read_text()
        for path in GEN.rglob("*_pb2*.py*")
        if "__pycache__" not in path.parts
    }
    proto = COMMON.read_text()
    return ([] if proto == with_all_knobs(proto) else [str(COMMON.relative_to(ROOT))]) + sorted(
        name for name in wanted.keys() | present.keys() if wanted.get(name) != present.get(name)
    )


def write() -> None:
    """Bring the proto up to the schema, and replace the stubs."""
    COMMON.write_text(with_all_knobs(COMMON.read_text()))
    wanted = render()
    for path in GEN.rglob("*_pb2*.py*"):
        if "__pycache__" not in path.parts:
            path.unlink()
    for name, content in wanted.items():
        target = GEN / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(content)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m paceline.rpc.generate", description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail when the stubs are stale")
    if parser.parse_args().check:
        different = stale()
        if different:
            sys.exit(
                "stale files in rpc, run `python -m paceline.rpc.generate`:\n  "
                + "\n  ".join(different)
            )
        print("rpc/gen is up to date")
    else:
        write()
        print(f"wrote {GEN}")


if __name__ == "__main__":
    main()
