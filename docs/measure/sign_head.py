"""ADF and LocalReparam with outputs that pass through a sign, as in the program of the paper's authors; on 3,000 MNIST digits.

``python docs/measure/sign_head.py docs/measure/sign_head.json`` goes on where it was stopped, with MNIST's files in the folder
``mnist`` of ``$FLIPGRAD_DATA``; the table of the page "Measuring gradients" is made from that file.
"""

from __future__ import annotations

import json
import sys
from itertools import product
from pathlib import Path
from statistics import mean

import torch
from torch import Tensor

import flipgrad as fg
from flipgrad import files
from flipgrad.affine import Affine
from flipgrad.contract import LayerCall, Network
from flipgrad.data import mnist, usual_folder
from flipgrad.errors import InputError
from flipgrad.estimators._moments import MomentEstimator
from flipgrad.noise import Logistic
from flipgrad.objectives import Objective, evaluate
from flipgrad.training.models import fully_connected

IMAGES, EPOCHS, BATCH, SAMPLES = 3000, 20, 64, 10
RATES = (0.03, 0.1, 0.3)
SEEDS = (0, 1)
NAMES = ("loss", "accuracy", "validation_loss", "validation_accuracy")


class SignHead(MomentEstimator):
    """The moments of another estimator; those of the head's outputs pass through a sign, and outputs are drawn from that.

    So the outputs have the mean m of a sign and the variance 1 - m^2: they stay near ±1. Only for this measurement.
    """

    citation = "the program of Shekhovtsov, Yanush, Flach 2020"

    def __init__(self, inner: fg.ADF | fg.LocalReparam) -> None:
        self.inner = inner

    def means(self, call: LayerCall, mu: Tensor, v: Tensor) -> Tensor:
        return self.inner.means(call, mu, v)

    def head(self, net: Network, last: LayerCall, states: Tensor, objective: Objective) -> Tensor:
        affine, noise = Affine(net.head.weight, net.head.bias, views=net.tail), Logistic()
        mu, v = affine(states), affine.variance(1 - states.square())
        m = noise.mean_sign(mu / (1 + v / noise.variance).sqrt())
        return evaluate(objective, self.sample_normal(m, 1 - m.square(), last.draw))


METHODS: dict[str, fg.Estimator] = {
    "PSA": fg.PSA(inputs="sampled", head="sampled"),
    "ADF": fg.ADF(),
    "ADF states": fg.ADF(sample="states"),
    "ADF, sign": SignHead(fg.ADF()),
    "LocalReparam": fg.LocalReparam(),
    "LocalReparam, sign": SignHead(fg.LocalReparam()),
}


def splits() -> list[tuple[Tensor, Tensor]]:
    """Images [N, pixels] and labels to train on, and as many others."""
    folder = usual_folder("mnist")
    if folder is None:
        raise InputError("put MNIST's four files into a folder mnist and give the folder of that as $FLIPGRAD_DATA")
    data = mnist(folder).train
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))
    return [(data.x[part].flatten(1), data.y[part]) for part in (order[:IMAGES], order[IMAGES : 2 * IMAGES])]


@torch.no_grad()
def scores(net: fg.Sequential, x: Tensor, y: Tensor, generator: torch.Generator) -> tuple[float, float]:
    """The expected loss of the binary network, and the accuracy of averaged samples."""
    log_p = torch.stack([net(x, generator=generator) for _ in range(SAMPLES)]).log_softmax(-1)
    losses = -log_p.gather(-1, y.expand(SAMPLES, -1)[..., None])
    return float(losses.mean()), float((log_p.exp().mean(0).argmax(-1) == y).double().mean())


def trained(method: str, rate: float, seed: int) -> dict[str, float] | None:
    """The mean of the objective over the last epoch, and the scores then; None if the training diverged."""
    (x, y), unseen = splits()
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    net = fully_connected(x.shape[1], (100, 100, 100), 10).initialize(x[:256])
    optimizer = torch.optim.SGD(net.parameters(), lr=rate, momentum=0.9)
    for _ in range(EPOCHS):
        objectives = []
        for index in torch.randperm(IMAGES, generator=generator).split(BATCH):
            optimizer.zero_grad()
            loss = net(x[index], fg.CrossEntropy(y[index]), estimator=METHODS[method], generator=generator).mean()
            loss.backward()
            optimizer.step()
            objectives.append(loss.item())
    numbers = [mean(objectives), *scores(net, x, y, generator), *scores(net, *unseen, generator)]
    if not all(map(torch.isfinite, map(torch.tensor, numbers))):
        return None
    return dict(zip(("objective", *NAMES), (float(f"{number:.4g}") for number in numbers), strict=True))


def main(output: Path) -> None:
    """All trainings that ``output`` does not have yet."""
    torch.set_num_threads(1)
    runs = json.loads(output.read_text())["runs"] if output.exists() else {}
    for seed, method, rate in product(SEEDS, METHODS, RATES):
        key = f"{method} {rate} {seed}"
        if key not in runs:
            runs[key] = trained(method, rate, seed)
            files.write(output, (json.dumps({"torch": torch.__version__, "runs": runs}, indent=0) + "\n").encode())


def table(output: Path) -> str:
    """Means over the seeds, each at the rate with the lowest objective, in Markdown."""
    runs = json.loads(output.read_text())["runs"]
    head = ("method", "rates", "its objective", "training loss", "accuracy", "validation loss", "accuracy")
    lines = ["| " + " | ".join(head) + " |", "| --- " * len(head) + "|"]
    for method in METHODS:
        best: list[tuple[float, dict[str, float]]] = []
        for seed in SEEDS:
            found = {rate: run for rate in RATES if (run := runs[f"{method} {rate} {seed}"])}
            best.append(min(found.items(), key=lambda item: item[1]["objective"]))
        rates = ", ".join(f"{rate:g}" for rate, _ in best)
        objective, loss, share, unseen, right = (mean(run[key] for _, run in best) for key in ("objective", *NAMES))
        lines.append(f"| {method} | {rates} | {objective:.2f} | {loss:.2f} | {share:.1%} | {unseen:.2f} | {right:.1%} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
