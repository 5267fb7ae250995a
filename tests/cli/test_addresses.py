"""Commands that write on a disk only refuse an address, and make no folder of its name."""

from pathlib import Path

import pytest

from command_lines import run

ADDRESS, AUDIT = "s3://bucket/there", "digits.toml"
DIGITS = Path(__file__).parents[2] / "audits" / AUDIT


@pytest.mark.parametrize(
    "words",
    [
        ["demo", "--output-dir", ADDRESS],
        ["audits", "shadow", AUDIT, "--output-dir", ADDRESS],
        ["import", "norms.npz", "--run", "run.json", "--output-dir", ADDRESS],
        ["publish", "statement", ADDRESS, "--example", "3"],
        ["audits", "train", AUDIT, "--run-dir", ADDRESS],
        ["audits", "sweep", AUDIT, "--over", "max_grad_norm=0.1,0.3", "--output-dir", ADDRESS],
        ["audits", "subsets", AUDIT, "--target", "1.0", "--output-dir", ADDRESS],
        ["audits", "deletion", AUDIT, "--without", "label=3", "--output-dir", ADDRESS],
        ["audits", "exposure", ADDRESS],
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_an_address_is_refused_where_files_are_written_on_a_disk(
    words, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / AUDIT).write_bytes(DIGITS.read_bytes())
    assert run(words) == 2
    assert "lies in object storage" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [AUDIT]
