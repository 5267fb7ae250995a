"""README.md and docs/: every block of code runs, every link leads somewhere, the site builds."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pages
import pytest
from filelock import FileLock
from notebook import NOTEBOOK, PAGE, notebook_of, written
from reference import checks, commands

from indpriv import NormLog, account
from indpriv._facts import templates

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
DOCS = ROOT / "docs"
PAGES = [README, *sorted(DOCS.rglob("*.md"))]
OF_CLONES = sorted(
    (ROOT / "audits/docs").glob("*.md")
)  # about experiments, which are not installed
RUN = [*PAGES, *OF_CLONES]
WORDS = 35_000  # of README.md and all of docs/, as `wc -w` counts them
WORDS_OF_A_PAGE = 1_500
WORDS_GENERATED = 19400  # on pages of commands, audit.json, Python and checks
SITE_TOOLS = ("mkdocs", "material", "mkdocstrings")


def name_of(page):
    return page.relative_to(ROOT).as_posix()


def marks_of(page):
    return [pytest.mark.slow] if pages.facts_of(page).get("test", "").startswith("slow") else []


def runs(page):
    return any(not block.not_run for block in pages.blocks(page.read_text(encoding="utf-8")))


@pytest.fixture(scope="session")
def digits(tmp_path_factory):
    """A folder with the run runs/digits and its audit reports/digits."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "digits"
    with FileLock(f"{folder}.lock"):
        if not (folder / "reports/digits/report.html").is_file():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            pages.make_digits(folder)
    return folder


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, id=name_of(page), marks=marks_of(page)) for page in RUN if runs(page)],
)
def test_a_page_runs(page, tmp_path, request):
    facts = pages.facts_of(page)
    for module in facts.get("needs", "").split():
        pytest.importorskip(module)
    folder = tmp_path / "reader"
    if facts.get("given") == "digits":
        shutil.copytree(request.getfixturevalue("digits"), folder)
    command = [sys.executable, "-W", "ignore", DOCS / "tools/pages.py", page, folder]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    if page == README:
        pages.check_supported(folder / "runs/mine")


def test_a_page_whose_run_is_not_supported_fails(tmp_path):
    head = f"---\nsupported: {ROOT / 'tests/baseline/runs/adult'}\n---\n"  # from before comparisons
    with pytest.raises(RuntimeError, match=r"not supported\n(?s:.*)contribution: declared"):
        run_page(head, tmp_path)


def test_code_of_the_package_on_a_page_is_that_of_the_package():
    """Where this fails: python docs/tools/screens.py PAGE."""
    shown = [
        (name_of(page), block)
        for page in PAGES
        for block in pages.blocks(page.read_text(encoding="utf-8"))
        if block.source
    ]
    assert all(pages.is_its_source(block) for _, block in shown)
    found = {(name, block.source) for name, block in shown}
    assert ("docs/tutorials/first_audit.md", "indpriv/demo/train.py:train") in found


def run_page(text, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(text, encoding="utf-8")
    folder = tmp_path / "folder"
    folder.mkdir()
    pages.run(page, folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("```python\nx = 1 / 0\n```", "ZeroDivisionError"),
        ("```bash\nfalse\n```", "exit code 1"),
        ('```bash\necho 2\n```\n```text title="Output"\n3\n```', "the page shows"),
        (
            '```bash\necho one two 3\n```\n```text title="Output of one run"\none 2 two\n```',
            "the page shows",
        ),
        (
            '```bash\necho one two\n```\n```text title="Output of one run"\none, one two\n```',
            "the page shows",
        ),
        ("<!-- first python\nunknown\n-->", "NameError"),
        ("<!-- source: Makefile -->\n```python\nx = 1\n```", "is not Makefile any more"),
        (
            "<!-- source: indpriv/demo/train.py:train -->\n```python\ndef train():\n```",
            "is not indpriv/demo/train.py:train any more",
        ),
    ],
)
def test_a_page_with_a_fault_fails(text, message, tmp_path):
    with pytest.raises(RuntimeError, match=message):
        run_page(text, tmp_path)


