import json

import pytest
import torch
from torch import nn

import flipgrad as fg
from flipgrad.data import Split
from flipgrad.training.metrics import evaluate
from flipgrad.training.predictions import describe


def images(n=50, side=4, channels=1):
    y = torch.arange(n) % 3
    x = torch.randn(n, channels, side, side, generator=torch.Generator().manual_seed(0)) + (y - 1.0).view(-1, 1, 1, 1) / 2
    return Split(x, y)


def image_net(side=4, channels=1, classes=3):
    return fg.Sequential(nn.Flatten(), fg.BinaryLinear(channels * side * side, 8), head=nn.Linear(8, classes))


def point_net():
    return fg.Sequential(fg.BinaryLinear(2, 4), head=nn.Linear(4, 2))


def entropy(probabilities):
    return torch.special.entr(torch.tensor(probabilities)).sum().item()


def test_two_thirds_are_drawn_and_the_rest_are_the_least_certain_of_the_others():
    split, net = images(), image_net()
    result = describe(net, split, 5, seed=3, examples=12, batch_size=16)
    everything = describe(net, split, 5, seed=3, examples=50, batch_size=16)["examples"]
    means = {example["index"]: example["probabilities"] for example in everything}
    assert set(means) == set(range(50))
    drawn = [example["index"] for example in result["examples"] if example["chosen"] == "random"]
    uncertain = [example["index"] for example in result["examples"] if example["chosen"] == "uncertain"]
    assert (len(drawn), len(uncertain)) == (8, 4)
    others = sorted(set(means) - set(drawn), key=lambda index: -entropy(means[index]))
    assert uncertain == others[:4]
    # The draw does not look at the network.
    again = describe(image_net(), split, 5, seed=3, examples=12)["examples"]
    assert [example["index"] for example in again if example["chosen"] == "random"] == drawn


def test_an_example_is_the_input_with_what_the_members_say():
    split = images()
    for example in describe(image_net(), split, 7, seed=0)["examples"]:
        index = example["index"]
        assert example["label"] == split.y[index]
        assert torch.allclose(torch.tensor(example["image"]), split.x[index], atol=1e-4)
        assert example["point"] is None
        members = torch.tensor(example["members"])
        assert members.shape == (7, 3)
        assert torch.allclose(members.sum(1), torch.ones(7), atol=1e-5)
        assert torch.allclose(members.mean(0), torch.tensor(example["probabilities"]), atol=1e-5)


def test_the_histogram_is_that_of_the_members_over_the_whole_split():
    split, samples = images(), 5
    result = describe(image_net(), split, samples, seed=0, examples=50, batch_size=16)
    counts = {True: [0] * samples, False: [0] * samples}
    for example in result["examples"]:
        predicted = torch.tensor(example["probabilities"]).argmax()
        disagree = int((torch.tensor(example["members"]).argmax(1) != predicted).sum())
        counts[bool(predicted == example["label"])][disagree] += 1
    assert result["disagreement"] == {"edges": [0.0, 0.2, 0.4, 0.6, 0.8, 1.0], "correct": counts[True], "wrong": counts[False]}
    assert sum(counts[False]) > 0
    assert any(counts[True][1:])


def test_its_share_of_correct_predictions_is_the_accuracy():
    split = images()
    net = image_net()
    accuracy = evaluate(net, split, 6, generator=torch.Generator().manual_seed(4)).accuracy_n
    assert sum(describe(net, split, 6, seed=4)["disagreement"]["correct"]) / len(split) == pytest.approx(accuracy)


def test_confusions_count_every_example_by_its_class_and_the_ensembles():
    split = images()
    found = describe(image_net(), split, 5, seed=3, examples=50)
    confusion = torch.tensor(found["confusion"])
    means = {example["index"]: torch.tensor(example["probabilities"]).argmax() for example in found["examples"]}
    for label in range(len(confusion)):
        for said in range(len(confusion)):
            expected = sum(int(split.y[index]) == label and int(mean) == said for index, mean in means.items())
            assert confusion[label, said] == expected
    assert confusion.sum() == len(split)


