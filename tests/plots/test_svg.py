import re
from xml.etree import ElementTree

from matplotlib.figure import Figure

from flipgrad.plots.charts import inline
from flipgrad.plots.style import BLUE, defaults


def figure(text="epoch"):
    with defaults():
        drawing = Figure(figsize=(4, 2), layout="constrained")
        axes = drawing.subplots()
        axes.plot([1, 2, 3], color=BLUE, marker="o")
        axes.set_xlabel(text, parse_math=False)
    return drawing


def test_it_is_one_svg_element_in_the_colours_of_the_page():
    text = str(inline(figure(), "losses"))
    root = ElementTree.fromstring(text)
    assert (root.tag, root.get("viewBox"), root.get("aria-hidden")) == ("svg", "0 0 288 144", "true")
    assert "var(--blue)" in text
    assert "var(--ink)" in text
    assert BLUE.lower() not in text
    assert not {"style", "script", "metadata"} & {element.tag for element in root.iter()}


def test_text_stays_text_in_the_font_of_the_page():
    text = str(inline(figure(), "losses"))
    assert "epoch" in [element.text for element in ElementTree.fromstring(text).iter("text")]
    assert "DejaVu" not in text


def test_nothing_is_loaded():
    text = str(inline(figure(), "losses"))
    assert "http" not in text
    assert "<!" not in text


def test_figures_can_share_a_page():
    ids = [re.findall(r'\bid="([^"]+)"', str(inline(figure(), key))) for key in ("a", "b")]
    assert not set(ids[0]) & set(ids[1])
    text = str(inline(figure(), "a"))
    references = re.findall(r'(?:href="#|url\(#)([^")]+)', text)
    assert references
    assert set(references) <= set(ids[0])


def test_the_same_bytes_each_time():
    assert inline(figure(), "a") == inline(figure(), "a")


def test_strings_are_escaped():
    text = str(inline(figure("</svg><script>alert(1)</script>"), "a"))
    assert "<script" not in text
    assert text.count("</svg>") == 1
