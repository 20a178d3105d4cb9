"""The page in a real browser: what it shows, and that nothing runs in it or is loaded by it."""

from __future__ import annotations

import re
import shutil
import subprocess
import threading
from html.parser import HTMLParser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

import matplotlib.image
import pytest
from run_files import write_evil_run, write_run

from flipgrad.plots import report

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs chromium, chromium-browser or google-chrome on the PATH")

OPTIONS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--enable-logging=stderr",
    "--virtual-time-budget=2000",
]
POLICY = re.compile(r'<meta http-equiv="Content-Security-Policy"[^>]*>')


class Shown(NamedTuple):
    """What a browser made of a page: its elements and text, and the messages on its console."""

    dom: str
    console: list[str]

    @property
    def text(self) -> str:
        words: list[str] = []
        parser = HTMLParser()
        parser.handle_data = words.append
        parser.feed(self.dom)
        return " ".join(" ".join(words).split())


def browse(page: Path, profile: Path, *options: str) -> Shown:
    command = [BROWSER, *OPTIONS, f"--user-data-dir={profile}", *options, page.as_uri()]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return Shown(result.stdout, [line for line in result.stderr.splitlines() if "CONSOLE" in line])


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return report(write_run(tmp_path_factory.mktemp("run")))


def test_the_headline_is_shown_and_nothing_complains(page, tmp_path):
    shown = browse(page, tmp_path / "profile", "--dump-dom")
    assert shown.console == []
    assert "averaging 4 samples classifies 96.17% correctly; a single sample 92.12%" in shown.text
    assert "95.33%" in shown.text
    assert shown.dom.count("<figure") == 11
    assert "<title>PSA on digits – flipgrad</title>" in shown.dom


# A desktop's width and the least that the browser opens, in light and dark: the page's colour, and the project's.
PAINTED = {
    "light": (1280, "1", (251, 251, 250), {(0, 114, 178), (213, 94, 0), (0, 158, 115)}),
    "dark": (500, "0", (18, 21, 24), {(86, 180, 233), (240, 129, 58), (47, 197, 151)}),
}


@pytest.mark.parametrize(("width", "scheme", "paper", "colours"), PAINTED.values(), ids=PAINTED)
def test_figures_and_pictures_are_painted(page, tmp_path, width, scheme, paper, colours):
    look = (f"--window-size={width},3000", f"--blink-settings=preferredColorScheme={scheme}")
    browse(page, tmp_path / "profile", f"--screenshot={tmp_path / 'page.png'}", *look)
    image = (matplotlib.image.imread(tmp_path / "page.png")[..., :3] * 255).round().astype(int)
    assert image.shape[1] == width
    for colour in colours:
        assert (image == colour).all(-1).any(), colour
    # Nothing sticks out: the page's margin on the right is empty.
    assert (image[:, -8:] == paper).all()


def test_strings_of_the_files_stay_strings(tmp_path):
    shown = browse(report(write_evil_run(tmp_path / "run")), tmp_path / "profile", "--dump-dom")
    assert shown.console == []
    assert "<script" not in shown.dom
    assert not re.search(r"<[^>]*\sonerror=[^>\"]*>", re.sub(r'"[^"]*"', '""', shown.dom))
    assert "<title>evil</title>" not in shown.dom
    assert "document.title='evil'" in shown.text


@pytest.fixture
def server():
    """Records every path that is asked for."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Silent."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}", asked
        running.shutdown()
        thread.join()


@pytest.mark.parametrize("protected", [True, False], ids=["with its policy", "without"])
def test_the_policy_would_stop_what_got_through_the_escaping(page, tmp_path, server, protected):
    address, asked = server
    intruder = f"""<script>document.title = "intruder"</script>
        <img src="{address}/image"><link rel="stylesheet" href="{address}/css">
        <iframe src="{address}/frame"></iframe><script src="{address}/script"></script></body>"""
    text = page.read_text(encoding="utf-8").replace("</body>", intruder)
    changed = tmp_path / "changed.html"
    changed.write_text(text if protected else POLICY.sub("", text), encoding="utf-8")
    shown = browse(changed, tmp_path / "profile", "--dump-dom")
    # Without the policy all of it happens: the test would notice.
    assert ("<title>intruder</title>" in shown.dom) is not protected
    assert {"/image", "/css", "/frame", "/script"} & set(asked) == (
        set() if protected else {"/image", "/css", "/frame", "/script"}
    )
    assert any("Content Security Policy" in line for line in shown.console) is protected
