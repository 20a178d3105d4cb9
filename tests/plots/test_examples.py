from base64 import b64decode
from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from flipgrad.plots.report import CLASSES, MARKS, cards, picture
from flipgrad.plots.runs import Example


def example(probabilities, label=0, members=None, image=None, point=None):
    members = np.array([probabilities] if members is None else members, dtype=float)
    return Example(7, label, list(probabilities), members, image, point, "random")


def pixels(uri):
    head, _, content = uri.partition(",")
    assert head == "data:image/png;base64"
    return np.array(Image.open(BytesIO(b64decode(content))))


def test_a_grey_image_goes_from_black_to_white():
    shown = pixels(picture(np.array([[[-1.0, 0.0], [0.5, 1.0]]]), -1.0, 1.0))
    assert shown.tolist() == [[0, 128], [191, 255]]


def test_three_channels_are_colours_and_others_are_averaged():
    image = np.zeros((3, 1, 2))
    image[0, 0, 0] = image[2, 0, 1] = 1
    assert pixels(picture(image, 0.0, 1.0)).tolist() == [[[255, 0, 0], [0, 0, 255]]]
    assert pixels(picture(image[:2], 0.0, 1.0)).tolist() == [[128, 0]]


def test_images_share_one_range_of_values():
    dark, bright = (example([0.5, 0.5], image=np.full((1, 1, 1), value)) for value in (-3.0, 5.0))
    assert [pixels(card.picture).item() for card in cards([dark, bright], [])] == [0, 255]
    # An image of one value only.
    assert pixels(cards([dark], [])[0].picture).item() == 0


def test_the_likeliest_classes_are_shown_and_the_label_in_any_case():
    (card,) = cards([example([0.02, 0.3, 0.25, 0.2, 0.13, 0.1], label=0)], ["a", "b", "c", "d", "e"])
    assert len(card.bars) == CLASSES
    assert [bar.name for bar in card.bars] == ["b", "c", "d", "a"]
    assert [(bar.is_predicted, bar.is_label) for bar in card.bars] == [
        (True, False),
        (False, False),
        (False, False),
        (False, True),
    ]
    assert (card.predicted, card.label, card.correct) == ("b", "a", False)
    (card,) = cards([example([0.1, 0.9], label=1)], [])
    assert [bar.name for bar in card.bars] == ["1", "0"]
    assert card.correct


def test_every_member_is_a_stroke():
    members = [[0.9, 0.1], [0.2, 0.8], [0.7, 0.3]]
    (card,) = cards([example([0.6, 0.4], members=members)], [])
    assert card.bars[0].marks == [0.2, 0.7, 0.9]
    assert (card.agreeing, card.members) == (2, 3)


def test_of_many_members_the_extremes_and_some_between_are_marked():
    share = np.linspace(0, 1, 1001)
    (card,) = cards([example([0.5, 0.5], members=np.stack([share, 1 - share], 1))], [])
    marks = card.bars[0].marks
    assert (len(marks), marks[0], marks[-1]) == (MARKS, 0, 1)
    assert marks == sorted(marks)


def test_an_example_without_members():
    (card,) = cards([example([0.5, 0.5], members=np.empty((0, 2)))], [])
    assert (card.members, card.bars[0].marks) == (0, [])


def test_points_of_a_plane_have_their_place_in_it():
    points = [[0.0, 0.0], [2.0, 1.0], [1.0, 4.0]]
    shown = cards([example([0.5, 0.5], point=point) for point in points], [])
    assert [card.place for card in shown] == [(0.0, 0.0), (1.0, 0.25), (0.5, 1.0)]
    assert shown[1].coordinates == "(2, 1)"
    assert cards([example([0.5, 0.5], point=[1.0, 1.0])], [])[0].place == (0.0, 0.0)


@pytest.mark.parametrize("point", [[1.0], [1.0, 2.0, 3.0]])
def test_other_points_are_told_by_their_coordinates(point):
    (card,) = cards([example([0.5, 0.5], point=point)], [])
    assert card.place is None
    assert card.coordinates == f"({', '.join(f'{value:g}' for value in point)})"
