"""Figures 2, 3 and C.3 to C.6: how accurate estimators are in small networks, against the exact gradient."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean, geometric_mean

from flipgrad import estimators, plots
from flipgrad.gradeval.evaluate import FEWEST
from flipgrad.plots.accuracy import Measurement
from flipgrad.plots.accuracy import read as read_layer
from flipgrad.reproduce._workshop import Claim, ToyNet, Workshop, experiment

WIDTHS = (5, 5, 5)
LAYERS = ("layer 1", "layer 2", "layer 3")
# The paper's seven, and with three more that it trains with.
SEVEN = ("reinforce", "arm", "concrete:0.1", "concrete", "tanh", "st", "psa:sampled")
TEN = (*SEVEN, "adf", "local-reparam", "hard-st")
# With more baselines. The paper takes 2,000 draws here, a fifth of the others.
UNBIASED = ("reinforce", "reinforce+mean", "muprop", "muprop+mean", "arm", "psa:sampled")
SHARE = 5
# The paper's PSA here; what averages more is the subject of "beyond".
EVERY = (
    *("psa:sampled" if name == "psa" else name for name in estimators.ESTIMATORS if name != "exact"),
    *("concrete:0.1", "reinforce+mean", "muprop+mean"),
)
# One network says little of a width or depth: claims are about the geometric mean over this many trainings.
NETWORKS = 10


# Accuracies by layer and estimator.
Table = Mapping[str, Mapping[str, Measurement]]


def read(path: Path, layers: Sequence[str] = LAYERS) -> Table:
    """The accuracies in a result file."""
    return {layer: read_layer(path, layer).estimators for layer in layers}


def _ratios(table: Table, ours: str, theirs: str) -> list[float]:
    """The RMSE of one estimator over that of another, with one draw, by layer."""
    return [layer[ours].rmse[0] / layer[theirs].rmse[0] for layer in table.values()]


def _listed(numbers: Iterable[float]) -> str:
    return ", ".join(f"{number:.2f}" for number in numbers)


def rmse_by_layer(shop: Workshop, name: str, methods: Sequence[str], samples: int) -> Table:
    """Measure a 5-5-5 network after one epoch, and draw RMSE against the number of draws in every layer."""
    path = shop.measure(ToyNet(WIDTHS, shop.scale.epochs[0], shop.scale.epochs), methods, samples)
    plots.rmse([plots.Panel(path, layer, layer) for layer in LAYERS], shop.folder / name)
    return read(path)


def cosine_by_epoch(shop: Workshop, name: str, methods: Sequence[str], samples: int) -> dict[int, Table]:
    """Measure a 5-5-5 network along its training, and draw the cosine in layer 1 against the number of draws."""
    epochs = shop.scale.epochs
    paths = {epoch: shop.measure(ToyNet(WIDTHS, epoch, epochs), methods, samples) for epoch in epochs}
    panels = [plots.Panel(path, "layer 1", f"after {epoch:,} epoch{'s' * (epoch > 1)}") for epoch, path in paths.items()]
    plots.cosine(panels, shop.folder / name)
    return {epoch: read(path, ["layer 1"]) for epoch, path in paths.items()}


@experiment("rmse", "Figure 2", seconds=(3, 215, 320))
def rmse(shop: Workshop) -> Iterator[Claim]:
    """Figure 2: relative RMSE of the gradient in layers 1 to 3 of a 5-5-5 network, after 1 epoch.

    The error of the estimated gradient in each of three layers of a 5-5-5 network, relative to the gradient's length, against
    the number of draws that are averaged, after one epoch of training. Unbiased estimators improve with every draw; biased ones
    up to a point, but they start much lower, the more so the further a layer is from the loss. One draw of PSA is not worse
    than 1,000 of ARM; PSA is always more accurate than ST, and unbiased in the last layer.
    """
    return rmse_claims(rmse_by_layer(shop, "rmse", TEN, shop.scale.samples))


def rmse_claims(table: Table) -> Iterator[Claim]:
    """PSA against ARM with many draws, its bias in the last layer, and PSA against ST for every number of draws."""
    first, last = table[LAYERS[0]], table[LAYERS[-1]]
    # With 1,000 draws, or the most below that were measured.
    many, arm = [pair for pair in zip(first["ARM"].samples, first["ARM"].rmse, strict=True) if pair[0] <= 1000][-1]
    one = first["PSA"].rmse[0]
    yield Claim(
        f"PSA with 1 draw is not worse than ARM with {many:,} in layer 1 (the paper: 1,000)",
        one <= arm,
        f"relative RMSE {one:.3f} against {arm:.3f}",
    )
    psa, st = last["PSA"], last["ST"]
    yield Claim(
        "PSA is unbiased in the last hidden layer (the 95 % interval of its bias contains 0)",
        psa.bias_low == 0,
        f"relative bias {psa.bias:.3f} [{psa.bias_low:.3f}, {psa.bias_high:.3f}]; of ST {st.bias:.3f}",
    )
    pairs = {layer: zip(named["PSA"].rmse, named["ST"].rmse, strict=True) for layer, named in table.items()}
    ratios = {layer: [ours / theirs for ours, theirs in both] for layer, both in pairs.items()}
    yield Claim(
        "PSA is always more accurate than ST",
        all(ratio < 1 for layer in ratios.values() for ratio in layer),
        "RMSE of PSA over that of ST with 1 draw and with the most: "
        + "; ".join(f"{layer} {_listed((values[0], values[-1]))}" for layer, values in ratios.items()),
    )


@experiment("cosine", "Figure 3", seconds=(4, 230, 470))
def cosine(shop: Workshop) -> Iterator[Claim]:
    """Figure 3: cosine similarity of the estimated and the true gradient in layer 1 of a 5-5-5 network.

    The cosine between estimated and true gradient in layer 1 after 1, 100 and 2,000 epochs, with the interval that holds 70 %
    of the trials. With few draws some estimators have good chances of a direction that does not descend, some biased ones even
    with many. PSA is the best with few draws.
    """
    return cosine_claims(cosine_by_epoch(shop, "cosine", TEN, shop.scale.samples))


def cosine_claims(tables: Mapping[int, Table]) -> Iterator[Claim]:
    """Whether PSA's interval of cosines stays positive, and who points uphill, with one draw and with many."""
    lows = {epoch: table["layer 1"]["PSA"].cosine_low[0] for epoch, table in tables.items()}
    yield Claim(
        "PSA with 1 draw gives descent directions in layer 1 (70 % of the trials have a positive cosine)",
        all(low > 0 for low in lows.values()),
        "lower end of the interval: " + ", ".join(f"{low:.2f} after {epoch:,}" for epoch, low in lows.items()),
    )
    parts = []
    for epoch, table in tables.items():
        often = [name for name, measured in table["layer 1"].items() if measured.cosine_low[0] < 0]
        always = [name for name, measured in table["layer 1"].items() if measured.cosine_mean[-1] < 0]
        parts.append(
            f"after {epoch:,}: {', '.join(often) or 'none'} with 1 draw"
            + (f"; even with many on average {', '.join(always)}" if always else "")
        )
    yield Claim(
        "some estimators have good chances of a negative cosine in layer 1",
        any(not part.endswith("none with 1 draw") for part in parts),
        ". ".join(parts),
    )


