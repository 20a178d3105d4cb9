"""A Python that lacks packages."""

from __future__ import annotations

import subprocess
import sys

# What takes long to import, or is large: nothing of it may be needed.
HEAVY = ("torch", "scipy", "sklearn", "matplotlib", "safetensors", "jinja2", "triton", "onnx", "onnxruntime")

REFUSING = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        known = top in {{"flipgrad", *{names!r}}} or top in sys.stdlib_module_names
        if top in {names!r} if {lacking} else not known:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Refuse())
before = set(sys.modules)
"""


def alone(code: str, *packages: str) -> str:
    """What ``code`` prints in a Python that has its standard library, flipgrad and the ``packages``, and nothing else."""
    return _run(REFUSING.format(names=packages, lacking=False) + code)


def lacking(code: str, *packages: str) -> str:
    """What ``code`` prints in a Python that has everything but the ``packages``."""
    return _run(REFUSING.format(names=packages, lacking=True) + code)


def _run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
