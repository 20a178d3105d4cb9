import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize

from flipgrad.plots.labels import Box, keep_apart

wanted = st.lists(st.floats(0, 100), min_size=1, max_size=12)


@given(wanted)
def test_labels_keep_gaps_bounds_and_order(values):
    found = keep_apart(values, 5.0, 0.0, 100.0)
    assert all(-1e-6 <= value <= 100 + 1e-6 for value in found)
    pairs = sorted(zip(values, found, strict=True))
    assert all(after[1] - before[1] >= 5 - 1e-6 or after[0] == before[0] for before, after in itertools.pairwise(pairs))
    assert all(after - before >= 5 - 1e-6 for before, after in itertools.pairwise(sorted(found)))


def test_what_has_room_stays():
    assert keep_apart([50.0, 10.0, 30.0], 5.0, 0.0, 100.0) == [50.0, 10.0, 30.0]


@pytest.mark.parametrize(
    "values", [[10.0, 10.0, 12.0, 40.0], [0.0, 1.0, 2.0], [99.0, 98.0, 60.0, 60.0], [50.0, 52.0, 58.0, 59.0]]
)
def test_labels_move_as_little_as_possible(values):
    found = keep_apart(values, 5.0, 0.0, 100.0)
    order = sorted(range(len(values)), key=lambda index: values[index])
    gaps = [{"type": "ineq", "fun": lambda x, a=a, b=b: x[b] - x[a] - 5.0} for a, b in itertools.pairwise(order)]
    start = [5.0 * order.index(index) for index in range(len(values))]
    best = minimize(
        lambda x: sum((x - values) ** 2), start, constraints=gaps, bounds=[(0, 100)] * len(values), method="SLSQP", tol=1e-10
    )
    assert best.success
    assert found == pytest.approx(best.x, abs=1e-3)


def test_the_gap_shrinks_where_there_is_no_room():
    assert sorted(keep_apart([3.0] * 5, 5.0, 0.0, 8.0)) == pytest.approx([0, 2, 4, 6, 8])


def test_boxes():
    assert Box(0, 0, 2, 2).overlaps(Box(1, 1, 5, 5))
    assert not Box(0, 0, 2, 2).overlaps(Box(2, 0, 5, 5))
    assert not Box(0, 0, 2, 2).overlaps(Box(0, 3, 2, 5))
    assert Box(0, 0, 2, 2).within(Box(0, 0, 2, 3))
    assert not Box(0, 0, 2, 2).within(Box(0, 0, 1, 3))