def test_blocks_share_names_files_and_outputs(tmp_path):
    run_page(
        '```toml title="a.toml"\nx = 1\n```\n```python\ny = 2\n```\n```python\nprint(y)\n```\n'
        '```text title="Output"\n2\n```\n```bash\ncat a.toml\n```\n'
        '```text title="Output of one run"\nx = 5\n```\n'
        "<!-- not run: no such machine -->\n```bash\nfalse\n```\n"
        "<!-- needs: json no_such_module -->\n```bash\nfalse\n```\n",
        tmp_path,
    )


def test_the_site_can_be_read_to_the_end():
    """No page takes more than ten minutes."""
    words = {name_of(page): len(page.read_text(encoding="utf-8").split()) for page in PAGES}
    assert sum(words.values()) <= WORDS
    assert {page: n for page, n in words.items() if n > WORDS_OF_A_PAGE} == {}


def test_what_the_page_says_of_class_weights():
    """One of 40 people moves the clipped sum; docs/explanation/sharp-edges.md has the figures."""
    torch, opacus = pytest.importorskip("torch"), pytest.importorskip("opacus")
    nn = torch.nn
    weight = torch.tensor([1.0, 9.0])
    x = torch.rand(40, 3, generator=torch.Generator().manual_seed(0))
    y = torch.tensor([0] * 36 + [1] * 4)
    by_torch = nn.CrossEntropyLoss(weight=weight)
    single = nn.CrossEntropyLoss(weight=weight, reduction="none")

    def clipped_sum(loss, rows):
        model = nn.Linear(3, 2)
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
        model = opacus.GradSampleModule(model)
        loss(model(x[rows]), y[rows]).backward()
        each = torch.cat([p.grad_sample.flatten(1) for p in model.parameters()], dim=1)
        return ((1 / each.norm(dim=1)).clamp(max=1)[:, None] * each).sum(dim=0)

    def moved_and_epsilon(loss):
        rows = torch.arange(40)
        whole = clipped_sum(loss, rows)
        moved = max(float((whole - clipped_sum(loss, rows[rows != i])).norm()) for i in rows)
        settings = {"total_steps": 1, "max_grad_norm": 1.0, "sample_rate": 1.0}
        log = NormLog.from_arrays([[1.0]], [0], noise_multiplier=4.0 / moved, **settings)
        return f"{moved:.2f}", f"{account(log, delta=1e-5, accountant='pld').epsilon[0]:.2f}"

    page = " ".join((DOCS / "explanation/sharp-edges.md").read_text("utf-8").split())
    assert moved_and_epsilon(lambda outputs, labels: single(outputs, labels).mean()) == (
        "1.00",
        "0.93",
    )
    moved, epsilon = moved_and_epsilon(by_torch)
    assert f"by {moved} clipping norms, which costs epsilon {epsilon} at delta 1e-5" in page
    assert "the account states 0.93" in page


@pytest.mark.parametrize("page", RUN, ids=name_of)
def test_what_is_left_out_of_a_run_exists(page):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for block in pages.blocks(page.read_text(encoding="utf-8")):
        if block.language != "bash":
            continue
        for target in re.findall(r"^make (\S+)", block.code, re.MULTILINE):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
        for extras in re.findall(r"^pip install .*\[(.*)\]", block.code, re.MULTILINE):
            for extra in extras.split(","):
                assert re.search(rf"^{extra} = \[", project, re.MULTILINE), extra


LINKING = [
    *RUN,
    *(ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "audits/README.md")),
    *sorted(ROOT.glob("reports/**/README.md")),
    *sorted(ROOT.glob("reports/*/audit.md")),
]


@pytest.mark.parametrize("page", LINKING, ids=name_of)
def test_relative_links_exist(page):
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


def test_the_readme_is_one_page():
    lines = README.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 150
    assert lines.index('```python title="train.py"') < 40
    makes = re.findall(r"^make (\w+)", "\n".join(lines), re.MULTILINE)
    assert makes == ["demo", "test"]


def test_the_first_screen_is_the_generated_one():
    text = README.read_text(encoding="utf-8")
    shown = re.search(r"<!-- first screen.*?-->\n```text\n(.*?)```\n<!-- end", text, re.DOTALL)
    screen = (ROOT / "reports/demo/adult.txt").read_text(encoding="utf-8")
    assert screen == shown[1]
    assert 8 <= screen.count("\n") <= 16
    assert max(map(len, screen.splitlines())) <= 80
    assert (ROOT / "reports/demo/adult.svg").is_file()


