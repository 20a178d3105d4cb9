"""The site as it is built, in a real browser: links, images, the console, both themes, and what its search finds.

``make test-all`` builds it once, without a warning; without Sphinx, or without a browser, these tests are skipped and say so.
"""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
# What a new user asks, and where it is answered: the page must be among the first hits of the search.
FIRST_HITS = 3
ANSWERS = {
    "which estimator": "choose/estimator.html",
    "what it costs": "choose/estimator.html",
    "noise scale": "choose/noise.html",
    "learning rate": "choose/rate.html",
    "loss does not fall": "choose/trouble.html",
    "uncertainty": "tutorials/lesson_7_uncertainty.html",
    "skip connections": "tutorials/lesson_2_your_own_network.html",
    "shipping a net": "guide/shipping.html",
    "adding an estimator": "tutorials/lesson_4_invent_an_estimator.html",
}

# One process builds the site, and looks at it.
pytestmark = pytest.mark.xdist_group("built site")


@pytest.fixture(scope="module")
def look():
    spec = importlib.util.spec_from_file_location("look", DOCS / "look.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def browser(look):
    if look.BROWSER is None:
        pytest.skip("needs chromium, chromium-browser or google-chrome on the PATH: apt-get install chromium")
    return look


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built as ``make docs`` does from what is in git: no page is left from before."""
    if importlib.util.find_spec("sphinx") is None:
        pytest.skip("needs Sphinx: pip install 'flipgrad[docs]', or make docs")
    folder = tmp_path_factory.mktemp("clone")
    generated = shutil.ignore_patterns("build", "tutorials", "reference", "paper.md", "__pycache__")
    source = shutil.copytree(DOCS, folder / "docs", ignore=generated)
    for name in ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"):
        shutil.copy(DOCS.parent / name, folder)
    options = ["-W", "--keep-going", "-n", "-q", "-b", "html"]
    command = [sys.executable, "-m", "sphinx", *options, str(source), str(folder / "html")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "html"


def test_broken_links_are_found(look, tmp_path):
    (tmp_path / "a.html").write_text(
        '<a href="b.html#here">1</a><a href="b.html#there">2</a><a href="c.html">3</a><p id="top2">'
    )
    (tmp_path / "b.html").write_text('<p id="here"><img src="no.png"><a href="https://example.org/x">4</a>')
    assert sorted(look.broken_links(tmp_path)) == ["a.html: b.html#there: no such place", "a.html: c.html", "b.html: no.png"]


@pytest.mark.slow
def test_what_is_wrong_with_a_page_is_told(browser, tmp_path):
    site = tmp_path / "site"
    site.mkdir()
    (site / "good.html").write_text("<!DOCTYPE html><title>good</title><link rel=icon href='data:,'><p>Hello")
    bad = "<link rel=icon href='data:,'><div style='width:600px'>wide</div><script>nothing()</script>"
    (site / "bad.html").write_text(f"<!DOCTYPE html><title>bad</title>{bad}")
    found = browser.looked_at(site, tmp_path / "shots")
    assert not any(problem.startswith("good") for problem in found)
    assert any("bad.html: 608 pixels wide in 375" in problem for problem in found)
    assert any("nothing is not defined" in problem for problem in found)
    assert {path.name for path in (tmp_path / "shots").iterdir()} >= {
        f"good-{view}.png" for view in ("375-light", "1280-light", "1280-dark")
    }


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_needs_no_network(site):
    assert (site / "_static" / "mathjax" / "tex-chtml.js").is_file()
    for page in site.rglob("*.html"):
        assert 'src="http' not in page.read_text(encoding="utf-8"), page


@pytest.mark.slow
def test_every_page_of_the_site(browser, site, tmp_path):
    assert browser.looked_at(site, tmp_path / "shots") == []


@pytest.mark.slow
def test_the_search_finds_the_answers(browser, site):
    found = browser.found(site, ANSWERS)
    assert {question: hits[:FIRST_HITS] for question, hits in found.items() if ANSWERS[question] not in hits[:FIRST_HITS]} == {}
