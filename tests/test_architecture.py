"""Dependencies point downwards, nothing in the package runs what it reads, and no test imports another."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import flipgrad

ROOT = Path(flipgrad.__file__).parent

# From the bottom up: a part imports only from its own row and those before it, and there are no cycles.
LAYERS = [
    ["errors", "files", "tensor_files", "image_files", "machine", "memory", "guards", "user_code"],
    ["native"],
    ["noise"],
    ["flips"],
    ["pooling", "sampling"],
    ["affine", "binary_weights", "objectives"],
    ["jets"],
    ["norms", "contract"],
    ["connections", "record"],
    ["layers", "max_pooling"],
    ["residual"],
    ["steps"],
    ["network", "graph"],
    ["exact", "bounds", "costs", "export", "latent", "packed"],
    ["estimators"],
    ["data", "training", "plots", "gradeval", "zoo"],
    ["benchmarks"],
    ["reproduce"],
    ["cli"],
]
LEVEL = {part: level for level, parts in enumerate(LAYERS) for part in parts}

SOURCES = sorted(ROOT.rglob("*.py"))


@cache
def tree_of(path: Path) -> ast.Module:
    """The syntax of a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


# In one process: they share the trees.
pytestmark = pytest.mark.xdist_group("architecture")


def part_of(path: Path) -> str:
    """The part of the package that a file belongs to: a module, or a folder."""
    return path.relative_to(ROOT).with_suffix("").parts[0]


def imported_names(node: ast.AST) -> Iterator[str]:
    """The full names that an import statement mentions; relative ones begin with a dot."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        module = "." * node.level + (node.module or "")
        yield from (f"{module}.{alias.name}" for alias in node.names)


def imported_parts(path: Path) -> Iterator[tuple[str, bool]]:
    """The parts of flipgrad that a file imports, and whether it does so inside a function."""
    tree = tree_of(path)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    lazy = {id(node) for function in functions for node in ast.walk(function)}
    for node in ast.walk(tree):
        for name in imported_names(node):
            assert not name.startswith("."), f"{path}: write imports in full, not relative ({name})"
            package, _, rest = name.partition(".")
            if package == "flipgrad":
                part = rest.partition(".")[0]
                yield part if part in LEVEL else "__init__", id(node) in lazy


def test_every_part_has_its_level():
    assert SOURCES
    for path in SOURCES:
        part = part_of(path)
        assert part in LEVEL or part in ("__init__", "__main__"), f"give {part!r} its place in LAYERS"


def test_imports_point_downwards():
    # What the package itself exports is as high as the highest part that it imports.
    top = max(LEVEL[other] for other, _ in imported_parts(ROOT / "__init__.py")) + 1
    for path in SOURCES:
        part = part_of(path)
        for other, _ in imported_parts(path) if part in LEVEL else ():
            assert LEVEL.get(other, top) <= LEVEL[part], f"{path} imports {other}"


def test_imports_form_no_cycle():
    graph: dict[str, set[str]] = {}
    for path in SOURCES:
        if part_of(path) not in ("__init__", "__main__"):
            others = {other for other, lazy in imported_parts(path) if not lazy}
            graph.setdefault(part_of(path), set()).update(others - {part_of(path), "__init__"})
    # The core is there, so that an empty graph is no success.
    assert {"noise", "pooling", "flips"} <= graph["affine"]
    TopologicalSorter(graph).prepare()


# Half a second each, of every process that imports the package.
SLOW_IMPORTS = ("sklearn", "scipy.stats")


def test_imports_that_take_long_wait_until_they_are_needed():
    for path in SOURCES:
        names = [name for node in tree_of(path).body for name in imported_names(node)]
        assert not any(name.startswith(SLOW_IMPORTS) for name in names), path


def calls(tree: ast.AST) -> Iterator[str]:
    """The called names of a file, as they are written, and arguments that unpickle."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func)
            yield from (f"{word.arg}={ast.unparse(word.value)}" for word in node.keywords if word.arg == "allow_pickle")


FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "torch.load", "allow_pickle=True"}
FORBIDDEN_IMPORTS = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}

# The one file that may import pickle: its unpickler runs nothing that a pickle names, see tests/data/test_unpickle.py.
UNPICKLER = ROOT / "data" / "_unpickle.py"


def test_nothing_is_unpickled_or_evaluated():
    for path in SOURCES:
        tree = tree_of(path)
        assert not FORBIDDEN_CALLS & set(calls(tree)), path
        names = {name for node in ast.walk(tree) for name in imported_names(node)}
        allowed = {"pickle"} if path == UNPICKLER else set()
        assert not (FORBIDDEN_IMPORTS - allowed) & {name.partition(".")[0] for name in names}, path
        assert "torch.load" not in names, path


def test_pickle_is_only_the_base_of_one_restricted_class():
    tree = tree_of(UNPICKLER)
    restricted = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        and [ast.unparse(base) for base in node.bases] == ["pickle.Unpickler"]
        and "find_class" in {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
    ]
    assert len(restricted) == 1
    assert [name for node in ast.walk(tree) for name in imported_names(node) if "pickle" in name] == ["pickle"]
    assert sum(isinstance(node, ast.Name) and node.id == "pickle" for node in ast.walk(tree)) == 1


def test_what_is_forbidden_would_be_found():
    tree = ast.parse("import pickle\nfrom torch import load\neval('1'); torch.load(f); numpy.load(f, allow_pickle=True)")
    assert {"eval", "torch.load", "allow_pickle=True"} <= set(calls(tree))
    assert [name for node in ast.walk(tree) for name in imported_names(node)] == ["pickle", "torch.load"]


def test_no_function_is_too_long_to_read_in_one_go():
    functions = [(path, node) for path in SOURCES for node in ast.walk(tree_of(path)) if isinstance(node, ast.FunctionDef)]
    assert len(functions) > 500
    for path, node in functions:
        assert (node.end_lineno or 0) - node.lineno < 60, f"{path}: {node.name}"


def imported_tests(tree: ast.AST) -> set[str]:
    """What a file imports from, or of, modules that hold tests."""
    names = {name for node in ast.walk(tree) for name in imported_names(node)}
    return {name for name in names if any(part.startswith("test_") for part in name.split("."))}


def test_no_test_imports_another():
    """What several tests use is in a module of its own beside them, whose name says what it holds."""
    paths = sorted(Path(__file__).parent.rglob("*.py"))
    assert len(paths) > 100
    for path in paths:
        assert not imported_tests(tree_of(path)), path


def test_an_import_of_a_test_would_be_found():
    for line in (
        "from test_psa import dense",
        "import test_psa",
        "from torture import test_torture",
        "from .test_psa import dense",
    ):
        assert imported_tests(ast.parse(f"def function():\n    {line}")), line
    assert not imported_tests(ast.parse("import pytest\nfrom torch.testing import assert_close"))
