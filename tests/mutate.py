"""How many small defects the tests notice: ``make mutate MUTANTS=60``.

A mutant is the package with one operator, constant or return value changed, in the estimators, the flips, ``affine.py`` or
``exact.py``. A random sample of all mutants, the same for a seed, is tested one by one in a copy of the project, up to the
first failure: by the tests named like the changed file and, with ``--wide``, then by the others of its part. ``--tests`` takes
the tests from elsewhere, an older commit for example, so that two sets of tests can be compared on the same mutants.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import itertools
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest
import torch

ROOT = Path(__file__).parent.parent
PACKAGE = Path("src/flipgrad")

# Imported once, for all mutants. The package itself must not be.
torch.set_num_threads(1)

# The parts that are mutated: their files, and tests that concern all of them.
PARTS = {
    "flips/*.py": ["flips"],
    "native/*.py": ["flips/test_native.py"],
    "estimators/*.py": ["estimators"],
    "affine.py": ["test_affine.py", "test_layers.py"],
    "exact.py": ["test_exact.py", "test_bounds.py"],
}
OUTPUT = "output.txt"
# It cannot be imported without a GPU or Triton's interpreter.
EXCLUDED = ("_triton_kernel.py",)
# Tests named otherwise than the file that they are about.
NAMED = {
    "_vmap": ["vmap"],
    "compiled": ["native"],
    "form": ["separable"],
    "separable": ["separable", "ratio", "choice"],
    "_arguments": ["flips"],
    "vectorized": ["flips"],
    "naive": ["flips"],
    "ordinary": ["flips"],
    "exact": ["exact", "exact_estimator"],
    "_sample_analytic": ["inputs"],
    "_moments": ["adf", "local_reparam", "inputs"],
    "_base": ["base", "local"],
    "_tuned": ["rebar", "relax", "double_cv"],
    "_head": ["psa", "local"],
    "_paths": ["unbiased", "reinforce"],
    "_draws": ["base", "local"],
    "flips/__init__": ["flips", "ratio"],
    "estimators/__init__": ["base", "facts"],
}

COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
ARITHMETIC = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Pow: ast.Mult,
    ast.Mod: ast.Mult, ast.MatMult: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip

# A change of a node in its place, and its description.
Change = tuple[str, Callable[[], None]]


def changes(node: ast.AST) -> Iterator[Change]:
    """The changes of one node."""

    def put(name: str, value: object) -> Callable[[], None]:
        return lambda: setattr(node, name, value)

    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        yield "comparison", put("ops", [COMPARISONS[type(node.ops[0])](), *node.ops[1:]])
    elif isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in ARITHMETIC:
        yield "arithmetic", put("op", ARITHMETIC[type(node.op)]())
    elif isinstance(node, ast.BoolOp):
        yield "boolean", put("op", ast.Or() if isinstance(node.op, ast.And) else ast.And())
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield "sign", put("op", ast.UAdd())
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "negation", put("operand", ast.UnaryOp(ast.Not(), node.operand))
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield "constant", put("value", not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield "constant", put("value", node.value + 1)
    elif isinstance(node, ast.Constant) and isinstance(node.value, float):
        yield "constant", put("value", 1.5 * node.value or 1.0)
    elif isinstance(node, ast.Return) and node.value is not None and not isinstance(node.value, ast.Constant):
        yield "return value", put("value", ast.Constant(None))
    elif isinstance(node, ast.If | ast.IfExp) and isinstance(node.test, ast.Name | ast.Call | ast.Attribute):
        yield "condition", put("test", ast.UnaryOp(ast.Not(), node.test))


def nodes(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a tree, but for annotations, which nothing evaluates, and messages of errors."""
    if isinstance(node, ast.Raise):
        return
    yield node
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from nodes(child)


def mutant_of(source: str, number: int) -> tuple[str, str]:
    """One mutant of a file: what was changed, and its source."""
    tree = ast.parse(source)
    node, (kind, change) = next(itertools.islice(every_change(tree), number, None))
    before = ast.unparse(node)
    change()
    ast.fix_missing_locations(tree)
    return f"line {node.lineno}, {kind}: {before[:60]!r} -> {ast.unparse(node)[:60]!r}", ast.unparse(tree)


def every_change(tree: ast.AST) -> Iterator[tuple[ast.AST, Change]]:
    yield from ((node, change) for node in nodes(tree) for change in changes(node))


def sample(count: int, seed: int) -> list[tuple[Path, int]]:
    """Mutants of all parts, by file and number."""
    files = sorted(path for pattern in PARTS for path in (ROOT / PACKAGE).glob(pattern) if path.name not in EXCLUDED)
    sizes = {path: sum(1 for _ in every_change(ast.parse(path.read_text(encoding="utf-8")))) for path in files}
    everything = [(path.relative_to(ROOT), number) for path in files for number in range(sizes[path])]
    return Random(seed).sample(everything, min(count, len(everything)))