@experiment("rmse-unbiased", "Figure C.3", seconds=(2, 220, 300))
def rmse_unbiased(shop: Workshop) -> Iterator[Claim]:
    """Appendix: relative RMSE of unbiased estimators in layers 1 to 3 of a 5-5-5 network, after 1 epoch.

    The setting of figure 2 with more unbiased estimators: REINFORCE with the true expected loss as its baseline, and MuProp.
    MuProp's linear baseline does not help in the layers far from the loss.
    """
    found = rmse_by_layer(shop, "rmse-unbiased", UNBIASED, shop.scale.samples // SHARE)
    constant = _ratios(found, "REINFORCE + mean", "REINFORCE")
    yield Claim(
        "the true expected loss as the baseline lowers the variance of REINFORCE in every layer",
        all(ratio < 1 for ratio in constant),
        f"RMSE with it over RMSE without: {_listed(constant)}",
    )
    linear = _ratios(found, "MuProp + mean", "REINFORCE + mean")
    yield Claim(
        "MuProp's linear baseline does not help in the layers far from the loss (less than 10 % in layer 1)",
        linear[0] > 0.9,
        f"RMSE of MuProp over that of REINFORCE, both with the true mean, in layers 1 to 3: {_listed(linear)}",
    )


@experiment("cosine-unbiased", "Figure C.4", seconds=(3, 225, 380))
def cosine_unbiased(shop: Workshop) -> Iterator[Claim]:
    """Appendix: cosine similarity in layer 1 of unbiased estimators along the training of a 5-5-5 network.

    The setting of figure 3 with the same estimators. MuProp's linear baseline degrades by the end of the training.
    """
    found = cosine_by_epoch(shop, "cosine-unbiased", UNBIASED, shop.scale.samples // SHARE)
    gains = {epoch: _ratios(table, "MuProp + mean", "REINFORCE + mean")[0] for epoch, table in found.items()}
    first, *_, last = gains.values()
    yield Claim(
        "MuProp's linear baseline degrades in the course of training",
        last > first,
        "RMSE of MuProp over that of REINFORCE, both with the true mean, in layer 1: "
        + ", ".join(f"{gain:.2f} after {epoch:,}" for epoch, gain in gains.items()),
    )


@experiment("width", "Figure C.5", seconds=(9, 32, 320))
def width(shop: Workshop) -> Iterator[Claim]:
    """Appendix: relative RMSE in layer 1 against the width of the network, after 1 epoch.

    Errors in layer 1 for networks 3-3-3, 5-5-5 and 10-10-10. The bias of PSA and ST is more prominent in small networks.
    """
    tables = _by_size(shop, "width", {f"{n}-{n}-{n}": (n,) * 3 for n in (3, 5, 10)})
    yield from (advantage_grows(tables, ours, "width") for ours in ("PSA", "ST"))
    biases = {
        name: [fmean(table["layer 1"][ours].bias for table in several) for ours in ("PSA", "ST")]
        for name, several in tables.items()
    }
    first, *_, last = biases.values()
    yield Claim(
        "the bias of PSA and of ST is more prominent in small networks",
        all(small > large for small, large in zip(first, last, strict=True)),
        "mean relative bias of PSA, ST: " + "; ".join(f"{psa:.3f}, {st:.3f} for {name}" for name, (psa, st) in biases.items()),
    )


@experiment("depth", "Figure C.6", seconds=(11, 43, 430))
def depth(shop: Workshop) -> list[Claim]:
    """Appendix: relative RMSE in layer 1 against the depth of the network, after 1 epoch.

    Errors in layer 1 for 2, 5 and 7 layers of 5 units. The variance of unbiased estimators grows much faster with the depth.
    """
    tables = _by_size(shop, "depth", {f"{n} layers": (5,) * n for n in (2, 5, 7)})
    return [advantage_grows(tables, ours, "depth") for ours in ("PSA", "ST")]


def _by_size(shop: Workshop, figure: str, nets: Mapping[str, tuple[int, ...]]) -> dict[str, list[Table]]:
    """Draw the figure of one network of each kind, and return the results of all of them."""
    samples = shop.scale.samples
    first = {name: shop.measure(ToyNet(widths), SEVEN, samples) for name, widths in nets.items()}
    plots.rmse([plots.Panel(path, "layer 1", name) for name, path in first.items()], shop.folder / figure)
    few, compared = max(FEWEST, samples // NETWORKS), ("arm", "st", "psa:sampled")

    def measured(widths: tuple[int, ...], number: int) -> Table:
        return read(shop.measure(ToyNet(widths, number=number), compared, few), ["layer 1"])

    return {name: [measured(widths, number) for number in range(NETWORKS)] for name, widths in nets.items()}


def advantage_grows(tables: Mapping[str, Sequence[Table]], ours: str, what: str) -> Claim:
    """The RMSE of ARM over ours with one draw."""
    ratios = {name: [_ratios(table, "ARM", ours)[0] for table in several] for name, several in tables.items()}
    means = {name: geometric_mean(values) for name, values in ratios.items()}
    told = [f"{means[name]:,.0f} ({min(several):,.0f} to {max(several):,.0f}) for {name}" for name, several in ratios.items()]
    return Claim(
        f"the advantage of {ours} over ARM grows with the {what}",
        all(small < large for small, large in pairwise(means.values())),
        f"RMSE of ARM over that of {ours}, 1 draw, geometric mean (and range) over several networks: {', '.join(told)}",
    )


@experiment("estimators", "Not in the paper", seconds=(4, 235, 400))
def every_estimator(shop: Workshop) -> Iterator[Claim]:
    """All estimators: relative bias and standard deviation of one draw, 5-5-5 network, in the middle of its training.

    Bias and spread of every estimator of this library, the newer ones included, with one draw.
    """
    epochs = shop.scale.epochs
    path = shop.measure(ToyNet(WIDTHS, epochs[1], epochs), EVERY, shop.scale.samples)
    plots.bias_and_spread([plots.Panel(path, layer, layer) for layer in LAYERS], shop.folder / "estimators")
    table = read(path)
    unbiased = [(name, layer) for name in table["layer 1"] for layer in LAYERS if table[layer][name].unbiased]
    wrong = [f"{name} ({layer})" for name, layer in unbiased if table[layer][name].bias_low > 0]
    right = f"{len(unbiased) - len(wrong)} of {len(unbiased)} intervals contain 0"
    yield Claim(
        "estimators that are unbiased show no bias (95 % intervals contain 0, but for one in twenty of them by chance)",
        len(wrong) <= 0.15 * len(unbiased),
        f"{right}, not {', '.join(wrong)}" if wrong else right,
    )
    ratios = [named["DisARM"].std / named["ARM"].std for named in table.values()]
    yield Claim(
        "DisARM varies less than ARM",
        all(ratio < 1 for ratio in ratios),
        f"standard deviation of DisARM over that of ARM in layers 1 to 3: {_listed(ratios)}",
    )
    for layer, named in table.items():
        errors = {name: found.rmse[0] for name, found in named.items()}
        order = sorted(errors, key=errors.__getitem__)
        yield Claim(
            f"PSA is the most accurate with 1 draw in {layer}",
            order[0] == "PSA",
            "relative RMSE: " + ", ".join(f"{name} {errors[name]:.2f}" for name in order[:6]),
        )
