"""A validation part is drawn from the training part, and from nothing else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flipgrad.data import DataSet, Split, digits
from flipgrad.errors import InputError


def numbered(labels):
    return Split(torch.arange(float(len(labels))), torch.tensor(labels))


@given(st.lists(st.integers(0, 3), min_size=10, max_size=60), st.floats(0.1, 0.9), st.integers(0, 5))
def test_parts_are_disjoint_complete_and_have_every_class_in_proportion(labels, share, seed):
    whole = numbered(labels)
    rest, part = whole.divide(share, seed=seed)
    assert len(part) == round(share * len(whole))
    assert torch.equal(torch.cat([rest.x, part.x]).sort().values, whole.x)
    for side in rest, part:
        assert torch.equal(side.x, side.x.sort().values)
        assert torch.equal(side.y, whole.y[side.x.long()])
    wanted = whole.y.bincount(minlength=4) * len(part) / len(whole)
    assert ((part.y.bincount(minlength=4) - wanted).abs() < 1 + 1e-5).all()


def test_every_example_is_as_likely_as_any_other():
    """Of 1,000 seeds each example is chosen in 20 %, within 4.5 standard errors: a false alarm in 7,000 for the 20 examples."""
    whole = numbered([0] * 5 + [1] * 15)
    chosen = torch.zeros(20)
    for seed in range(1000):
        chosen[whole.divide(0.2, seed=seed)[1].x.long()] += 1
    assert ((chosen / 1000 - 0.2).abs() < 4.5 * (0.2 * 0.8 / 1000) ** 0.5).all()


def test_validation_comes_out_of_training_and_the_seed_decides_which():
    data = digits()
    one, same, other = data.with_validation(), data.with_validation(0.1, seed=0), data.with_validation(seed=1)
    assert (len(one.train), len(one.validation)) == (1293, 144)
    assert torch.equal(one.validation.x, same.validation.x)
    assert not torch.equal(one.validation.x, other.validation.x)
    assert one.test is data.test
    assert data.validation is None
    assert (one.name, one.classes, one.background) == (data.name, data.classes, data.background)


@pytest.mark.parametrize("share", [0.0, 1.0, -0.1, 2.0, float("nan"), 0.01, 0.99])
def test_a_share_that_leaves_a_part_empty_is_refused(share):
    with pytest.raises(InputError, match="of 10 examples leaves a part empty; give a share between 0 and 1"):
        numbered([0, 1] * 5).divide(share)


def test_a_second_validation_part_is_refused():
    data = DataSet("pair", numbered([0, 1] * 5), numbered([0, 1]), classes=2, background=0.0).with_validation()
    with pytest.raises(InputError, match="'pair' has a validation part already; split the original"):
        data.with_validation()
