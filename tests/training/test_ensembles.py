import math

import pytest
import torch
from torch import nn

import flipgrad as fg
from flipgrad.data import Split
from flipgrad.training import evaluate, measure_ensembles
from flipgrad.training.reliability import Mean, ReliabilityBins


def small():
    torch.manual_seed(0)
    net = fg.Sequential(fg.BinaryLinear(2, 4), fg.BinaryLinear(4, 4), head=nn.Linear(4, 3))
    return net, Split(torch.randn(40, 2), torch.randint(3, (40,)))


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def exact_ensemble(net, data, size):
    """The expected accuracy and loss of ``size`` independent draws, by a sum over all tuples of the hidden states."""
    weights, outputs = states_and_outputs(net, data.x)
    accuracy, loss = torch.zeros(len(data)), torch.zeros(len(data))
    probabilities = outputs.softmax(-1)
    for pick in torch.cartesian_prod(*[torch.arange(len(weights))] * size).view(-1, size):
        weight = weights[pick].prod(0)
        mean = probabilities[pick].mean(0)
        accuracy += weight * (mean.argmax(-1) == data.y)
        loss -= weight * mean.gather(-1, data.y[:, None])[:, 0].log()
    return accuracy.mean().item(), loss.mean().item()


def states_and_outputs(net, x):
    """Probabilities [S, B] of all states of one hidden layer, and the head's outputs [S, B, K] for them."""
    layer = net[0]
    states = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0])] * layer.out_features)
    up = layer.noise.cdf(torch.nn.functional.linear(x, layer.weight, layer.bias))
    weights = torch.where(states[:, None] > 0, up, 1 - up).prod(-1)
    return weights.detach(), net.head(states).detach()[:, None].expand(-1, len(x), -1)


def test_every_size_has_the_expected_accuracy_and_loss_of_so_many_draws():
    torch.manual_seed(1)
    net = fg.Sequential(fg.BinaryLinear(2, 3), head=nn.Linear(3, 3))
    with torch.no_grad():
        net.head.weight.mul_(5)
    data = Split(torch.randn(300, 2), torch.randint(3, (300,)))
    found = measure_ensembles(net, data, 2, [1, 2, 3], generator=seeded(), batch_size=128)
    again = [measure_ensembles(net, data, 2, [1, 2, 3], generator=seeded(seed)) for seed in range(1, 20)]
    for k, size in enumerate(found.sizes):
        accuracy, loss = exact_ensemble(net, data, size.samples)
        runs = [found.sizes[k], *(other.sizes[k] for other in again)]
        # Of 20 means over other draws: four of their own standard errors, six comparisons, a false alarm in 2,600 seeds.
        for name, truth in (("accuracy", accuracy), ("loss", loss)):
            values = torch.tensor([getattr(run, name) for run in runs]).double()
            assert abs(values.mean() - truth) < 4 * values.std() / math.sqrt(len(runs)) + 1e-6
    assert [(size.samples, size.ensembles) for size in found.sizes] == [(1, 3), (2, 1), (3, 1)]


def test_the_standard_error_is_that_over_new_examples_and_draws():
    torch.manual_seed(1)
    net = fg.Sequential(fg.BinaryLinear(2, 3), head=nn.Linear(3, 3))
    sets = [Split(torch.randn(100, 2), torch.randint(3, (100,))) for _ in range(200)]
    found = [measure_ensembles(net, data, 1, [1, 4], generator=seeded(k)).sizes for k, data in enumerate(sets)]
    for k in range(2):
        for value, error in (("accuracy", "accuracy_error"), ("loss", "loss_error")):
            spread = torch.tensor([getattr(sizes[k], value) for sizes in found]).double().std()
            stated = torch.tensor([getattr(sizes[k], error) for sizes in found]).double().square().mean().sqrt()
            # A standard deviation of 200 numbers is known within 5 %: four times that.
            assert stated == pytest.approx(spread, rel=0.2)