@pytest.mark.parametrize(("samples", "bins"), [(1, 1), (20, 20), (21, 20), (60, 20)])
def test_no_share_rounds_into_the_wrong_bin(samples, bins):
    result = describe(image_net(), images(), samples, seed=0, examples=50)
    histogram = result["disagreement"]
    edges = histogram["edges"]
    assert (len(edges), edges[0], edges[-1]) == (bins + 1, 0.0, 1.0)
    counts = [0] * bins
    for example in result["examples"]:
        predicted = torch.tensor(example["probabilities"]).argmax()
        disagree = int((torch.tensor(example["members"]).argmax(1) != predicted).sum())
        counts[max(b for b in range(bins) if disagree * bins >= b * samples)] += 1
    assert [a + b for a, b in zip(histogram["correct"], histogram["wrong"], strict=True)] == counts


def test_a_class_that_no_member_names_still_counts():
    # Two members, each sure of another class, and both give the third 0.45: the ensemble takes that one.
    head = nn.Linear(1, 3)
    with torch.no_grad():
        p = torch.tensor([[0.54, 0.01, 0.45], [0.01, 0.54, 0.45]]).log()
        head.weight.copy_(((p[0] - p[1]) / 2)[:, None])
        head.bias.copy_((p[0] + p[1]) / 2)
    net = fg.Sequential(fg.BinaryLinear(1, 1), head=head)
    split = Split(torch.zeros(40, 1), torch.full((40,), 2))
    result = describe(net, split, 2, seed=0, examples=0)
    assert sum(result["disagreement"]["correct"]) == sum(result["disagreement"]["correct"][1:]) > 0


def test_points_and_long_vectors_are_no_images():
    split = Split(torch.randn(9, 2), torch.arange(9) % 2)
    for example in describe(point_net(), split, 3, seed=0)["examples"]:
        assert example["image"] is None
        assert torch.allclose(torch.tensor(example["point"]), split.x[example["index"]], atol=1e-4)
    net = fg.Sequential(fg.BinaryLinear(30, 4), head=nn.Linear(4, 2))
    for example in describe(net, Split(torch.randn(9, 30), torch.arange(9) % 2), 3, seed=0)["examples"]:
        assert example["image"] is example["point"] is None


def test_images_without_channels_and_large_ones():
    net = fg.Sequential(nn.Flatten(), fg.BinaryLinear(100 * 50, 4), head=nn.Linear(4, 2))
    (example,) = describe(net, Split(torch.ones(1, 100, 50), torch.zeros(1).long()), 2, seed=0)["examples"]
    assert torch.equal(torch.tensor(example["image"]), torch.ones(1, 64, 32))


def test_same_seed_same_numbers_whatever_the_global_state_and_mode():
    split = images()
    net = image_net().train()
    first = describe(net, split, 4, seed=1)
    torch.manual_seed(99)
    assert describe(net, split, 4, seed=1) == first
    assert net.training
    assert describe(net, split, 4, seed=2) != first
    assert json.loads(json.dumps(first, allow_nan=False)) == first


def test_examples_are_at_most_those_there_are_and_may_be_none():
    assert len(describe(image_net(), images(5), 2, seed=0)["examples"]) == 5
    assert describe(image_net(), images(5), 2, seed=0, examples=0)["examples"] == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"split": images(0)}, "the split is empty"),
        ({"samples": 0}, r"describe\(samples=0\): at least one"),
        ({"examples": -1}, r"describe\(examples=-1\): give 0 or more"),
        ({"net": image_net(classes=1)}, "the head has one output"),
    ],
)
def test_what_cannot_be_described_is_refused(change, message):
    arguments = {"net": image_net(), "split": images(), "samples": 2, "examples": 3, **change}
    with pytest.raises(fg.InputError, match=message):
        describe(seed=0, **arguments)


def test_a_diverged_network_is_refused():
    net = image_net()
    with torch.no_grad():
        net.head.bias.fill_(torch.nan)
    with pytest.raises(fg.InputError, match="outputs hold NaN or inf"):
        describe(net, images(), 2, seed=0)
