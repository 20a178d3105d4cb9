"""Looks at every page of the site, or at some, in chromium: ``python docs/look.py docs/build/html shots [PAGE ...]``.

Links must lead to pages and places that exist, images must load, the console must stay empty, and nothing may stick out of a
window that is 375 or 1280 pixels wide, light or dark. Screenshots of whole pages are left in the second folder. The function
``found`` asks the site's search.
"""

from __future__ import annotations

import functools
import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote_plus, unquote, urldefrag, urljoin, urlparse

from PIL import Image

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# Widths in pixels, with themes.
VIEWS = ((375, "light"), (1280, "light"), (1280, "dark"))
# Pixels: what a screenshot holds at most.
TALLEST = 16_000
FRAME_NAME = "_frame.html"
OPTIONS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--enable-logging=stderr",
    "--virtual-time-budget=8000",
]
# A page in a frame of a width, as a browser window cannot be as narrow as a telephone. What it finds it writes into its title.
# The theme is kept where the site's own switch keeps it. The frame becomes as tall as the page.
FRAME = """<!DOCTYPE html><title>waiting</title><body style="margin:0">
<iframe id="f" style="border:0;width:WIDTHpx;height:900px"></iframe><script>
localStorage.setItem("theme", "THEME");
const f = document.getElementById("f");
f.onload = () => setTimeout(() => {
  const d = f.contentDocument, broken = [...d.images].filter(i => i.complete && !i.naturalWidth).map(i => i.src);
  const tall = Math.min(TALLEST, d.documentElement.scrollHeight);
  f.style.height = tall + "px";
  document.title = JSON.stringify({broken, wide: d.documentElement.scrollWidth, tall});
}, 1500);
f.src = "PAGE";
</script>"""


class Page(HTMLParser):
    """The links of a page, and the places in it that a link can lead to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.places: set[str] = {"", "top"}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keep what a link or a place is."""
        found = dict(attrs)
        self.places |= {value for key in ("id", "name") if (value := found.get(key))}
        self.links += [value for key in ("href", "src") if (value := found.get(key))]


def broken_links(site: Path) -> list[str]:
    """The links within the site that lead nowhere."""
    pages = {path.relative_to(site).as_posix(): Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    found = []
    for name, page in pages.items():
        for link in page.links:
            address, place = urldefrag(urljoin(f"http://site/{name}", link))
            target = unquote(urlparse(address).path.lstrip("/"))
            if urlparse(address).netloc != "site":
                continue
            target = target + "index.html" if target.endswith("/") or not target else target
            if not (site / target).is_file():
                found.append(f"{name}: {link}")
            elif target in pages and unquote(place) not in pages[target].places:
                found.append(f"{name}: {link}: no such place")
    return found


class Silent(SimpleHTTPRequestHandler):
    """Serves files, and says nothing."""

    def log_message(self, *_: object) -> None:
        """Nothing."""


class Server(NamedTuple):
    """A site that is served: its folder, its address, and the folder of the browser's own files."""

    site: Path
    address: str
    profile: Path


def browse(address: str, profile: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """What chromium makes of an address: its elements on standard output, its console on standard error."""
    if BROWSER is None:
        sys.exit("needs chromium, chromium-browser or google-chrome on the PATH: apt-get install chromium")
    command = [BROWSER, *OPTIONS, f"--user-data-dir={profile}", *options, "--dump-dom", address]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def look(page: str, view: tuple[int, str], server: Server, shots: Path) -> list[str]:
    """What is wrong with a page in a view; its picture goes to ``shots``."""
    width, theme = view
    texts = {"PAGE": f"/{page}", "WIDTH": str(width), "THEME": theme, "TALLEST": str(TALLEST)}
    frame = FRAME
    for name, text in texts.items():
        frame = frame.replace(name, text)
    (server.site / FRAME_NAME).write_text(frame, encoding="utf-8")
    dark = "" if theme == "light" else f"-{theme}"
    shot = shots / f"{page.replace('/', '-').removesuffix('.html')}-{width}{dark}.png"
    size = f"--window-size={max(width, 500)},{TALLEST}"
    done = browse(f"{server.address}/{FRAME_NAME}", server.profile, size, f"--screenshot={shot}")
    problems = [line.split("CONSOLE", 1)[1] for line in done.stderr.splitlines() if "CONSOLE" in line]
    title = re.search(r"<title>(\{.*?\})</title>", done.stdout)
    if title is None:
        problems.append("it did not load")
    else:
        told = json.loads(title[1].replace("&amp;", "&"))
        problems += [f"image {image}" for image in told["broken"]]
        if told["wide"] > width:
            problems.append(f"it is {told['wide']} pixels wide")
        with Image.open(shot) as whole:
            whole.crop((0, 0, width, told["tall"])).save(shot)
    return [f"{page}, {width} px, {theme}: {problem}" for problem in problems]


def hits(question: str, server: Server) -> list[str]:
    """The pages that the site's search finds for a question, best first."""
    done = browse(f"{server.address}/search.html?q={quote_plus(question)}", server.profile)
    links = re.findall(r'<li[^>]*><a href="([^"?#]+\.html)[^"]*"', done.stdout.partition('class="search"')[2])
    return list(dict.fromkeys(links))


@contextmanager
def served(site: Path) -> Iterator[Server]:
    """Serve a folder while inside."""
    handler = functools.partial(Silent, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, tempfile.TemporaryDirectory() as profile:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield Server(site, f"http://127.0.0.1:{server.server_port}", Path(profile))
        finally:
            server.shutdown()
            (site / FRAME_NAME).unlink(missing_ok=True)


def looked_at(site: Path, shots: Path, pages: list[str] | None = None) -> list[str]:
    """All that is wrong with the ``pages``, by default every page."""
    shots.mkdir(parents=True, exist_ok=True)
    chosen = pages or sorted(path.relative_to(site).as_posix() for path in site.rglob("*.html"))
    problems = broken_links(site)
    with served(site) as server:
        for page in chosen:
            for view in VIEWS:
                problems += look(page, view, server, shots)
    return problems


def found(site: Path, questions: Iterable[str]) -> dict[str, list[str]]:
    """The pages that the site's search finds, best first, by question."""
    with served(site) as server:
        return {question: hits(question, server) for question in questions}


if __name__ == "__main__":
    wrong = looked_at(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:] or None)
    sys.exit("\n".join(wrong) or None)
