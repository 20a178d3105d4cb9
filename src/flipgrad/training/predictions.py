"""What an ensemble predicts: single examples with the probabilities of every member, and how often members disagree."""

from typing import Any

import torch
from torch import Generator, Tensor
from torch.nn import functional

from flipgrad.data import Split
from flipgrad.errors import InputError
from flipgrad.network import BinaryNetwork, probabilities

# Bars of the histogram of disagreement: with fewer samples there is one for every possible share.
MOST_BINS = 20
# Pixels: an example is to be recognised, not to be trained on.
LARGEST_SIDE = 64
# An input of at most this many features is stored as a point.
MOST_POINT_FEATURES = 4


@torch.no_grad()
def describe(
    net: BinaryNetwork, split: Split, samples: int, *, seed: int, examples: int = 24, batch_size: int = 512
) -> dict[str, Any]:
    """Predict ``split`` in eval mode by ``samples`` members each, and tell what they say.

    The ensemble's class is that of the highest mean probability, as for ``accuracy_n`` of
    :func:`flipgrad.training.metrics.evaluate`. Two thirds of the examples are drawn at random, independently of the network;
    the others are those of the rest about which the ensemble is least certain (by the entropy of its mean probabilities).

    Args:
        net: its head gives the outputs of at least two classes.
        split: what to predict.
        samples: draws of all noises per example.
        seed: of these draws and of the choice; the same seed and batch size give the same numbers.
        examples: how many to describe, at most.
        batch_size: examples evaluated at once.

    Returns:
        What a run's ``evaluation.json`` says beside accuracies and losses, ready for JSON: ``samples``; ``examples``, each with
        ``index`` in the split, ``label``, how it was ``chosen`` ("random" or "uncertain"), ``image`` [C][H][W] (at most 64
        pixels a side) or None, ``point`` (a few features) or None, mean ``probabilities`` [K] and those of the ``members``
        [samples][K]; ``disagreement``, the numbers of ``correct`` and ``wrong`` predictions by the share of members whose class
        is not the ensemble's, between ``edges``: every bin has its lower edge, the last one both.

    Raises:
        InputError: if there is nothing to predict, or the outputs are no class scores.
    """
    if not len(split):
        raise InputError("describe: the split is empty; give at least one example")
    if samples < 1:
        raise InputError(f"describe(samples={samples}): at least one sample is needed")
    if examples < 0:
        raise InputError(f"describe(examples={examples}): give 0 or more")
    count = min(examples, len(split))
    drawn = torch.randperm(len(split), generator=torch.Generator().manual_seed(seed))[: count - count // 3]
    noise = torch.Generator(split.y.device).manual_seed(seed)
    was_training = net.training
    net.eval()
    kept, uncertain, disagreeing, predicted, classes = _survey(net, split, samples, noise, drawn, count // 3, batch_size)
    labels = split.y.cpu()
    net.train(was_training)
    chosen = [*((index, "random") for index in drawn.tolist()), *((index, "uncertain") for index in uncertain)]
    return {
        "samples": samples,
        "examples": [_example(split, index, kept[index], how) for index, how in chosen],
        "disagreement": _histogram(disagreeing, predicted == labels, samples),
        "confusion": (labels * classes + predicted).bincount(minlength=classes**2).view(classes, classes).tolist(),
    }


def _survey(
    net: BinaryNetwork, split: Split, samples: int, noise: Generator, drawn: Tensor, uncertain: int, batch_size: int
) -> tuple[dict[int, Tensor], list[int], Tensor, Tensor, int]:
    """Predict all examples.

    Gives the members [samples, K] of the ``drawn`` examples and of the ``uncertain`` ones by their indices; the indices of the
    latter; for every example how many members disagree with the ensemble, and its class; and the number K of classes.
    """
    # Negative entropies never are among the largest.
    entropies = torch.full((len(split),), -1.0, dtype=torch.float64)
    disagreeing = torch.zeros(len(split), dtype=torch.long)
    classes = torch.zeros(len(split), dtype=torch.long)
    kept: dict[int, Tensor] = {}
    for start in range(0, len(split), batch_size):
        part = slice(start, start + batch_size)
        members = probabilities(sampled_outputs(net, split.x[part], samples, noise))
        mean = members.mean(0)
        predicted = mean.argmax(-1)
        entropies[part] = torch.special.entr(mean).sum(-1)
        entropies[drawn] = -1
        disagreeing[part] = (members.argmax(-1) != predicted).sum(0)
        classes[part] = predicted
        # Only those that may still be described, so that memory does not grow with the split.
        least_certain = entropies.topk(uncertain).indices.tolist()
        candidates = {*drawn.tolist(), *least_certain}
        kept |= {start + row: members[:, row] for row in range(members.shape[1]) if start + row in candidates}
        kept = {index: kept[index] for index in kept.keys() & candidates}
    return kept, least_certain, disagreeing, classes, members.shape[-1]


def sampled_outputs(net: BinaryNetwork, x: Tensor, samples: int, noise: Generator | None) -> Tensor:
    """The head's outputs of every draw, [samples, B, K], in float64 on the CPU; refused if they are no scores of classes."""
    outputs = torch.stack([net(x, generator=noise) for _ in range(samples)]).double().cpu()
    if outputs.shape[-1] < 2:
        raise InputError("the head has one output; predictions by class need at least two")
    if not bool(torch.isfinite(outputs).all()):
        raise InputError("the network's outputs hold NaN or inf; evaluate weights from before the divergence")
    return outputs


def _example(split: Split, index: int, members: Tensor, chosen: str) -> dict[str, Any]:
    return {
        "index": index,
        "label": int(split.y[index]),
        "chosen": chosen,
        "image": _image(split.x[index]),
        "point": _rounded(split.x[index], 4) if split.x.dim() == 2 and split.x.shape[1] <= MOST_POINT_FEATURES else None,
        "probabilities": _rounded(members.mean(0), 6),
        "members": _rounded(members, 6),
    }


def _image(x: Tensor) -> Any:
    """Nested lists [C][H][W] of an image [C, H, W] or [H, W], made smaller where it is large; None for other inputs."""
    if x.dim() not in (2, 3):
        return None
    x = x.view(-1, *x.shape[-2:]).float()
    scale = LARGEST_SIDE / max(x.shape[-2:])
    if scale < 1:
        size = [max(1, round(scale * side)) for side in x.shape[-2:]]
        x = functional.interpolate(x[None], size, mode="area")[0]
    return _rounded(x, 4)


def _rounded(values: Tensor, decimals: int) -> Any:
    """Nested lists of numbers with few digits: a file for people."""
    return values.double().cpu().round(decimals=decimals).tolist()


def _histogram(disagreeing: Tensor, correct: Tensor, samples: int) -> dict[str, Any]:
    bins = min(samples, MOST_BINS)
    # In whole numbers, so that a share on an edge never rounds to the wrong side of it.
    place = (disagreeing * bins // samples).clamp(max=bins - 1)
    return {
        "edges": [edge / bins for edge in range(bins + 1)],
        "correct": place[correct].bincount(minlength=bins).tolist(),
        "wrong": place[~correct].bincount(minlength=bins).tolist(),
    }