def tests_of(path: Path, tests: Path, wide: bool) -> list[str]:
    """The tests that are about a file, and if wanted, or if there are none, the others of its part."""
    part = path.relative_to(PACKAGE)
    general = next(names for pattern, names in PARTS.items() if part.match(pattern))
    files = [
        file
        for name in general
        for file in ([tests / name] if name.endswith(".py") else sorted((tests / name).glob("test_*.py")))
    ]
    names = NAMED.get(part.stem) or NAMED.get(part.with_suffix("").as_posix()) or [part.stem]
    near = [file for file in files if file.name in [f"test_{name}.py" for name in names]]
    chosen = near + [file for file in files if file not in near] if wide or not near else near
    return [str(Path("tests") / file.relative_to(tests)) for file in chosen]


def run_here(project: Path, files: list[str], seconds: int) -> int:
    """Runs the tests in this process, which is for nothing else; what they say goes to a file. Returns pytest's exit code."""
    os.chdir(project)
    output = os.open(OUTPUT, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
    os.environ["PYTHONPATH"] = str(project / "src")
    sys.path[:] = [str(project / "src"), *(path for path in sys.path if Path(path) not in (ROOT / "src", ROOT / "tests"))]
    off = [option for name in ("cacheprovider", "xdist", "doctest") for option in ("-p", f"no:{name}")]
    return int(pytest.main(["-x", "-q", "-m", "not slow", *off, "-o", "addopts=", *files]))


def run(project: Path, files: list[str], seconds: int) -> str:
    """What the tests say in a child process: passed, failed, or no end after so many seconds of processor time."""
    child = os.fork()
    if not child:
        code = 1
        try:
            code = run_here(project, files, seconds)
        finally:
            sys.stdout.flush()
            os._exit(code)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return "no end" if os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL) else "failed"
    return "failed" if os.WEXITSTATUS(status) else "passed"


def copied(tests: Path) -> Path:
    """A copy of the project with the given tests."""
    project = Path(tempfile.mkdtemp(prefix="mutants-"))
    unwanted = shutil.ignore_patterns("__pycache__", ".*cache", ".hypothesis")
    shutil.copytree(ROOT / "src", project / "src", ignore=unwanted)
    shutil.copytree(tests, project / "tests", ignore=unwanted)
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, project / path.name)
    (project / "docs").symlink_to(ROOT / "docs")
    return project


def tell(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutants", type=int, default=60, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--seconds", type=int, default=300, help="processor time for one mutant, at most")
    parser.add_argument("--wide", action="store_true", help="run all tests of the part, not only those about the file")
    parser.add_argument("--tests", type=Path, default=ROOT / "tests", help="the folder of the tests")
    parser.add_argument("--survivors", type=Path, help="only the mutants that survived in this file, written by --json")
    parser.add_argument("--json", type=Path, help="where to write what became of each mutant")
    options = parser.parse_args()
    chosen = sample(options.mutants, options.seed)
    if options.survivors:
        survived = {
            (entry["file"], entry["number"]) for entry in json.loads(options.survivors.read_text()) if not entry["killed"]
        }
        chosen = [mutant for mutant in chosen if (str(mutant[0]), mutant[1]) in survived]
    project = copied(options.tests)
    found = []
    try:
        needed = sorted({file for path, _ in chosen for file in tests_of(path, project / "tests", options.wide)})
        if run(project, needed, 10 * options.seconds) != "passed":
            tell((project / OUTPUT).read_text(encoding="utf-8")[-4000:])
            tell("mutate: the tests fail without any mutant")
            return 2
        for path, number in chosen:
            source = (project / path).read_text(encoding="utf-8")
            what, changed = mutant_of(source, number)
            # Files of compiled code are told apart by the time in seconds: the mutant's must not be taken for another's.
            cached = Path(importlib.util.cache_from_source(str(project / path)))
            (project / path).write_text(changed, encoding="utf-8")
            cached.unlink(missing_ok=True)
            started = time.monotonic()
            outcome = run(project, tests_of(path, project / "tests", options.wide), options.seconds)
            (project / path).write_text(source, encoding="utf-8")
            cached.unlink(missing_ok=True)
            tell(f"{outcome:7} {time.monotonic() - started:5.0f} s  {path}, {what}")
            found.append({"file": str(path), "number": number, "what": what, "killed": outcome != "passed", "outcome": outcome})
            if options.json:
                options.json.write_text(json.dumps(found, indent=1))
    finally:
        shutil.rmtree(project)
    killed = sum(entry["killed"] for entry in found)
    tell(f"mutate: {killed} of {len(found)} mutants were killed, {killed / max(1, len(found)):.0%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
