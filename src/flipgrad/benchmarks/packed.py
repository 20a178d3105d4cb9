"""The speed of packed networks beside PyTorch and onnxruntime, on the same cores; and the size of their files."""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flipgrad import export, machine
from flipgrad.network import Sequential
from flipgrad.packed import compiled, parts, plain
from flipgrad.packed.network import PackedNetwork
from flipgrad.packed.packing import pack
from flipgrad.packed.parts import Part, Shape
from flipgrad.training.models import cifar_net

BATCH, SAMPLES = 64, 10
# Of rows of convolutions, of one image and of a batch.
REPEATS = {"convolutions": 30, "batch1": 200, "batch64": 10}
# Binary convolutions: channels, and the pixels of a side. Several in a row, as bits come from and go to other layers.
LAYERS = {"96": (96, 32), "192": (192, 16), "512": (512, 8)}
IN_A_ROW = 8
# The largest difference of outputs that PyTorch's rounding to single precision makes.
LARGEST_DIFFERENCE = 1e-4


def packed() -> dict[str, Any]:
    """How many times as fast as PyTorch: binary convolutions, and the paper's network for CIFAR-10 with binary weights, whole.

    PyTorch computes the deterministic network of the same weights in float32, with its norms multiplied into these. The numbers
    of a packed network are those of the numpy engine and, to rounding, of PyTorch itself, or there is no ratio.
    """
    rows: dict[str, Any] = {"threads": torch.get_num_threads(), "instructions": compiled.best_instructions()}
    if not compiled.best_instructions():
        return {**rows, "reason": compiled.lower((), (1,))[1]}
    for name, (channels, side) in LAYERS.items():
        rows[f"convolution_{name}_over_torch"] = _convolutions(channels, side)
    torch.manual_seed(0)
    x = torch.randn(BATCH, 3, 32, 32)
    net = cifar_net(norm="batch", weights="binary").initialize(x).eval()
    return {**rows, **_network(net, x)}


def _convolutions(channels: int, side: int) -> float | None:
    """Padded 3x3 convolutions in a row: those of PyTorch alone over binary ones with their thresholds, on one image."""
    rng = np.random.default_rng(0)
    chain: list[Part] = [parts.Sign("logistic", 1.0)]
    for _ in range(IN_A_ROW):
        bits = np.packbits(rng.random(channels * channels * 9) < 0.5)
        scale, shift = (rng.normal(size=channels).astype(np.float32) for _ in range(2))
        sums = parts.Sums(bits, channels, (channels, 3, 3), padding=(1, 1, 1, 1))
        chain += [sums, parts.Affine(scale / math.sqrt(9 * channels), shift), parts.Sign("logistic", 1.0)]
    shape = (channels, side, side)
    x = rng.normal(size=(1, *shape))
    engine = _lowered(chain, shape)
    layers = [module.float() for module in float_twin(chain) if isinstance(module, nn.Conv2d)]
    image = torch.from_numpy(x).float()

    @torch.inference_mode()
    def in_torch() -> None:
        for layer in layers:
            layer(image)

    right = _same_as_numpy(chain, x, engine)
    seconds = machine.fastest({"torch": in_torch, "packed": lambda: engine.run(x, None, 0, 0)}, repeats=REPEATS["convolutions"])
    return seconds["torch"] / seconds["packed"] if right else None


def _network(net: Sequential, x: Tensor) -> dict[str, Any]:
    """The ratios of a whole network, for one image and for a batch, and its size."""
    small = pack(net, x[:1])
    twin = float_twin(small.program).float()
    floats = sum(values.numel() * 4 for values in net.state_dict().values() if values.is_floating_point())
    result: dict[str, Any] = {}
    for name, file in (("file", pack(net, x[:1], draws=False)), ("file_with_draws", small)):
        size = len(file.to_bytes()[0])
        result |= {f"{name}_over_float32": size / floats, f"{name}_bytes": size}
    right = _right(small, net, x)
    sessions, reason = _onnx_sessions(net, x)
    if reason:
        result["onnxruntime"] = reason
    for name, inputs in (("batch1", x[:1]), (f"batch{BATCH}", x)):
        given = inputs.numpy()
        works: dict[str, Callable[[], object]] = {
            "torch": lambda inputs=inputs: _in_torch(twin, inputs),  # type: ignore[misc]
            "packed": lambda given=given: small(given),  # type: ignore[misc]
            "ensemble": lambda given=given: small(given, samples=SAMPLES),  # type: ignore[misc]
            **{key: lambda given=given, run=run: run(given) for key, run in sessions.items()},  # type: ignore[misc]
        }
        seconds = machine.fastest(works, repeats=REPEATS[name])
        ratios = {f"{name}_over_{key}": seconds[key] / seconds["packed"] for key in ("torch", *sessions)}
        ratios[f"{name}_ensemble{SAMPLES}_over_one_float"] = seconds["torch"] / seconds["ensemble"]
        result.update((key, ratio if right else None) for key, ratio in ratios.items())
        result[f"{name}_seconds"] = seconds
    # Those that are promised are the worse ones of both.
    promised = {f"ensemble{SAMPLES}_over_one_float", *(f"over_{key}" for key in sessions)}
    for key in promised:
        both = [result[f"{name}_{key}"] for name in ("batch1", f"batch{BATCH}")]
        result[key] = min(both) if right else None
    return result


