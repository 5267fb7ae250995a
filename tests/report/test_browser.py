"""The page in a real browser: it asks for nothing, and is readable in light, dark, small, printed.

Its policy lets nothing in, so a browser reports each refused request on the console: silence means
that the page made none.
"""

import html
import json
import re
import subprocess

import pytest

from indpriv.errors import InputError
from indpriv.report import page as pages
from indpriv.report.report import audit_page

BROWSER = pages.find_browser()
needs_browser = pytest.mark.skipif(
    BROWSER is None, reason=f"none of {', '.join(pages.BROWSERS)} is installed"
)
READABLE = 4.5  # contrast of text and background, WCAG 2.2, level AA
MEASURE = """<script>
const light = ([r, g, b]) => [r, g, b].map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
  .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
const rgb = text => (text.match(/[\\d.]+/g) || []).map(Number);
const solid = c => c.length === 3 || (c.length === 4 && c[3] > 0);
function behind(node) {
  for (; node; node = node.parentElement) { const c = rgb(getComputedStyle(node).backgroundColor); if (solid(c)) return c; }
  return [255, 255, 255];
}
let worst = [99, ""];
document.querySelectorAll("details").forEach(d => d.open = true);
for (const node of document.querySelectorAll("body *")) {
  if (node.closest("script") || ![...node.childNodes].some(c => c.nodeType === 3 && c.data.trim())) continue;
  if (["title", "desc"].includes(node.tagName)) continue;
  const style = getComputedStyle(node), colour = rgb(node.closest("svg") ? style.fill : style.color);
  const [a, b] = [light(colour), light(behind(node))].sort((x, y) => y - x), ratio = (a + 0.05) / (b + 0.05);
  if (ratio < worst[0]) worst = [ratio, node.textContent.slice(0, 40)];
}
const found = {width: innerWidth, scroll: document.documentElement.scrollWidth, worst: worst,
  dark: matchMedia("(prefers-color-scheme: dark)").matches,
  figures: [...document.querySelectorAll("svg.figure")].map(f => f.getBoundingClientRect().height)};
parent.postMessage(JSON.stringify(found), "*");
</script></body>"""
FRAME = """<!doctype html><body style="margin:0"><script>
addEventListener("message", e => document.title = e.data)
</script><iframe src="page.html" style="border:0;width:{width}px;height:900px"></iframe></body>"""


@pytest.fixture(scope="module")
def page(summary):
    return audit_page(summary).html()


def browse(folder, *options):
    """Standard output and error of the browser."""
    command = pages.browser_command(
        BROWSER, folder / "profile", "--enable-logging=stderr", *options
    )
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, done.stderr


def console(folder, text):
    """What a page makes the browser write on its console."""
    (folder / "page.html").write_text(text, encoding="utf-8")
    shown, log = browse(folder, "--dump-dom", (folder / "page.html").as_uri())
    assert "SENSITIVE" in shown
    return re.findall(r"CONSOLE.*", log)


@needs_browser
def test_nothing_on_the_console_and_nothing_from_outside(page, tmp_path):
    assert console(tmp_path, page) == []
    asking = page.replace("</main>", '<img src="https://example.org/x.png" alt=""></main>')
    assert "example.org" in " ".join(console(tmp_path, asking))


@needs_browser
@pytest.mark.parametrize(
    ("scheme", "width"), [("light", 1100), ("dark", 1100), ("light", 390), ("dark", 390)]
)
def test_it_is_readable_and_never_wider_than_the_screen(page, scheme, width, tmp_path):
    measured = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page).replace(
        "</body>", MEASURE
    )
    (tmp_path / "page.html").write_text(measured, encoding="utf-8")
    (tmp_path / "frame.html").write_text(FRAME.format(width=width), encoding="utf-8")
    shown, _ = browse(
        tmp_path,
        f"--blink-settings=preferredColorScheme={int(scheme == 'light')}",
        "--window-size=1300,1000",
        "--virtual-time-budget=3000",
        "--dump-dom",
        (tmp_path / "frame.html").as_uri(),
    )
    found = json.loads(html.unescape(re.search(r"<title>(.*?)</title>", shown)[1]))
    assert found["dark"] == (scheme == "dark")
    assert abs(found["width"] - width) <= 1
    assert found["scroll"] <= found["width"]
    assert found["worst"][0] >= READABLE, found["worst"]
    assert len(found["figures"]) == 7
    assert min(found["figures"]) > 50


def printed(folder, text):
    """The PDF of a page."""
    folder.mkdir()
    (folder / "report.html").write_text(text, encoding="utf-8")
    pages.print_pdf(folder / "report.html", folder / "report.pdf")
    return folder / "report.pdf"


def n_pages(path):
    return len(re.findall(rb"/Type\s*/Page\b", path.read_bytes()))


@needs_browser
def test_the_verdict_is_one_printed_page_and_folded_sections_are_printed(page, tmp_path):
    found = printed(tmp_path / "whole", page)
    assert found.read_bytes().startswith(b"%PDF")
    assert found.stat().st_mode & 0o777 == 0o600
    verdict = page[: page.index('<section id="groups"')] + "</main></body></html>"
    assert n_pages(printed(tmp_path / "verdict", verdict)) == 1
    sections = re.sub(r'<details class="section">.*</details>', "", page, flags=re.DOTALL)
    assert n_pages(found) > n_pages(printed(tmp_path / "sections", sections)) > 3
    # Tables behind figures and run.json stay on the screen.
    unfolded = re.sub(r"<details>.*?</details>", "", page, flags=re.DOTALL)
    assert n_pages(found) == n_pages(printed(tmp_path / "unfolded", unfolded))


def test_without_a_browser_it_says_so(page, tmp_path, monkeypatch):
    (tmp_path / "report.html").write_text(page, encoding="utf-8")
    monkeypatch.setattr(pages.shutil, "which", lambda _: None)
    with pytest.raises(InputError, match="no browser was found"):
        pages.print_pdf(tmp_path / "report.html", tmp_path / "report.pdf")
    with pytest.raises(InputError, match="make an audit first"):
        pages.print_pdf(tmp_path / "absent.html", tmp_path / "report.pdf")


def test_a_browser_that_fails_is_one_message(page, tmp_path, monkeypatch):
    (tmp_path / "report.html").write_text(page, encoding="utf-8")
    for command, words in (("false", "did not print"), ("true", "printed nothing")):
        monkeypatch.setattr(pages, "BROWSERS", (command,))
        with pytest.raises(InputError, match=words):
            pages.print_pdf(tmp_path / "report.html", tmp_path / "report.pdf")
    assert not (tmp_path / "report.pdf").exists()
