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
    "--virtual-time-budget=12000",
]
# A page in frames side by side, one for each view, as a window of a browser cannot be as narrow as a telephone. A theme is kept
# where the site's own switch keeps it. A frame becomes as tall as its page. What is found is written into the title.
FRAMES = """<!DOCTYPE html><title>waiting</title><body style="margin:0;display:flex;align-items:flex-start"><script>
const told = [], views = VIEWS;
function show(number) {
  if (number == views.length) { document.title = JSON.stringify(told); return; }
  localStorage.setItem("theme", views[number][1]);
  const f = document.createElement("iframe");
  f.style = "border:0;flex:none;height:900px;width:" + views[number][0] + "px";
  f.onload = () => setTimeout(() => {
    const d = f.contentDocument, broken = [...d.images].filter(i => i.complete && !i.naturalWidth).map(i => i.src);
    const tall = Math.min(TALLEST, d.documentElement.scrollHeight);
    f.style.height = tall + "px";
    told.push({broken, wide: d.documentElement.scrollWidth, tall});
    show(number + 1);
  }, 1500);
  f.src = "PAGE";
  document.body.append(f);
}
show(0);
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


def look(page: str, server: Server, shots: Path) -> list[str]:
    """What is wrong with a page; its pictures go to ``shots``."""
    frames = FRAMES.replace("VIEWS", json.dumps(VIEWS)).replace("TALLEST", str(TALLEST)).replace("PAGE", f"/{page}")
    (server.site / FRAME_NAME).write_text(frames, encoding="utf-8")
    whole = shots / "whole.png"
    size = f"--window-size={sum(width for width, _ in VIEWS)},{TALLEST}"
    done = browse(f"{server.address}/{FRAME_NAME}", server.profile, size, f"--screenshot={whole}")
    problems = [line.split("CONSOLE", 1)[1] for line in done.stderr.splitlines() if "CONSOLE" in line]
    title = re.search(r"<title>(\[.*?\])</title>", done.stdout)
    if title is None:
        return [f"{page}: {problem}" for problem in (*problems, "it did not load")]
    left = 0
    for (width, theme), told in zip(VIEWS, json.loads(title[1].replace("&amp;", "&")), strict=True):
        problems += [f"image {image}" for image in told["broken"]]
        if told["wide"] > width:
            problems.append(f"{told['wide']} pixels wide in {width}")
        with Image.open(whole) as picture:
            picture.crop((left, 0, left + width, told["tall"])).save(
                shots / f"{page.replace('/', '-').removesuffix('.html')}-{width}-{theme}.png"
            )
        left += width
    whole.unlink()
    return [f"{page}: {problem}" for problem in problems]


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
            problems += look(page, server, shots)
    return problems


def found(site: Path, questions: Iterable[str]) -> dict[str, list[str]]:
    """The pages that the site's search finds, best first, by question."""
    with served(site) as server:
        return {question: hits(question, server) for question in questions}


if __name__ == "__main__":
    wrong = looked_at(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:] or None)
    sys.exit("\n".join(wrong) or None)
