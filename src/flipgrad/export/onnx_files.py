"""Plain modules as ONNX files of standard operators, and their evaluation by onnxruntime.

Bai, Lu, Zhang et al. ONNX: Open Neural Network Exchange. https://onnx.ai. The sign of a state is never ONNX's ``Sign``, which
is 0 at 0, but a comparison: +1 where a - Z >= 0.
"""

from __future__ import annotations

import logging
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.export import ExportedProgram

from flipgrad import files
from flipgrad.errors import InputError
from flipgrad.export.plain import FixedNet, SampledNet
from flipgrad.export.programs import program
from flipgrad.export.thresholds import thresholded

# The version of the standard operators, which onnxruntime has known since 1.14.
OPSET = 18
INPUTS, OUTPUTS, BATCH = "inputs", "outputs", "batch"
# Bytes: a file of ONNX (protocol buffers) cannot be larger.
LARGEST_FILE = 2**31 - 1


def write_onnx(
    module: FixedNet | SampledNet,
    x: Tensor,
    path: Path | str,
    *,
    batch_size: int | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a plain module as an ONNX file: operators of the standard domain alone, of the version ``OPSET``.

    Its input ``inputs`` [batch, ...] becomes the output ``outputs`` [batch, K], the head's. That of a :class:`SampledNet` takes
    ``noise_1``, ``noise_2``, ... of all layers, too, and ``weight_noise_1``, ... where weights are drawn. Weights are stored as
    float32, binary ones as ±1.

    Args:
        module: what :func:`flipgrad.export.deterministic`, ``member`` or ``sampled`` gave.
        x: inputs [B, ...], B >= 1; their values do not matter, their size does.
        path: of the file.
        batch_size: the only size of a batch that it takes; by default, any.
        metadata: names and texts to be stored in the file (``metadata_props``).

    Raises:
        InputError: if the packages ``onnx`` and ``onnxscript`` are missing, or the module cannot be written so.
    """
    model = _model(module, x, batch_size)
    for key, text in {"flipgrad": version("flipgrad"), **(metadata or {})}.items():
        model.metadata_props.add(key=key, value=text)
    if model.ByteSize() > LARGEST_FILE:
        raise InputError(f"the network has {model.ByteSize():,} bytes, and a file of ONNX at most {LARGEST_FILE:,}")
    files.write(Path(path), model.SerializeToString())


def _model(module: FixedNet | SampledNet, x: Tensor, batch_size: int | None) -> Any:
    """The module as a checked ONNX model."""
    _check_installed("onnx", "onnxscript", by="'flipgrad[onnx]'")
    import onnx

    # Runtimes multiply scales into weights, which would move sums that are exactly a threshold.
    captured = thresholded(module) if isinstance(module, FixedNet) else module
    written = _converted(program(captured, x, batch_size=batch_size), _input_names(module))
    model = written.model_proto
    _check_standard(model)
    _tidy(model)
    onnx.checker.check_model(model, full_check=True)
    return model


def _converted(captured: ExportedProgram, names: list[str]) -> torch.onnx.ONNXProgram:
    """What torch's converter makes of a program."""
    try:
        with _quiet():
            options: dict[str, Any] = {"opset_version": OPSET, "dynamo": True, "verbose": False}
            written = torch.onnx.export(captured, input_names=names, output_names=[OUTPUTS], **options)
    except torch.onnx.OnnxExporterError as error:
        unknown = re.search(r"No ONNX function found for <OpOverload\(op='([\w.]+)'", str(error))
        if unknown is None:
            raise
        raise InputError(
            f"ONNX has no operator for what a module of the network computes ({unknown[1]}): replace that module by one of "
            "standard operations, or use fg.export.program"
        ) from None
    if written is None:
        raise RuntimeError("torch.onnx.export gave no program")
    return written


def _input_names(module: FixedNet | SampledNet) -> list[str]:
    if isinstance(module, FixedNet):
        return [INPUTS]
    counts = zip(("noise", "weight_noise"), module.counts, strict=True)
    return [INPUTS, *(f"{name}_{number}" for name, count in counts for number in range(1, count + 1))]


def _check_standard(model: Any) -> None:
    """Refuse operators that not every runtime has."""
    for node in _nodes(model.graph):
        if node.domain not in ("", "ai.onnx"):
            raise InputError(
                f"a module of the network becomes {node.domain}::{node.op_type}, which is no standard operator of ONNX: "
                "replace that module by one of standard operations"
            )
    if model.functions:
        raise InputError(f"a module of the network becomes the function {model.functions[0].name}, which is none of ONNX's own")


def _nodes(graph: Any) -> Iterator[Any]:
    """All nodes of a graph, those in branches and loops too."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                yield from _nodes(inner)


def _tidy(model: Any) -> None:
    """Name the batch, and leave out where in whose code a node came from."""
    model.producer_name, model.producer_version = "flipgrad", version("flipgrad")
    graph = model.graph
    symbol = graph.input[0].type.tensor_type.shape.dim[0].dim_param
    for value in (*graph.input, *graph.output, *graph.value_info):
        del value.metadata_props[:]
        for dim in value.type.tensor_type.shape.dim:
            if symbol and dim.dim_param:
                dim.dim_param = re.sub(rf"\b{symbol}\b", BATCH, dim.dim_param)
    for node in _nodes(graph):
        node.ClearField("doc_string")
        del node.metadata_props[:]
    del graph.metadata_props[:]
    del model.metadata_props[:]


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's words on packages that nobody asked for and on its own changes to come."""
    log = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated", FutureWarning)
            yield
    finally:
        log.setLevel(level)


def _check_installed(*packages: str, by: str) -> None:
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise InputError(f"this needs {' and '.join(missing)}, not installed here: pip install {by}")


@final
class OnnxSession:
    """An ONNX file in onnxruntime: ``session(x)`` gives outputs [B, K], ``session(x, noise, weight_noise)`` of a sampled net.

    It is for checks; who uses the file needs neither torch nor flipgrad.

    Args:
        path: of the file.

    Raises:
        InputError: if onnxruntime is missing.
    """

    def __init__(self, path: Path | str) -> None:
        _check_installed("onnxruntime", by="onnxruntime")
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        self._session = onnxruntime.InferenceSession(os.fspath(path), options, providers=["CPUExecutionProvider"])
        self.names = [value.name for value in self._session.get_inputs()]
        self.metadata: dict[str, str] = self._session.get_modelmeta().custom_metadata_map

    def __call__(self, x: Tensor, *noise: list[Tensor]) -> Tensor:
        given = [x, *(z for tensors in noise for z in tensors)]
        arrays = dict(zip(self.names, (_array(tensor) for tensor in given), strict=True))
        return torch.from_numpy(self._session.run([OUTPUTS], arrays)[0])


def _array(tensor: Tensor) -> NDArray[Any]:
    return np.ascontiguousarray(tensor.detach().cpu().numpy())
