"""Latent-variable models: :class:`flipgrad.Variational`, and its negative ELBO as costs of neighbouring layers."""

from flipgrad.latent.costs import Elbo, ElboHead, Stage, bernoulli
from flipgrad.latent.model import Variational, check_latent

__all__ = ["Elbo", "ElboHead", "Stage", "Variational", "bernoulli", "check_latent"]
