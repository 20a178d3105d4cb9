"""Latent-variable models of images as the literature trains them, and one update of such a training.

The recipe is that of Yin, Zhou (ARM, ICLR 2019), Dong, Mnih, Tucker (DisARM, NeurIPS 2020) and those who compare with them: a
binary autoencoder of 784 pixels with 200 units in each latent layer, images that are binarised anew in every batch, the
encoder's input less the mean image, and a decoder whose bias starts at the mean's logits and whose input is ±1.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Literal, final

import torch
from torch import Generator, Tensor, nn

from flipgrad.contract import Estimator
from flipgrad.errors import InputError
from flipgrad.latent import Variational
from flipgrad.layers import BinaryLinear

ModelName = Literal["linear", "nonlinear", "two-layer", "four-layer"]
# How many latent layers each has.
DEPTHS: dict[str, int] = {"linear": 1, "nonlinear": 1, "two-layer": 2, "four-layer": 4}
UNITS = 200
# Of LeakyReLU in the nonlinear model.
SLOPE = 0.3
# Probabilities of pixels that the decoder starts with are at least this far from 0 and 1.
MARGIN = 1e-3
# Of Adam for the encoder and the decoder, of gradient descent for the prior, and of Adam for an estimator's own parameters.
RATE, PRIOR_RATE, OWN_RATE = 1e-4, 1e-2, 1e-3


@final
class Centre(nn.Module):
    """The input less a ``mean``, which is no parameter."""

    mean: Tensor

    def __init__(self, mean: Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", mean.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return x - self.mean


def latent_model(name: str, mean: Tensor, *, units: int = UNITS) -> Variational:
    """One of the models for images with this ``mean`` [pixels], from torch's generator.

    "linear" has one latent layer between linear maps, "two-layer" and "four-layer" more of them; "nonlinear" has two hidden
    layers of LeakyReLU on both sides of one latent layer.
    """
    if name not in DEPTHS:
        raise InputError(f"no latent-variable model {name!r}; choose {', '.join(DEPTHS)}")
    pixels = len(mean)
    if name == "nonlinear":
        encoder: list[nn.Module] = [Centre(mean), *_hidden(pixels, units), *_hidden(units, units), BinaryLinear(units, units)]
        output = nn.Linear(units, pixels)
        decoder: list[nn.Module] = [nn.Sequential(*_hidden(units, units), *_hidden(units, units), output)]
    else:
        sizes = [pixels, *[units] * DEPTHS[name]]
        layers = list(pairwise(sizes))
        encoder = [Centre(mean), *(BinaryLinear(n, m) for n, m in layers)]
        decoder = [nn.Linear(m, n) for n, m in layers]
        output = decoder[0]  # type: ignore[assignment]
    model = Variational(encoder, decoder)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)
    with torch.no_grad():
        output.bias.copy_(torch.logit(mean.clamp(MARGIN, 1 - MARGIN)))
    return model


def _hidden(inputs: int, outputs: int) -> tuple[nn.Module, nn.Module]:
    return nn.Linear(inputs, outputs), nn.LeakyReLU(SLOPE)


def baseline_network(pixels: int, start: float) -> nn.Module:
    """A network for a learned baseline, whose guesses begin near ``start``: from 0 they would take long to get there."""
    last = nn.Linear(100, 1)
    nn.init.constant_(last.bias, start)
    return nn.Sequential(nn.Linear(pixels, 100), nn.Tanh(), last)


def binarised(images: Tensor, generator: Generator | None) -> Tensor:
    """Bits with the probabilities of pixels from 0 to 1."""
    return torch.bernoulli(images, generator=generator)


@final
class ElboTraining:
    """The state of a training: a model, an estimator, their optimisers and the source of all randomness.

    Args:
        model: what is trained.
        estimator: with which gradient.
        images: of the training set, [N, pixels] from 0 to 1.
        batch: images per update.
        rate: of Adam.
        seed: of batches, bits and noise.
    """

    def __init__(
        self, model: Variational, estimator: Estimator, images: Tensor, *, batch: int = 50, rate: float = RATE, seed: int = 0
    ) -> None:
        self.model, self.estimator, self.images, self.batch = model, estimator, images, batch
        self.generator = torch.Generator().manual_seed(seed)
        self.steps = 0
        prior = [p for name, p in model.named_parameters() if name == "prior"]
        others = [p for name, p in model.named_parameters() if name != "prior"]
        self.optimizers: list[torch.optim.Optimizer] = [torch.optim.Adam(others, lr=rate, fused=True)]
        if prior:
            self.optimizers.append(torch.optim.SGD(prior, lr=PRIOR_RATE))
        if isinstance(estimator, nn.Module):
            # Some build their parameters for the model at the first estimate.
            model(images[:2], estimator=estimator, index=torch.zeros(2, dtype=torch.long), generator=torch.Generator())
            own = [p for p in estimator.parameters() if p.requires_grad]
            if own:
                self.optimizers.append(torch.optim.Adam(own, lr=OWN_RATE))

    def update(self) -> float:
        """One update by a random batch; returns its mean negative ELBO."""
        index = torch.randint(len(self.images), (self.batch,), generator=self.generator)
        x = binarised(self.images[index], self.generator)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss = self.model(x, estimator=self.estimator, generator=self.generator, index=index).mean()
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
        self.steps += 1
        return float(loss.detach())

    def state(self) -> dict[str, Tensor]:
        """All that the rest of the training depends on, as tensors by name."""
        return dict(_tensors(self))

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Go on from a :meth:`state`."""
        for optimizer in self.optimizers:
            # Makes what an optimiser keeps, which is replaced below.
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
        with torch.no_grad():
            for name, tensor in _tensors(self):
                if name not in tensors or tensors[name].shape != tensor.shape:
                    raise InputError(f"the state of a training lacks {name!r}, or has it in another shape")
                if name not in ("generator", "steps"):
                    tensor.copy_(tensors[name])
        self.generator.set_state(tensors["generator"])
        self.steps = int(tensors["steps"])


def _tensors(training: ElboTraining) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in training.model.state_dict().items():
        yield f"model.{name}", tensor
    if isinstance(training.estimator, nn.Module):
        for name, tensor in training.estimator.state_dict().items():
            yield f"estimator.{name}", tensor
    for number, optimizer in enumerate(training.optimizers):
        state: dict[int, dict[str, Any]] = optimizer.state_dict()["state"]
        for key, values in state.items():
            for name, value in values.items():
                if isinstance(value, Tensor):
                    yield f"optimizer.{number}.{key}.{name}", value
    yield "generator", training.generator.get_state()
    yield "steps", torch.tensor(training.steps)


def encoder_gradients(model: Variational, x: Tensor, estimator: Estimator, draws: int, generator: Generator) -> Tensor:
    """Gradients [draws, P] of the mean negative ELBO of ``x`` in the parameters of the encoder, with new noise each."""
    parameters = [p for p in model.encoder.parameters() if p.requires_grad]
    index, found = torch.zeros(len(x), dtype=torch.long), []
    for _ in range(draws):
        loss = model(x, estimator=estimator, generator=generator, index=index).mean()
        found.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)]))
    return torch.stack(found)


def gradient_variance(model: Variational, x: Tensor, estimator: Estimator, draws: int, generator: Generator) -> float:
    """The variance of the encoder's gradient for the data ``x``, summed over its parameters, from ``draws`` draws."""
    if draws < 2:
        raise InputError(f"gradient_variance(draws={draws}): give at least 2 draws")
    return float(encoder_gradients(model, x, estimator, draws, generator).var(0).sum())