@pytest.mark.skipif(
    any(importlib.util.find_spec(tool) is None for tool in SITE_TOOLS),
    reason="the site is built with the extra docs: pip install -e '.[docs]'",
)
def test_the_site_builds_without_a_warning(tmp_path):
    command = [sys.executable, "-W", "ignore", "-m", "mkdocs", "build", "--strict"]
    done = subprocess.run(
        [*command, "--site-dir", tmp_path / "site"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    generated = {
        "commands": "indpriv publish card",
        "audit-json": "claim_reason",
        "python": "from_arrays",
        "checks": "opacus_accountant",
    }
    words = 0
    for page, found in generated.items():
        text = (tmp_path / f"site/reference/{page}.html").read_text(encoding="utf-8")
        assert found in text
        article = re.search("<article.*</article>", text, re.DOTALL)[0]
        words += len(re.sub("<[^>]+>", "", article).split())
    assert words <= WORDS_GENERATED
    assert (tmp_path / "site/indpriv/_facts/refusals.toml").is_file()
    for page, found in (("commands", "python -m audits deletion"), ("audit-file", "lost_steps")):
        assert found in (tmp_path / f"site/audits/docs/{page}.html").read_text(encoding="utf-8")
    told = (tmp_path / "site/how-to/known-participation.html").read_text(encoding="utf-8")
    assert '<abbr title="In each step, each example is drawn by a coin of its own.">Poisson' in told
    for page in (tmp_path / "site").rglob("*.html"):
        loaded = re.findall(
            r'<(?:link rel="stylesheet" href|script src|img [^>]*src)="(https?:[^"]*)"',
            page.read_text(encoding="utf-8"),
        )
        assert not loaded, (page, loaded)


def test_commands_are_listed_with_their_options_and_settings():
    sections = dict(re.findall(r"^## indpriv (.+)\n((?:(?!## ).*\n)*)", commands(), re.MULTILINE))
    assert [*sections][:3] == ["demo", "audit", "import"]
    assert "`--signals`" in sections["attack"]
    assert "`accountant` | rdp or pld: " in sections["audit"]
    assert "`worst_case_epsilon`" in sections["gate"]
    assert "publish" not in sections
    assert "publish statement" in sections


def test_the_page_of_messages_quotes_the_screen():
    """Its first column has words of the code, but for relations, which are put together there."""
    files = (
        path for path in (ROOT / "indpriv").rglob("*") if path.suffix in (".py", ".toml", ".j2")
    )
    code = " ".join(" ".join(path.read_text("utf-8").split()) for path in files)
    page = (DOCS / "reference/messages.md").read_text("utf-8")
    for words in re.findall(r"^\| (?!the screen|---)(.+?) \|", page, re.MULTILINE):
        if words not in ("one example zeroed out", "one client, one user"):
            parts = [
                part.strip(" .,")
                for part in re.split(r"\.\.\.|x?\d[\d.]*(?: %)?|, | or |[“”():`]", words)
            ]
            assert [part for part in parts if part not in code] == [], words


def test_every_check_is_explained():
    """Each is listed once, with what it states, what a failure means and what to do."""
    listed = list(templates("check").values())
    assert all(assumed.holds and assumed.failure and assumed.advice for assumed in listed)
    assert checks().count("\n*What to do:* ") == len(listed)
    assert "<!-- generated: checks -->" in (DOCS / "reference/checks.md").read_text("utf-8")


def test_the_notebook_is_the_page():
    """Where this fails: make screens."""
    assert NOTEBOOK.read_text(encoding="utf-8") == written(
        notebook_of(PAGE.read_text(encoding="utf-8"))
    )
    assert NOTEBOOK.stat().st_size < 100_000


@pytest.mark.slow
def test_the_notebook_runs(tmp_path, monkeypatch):
    nbformat = pytest.importorskip("nbformat", reason="pip install -e '.[docs]'")
    nbclient = pytest.importorskip("nbclient", reason="pip install -e '.[docs]'")
    pytest.importorskip("ipykernel", reason="pip install -e '.[docs]'")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    client = nbclient.NotebookClient(
        notebook, timeout=900, resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    assert (tmp_path / "reports/adult-demo/report.html").is_file()
