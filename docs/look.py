"""Looks at every page of the site, or at one page, in chromium: ``python docs/look.py docs/build/html shots``.

Links must lead to pages and places that exist, images must load, the console must stay empty, and nothing may stick out of a
window that is 375 or 1280 pixels wide. Screenshots are left in the second folder.
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
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin, urlparse

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WIDTHS = (375, 1280)
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
FRAME = """<!DOCTYPE html><title>waiting</title><body style="margin:0">
<iframe id="f" src="PAGE" style="border:0;width:WIDTHpx;height:HEIGHTpx"></iframe><script>
const f = document.getElementById("f");
f.onload = () => setTimeout(() => {
  const d = f.contentDocument, broken = [...d.images].filter(i => i.complete && !i.naturalWidth).map(i => i.src);
  document.title = JSON.stringify({broken, wide: d.documentElement.scrollWidth, pending: [...d.images].length});
}, 1500);
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


def look(page: str, address: str, width: int, shots: Path, profile: Path, frames: Path) -> list[str]:
    """What is wrong with a page at a width; its picture goes to ``shots``."""
    assert BROWSER is not None
    frame = frames / "_frame.html"
    frame.write_text(FRAME.replace("PAGE", f"/{page}").replace("WIDTH", str(width)).replace("HEIGHT", "2400"))
    shot = shots / f"{page.replace('/', '-').removesuffix('.html')}-{width}.png"
    command = [BROWSER, *OPTIONS, f"--user-data-dir={profile}", f"--window-size={max(width, 500)},2400"]
    url = f"{address}/_frame.html"
    done = subprocess.run(
        [*command, "--dump-dom", f"--screenshot={shot}", url], capture_output=True, text=True, timeout=180, check=False
    )
    problems = [line.split("CONSOLE", 1)[1] for line in done.stderr.splitlines() if "CONSOLE" in line]
    title = re.search(r"<title>(\{.*?\})</title>", done.stdout)
    if title is None:
        return [*problems, "it did not load"]
    found = json.loads(title[1].replace("&amp;", "&"))
    problems += [f"image {image}" for image in found["broken"]]
    if found["wide"] > width:
        problems.append(f"it is {found['wide']} pixels wide")
    return [f"{page}, {width} px: {problem}" for problem in problems]


class Silent(SimpleHTTPRequestHandler):
    """Serves files, and says nothing."""

    def log_message(self, *_: object) -> None:
        """Nothing."""


def looked_at(site: Path, shots: Path, pages: list[str] | None = None) -> list[str]:
    """All that is wrong with the ``pages``, by default every page."""
    shots.mkdir(parents=True, exist_ok=True)
    every = sorted(path.relative_to(site).as_posix() for path in site.rglob("*.html"))
    chosen = pages or [name for name in every if name != "_frame.html"]
    problems = broken_links(site)
    handler = functools.partial(Silent, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, tempfile.TemporaryDirectory() as profile:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for page in chosen:
            for width in WIDTHS:
                address = f"http://127.0.0.1:{server.server_port}"
                problems += look(page, address, width, shots, Path(profile), site)
        server.shutdown()
    (site / "_frame.html").unlink(missing_ok=True)
    return problems


if __name__ == "__main__":
    if BROWSER is None:
        sys.exit("needs chromium, chromium-browser or google-chrome on the PATH: apt-get install chromium")
    wrong = looked_at(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:] or None)
    sys.exit("\n".join(wrong) or None)
