"""Makes what is expected of group tables: python tests/analysis/groups/make_expected.py

expected.json holds every figure of group tables of four stored runs of tests/baseline, as audit.json
writes them, and of one of them counted in bins as if it had more than a million examples. It was made
by the code of commit 79fdd3e, which had a class for every kind of row; intervals and p-values are of
later code, which allows for skewness without resampling. Make it again only where figures are meant to
change.
"""

import json
import sys
from pathlib import Path

TESTS = Path(__file__).parents[2]
sys.path.insert(0, str(TESTS))

from baseline.figures import DELTA, RUNS  # noqa: E402
from indpriv import NormLog, account  # noqa: E402
from indpriv._plain import to_json  # noqa: E402
from indpriv.analysis import statistics  # noqa: E402
from indpriv.analysis.groups import group_tables  # noqa: E402
from indpriv.analysis.recorded_run import in_rows_of  # noqa: E402
from indpriv.example_table import open_examples  # noqa: E402

EXPECTED = Path(__file__).with_name("expected.json")
COLUMNS = {
    "digits": ["label"],
    "adult": ["label", "sex", "race,sex", "loss:bins=3"],
    "units": ["site", "age:bins=3", "label"],
    "every_step": ["site", "correct", "site,label"],
}
BINNED = "adult in bins"


def tables_of(name):
    """The group tables of a run, as audit.json writes them."""
    run = name.removesuffix(" in bins")
    epsilons = account(NormLog.open(RUNS / run), delta=DELTA)
    examples = in_rows_of(epsilons, open_examples(RUNS / run / "examples.parquet"))
    train = examples.train_rows(epsilons.example_ids)
    most, statistics.MOST_EXACT = statistics.MOST_EXACT, 100 if name == BINNED else 10**6
    try:
        tables = group_tables(epsilons, train, examples.rows("test"), COLUMNS[run], seed=3)
    finally:
        statistics.MOST_EXACT = most
    return by_column(json.loads(json.dumps(to_json(tables), allow_nan=False)))


def by_column(content):
    """The same with every list of like objects as one object of lists, which takes half the space."""
    if isinstance(content, dict):
        return {key: by_column(value) for key, value in content.items()}
    if isinstance(content, list) and content and all(isinstance(each, dict) for each in content):
        return {key: [by_column(each[key]) for each in content] for key in content[0]}
    return content


if __name__ == "__main__":
    found = {name: tables_of(name) for name in (*COLUMNS, BINNED)}
    EXPECTED.write_text(json.dumps(found, separators=(",", ":")) + "\n", encoding="utf-8")