def float_twin(chain: Sequence[Part]) -> nn.Sequential:
    """The deterministic network as modules of PyTorch, with real weights: what it would be without bits.

    Norms, scales and shifts behind a layer are multiplied into its weights, in double precision, which it has.
    """
    modules: list[nn.Module] = []
    for part in chain:
        if isinstance(part, parts.Affine | parts.BatchNorm):
            _fold(modules[-1], *part.scale_and_shift(len(modules[-1].weight)))  # type: ignore[arg-type]
        elif isinstance(part, parts.Convolution | parts.Sums):
            weight = part.weights() if isinstance(part, parts.Sums) else part.weight
            layer = nn.Conv2d(weight.shape[1], len(weight), weight.shape[2:], part.stride, part.padding[::2])
            modules.append(_with(layer, weight, getattr(part, "bias", None)))
        elif isinstance(part, parts.Linear):
            modules.append(_with(nn.Linear(part.weight.shape[1], len(part.weight)), part.weight, part.bias))
        else:
            modules.append(nn.Flatten() if isinstance(part, parts.Reshape) else _Signs())
    return nn.Sequential(*modules).eval()


class _Signs(nn.Module):
    def forward(self, a: Tensor) -> Tensor:
        return torch.where(a >= 0, 1.0, -1.0).to(a.dtype)


def _with(layer: Any, weight: Any, bias: Any) -> nn.Module:
    layer.weight.data = torch.from_numpy(weight.astype(np.float64))
    layer.bias.data = torch.from_numpy(np.zeros(len(weight)) if bias is None else bias.astype(np.float64))
    made: nn.Module = layer
    return made


def _fold(layer: Any, scale: Any, shift: Any) -> None:
    by = torch.from_numpy(scale)
    layer.weight.data *= by.view(-1, *[1] * (layer.weight.dim() - 1))
    layer.bias.data = layer.bias.data * by + torch.from_numpy(shift)


@torch.inference_mode()
def _in_torch(twin: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = twin(x)
    return found


def _lowered(chain: Sequence[Part], shape: Shape) -> compiled.Lowered:
    found, reason = compiled.lower(chain, shape)
    if found is None:
        raise RuntimeError(reason)
    return found


def _same_as_numpy(chain: Sequence[Part], x: Any, engine: compiled.Lowered) -> bool:
    return all((engine.run(x, draws, 0, 0) == plain.outputs(chain, x, draws, 0, 0)).all() for draws in (None, 1))


def _right(small: PackedNetwork, net: Sequential, x: Tensor) -> bool:
    """Whether the packed network gives what the network itself does, and in some draws what numpy does.

    Every example's outputs are to be those in single or in double precision: where a norm of a fresh network makes sums of
    bits exact ties, its rounding decides.
    """
    few = x[:2].double().numpy()
    same = bool(np.abs(small.members(few, 2) - plain.outputs(small.program, few, 2, 0, 0)).max() <= LARGEST_DIFFERENCE)
    found = torch.from_numpy(small(x.numpy())).double()
    with torch.inference_mode():
        references = torch.stack([net.deterministic(x).double(), copy.deepcopy(net).double().deterministic(x.double())])
        differences = (references - found).abs().amax(-1).amin(0)
    return same and bool(differences.max() <= LARGEST_DIFFERENCE)


def _onnx_sessions(net: Sequential, x: Tensor) -> tuple[dict[str, Callable[[Any], object]], str]:
    """The deterministic network in onnxruntime, on as many threads, or none and why."""
    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if find_spec(name) is None]
    if missing:
        return {}, f"not compared: {', '.join(missing)} is missing; pip install 'flipgrad[onnx]' onnxruntime"
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "net.onnx"
        export.write_onnx(export.deterministic(net), x[:2], path)
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return {"onnxruntime": lambda given: session.run(None, {name: given})}, ""