def test_numbers_agree_with_those_of_the_evaluation():
    net, data = small()
    found = measure_ensembles(net, data, 6, [1, 6], generator=seeded())
    whole = evaluate(net, data, 6, generator=seeded())
    assert found.sizes[0].accuracy == pytest.approx(whole.accuracy_1)
    assert found.sizes[0].loss == pytest.approx(whole.expected_loss, rel=1e-5)
    assert found.sizes[1].accuracy == pytest.approx(whole.accuracy_n)
    assert found.sizes[1].loss == pytest.approx(whole.marginal_loss, rel=1e-5)
    single, many, fixed = found.reliability
    assert (single.samples, many.samples, fixed.samples) == (1, 6, None)
    for diagram, accuracy in ((single, whole.accuracy_1), (many, whole.accuracy_n), (fixed, whole.accuracy_deterministic)):
        right = sum(count * (share or 0) for count, share in zip(diagram.count, diagram.accuracy, strict=True))
        assert right / sum(diagram.count) == pytest.approx(accuracy)
    assert sum(single.count) == 6 * sum(many.count) == 6 * sum(fixed.count) == 6 * 40


def test_bins_hold_predictions_by_their_confidence():
    bins = ReliabilityBins(4)
    probabilities = torch.tensor([[0.2, 0.8], [0.5, 0.5], [1.0, 0.0], [0.74, 0.26], [0.25, 0.75]])
    bins.add(probabilities[:2], torch.tensor([1, 1]))
    bins.add(probabilities[2:], torch.tensor([0, 0, 0]))
    found = bins.result(3)
    assert found.edges == [0, 0.25, 0.5, 0.75, 1]
    # 0.5 belongs to the bin that begins there, 1 to the last one.
    assert found.count == [0, 0, 2, 3]
    assert found.confidence == [None, None, pytest.approx(0.62), pytest.approx(0.85)]
    assert found.accuracy == [None, None, 0.5, pytest.approx(2 / 3)]
    assert found.error == pytest.approx((2 * 0.12 + 3 * (0.85 - 2 / 3)) / 5)


def test_the_calibration_error_vanishes_where_confidence_is_the_share_of_right_predictions():
    torch.manual_seed(0)
    confidence = torch.rand(200_000, dtype=torch.float64) / 2 + 0.5
    probabilities = torch.stack([confidence, 1 - confidence], -1)
    labels = (torch.rand(len(confidence), dtype=torch.float64) > confidence).long()
    believed, boasting = ReliabilityBins(), ReliabilityBins()
    believed.add(probabilities, labels)
    sure = torch.stack([confidence.sqrt(), 1 - confidence.sqrt()], -1)
    boasting.add(sure, labels)
    # Eight bins of 25,000: each is off by 0.003 or less, by chance.
    assert believed.result(1).error < 0.005
    assert boasting.result(1).error == pytest.approx((confidence.sqrt() - confidence).mean().item(), abs=0.005)


def test_a_mean_has_its_standard_error():
    values = torch.randn(50)
    mean = Mean()
    for part in values.split(7):
        mean.add(part)
    assert mean.mean == pytest.approx(values.mean().item(), abs=1e-6)
    assert mean.error == pytest.approx((values.std() / math.sqrt(50)).item(), rel=1e-5)
    one = Mean()
    one.add(torch.ones(1))
    assert one.error is None


def test_same_seed_same_numbers_and_the_mode_stays():
    net, data = small()
    net.train()
    first = measure_ensembles(net, data, 3, generator=seeded())
    assert measure_ensembles(net, data, 3, generator=seeded()) == first
    assert measure_ensembles(net, data, 3, generator=seeded(1)) != first
    assert [size.samples for size in first.sizes] == [1, 2, 3, 5]
    assert net.training


def test_one_sample_has_one_diagram():
    net, data = small()
    found = measure_ensembles(net, data, 1, [1], generator=seeded())
    assert [diagram.samples for diagram in found.reliability] == [1, None]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"split": Split(torch.zeros(0, 2), torch.zeros(0).long())}, "the split is empty"),
        ({"samples": 0}, r"measure_ensembles\(samples=0\): at least one"),
        ({"sizes": [0, 2]}, r"numbers of samples \[0, 2\]: give one or more positive ones"),
        ({"sizes": []}, r"numbers of samples \[\]: give one or more positive ones"),
        ({"net": fg.Sequential(fg.BinaryLinear(2, 3), head=nn.Linear(3, 1))}, "the head has one output"),
    ],
)
def test_what_cannot_be_measured_is_refused(change, message):
    net, data = small()
    with pytest.raises(fg.InputError, match=message):
        measure_ensembles(**{"net": net, "split": data, "samples": 2, **change})
