"""The site in a real browser: links, images, the console, and that nothing sticks out of a narrow or a wide window."""

import importlib.util
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
SITE = DOCS / "build" / "html"


@pytest.fixture(scope="module")
def look():
    spec = importlib.util.spec_from_file_location("look", DOCS / "look.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_broken_links_are_found(look, tmp_path):
    (tmp_path / "a.html").write_text(
        '<a href="b.html#here">1</a><a href="b.html#there">2</a><a href="c.html">3</a><p id="top2">'
    )
    (tmp_path / "b.html").write_text('<p id="here"><img src="no.png"><a href="https://example.org/x">4</a>')
    assert sorted(look.broken_links(tmp_path)) == ["a.html: b.html#there: no such place", "a.html: c.html", "b.html: no.png"]


@pytest.mark.slow
def test_what_is_wrong_with_a_page_is_told(look, tmp_path):
    if look.BROWSER is None:
        pytest.skip("needs chromium, chromium-browser or google-chrome on the PATH")
    site = tmp_path / "site"
    site.mkdir()
    (site / "good.html").write_text("<!DOCTYPE html><title>good</title><link rel=icon href='data:,'><p>Hello")
    bad = "<link rel=icon href='data:,'><div style='width:600px'>wide</div><script>nothing()</script>"
    (site / "bad.html").write_text(f"<!DOCTYPE html><title>bad</title>{bad}")
    found = look.looked_at(site, tmp_path / "shots")
    assert not any(problem.startswith("good") for problem in found)
    assert any("bad.html, 375 px: it is 6" in problem for problem in found)
    assert any("nothing is not defined" in problem for problem in found)


@pytest.mark.slow
def test_every_page_of_the_site(look, tmp_path):
    if look.BROWSER is None:
        pytest.skip("needs chromium, chromium-browser or google-chrome on the PATH")
    if not SITE.is_dir():
        pytest.skip("the site is not built: make docs")
    assert look.looked_at(SITE, tmp_path / "shots") == []
