"""What needs no torch starts without it, and without anything but numpy; the package's names come when they are used."""

from __future__ import annotations

import ast
import copy
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import flipgrad as fg
from alone import HEAVY, alone, lacking
from flipgrad import cli


def test_the_package_imports_nothing_but_the_standard_library():
    loaded = alone("import flipgrad; print(*sorted(set(sys.modules) - before))").split()
    assert [name for name in loaded if name.partition(".")[0] not in sys.stdlib_module_names] == ["flipgrad", "flipgrad.errors"]


def test_what_packed_networks_need_has_no_torch():
    code = """
import pathlib, tempfile
from flipgrad import InputError, errors, files, machine, memory
from flipgrad.native import loading
library, reason = loading.load(["flipgrad_has_avx2"])
assert (library is None) == bool(reason)
with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder) / "facts.json"
    files.write_json(path, {"bits": 3})
    assert files.read_json(path, missing="", broken="") == {"bits": 3}
assert machine.cores() > 0 and machine.fastest({"nothing": int}, repeats=1)["nothing"] >= 0
assert memory.ran_out(MemoryError()) and not memory.ran_out(RuntimeError("other"))
print(InputError is errors.InputError)
"""
    assert alone(code) == "True\n"


def test_a_packed_network_runs_with_numpy_alone(tmp_path):
    layers = (fg.BinaryConv2d(1, 8, 3), fg.BinaryConv2d(8, 8, 3, weights="binary", noise=fg.Normal()), nn.Flatten())
    net = fg.Sequential(*layers, head=nn.Linear(32, 3))
    x = torch.randn(2, 1, 6, 6)
    packed = fg.packed.pack(net, x)
    packed.save(tmp_path / "net.safetensors")
    np.save(tmp_path / "x.npy", x.numpy())
    code = f"""
import numpy as np
from flipgrad.packed import load
net = load({str(tmp_path / "net.safetensors")!r}, engine="numpy")
x = np.load({str(tmp_path / "x.npy")!r})
print(net(x).tolist(), net(x, samples=3, seed=5).tolist(), "torch" in sys.modules)
"""
    packed.engine = "numpy"
    wanted = f"{packed(x).tolist()} {packed(x, samples=3, seed=5).tolist()} False\n"
    assert alone(code, "numpy") == wanted
    assert alone("import flipgrad as fg; print(fg.packed.load.__name__, 'torch' in sys.modules)", "numpy") == "load False\n"
    refused = (
        "from flipgrad.packed import load\ntry: from flipgrad.packed import pack\nexcept ModuleNotFoundError as e: print(e)"
    )
    assert alone(refused, "numpy") == "No module named 'torch'\n"


def test_a_name_that_needs_torch_says_so():
    code = """
import flipgrad
try:
    flipgrad.PSA
except ModuleNotFoundError as error:
    print(error)
print(len(dir(flipgrad)) > 40)
"""
    assert alone(code) == "No module named 'torch'\nTrue\n"


def test_the_help_and_the_version_need_no_torch():
    printed = lacking("from flipgrad.cli import main\nmain(['--help'])", *HEAVY)
    assert all(name in printed for name in cli.COMMANDS)
    assert lacking("from flipgrad.cli import main\nmain(['--version'])", *HEAVY) == f"flipgrad {fg.__version__}\n"


def test_a_command_that_needs_torch_says_so():
    code = """
from flipgrad.cli import main
sys.stderr = sys.stdout
try:
    main(["estimators"])
except SystemExit as end:
    print(end.code)
"""
    assert lacking(code, *HEAVY) == "flipgrad: this command needs the package torch: install it, e.g. pip install torch\n1\n"


def test_the_lines_of_the_help_are_those_of_the_commands():
    for name, line in cli.COMMANDS.items():
        command = cli.command(name)
        assert command.name == name
        assert command.help.partition("\n\n")[0].replace("\n", " ") == line
    modules = {path.stem for path in Path(cli.__file__).parent.glob("*.py") if not path.stem.startswith("_")}
    assert modules == set(cli.COMMANDS)


def test_names_are_those_that_type_checkers_see():
    tree = ast.parse(Path(fg.__file__).read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    seen = {alias.name: node.module for node in block.body for alias in node.names}
    modules = {name for name, module in seen.items() if module == "flipgrad"}
    assert {name: module for name, module in seen.items() if name not in modules} == fg._HOMES
    assert {*seen, "InputError"} == set(fg.__all__)
    assert len(fg.__all__) == len(set(fg.__all__))
    # Importing a module of the name of a function would put it in the function's place.
    ours = {path.stem for path in Path(fg.__file__).parent.iterdir()}
    assert not ours & set(fg._HOMES)
    assert modules < ours


def test_every_name_is_there():
    everything: dict[str, object] = {}
    exec("from flipgrad import *", everything)
    assert set(fg.__all__) <= set(everything)
    assert set(fg.__all__) <= set(dir(fg))
    for name, module in fg._HOMES.items():
        assert everything[name] is getattr(fg, name) is getattr(sys.modules[module], name)
    # Modules that are no part of the list are found, too.
    assert fg.training.TrainConfig is sys.modules["flipgrad.training"].TrainConfig


def test_other_names_are_refused_as_usual():
    for name in ("nonexistent", "_native", "__wrapped__"):
        with pytest.raises(AttributeError, match=f"^module 'flipgrad' has no attribute '{name}'$") as caught:
            getattr(fg, name)
        assert (caught.value.name, caught.value.obj) == (name, fg)
    with pytest.raises(ImportError, match="cannot import name 'nonexistent' from 'flipgrad'"):
        from flipgrad import nonexistent  # noqa: F401


def test_objects_are_copied_and_pickled():
    noise = fg.Logistic(2.0)
    for again in (copy.deepcopy(noise), pickle.loads(pickle.dumps(noise))):
        assert type(again) is fg.Logistic
        assert again.scale == noise.scale
    assert pickle.loads(pickle.dumps(fg.PSA)) is fg.PSA
