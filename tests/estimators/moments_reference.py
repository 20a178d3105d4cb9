"""Moments written out: the coefficient of every unit by setting it, no folding and no squared kernels."""

from __future__ import annotations

import math

import torch

import flipgrad as fg

VARIANCE = {fg.Logistic: math.pi**2 / 3, fg.Normal: 1.0, fg.Laplace: 2.0, fg.Uniform: 1 / 3}


def variance(function, h, parents):
    """The variance of ``function(h)``, affine in the independent ±1 units of the layers ``parents``, with means h."""
    total = torch.zeros(())
    for k in parents:
        m = h[k].flatten(1)
        for i in range(m.shape[1]):
            ends = []
            for value in (1.0, -1.0):
                changed = m.clone()
                changed[:, i] = value
                ends.append(function([*h[:k], changed.view_as(h[k]), *h[k + 1 :]]))
            coefficient = (ends[0] - ends[1]) / 2
            total = total + coefficient**2 * (1 - m[:, i] ** 2).view(-1, *[1] * (coefficient.dim() - 1))
    return total


def means(graph, x, generator, unit):
    """The input and the means of all layers, where ``unit(node, mu, v, generator)`` gives a layer's."""
    h = [x]
    for node in graph.nodes:
        mu = node.a(h)
        h.append(unit(node, mu, variance(node.a, h, node.parents), generator) if node.parents else 2 * node.F(mu) - 1)
    return h


def outputs(graph, x, generator, unit):
    """The sampled outputs of a linear head."""
    h = means(graph, x, generator, unit)
    mean = graph.outputs(h)
    return normal(mean, variance(graph.outputs, h, graph.parents), generator)


def normal(mu, v, generator):
    return mu + v.sqrt() * fg.Normal().sample(mu.shape, generator=generator, dtype=mu.dtype)


def noise_variance(noise):
    return VARIANCE[type(noise)] * noise.scale**2
