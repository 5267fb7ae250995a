"""What is installed from an index: the wheel has what the commands need; its metadata are true."""

import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

pytest.importorskip("hatchling")

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder of a wheel and a source archive, built from this checkout."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-W", "ignore", "-m", "hatchling", "build", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    return folder


def test_the_wheel_holds_every_file_of_the_package(built):
    [wheel] = built.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    for path in (ROOT / "indpriv").rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            assert path.relative_to(ROOT).as_posix() in names
    assert not [name for name in names if "audits/" in name]
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"indpriv"}


def test_the_source_archive_can_be_tested(built):
    [archive] = built.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    needed = {"Makefile", "constraints.txt", "CITATION.cff", "SECURITY.md", "audits/adult.toml"}
    needed |= {"audits/__main__.py", "audits/README.md", "tests/experiments/test_readme.py"}
    needed |= {"tests/conftest.py", "reports/yu2023/paper.py", "LICENSE", "CHANGELOG.md"}
    needed |= {"reports/README.md", "reports/demo/adult.txt", "reports/mnist/audit.md"}
    needed |= {f"reports/yu2023/{name}" for name in ("yu2023.json", "preset/mnist/audit.json")}
    assert needed <= names


def test_every_package_that_make_installs_has_hashes():
    """Each part of constraints.txt with the ones before it is all that pip is asked for there."""
    text, found = (ROOT / "constraints.txt").read_text(encoding="utf-8"), {}
    parts = re.split(r"^# (make demo|make test|integrations)\n", text, flags=re.MULTILINE)[1:]
    assert parts[::2] == ["make demo", "make test", "integrations"]
    extras = PROJECT["optional-dependencies"]
    needed = {
        "make demo": PROJECT["dependencies"] + extras["opacus"] + extras["release"] + ["hatchling"],
        "make test": extras["dev"] + extras["docs"] + extras["sign"],
        "integrations": extras["integrations"] + extras["hf"],
    }
    for part, lines in zip(parts[::2], parts[1::2], strict=True):
        for block in re.split(r"\n(?=\S)", lines.strip()):
            first, *hashes = block.split(" \\\n")
            requirement = Requirement(first)
            assert hashes, first
            assert all(re.fullmatch(r"    --hash=sha256:[0-9a-f]{64}", line) for line in hashes)
            [version] = requirement.specifier
            assert version.operator == "=="
            found[canonicalize_name(requirement.name)] = version.version
        for text in needed[part]:
            asked = Requirement(text)
            if asked.name != "indpriv":
                assert asked.specifier.contains(found[canonicalize_name(asked.name)]), text
    assert not [name for name in found if name.startswith(("nvidia-", "cuda-"))]


def test_actions_are_pinned_by_commit():
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        for line in path.read_text(encoding="utf-8").splitlines():
            if "uses:" in line:
                assert re.search(r"uses: [\w/-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+$", line), line


def test_citation_and_package_have_one_version():
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {PROJECT['version']}\n" in citation
    assert f"\nlicense: {PROJECT['license']}\n" in citation


@pytest.mark.slow
def test_the_installed_wheel_shows_its_demo(built, tmp_path):
    """In a venv of its own, away from the checkout, with the libraries of this one."""
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    [wheel] = built.glob("*.whl")
    install = ["-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", str(wheel)]
    subprocess.run([sys.executable, *install], check=True, timeout=120)
    [libraries] = (tmp_path / "venv").glob("lib/python*/site-packages")
    (libraries / "libraries.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")

    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def call(*command):
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    where = call(python, "-P", "-c", "import indpriv; print(indpriv.__file__)")
    assert Path(where.strip()).is_relative_to(libraries)
    indpriv = python.with_name("indpriv")
    assert "Start with: indpriv demo" in call(indpriv, "--help")
    assert "You may promise" in call(indpriv, "demo", "--output-dir", "demo")
    assert "You may promise" in call(indpriv, "audit", "demo/run", "--by", "race")
    assert (tmp_path / "demo" / "run" / "audit" / "report.html").is_file()


# A run is audited in a process where the libraries of the other parts cannot be imported.
WITHOUT = """
import importlib.util, sys
from importlib.abc import MetaPathFinder
missing = {"torch", "opacus", "opendp", "safetensors", "transformers", "ray", "cryptography"}
class Finder(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in missing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name in missing else found(name, *rest)
sys.meta_path.insert(0, Finder())
"""


@pytest.fixture
def without_extras(tmp_path):
    def call(code):
        command = [sys.executable, "-c", WITHOUT + code]
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
        )
        assert "Traceback" not in done.stderr, done.stderr
        return done.stdout + done.stderr

    return call


MAIN = "from indpriv.cli import main\nsys.argv[1:] = {}\nmain()\n"


def test_the_audit_side_needs_no_extra_and_gives_the_same_figures(without_extras, tmp_path):
    run = ROOT / "tests" / "baseline" / "runs" / "adult"
    audit = ["audit", str(run), "--delta", "1e-5", "--output-dir"]
    shown = without_extras(MAIN.format([*audit, str(tmp_path / "light")]))
    assert "You may promise" in shown
    command = [sys.executable, "-m", "indpriv", *audit, str(tmp_path / "whole")]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    light, whole = (
        json.loads((tmp_path / name / "audit.json").read_text(encoding="utf-8"))
        for name in ("light", "whole")
    )
    for audited in (light, whole):
        for key in ("created", "command"):  # a time, and --output-dir
            del audited[key]
    assert light == whole
    assert "epsilon" in without_extras(MAIN.format(["show", str(tmp_path / "light")]))
    published = ["publish", "quantiles", str(tmp_path / "light"), "--epsilon", "1"]
    assert "pip install 'indpriv[release]'" in without_extras(MAIN.format(published))


def test_a_part_that_is_not_installed_says_what_to_type(without_extras, tmp_path):
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "step-1.pt").touch()
    (tmp_path / "other").mkdir()
    assert "indpriv[opacus]" not in without_extras(MAIN.format(["audit", "other"]))
    for command in (["demo"], ["audit", "saved"], ["leak", "saved"]):
        assert "pip install 'indpriv[opacus]'" in without_extras(MAIN.format(command)), command
    for code in (
        "from indpriv.recording import Recorder",
        "from indpriv.leakage import leak",
        "from indpriv.recording.norms.norm_pass import NormPass",
    ):
        told = f"try:\n    {code}\nexcept ImportError as error:\n    print(error)\n"
        assert "pip install 'indpriv[opacus]'" in without_extras(told), code
    callback = "from indpriv.integrations.callbacks import hugging_face_callback\n"
    told = callback + "try:\n    hugging_face_callback(None, delta=1e-5)\n"
    told += "except ImportError as error:\n    print(error)\n"
    assert "pip install 'indpriv[hf]'" in without_extras(told)
