"""The flip product over the ordinary input gradient, of layers of the paper's network, a wide one and a likelihood."""

import math
from collections.abc import Callable
from itertools import pairwise
from statistics import geometric_mean
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.grad import conv2d_input

from flipgrad.flips import Geometry, compiled, heads, separable, vectorized
from flipgrad.flips.form import find_form, root_mean_square
from flipgrad.machine import fastest
from flipgrad.native import library
from flipgrad.noise import Logistic, sign
from flipgrad.training.models import CIFAR_CHANNELS, CIFAR_KERNELS, CIFAR_STRIDES

BATCH, LINEAR_BATCH = 64, 256
HEAD_BATCH, HEAD_UNITS, HEAD_OUTPUTS = 50, 200, 784
REPEATS = 15
TOLERANCE = 1e-3
# Relative L2 error above which a kernel is wrong.
LIMITS = {"separable": TOLERANCE, "native": 1e-5}
NOISE = Logistic()


class Layer(NamedTuple):
    """A layer: channels, kernel, stride and the size of its input (0: fully connected)."""

    inputs: int
    outputs: int
    kernel: int
    stride: int
    size: int

    def __str__(self) -> str:
        if not self.size:
            return f"linear {self.inputs} -> {self.outputs}, batch {LINEAR_BATCH}"
        shape = f"{self.kernel}x{self.kernel}, stride {self.stride}, {self.size}x{self.size}"
        return f"conv {self.inputs} -> {self.outputs}, {shape}, batch {BATCH}"


def flips() -> dict[str, Any]:
    """Ratios for every layer and their geometric mean, of each kernel whose result is right."""
    rows = {str(layer): _measure(layer) for layer in (*_convolutions(), Layer(1024, 1024, 1, 1, 0))}
    result: dict[str, Any] = {"tolerance": TOLERANCE, "threads": torch.get_num_threads(), "layers": rows}
    for kernel in LIMITS:
        ratios = [row[f"{kernel}_over_gradient"] for name, row in rows.items() if name.startswith("conv")]
        if all(ratio is not None for ratio in ratios):
            result[f"{kernel}_geometric_mean"] = geometric_mean(ratios)
    result["bernoulli_head"] = _bernoulli_head(1)
    result["bernoulli_head_weights_x5"] = _bernoulli_head(5)
    return result


def _convolutions() -> list[Layer]:
    """The layers with binary inputs."""
    layers, size = [], 32 - CIFAR_KERNELS[0] + 1
    for (inputs, outputs), kernel, stride in zip(pairwise(CIFAR_CHANNELS), CIFAR_KERNELS[1:], CIFAR_STRIDES[1:], strict=True):
        layers.append(Layer(inputs, outputs, kernel, stride, size))
        size = (size - kernel) // stride + 1
    return layers


def _measure(layer: Layer) -> dict[str, Any]:
    torch.manual_seed(0)
    kernel, size = ((layer.kernel,) * 2, (layer.size,) * 2) if layer.size else ((), ())
    weight = torch.randn(layer.outputs, layer.inputs, *kernel) / math.sqrt(layer.inputs * math.prod(kernel))
    x = sign(torch.randn(BATCH if layer.size else LINEAR_BATCH, layer.inputs, *size))
    a = torch.nn.functional.conv2d(x, weight, stride=layer.stride) if layer.size else x @ weight.t()
    grad = torch.randn_like(a)
    geometry = Geometry((layer.stride, layer.stride)) if layer.size else None

    def by_form() -> Tensor:
        form = find_form(weight, NOISE, TOLERANCE, activation_rms=root_mean_square(a))
        return separable.flip_product(x, a, grad, weight, NOISE, form, geometry)

    kernels: dict[str, Callable[[], Tensor]] = {
        "gradient": lambda: grad @ weight if geometry is None else conv2d_input(x.shape, weight, grad, geometry.stride),
        "separable": by_form,
    }
    if library.available():
        kernels["native"] = lambda: compiled.flip_product(x, a, grad, weight, NOISE, geometry)
    seconds = fastest(kernels, repeats=REPEATS)
    # Errors are those of the first examples, against the exact product in double precision.
    expected = vectorized.flip_product(x[:2].double(), a[:2].double(), grad[:2].double(), weight.double(), NOISE, geometry)
    row: dict[str, Any] = {"gradient_seconds": seconds["gradient"]}
    for name, limit in LIMITS.items():
        error = float((kernels[name]()[:2] - expected).norm() / expected.norm()) if name in kernels else None
        row[f"{name}_error"] = error
        row[f"{name}_over_gradient"] = seconds[name] / seconds["gradient"] if error is not None and error <= limit else None
    return row


def _bernoulli_head(factor: float) -> dict[str, Any]:
    """Flips of the units before the logits of black and white images, over the ordinary gradient of the likelihood in them.

    With the weights that ``nn.Linear`` begins with, times a ``factor``, and bits of which a fifth are 1.
    """
    torch.manual_seed(0)
    head = torch.nn.Linear(HEAD_UNITS, HEAD_OUTPUTS)
    weight = (head.weight.detach() * factor).contiguous()
    x = sign(torch.randn(HEAD_BATCH, HEAD_UNITS))
    targets = (torch.rand(HEAD_BATCH, HEAD_OUTPUTS) < 0.2).float()
    logits = x @ weight.t() + head.bias.detach()

    def by_flips() -> Tensor:
        return heads.bernoulli(x, logits, targets, weight, tolerance=TOLERANCE)

    works: dict[str, Callable[[], Tensor]] = {"gradient": lambda: (logits.sigmoid() - targets) @ weight, "flips": by_flips}
    seconds = fastest(works, repeats=4 * REPEATS)
    some, outputs, bits = (t[:2].double() for t in (x, logits, targets))
    expected = vectorized.log_ratio(some, outputs, 2 * bits - 1, weight.double(), NOISE) * some / 2
    error = float((by_flips()[:2] - expected).norm() / expected.norm())
    return {
        "units": HEAD_UNITS,
        "outputs": HEAD_OUTPUTS,
        "batch": HEAD_BATCH,
        "way": heads.explain(weight, examples=HEAD_BATCH, tolerance=TOLERANCE),
        "gradient_seconds": seconds["gradient"],
        "error": error,
        "flips_over_gradient": seconds["flips"] / seconds["gradient"] if error <= TOLERANCE else None,
    }
