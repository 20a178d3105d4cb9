"""Norms of gradients by layer at initialisation, in the networks of ``flipgrad reproduce cifar`` at two scales.

``python docs/measure/gradient_norms.py docs/measure/gradient_norms.json`` measures them, with CIFAR-10's files in the folder
``cifar10`` of ``$FLIPGRAD_DATA``; the table of the page "Measuring gradients" is made from that file.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import mean

import torch

import flipgrad as fg
from flipgrad import files
from flipgrad.data import cifar10, usual_folder
from flipgrad.errors import InputError
from flipgrad.training.models import cifar_net

IMAGES, DRAWS = 256, 8
# Factors on the channels, and scales of the noise.
SCALES = {"medium": (0.5, 1.0), "small": (0.25, 0.5)}
METHODS = {"PSA": fg.PSA(inputs="sampled", head="sampled"), "ST": fg.ST(), "HardST": fg.HardST()}


def norms(net: fg.Sequential, x: torch.Tensor, y: torch.Tensor, estimator: fg.Estimator) -> list[float]:
    """The mean norm of one draw's gradient in the weights of every binary layer."""
    draws = []
    for _ in range(DRAWS):
        net.zero_grad()
        net(x, fg.CrossEntropy(y), estimator=estimator).mean().backward()
        draws.append([float(layer.weight.grad.norm()) for layer in net.binary_layers if layer.weight.grad is not None])
    return [float(f"{mean(layer):.3g}") for layer in zip(*draws, strict=True)]


def main(output: Path) -> None:
    """All networks with all methods."""
    folder = usual_folder("cifar10")
    if folder is None:
        raise InputError("put CIFAR-10's files into a folder cifar10 and give the folder of that as $FLIPGRAD_DATA")
    torch.set_num_threads(1)
    data = cifar10(folder).train
    x, y = data.x[:IMAGES], data.y[:IMAGES]
    found: dict[str, list[float]] = {}
    for scale, (width, noise) in SCALES.items():
        torch.manual_seed(0)
        net = cifar_net(width, noise=fg.Logistic(noise)).initialize(x)
        for method, estimator in METHODS.items():
            found[f"{scale}, {method}"] = norms(net, x, y, estimator)
    files.write(output, (json.dumps({"torch": torch.__version__, "norms": found}, indent=0) + "\n").encode())


def table(output: Path) -> str:
    """A row for every network and method, in Markdown."""
    found = json.loads(output.read_text())["norms"]
    head = ("scale, method", *(f"layer {number}" for number in range(1, 1 + len(next(iter(found.values()))))))
    lines = ["| " + " | ".join(head) + " |", "| --- " * len(head) + "|"]
    lines += [f"| {name} | " + " | ".join(f"{norm:.2g}" for norm in layers) + " |" for name, layers in found.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
