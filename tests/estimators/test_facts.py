from pathlib import Path

import pytest

from flipgrad.estimators import ESTIMATORS, facts

DOCS = Path(__file__).parents[2] / "docs" / "estimators.md"


@pytest.mark.parametrize(("counts", "text"), [([1, 1], "1"), ([1, 2], "L"), ([2, 4], "2L"), ([3, 5], "2L + 1")])
def test_passes_are_written_as_a_function_of_the_depth(counts, text):
    assert facts._linear(*counts) == text


def test_every_estimator_has_a_row():
    rows = {row[0]: row for row in facts.rows()}
    assert list(rows) == list(ESTIMATORS)
    assert rows["arm"] == ("arm", "yes", "2L + 1", "no", "no", "Yin, Zhou 2019")
    assert rows["psa"][1:5] == ("no; one hidden layer", "1", "no", "yes")


def test_the_documentation_shows_the_table_as_it_is():
    assert facts.markdown() in DOCS.read_text(), "run: flipgrad estimators --markdown, and put it into docs/estimators.md"


def test_the_documentation_explains_every_estimator():
    text = DOCS.read_text()
    for kind in ESTIMATORS.values():
        assert f"`{kind.__name__}" in text, f"docs/estimators.md says nothing of {kind.__name__}"
