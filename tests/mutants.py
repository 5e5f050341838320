"""Source mutations: small mistakes that a test of the mutated code has to notice.

A mutant is one change of one file: a comparison that is off or turned round, a number or a sum that
is off by one, a statement that is gone, two arguments in each other's place, `and` for `or`.
"""

from __future__ import annotations

import ast
import copy
import hashlib
import multiprocessing
import os
import resource
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
COPIED = (
    "benchmarks",
    "paceline",
    "rpc",
    "deployments",
    "cluster",
    "tuning",
    "tests",
    "pyproject.toml",
)
LARGE = (
    "pytest", "hypothesis", "torch", "transformers", "transformers.models.llama.modeling_llama",
    "transformers.models.auto.modeling_auto", "transformers.models.auto.tokenization_auto", "grpc",
    "typer.testing",
)  # fmt: skip

SYMMETRIC = ("min", "max", "np.minimum", "np.maximum", "np.array_equal")

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_SUMS: dict[type[ast.operator], type[ast.operator]] = {ast.Add: ast.Sub, ast.Sub: ast.Add}


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of a file.

    Attributes:
        file: relative to the repository.
        scope: the function or method, as in ``Class.method``; empty at the top of the module.
        before, after: the changed statement, or the head of a compound one, on one line each.
        source: the whole file with the change.
    """

    file: str
    scope: str
    before: str
    after: str
    source: str

    def __str__(self) -> str:
        return f"{self.file} {self.scope}: {self.before} -> {self.after}"


def mutants_of(file: str) -> list[Mutant]:
    """All mutants of a file of the repository, in an order that other changes do not disturb."""
    tree = ast.parse((ROOT / file).read_text("utf-8"))
    found: dict[str, Mutant] = {}
    for scope, path in _statements(tree, "", ()):
        before = _at(tree, path)
        for statement in _changed(before):
            mutated = copy.deepcopy(tree)
            _replace(mutated, path, statement)
            source = ast.unparse(ast.fix_missing_locations(mutated)) + "\n"
            mutant = Mutant(file, scope, _head(before), _head(statement), source)
            found.setdefault(str(mutant), mutant)  # equal statements of a function count once
    return sorted(found.values(), key=lambda m: hashlib.blake2b(str(m).encode()).digest())


Path_ = tuple[tuple[str, int], ...]  # from the module down: the list of statements, and the place


def _statements(node: ast.AST, scope: str, path: Path_) -> Iterator[tuple[str, Path_]]:
    """Each statement of a function with the place where it stands."""
    for field in ("body", "orelse", "finalbody", "handlers"):
        for place, child in enumerate(getattr(node, field, None) or ()):
            here = (*path, (field, place))
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{scope}.{child.name}".lstrip(".")
                yield from _statements(child, name, here)
                continue
            if scope and isinstance(child, ast.stmt) and not _is_text(child):
                yield scope, here
            yield from _statements(child, scope, here)


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _at(tree: ast.Module, path: Path_) -> ast.stmt:
    node: ast.AST = tree
    for field, place in path:
        node = getattr(node, field)[place]
    assert isinstance(node, ast.stmt)
    return node


def _replace(tree: ast.Module, path: Path_, statement: ast.stmt) -> None:
    node: ast.AST = tree
    for field, place in path[:-1]:
        node = getattr(node, field)[place]
    field, place = path[-1]
    getattr(node, field)[place] = statement


def _head(statement: ast.stmt) -> str:
    """A statement on one line; of a compound one, the line that begins it."""
    text = ast.unparse(statement)
    if hasattr(statement, "body"):
        return text.splitlines()[0]
    return " ".join(text.split())


def _changed(statement: ast.stmt) -> Iterator[ast.stmt]:
    """The statement with one change in each, those in statements below it left out."""
    dropped = isinstance(statement, ast.AugAssign | ast.Continue | ast.Break | ast.Delete) or (
        isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
    )
    stored = isinstance(statement, ast.Assign) and all(
        isinstance(target, ast.Attribute | ast.Subscript) for target in statement.targets
    )
    if dropped or stored:
        yield ast.Pass()
    for number in range(len(list(_own(statement)))):
        for choice in range(4):
            changed = copy.deepcopy(statement)
            node = list(_own(changed))[number]
            if not _change(node, choice):
                break
            yield changed


def _own(statement: ast.stmt) -> Iterator[ast.expr]:
    """The expressions of a statement without its annotation and the statements inside of it."""
    waiting: list[ast.AST] = [statement]
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, ast.expr):
            yield node
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns"):
                continue
            waiting += [
                child
                for child in (value if isinstance(value, list) else [value])
                if isinstance(child, ast.AST)
                and not isinstance(child, ast.stmt | ast.excepthandler)
            ]


def _change(node: ast.expr, choice: int) -> bool:
    """Change the node in place; False where it has no change with this number."""
    match node:
        case ast.Compare(ops=ops) if choice < len(ops):
            ops[choice] = _COMPARISONS[type(ops[choice])]()
        case ast.Constant(value=value) if type(value) is int and choice == 0:
            node.value = value + 1
        case ast.BinOp(op=op) if type(op) in _SUMS and choice == 0:
            node.op = _SUMS[type(op)]()
        case ast.BoolOp(op=op) if choice == 0:
            node.op = ast.Or() if isinstance(op, ast.And) else ast.And()
        case ast.Call(func=function, args=args) if choice + 1 < len(args):
            if ast.unparse(function) in SYMMETRIC:
                return False
            args[choice : choice + 2] = args[choice + 1], args[choice]
        case _:
            return False
    return True


class Copy:
    """A copy of the tree in which one file at a time is a mutant.

    Tests run in processes that are forked from one that has imported the large packages already:
    most mutants are found in less time than torch and transformers take to import.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)
            else:
                shutil.copy(ROOT / name, folder / name)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(LARGE))

    def passes(self, mutant: Mutant, tests: Sequence[str], cpu_s: int) -> bool:
        """Whether the tests pass with the mutant; False also where it never ends.

        Args:
            cpu_s: processor time in seconds after which it is taken to never end; on a busy machine
                that may be many minutes.

        Raises:
            RuntimeError: pytest ran no test, or they wait for something.
        """
        file, output = self.folder / mutant.file, self.folder / "output.txt"
        original = file.read_text("utf-8")
        file.write_text(mutant.source, "utf-8")
        process = self._context.Process(target=_run, args=(self.folder, output, list(tests), cpu_s))
        try:
            process.start()
            process.join(60 * cpu_s)
            if process.is_alive():
                process.kill()
                raise RuntimeError(f"{mutant}: the tests wait")
        finally:
            file.write_text(original, "utf-8")
        if process.exitcode in (3, 4, 5):  # neither passed nor failed
            raise RuntimeError(
                f"{mutant}: pytest ended with {process.exitcode}\n{output.read_text()}"
            )
        return process.exitcode == 0


def _run(folder: Path, output: Path, tests: list[str], cpu_s: int) -> None:
    """In a process of its own: run the tests of the copy."""
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("paceline", "tests")]:
        del sys.modules[name]
    os.chdir(folder)
    sys.path[:] = [
        str(folder),
        *(place for place in sys.path if Path(place) not in (ROOT, Path(""))),
    ]
    sys.dont_write_bytecode = True
    import pytest

    marks = "not slow and not nightly and not serve"
    sys.exit(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-m", marks, *tests]))
