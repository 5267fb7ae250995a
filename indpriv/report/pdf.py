"""A report as PDF, printed by an installed browser. Sensitive."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from indpriv._files import write_atomically
from indpriv.errors import InputError

BROWSERS = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "microsoft-edge",
)
_SECONDS = 300  # a report prints in a few; after that, a hanging browser is ended
# A profile of its own and no network: the page needs none, and the browser shall not phone home.
_ALONE = (
    "--headless",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND",
)


def find_browser() -> str | None:
    """Path of an installed browser that prints without a window; None if there is none."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def browser_command(browser: str, profile: Path, *options: str) -> list[str]:
    """Command line of a browser without a window and without network, with a profile of its own."""
    is_root = hasattr(os, "geteuid") and os.geteuid() == 0
    as_root = ("--no-sandbox",) if is_root else ()  # the sandbox refuses root
    return [browser, *_ALONE, *as_root, f"--user-data-dir={profile}", *options]


def print_pdf(page: Path, target: Path) -> None:
    """Print a page to a file that only its owner can read.

    Raises:
        InputError: no page, no browser, or one that fails or takes over five minutes.
    """
    if not page.is_file():
        raise InputError(
            f"{page} does not exist; make an audit first: indpriv audit RUN --output-dir "
            f"{page.parent}"
        )
    browser = find_browser()
    if browser is None:
        raise InputError(
            f"no browser was found to print with (looked for {', '.join(BROWSERS)}); install one, "
            f"e.g. apt-get install chromium, or print {page} from any browser"
        )
    with tempfile.TemporaryDirectory() as folder:  # readable by its owner only
        printed = Path(folder) / "report.pdf"
        options = ("--no-pdf-header-footer", f"--print-to-pdf={printed}", page.resolve().as_uri())
        command = browser_command(browser, Path(folder) / "profile", *options)
        try:
            subprocess.run(command, capture_output=True, timeout=_SECONDS, check=True)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            raise InputError(
                f"{browser} did not print {page}: {error}; print it from any browser"
            ) from error
        if not printed.is_file():
            raise InputError(f"{browser} printed nothing; print {page} from any browser")
        write_atomically(target, printed.read_bytes())
