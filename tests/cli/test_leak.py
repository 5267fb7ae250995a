"""Commands about reconstruction."""

import json

import numpy as np

from indpriv.cli import run
from reconstructions import scores


def test_scores_of_reconstructions_are_compared_with_their_ceiling(tmp_path, capsys):
    path = tmp_path / "row.parquet"
    scores(np.arange(200) < 60, 1.0).to_parquet(path)
    assert run(["attack", "--scores", str(path), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["reconstruction"]
    assert (found["identified"], found["above_ceiling"]) == (0.3, True)
    assert run(["attack", "--scores", str(path)]) == 0
    assert "there was less noise" in " ".join(capsys.readouterr().out.split())
