"""How often the members of an ensemble disagree with it, where it is right and where it is wrong."""

from __future__ import annotations

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator

from flipgrad.plots.runs import Disagreement
from flipgrad.plots.style import GREEN, ORANGE, percent_ticks, tidy

# Labels that fit below the axis.
LABELS = 10


def disagreement_figure(found: Disagreement, *, samples: int | None, size: tuple[float, float]) -> Figure:
    """Bars over the share of members that disagree, each group's as shares of that group: few errors are seen, too."""
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    lefts, rights = found.edges[:-1], found.edges[1:]
    for side, counts, colour in ((0.28, found.correct, GREEN), (0.72, found.wrong, ORANGE)):
        centres = [left + side * (right - left) for left, right in zip(lefts, rights, strict=True)]
        widths = [0.4 * (right - left) for left, right in zip(lefts, rights, strict=True)]
        axes.bar(centres, [count / max(1, sum(counts)) for count in counts], widths, color=colour)
    tidy(axes)
    axes.grid(visible=False, axis="x")
    axes.set(xlabel="members that disagree with the ensemble", ylabel="share of predictions", xlim=(0, found.edges[-1]))
    percent_ticks(axes.xaxis)
    percent_ticks(axes.yaxis)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=6))
    if exact(found, samples):
        # Every bin stands for one share, its lower edge: named in its middle.
        step = -(-len(lefts) // LABELS)
        axes.xaxis.set_major_locator(FixedLocator([(a + b) / 2 for a, b in zip(lefts, rights, strict=True)][::step]))
        axes.set_xticklabels([f"{100 * left:.3g}%" for left in lefts[::step]])
    return figure


def exact(found: Disagreement, samples: int | None) -> bool:
    """Whether every bin holds one possible share only, so that the first one means: all agree."""
    return samples == len(found.correct)


def meaning(found: Disagreement, *, samples: int | None) -> str:
    """What the histogram says about errors, in a sentence or two."""
    total, wrong = sum(found.correct) + sum(found.wrong), sum(found.wrong)
    if samples == 1:
        return "A single member cannot disagree: evaluate with more samples to see how sure the ensemble is."
    if not total:
        return "There were no predictions to compare."
    agreed, agreed_wrong = found.correct[0] + found.wrong[0], found.wrong[0]
    who = f"all {samples} members agree" if exact(found, samples) else f"fewer than {100 * found.edges[1]:.3g}% disagree"
    rest, rest_wrong = total - agreed, wrong - agreed_wrong
    if not wrong:
        return f"The ensemble made no error; in {agreed:,} of {total:,} predictions {who}."
    if not agreed or not rest:
        everywhere = "every" if agreed else "no"
        return f"In {everywhere} one of {total:,} predictions {who}, so that disagreement tells nothing about the errors here."
    sure, unsure = agreed_wrong / agreed, rest_wrong / rest
    facts = f"Where {who} ({agreed:,} predictions), {sure:.1%} are wrong; of the other {rest:,}, {unsure:.1%} are."
    if unsure > 2 * sure:
        return f"{facts} Disagreement, which needs no labels to be seen, warns of errors."
    return f"{facts} Disagreement is a weak sign of errors here."
