"""The README's own commands and code blocks, run as a reader would."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


(
    OWN_RUN,
    INDIVIDUAL_CLIPPING,
    PRIVACY_FILTER,
    PEOPLE,
    AUDIT_SPEC,
    NORMS_FROM_ELSEWHERE,
    OTHER_TRAINER,
) = blocks("python")


def run(code, folder):
    command = [sys.executable, "-W", "ignore", "-c", code]
    return subprocess.run(
        command, cwd=folder, check=True, timeout=120, capture_output=True, text=True
    ).stdout


@pytest.mark.parametrize(
    "code", [OWN_RUN, PEOPLE, NORMS_FROM_ELSEWHERE], ids=["own-run", "people", "elsewhere"]
)
def test_python_blocks_run(code, tmp_path):
    run(code, tmp_path)


def own_run_with(recorder):
    """The block of the own run with these lines in place of its recorder."""
    call = re.compile(r"^recorder = Recorder\(\n.*?^\)\n", re.MULTILINE | re.DOTALL)
    code, replaced = call.subn(lambda _: recorder, OWN_RUN)
    assert replaced == 1
    return code


def test_individual_clipping_is_the_own_run_with_another_recorder(tmp_path):
    assert run(own_run_with(INDIVIDUAL_CLIPPING), tmp_path).startswith(
        "exact Training clipped each example at its last recorded level"
    )


def test_the_privacy_filter_is_the_own_run_with_another_recorder(tmp_path):
    shown = run(own_run_with(PRIVACY_FILTER), tmp_path)
    assert re.search(r"The privacy filter left out \d+ of 1000 examples.*\n2\.0", shown)


def test_make_commands_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    commands = re.findall(r"^make (\w+)", "".join(blocks("bash")), re.MULTILINE)
    assert commands == ["demo", "test"]
    for command in commands:
        assert re.search(rf"^{command}:", makefile, re.MULTILINE)


def test_command_lines_run_in_order(tmp_path):
    shutil.copytree(ROOT / "audits", tmp_path / "audits")
    lines = [
        line
        for block in blocks("bash")
        for line in block.splitlines()
        if line.startswith("indpriv ")
    ]
    assert len(lines) == 15
    (tmp_path / "scores.csv").write_text("score,member\n0.9,1\n0.4,0\n")
    (tmp_path / "audit_spec.py").write_text(AUDIT_SPEC, encoding="utf-8")
    run(OTHER_TRAINER, tmp_path)
    for line in lines:
        words = shlex.split(line, comments=True)
        command = [str(Path(sys.executable).with_name("indpriv")), *words[1:]]
        subprocess.run(command, cwd=tmp_path, check=True, timeout=300, capture_output=True)
    assert (tmp_path / "reports/digits/report.html").is_file()
    assert (tmp_path / "reports/replayed/report.html").is_file()
    assert (tmp_path / "reports/digits/shareable/release.html").is_file()
    assert (tmp_path / "reports/digits/shareable/model-card.md").is_file()


def test_the_first_screen_is_the_generated_one():
    shown = re.search(r"<!-- first screen.*?-->\n```text\n(.*?)```\n<!-- end", README, re.DOTALL)
    assert shown[1] == (ROOT / "reports/adult.txt").read_text(encoding="utf-8")
    assert (ROOT / "reports/adult.svg").is_file()


def test_relative_links_exist():
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
