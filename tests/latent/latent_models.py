"""Latent-variable models small enough to enumerate, and their negative ELBO by definition: a sum over all states."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional

import flipgrad as fg

DATA = 3


def random_model(*widths: int, noise: fg.Noise | None = None, seed: int = 1, scale: float = 0.8, **options) -> fg.Variational:
    """Layers of these widths for data of three bits, in float64."""
    torch.manual_seed(seed)
    pairs = list(zip((DATA, *widths), widths, strict=False))
    encoder = [fg.BinaryLinear(n, m, noise=noise) for n, m in pairs]
    model = fg.Variational(encoder, [nn.Linear(m, n) for n, m in pairs], **options).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * scale)
    return model


def bits(examples: int, seed: int = 2) -> Tensor:
    """Data."""
    return torch.randint(2, (examples, DATA), generator=torch.Generator().manual_seed(seed)).double()


def by_enumeration(model: fg.Variational, x: Tensor) -> tuple[Tensor, Tensor]:
    """The negative ELBOs and the log-likelihoods [B]."""
    sizes = [layer.out_features for layer in model.encoder]
    elbo, joint = torch.zeros(len(x), dtype=x.dtype), []
    for states in itertools.product([-1.0, 1.0], repeat=sum(sizes)):
        z = [part.expand(len(x), -1) for part in torch.tensor(states, dtype=x.dtype).split(sizes)]
        log_q, before = torch.zeros(len(x), dtype=x.dtype), x
        for layer, now in zip(model.encoder, z, strict=True):
            log_q = log_q + layer.noise.cdf(now * functional.linear(before, layer.weight, layer.bias)).log().sum(1)
            before = now
        log_p = torch.sigmoid(z[-1] * model.prior).log().sum(1)
        for k in range(len(z) - 1, 0, -1):
            log_p = log_p + torch.sigmoid(z[k - 1] * model.decoder[k](z[k])).log().sum(1)
        p = torch.sigmoid(model.decoder[0](z[0]))
        log_p = log_p + (x * p.log() + (1 - x) * (1 - p).log()).sum(1)
        elbo = elbo + log_q.exp() * (log_q - log_p)
        joint.append(log_p)
    return elbo, torch.logsumexp(torch.stack(joint), 0)


def gradients(losses: Tensor, model: nn.Module) -> dict[str, Tensor]:
    """That of the mean in every parameter."""
    named = dict(model.named_parameters())
    return dict(zip(named, torch.autograd.grad(losses.mean(), list(named.values())), strict=True))
