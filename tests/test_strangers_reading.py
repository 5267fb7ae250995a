"""Files from strangers: whatever is in them, a command ends in a right result or in one message, within a GiB and a minute.

Each case runs in a forked child, whose memory and time are limited, and in which a crash of a library shows.
"""

import contextlib
import faulthandler
import hashlib
import importlib
import io
import json
import os
import random
import resource
import shutil
import signal
import time
import traceback
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import indpriv.accountant.risk
import indpriv.analysis.fidelity
import indpriv.analysis.guarantee
from audits.training.attributes import write_knowledge
from command_lines import run as run_command
from indpriv._files import (
    JournalWriter,
    parquet_bytes,
    read_journal,
    read_json,
    read_parquet,
    write_json,
    write_private_parquet,
)
from indpriv.analysis.summary import findings
from indpriv.attack_scores import AttackScores
from indpriv.audit import audit
from indpriv.errors import InputError
from indpriv.report.page import Page
from synthetic import knowledge, small_run, write_run

pytestmark = pytest.mark.skipif(os.name == "nt", reason="forks")

N, GIB, SECONDS = 60, 1 << 30, 60
RELEASE = ["--mean", "--epsilon", "0.5", "--quantiles", "0.5"]
TOML = Path(indpriv.__file__).parents[1] / "audits/digits.toml"
IMPORTED = (
    "analysis.lint",
    "norm_log.convert",
    "release.publish",
    "report.report",
)  # once, not by each child
WITH_EXTRAS = ("COARSER", "RULES", "FIDELITY_EPOCHS")  # further accounts, which take long


def remembered(function):
    """The risk of a log's settings, computed once: it takes most of an audit's time, and reads no file."""
    found = {}

    def of(log, **options):
        key = repr(
            [
                *map(np.unique, vars(log.settings).values()),
                len(log.settings),
                log.clipping_norm_epsilon,
                options,
            ]
        )
        if key not in found:
            found[key] = function(log, **options)
        return found[key]

    return of  # fmt: skip


# What a command may end with, beside one message and 2.
COMMANDS = {
    "check": (["check", "{run}"], {0, 1, 3}),
    "check --json": (["check", "{run}", "--json"], {0, 1, 3}),
    "audit": (["audit", "{run}", "--output-dir", "{new}"], {0}),
    "gate": (["gate", "{audit}", "--max", "epsilon=8", "--min", "coverage=0.5", "--figures"], {0, 1}),
    "show": (["show", "{audit}"], {0}),
    "show two": (["show", "{audit}", "{other}"], {0}),
    "publish": (["publish", "quantiles", "{audit}", *RELEASE], {0}),
    "card": (["publish", "card", "{audit}"], {0}),
    "statement": (["publish", "statement", "{audit}", "--example", "3", "--output-dir", "{new}"], {0}),
    "settings of": (["check", "{run}", "--set", "only=settings"], {0}),
    "lint file": (["audits", "lint", "{toml}"], {0}),
    "attack": (["attack", "{csv}"], {0}),
    "attack run": (["attack", "{run}"], {0}),
    "import": (["import", "{npz}", "--run", "{settings}", "--output-dir", "{new}"], {0}),
    "import parquet": (["import", "{norms}", "--run", "{settings}", "--output-dir", "{new}"], {0}),
}  # fmt: skip
READ_BY = {
    "journal": ["check", "check --json", "audit", "settings of"],
    "ids": ["check", "audit"],
    "record": ["check", "audit"],
    "run.json": ["check", "audit", "settings of", "attack run"],
    "run tables": ["audit", "attack run"],
    "audit.json": ["gate", "show", "show two", "publish", "card", "statement"],
    "audit tables": ["gate", "show", "show two", "publish", "statement"],
    "ledger": ["publish"],
    "release.json": ["card"],
    "toml": ["lint file"],
    "csv": ["attack"],
    "npz": ["import"],
    "norms": ["import parquet"],
    "settings": ["import", "import parquet"],
}
DEAR = ("audit", "settings of", "show", "show two")  # of the time of a command; drawn less often
FILES = {
    "journal": ["run/journal.jsonl"],
    "ids": ["run/ids.parquet"],
    "record": ["run/records/000000000001.parquet"],
    "run.json": ["run/run.json"],
    "run tables": ["run/examples.parquet", "run/canaries.parquet", "run/curve.parquet", "run/attributes.parquet"],
    "audit.json": ["audit/audit.json"],
    "audit tables": ["audit/epsilon.parquet", "audit/examples.parquet"],
    "ledger": ["audit/ledger/journal.jsonl"],
    "release.json": ["audit/shareable/release.json"],
    "toml": ["digits.toml"],
    "csv": ["scores.csv"],
    "npz": ["norms.npz"],
    "norms": ["norms.parquet"],
    "settings": ["settings.json"],
}  # fmt: skip


@pytest.fixture(scope="module")
def valid(tmp_path_factory):
    """Everything that the commands read, sound."""
    patch = pytest.MonkeyPatch()
    module = indpriv.analysis.guarantee
    patch.setattr(module, "worst_case_risk", remembered(module.worst_case_risk))
    top = tmp_path_factory.mktemp("valid")
    log, examples = small_run(N, steps=4)
    for name in WITH_EXTRAS:
        patch.setattr(indpriv.analysis.fidelity, name, ())
    patch.setattr(Page, "html", lambda page, *_: page.name)
    run_dir = write_run(top / "run", log, examples)
    facts = {
        "name": "tiny",
        "delta": 1e-5,
        "training": {"noise_multiplier": 1.1, "max_grad_norm": 1.0, "sample_rate": 0.1},
        "config": {"audit": {"groups": ["sex"]}},
        "data": {"class_names": ["poor", "rich"], "fingerprint": "abc"},
        "on_trust": {"duplicates": "none"},
        "guarantee": {"epsilon": 3.0, "delta": 1e-5},
    }
    write_json(run_dir / "run.json", facts)
    rng = np.random.default_rng(0)
    member = rng.random(N) < 0.5
    scores = AttackScores(rng.normal(size=N) + member, member, "canaries", fair_coins=True)
    scores.to_parquet(run_dir / "canaries.parquet")
    curve = {"step": [2, 4], "test_accuracy": [0.5, 0.6], "worst_case_epsilon": [1.0, 2.0]}
    write_private_parquet(pd.DataFrame(curve), run_dir / "curve.parquet")
    write_knowledge((knowledge(N),), run_dir / "attributes.parquet")
    audit(run_dir, top / "audit")
    shutil.copytree(top / "audit", top / "other")
    frame = pd.DataFrame({"score": scores.scores, "member": member.astype(int), "group": "a"})
    frame.to_csv(top / "scores.csv", index=False)
    norms = np.abs(rng.normal(size=(3, N)))
    np.savez(top / "norms.npz", norms=norms, recorded_steps=np.arange(3))
    columns = {"example_id": np.arange(N), **{str(step): norms[step] for step in range(3)}}
    pd.DataFrame(columns).to_parquet(top / "norms.parquet", index=False)
    settings_ = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "sample_rate": 0.1, "steps": 3}
    words = {"sampler": "poisson", "unit": "example", "neighbouring": "add_remove", "delta": 1e-5}
    write_json(top / "settings.json", settings_ | words)
    shutil.copy(TOML, top / "digits.toml")
    assert run_command(["publish", "quantiles", str(top / "audit"), *RELEASE, "--budget", "2"]) == 0
    for module in IMPORTED:
        importlib.import_module(f"indpriv.{module}")
    yield top
    patch.undo()


def places(top):
    names = {"csv": "scores.csv", "npz": "norms.npz", "norms": "norms.parquet"}
    names |= {"settings": "settings.json", "toml": "digits.toml", "new": "new"}
    return {name: str(top / names.get(name, name)) for name in (*names, "run", "audit", "other")}


def in_child(work, *, memory=GIB):
    """What a function returns, run in a forked child with limits; its traceback, if it has one."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        try:
            faulthandler.disable()
            status = dict(
                line.split(":", 1)
                for line in Path("/proc/self/status").read_text("utf-8").splitlines()
            )
            room = int(status["VmData"].split()[0]) * 1024 + memory
            resource.setrlimit(resource.RLIMIT_DATA, (room, room))
            signal.alarm(SECONDS)
            try:
                found = work()
            except BaseException:  # noqa: BLE001
                found = {"code": None, "err": traceback.format_exc()}
            with os.fdopen(writer, "w", encoding="utf-8", errors="replace") as file:
                json.dump(found, file)
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8") as file:
        text = file.read()
    _, status = os.waitpid(child, 0)
    return json.loads(text) if text else {"code": None, "err": f"killed, status {status}"}


HTML = Page.html


def outcome(arguments, *, plain=True, **limits):
    def work():
        out, err = io.StringIO(), io.StringIO()
        for name in WITH_EXTRAS:
            setattr(indpriv.analysis.fidelity, name, ())
        Page.html = (lambda page, *_: page.name) if plain else HTML
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            code = run_command(arguments)
        return {"code": code, "out": out.getvalue(), "err": err.getvalue()}  # fmt: skip

    return in_child(work, **limits)


def check_outcome(arguments, allowed=frozenset(), **limits):
    """A right result, or exit 2 with one message that names something, and no more than the memory."""
    found = outcome(arguments, **limits)
    code, err = found["code"], found["err"]
    assert code in {2, *allowed}, f"{code}\n{err[-3000:]}"
    assert "Traceback" not in err, err
    assert "MemoryError" not in err, err
    if code == 2:
        assert err.count("error: ") == 1, err
        assert len(err) < 3000, err
    return found


# ---------------------------------------------------------------- mutations

DEEP = "deep"  # replaced by nested lists when written
HUGE = "huge"
VALUES = [None, True, -1, 0, 1, 1.5, -1e308, 10**18, 10**25, "", "x", "\x1b[2J\u202e", [], {}, [1], {"a": None},
          float("nan"), float("inf"), DEEP, HUGE]  # fmt: skip


def json_text(value):
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return text.replace(f'"{DEEP}"', "[" * 9000 + "]" * 9000).replace(f'"{HUGE}"', "9" * 5000)


def paths_in(value, path=()):
    yield path
    parts = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, part in parts:
        yield from paths_in(part, (*path, key))


def mutate_json(value, rng):
    """Replace, remove, add or copy a value somewhere."""
    value = json.loads(json.dumps(value))
    for _ in range(rng.choice([1, 1, 1, 3])):
        *above, key = rng.choice([path for path in paths_in(value) if path] or [(None,)])
        if key is None:
            return rng.choice(VALUES)
        holder = value
        for step in above:
            holder = holder[step]
        how = rng.random()
        if how < 0.65:
            holder[key] = rng.choice(VALUES)
        elif how < 0.8:
            del holder[key]
        elif isinstance(holder[key], str):
            holder[key] += "x"
        elif isinstance(holder[key], int | float):
            holder[key] = rng.choice([-1, 2, 1e12]) * holder[key]
        else:
            holder[key] = [holder[key]]
    return value


def mutate_bytes(content, rng):
    content = bytearray(content)
    how = rng.random()
    if how < 0.25:
        return bytes(content[: rng.randrange(len(content) + 1)])
    if how < 0.35:
        return bytes(content) * 2
    if how < 0.45:
        return bytes(rng.randbytes(rng.choice([0, 1, 8, 500])))
    if how < 0.5:
        return b"[" * 100_000
    if how < 0.55:
        return b'{"a": ' + b"9" * 5000 + b"}"
    for _ in range(rng.choice([1, 1, 4, 30])):
        place = rng.randrange(len(content))
        content[place] = rng.choice(
            [0, 255, rng.randrange(256), content[place] ^ (1 << rng.randrange(8))]
        )
    return bytes(content)  # fmt: skip


def mutate_table(content, rng):
    """Another type, order, number or content of columns and rows."""
    table = pq.read_table(io.BytesIO(content))
    how, n = rng.random(), table.num_rows
    k = rng.randrange(table.num_columns)
    name = table.column_names[k]
    others = [
        pa.array(["x"] * n), pa.array([None] * n), pa.array([-1] * n), pa.array([float("nan")] * n),
        pa.array([float("inf")] * n), pa.array([True] * n), pa.array([[1]] * n), pa.array([b"\xff"] * n),
        pa.array([10**15] * n), pa.array([0] * n), pa.array(["\x1b[2J\n"] * n).dictionary_encode(),
        pa.array([1e300] * n), pa.array([{"a": 1}] * n), pa.array([0.5] * n, pa.float32()),
        pa.array([None if row % 2 else 1 for row in range(n)]), pa.array([0] * n, pa.timestamp("ns")),
    ]  # fmt: skip
    if how < 0.5:
        table = table.set_column(k, name, rng.choice(others))
    elif how < 0.6:
        table = table.remove_column(k)
    elif how < 0.7:
        table = table.append_column(name, table.column(k))
    elif how < 0.78:
        table = table.slice(0, rng.choice([0, 1, n - 1]))
    elif how < 0.86:
        table = pa.concat_tables([table, table])
    elif how < 0.92:
        table = table.rename_columns(rng.sample(table.column_names, table.num_columns))
    else:
        meta = dict(table.schema.metadata or {})
        for key in list(meta):
            meta[key] = (
                mutate_bytes(meta[key], rng)
                if rng.random() < 0.5
                else json_text(
                    mutate_json(json.loads(meta[key]), rng)
                    if meta[key][:1] == b"{"
                    else rng.choice(VALUES)
                ).encode()
            )
        table = table.replace_schema_metadata(meta)  # fmt: skip
    sink = io.BytesIO()
    pq.write_table(table, sink)
    return sink.getvalue()


def seal(folder, change=lambda lines: lines):
    """Write a journal again with a chain that holds, after its lines were changed, and hashes of its files."""
    lines, _ = read_journal(folder)
    for line in lines:
        file = folder / "records" / str(line.get("file"))
        if line["kind"] == "header" and (folder / "ids.parquet").is_file():
            line["ids_sha256"] = hashlib.sha256((folder / "ids.parquet").read_bytes()).hexdigest()
        elif file.is_file():
            line["sha256"] = hashlib.sha256(file.read_bytes()).hexdigest()
            line["bytes"] = file.stat().st_size
    write_lines(folder, change(lines))


def write_lines(folder, lines):
    chain, texts = "indpriv", []
    for number, line in enumerate(lines):
        if not isinstance(line, dict):
            texts.append(json_text(line))
            continue
        body = {**line, "seq": number}
        chain = hashlib.sha256(f"{chain}\n{json_text(body)}".encode()).hexdigest()
        texts.append(json_text({**body, "chain": chain}))
    (folder / "journal.jsonl").write_text("".join(f"{text}\n" for text in texts))


def mutate_lines(lines, rng):
    how = rng.random()
    k = rng.randrange(len(lines))
    if how < 0.75:
        changed = mutate_json(lines[k], rng)
        return [*lines[:k], changed, *lines[k + 1 :]]
    if how < 0.83:
        return [*lines[:k], *lines[k + 1 :]]
    if how < 0.91:
        return [*lines[:k], lines[k], *lines[k:]]
    return rng.sample(lines, len(lines))


def mutate(path, rng):
    """Change a file; a journal and what it hashes so that the chain holds, as a stranger would."""
    sealed = rng.random() < 0.8
    content = path.read_bytes()
    if path.name == "journal.jsonl" and sealed:
        return seal(path.parent, lambda lines: mutate_lines(lines, rng))
    if path.suffix == ".json" and sealed:
        path.write_text(json_text(mutate_json(json.loads(content), rng)))
    elif path.suffix == ".parquet" and sealed:
        path.write_bytes(mutate_table(content, rng))
    else:
        path.write_bytes(mutate_bytes(content, rng))
    run_dir = path.parent.parent if path.parent.name == "records" else path.parent
    if path.suffix == ".parquet" and (run_dir / "journal.jsonl").is_file() and rng.random() < 0.9:
        seal(run_dir)


def swapped(top, rng):
    """One file in place of another."""
    files = [top / file for group in FILES.values() for file in group]
    one, other = rng.sample(files, 2)
    one.write_bytes(other.read_bytes())


def one_case(valid, tmp, seed):
    rng = random.Random(seed)
    top = tmp / f"case-{seed}"
    shutil.copytree(valid, top)
    try:
        kind = rng.choice(list(FILES))
        if rng.random() < 0.05:
            swapped(top, rng)
        else:
            mutate(top / rng.choice(FILES[kind]), rng)
        names = READ_BY[kind]
        (command,) = rng.choices(names, [1 if name in DEAR else 4 for name in names])
        words, allowed = COMMANDS[command]
        check_outcome([word.format(**places(top)) for word in words], allowed)
    finally:
        shutil.rmtree(top)


def fuzz(valid, tmp_path, cases):
    @settings(
        max_examples=cases,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.integers(0, 10**9))
    def each(seed):
        one_case(valid, tmp_path, seed)

    each()


def test_every_command_reads_what_is_sound(valid, tmp_path):
    for name, (words, allowed) in COMMANDS.items():
        top = shutil.copytree(valid, tmp_path / name.replace(" ", "-"))
        found = outcome([word.format(**places(top)) for word in words])
        assert found["code"] in allowed, (name, found)
        assert found["code"] != 1, (name, found)


@pytest.mark.slow
def test_a_hundred_strange_files(valid, tmp_path):
    fuzz(valid, tmp_path, 100)


@pytest.mark.slow
def test_two_thousand_strange_files(valid, tmp_path):
    fuzz(valid, tmp_path, 2000)


# ---------------------------------------------------------------- memory

BOMB, MANY = 1 << 28, 17_000_000  # bytes and rows of a small file


def rows_of(n, **columns):
    return pa.table({name: np.zeros(n, dtype) for name, dtype in columns.items()})


def same_texts(n, length):
    return pa.array(["1" * length]).take(pa.array(np.zeros(n, np.int64)))


def claims_8_tb(path):
    header = io.BytesIO()
    about = {"descr": "<f8", "fortran_order": False, "shape": (10**6, 10**6)}
    np.lib.format.write_array_header_1_0(header, about)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("norms.npy", header.getvalue())
        archive.writestr("recorded_steps.npy", header.getvalue())
    assert path.stat().st_size < 700


def unpacks_to_much(path):
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
        archive.open("norms.npy", "w") as file,
    ):
        for part in [bytes(1 << 24)] * (BOMB >> 24):
            file.write(part)  # fmt: skip


def parquet_of(make):
    return lambda path: pq.write_table(make(), path, compression="zstd")


def varint(value):
    """As a whole number stands in the end of a Parquet file."""
    value, found = 2 * value, bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])


def lying(make, said, **options):
    """A Parquet file whose end says other sizes of its one column than it has; said: name -> another."""

    def write(path):
        pq.write_table(
            make(),
            path,
            compression="zstd",
            use_dictionary=False,
            write_statistics=False,
            **options,
        )
        chunk = pq.read_metadata(path).row_group(0).column(0)
        content = path.read_bytes()
        length = int.from_bytes(content[-8:-4], "little")
        body, end = content[: -8 - length], content[-8 - length :]
        for name, value in said.items():
            true, false = varint(getattr(chunk, name)), varint(value)
            assert true in end
            padding = [false[-1] | 128, *[128] * (len(true) - len(false) - 1), 0]
            end = end.replace(
                true, false if len(true) == len(false) else false[:-1] + bytes(padding)
            )
        path.write_bytes(body + end)
        assert all(
            getattr(pq.read_metadata(path).row_group(0).column(0), name) == value
            for name, value in said.items()
        )

    return write  # fmt: skip


def one_text():
    return pa.table({"score": ["1" * 150_000_000]})


SMALL = {"total_uncompressed_size": 90}
LIES = {
    "a text": lying(one_text, SMALL),
    "a text in a page of another kind": lying(one_text, SMALL, data_page_version="2.0"),
    "numbers in one page": lying(lambda: rows_of(20_000_000, score="f8"), SMALL | {"num_values": 60}, data_page_size=1 << 30),
    "texts as differences": lying(lambda: pa.table({"score": same_texts(15_000, 20_000)}), {}, column_encoding="DELTA_BYTE_ARRAY"),
    "columns beyond the file": lying(lambda: pa.table({"score": np.random.default_rng(0).random(60_000)}), {"total_compressed_size": 1_000_000}),
}  # fmt: skip


@pytest.mark.parametrize("name", LIES)
def test_what_the_end_of_a_table_says_of_its_sizes_is_not_believed(tmp_path, name):
    LIES[name](tmp_path / "scores.parquet")
    assert (tmp_path / "scores.parquet").stat().st_size < 10_000_000
    work = lambda: read_parquet(tmp_path / "scores.parquet") and None  # noqa: E731
    found = in_child(work, memory=GIB >> 2)
    assert found["err"].splitlines()[-1].startswith("indpriv.errors."), found["err"][-600:]
    assert "MemoryError" not in found["err"]


BOMBS = {
    "npz that claims 8 TB": ("import", "norms.npz", claims_8_tb),
    "npz that unpacks to much": ("import", "norms.npz", unpacks_to_much),
    "ids of many rows": ("check", "run/ids.parquet", parquet_of(lambda: rows_of(MANY, example_id="i8", exact="?"))),
    "ids of long texts": ("check", "run/ids.parquet", parquet_of(lambda: pa.table({"example_id": same_texts(9_000, 20_000), "exact": np.zeros(9_000, bool)}))),
    "scores of many rows": ("attack parquet", "scores.parquet", parquet_of(lambda: rows_of(MANY, score="f8", member="?"))),
    "scores of long texts": ("attack parquet", "scores.parquet", parquet_of(lambda: pa.table({"score": same_texts(9_000, 20_000), "member": np.zeros(9_000, bool)}))),
    "scores of many columns": ("attack", "scores.csv", lambda path: path.write_text("score,member" + ",a" * 100_000 + "\n" + "1,1\n" * 100_000)),
    "epsilons of many rows": ("gate", "audit/epsilon.parquet", parquet_of(lambda: rows_of(MANY, epsilon="f8", epsilon_lower="f8", epsilon_upper="f8"))),
    "norms of many rows": ("import parquet", "norms.parquet", parquet_of(lambda: rows_of(MANY, **{"0": "f8"}))),
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_a_small_file_does_not_fill_the_memory(valid, tmp_path, name):
    command, file, write = BOMBS[name]
    top = shutil.copytree(valid, tmp_path / "top")
    write(top / file)
    assert (top / file).stat().st_size < 10_000_000
    if file.startswith("run/"):
        seal(top / "run")
    words = COMMANDS.get(command, (["attack", "{top}/scores.parquet"],))[0]
    begin = time.monotonic()
    found = check_outcome([word.format(**places(top), top=top) for word in words], memory=GIB >> 1)
    assert found["code"] == 2
    assert Path(file).name in found["err"]
    assert time.monotonic() - begin < 20


def test_a_log_of_more_steps_than_memory_holds(valid, tmp_path):
    top = shutil.copytree(valid, tmp_path / "top")
    seal(
        top / "run",
        lambda lines: [line | ({"count": 10**12} if "count" in line else {}) for line in lines],
    )
    assert "count=1000000000000" in check_outcome(["audit", str(top / "run")])["err"]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("lines", "each"), [(1, 10**7), (20_000, 1), (1000, 1000)])
def test_a_small_log_of_many_steps_takes_no_minute(valid, tmp_path, lines, each):
    top = shutil.copytree(valid, tmp_path / "top")

    def longer(old):
        (place,) = [k for k, line in enumerate(old) if line["kind"] == "steps"][-1:]
        first, bare = old[place]["first"], {k: v for k, v in old[place].items() if k != "evidence"}
        more = [
            (old[place] if k + 1 == lines else bare) | {"first": first + k * each, "count": each - first * (lines == 1), "noise_multiplier": 1 + k * 1e-5}
            for k in range(lines)
        ]  # fmt: skip
        return [*old[:place], *more, *old[place + 1 :]]

    seal(top / "run", longer)
    assert (top / "run/journal.jsonl").stat().st_size < 10_000_000
    patch = pytest.MonkeyPatch()
    module = indpriv.analysis.guarantee
    patch.setattr(module, "worst_case_risk", indpriv.accountant.risk.worst_case_risk)
    check_outcome(["audit", str(top / "run"), "--output-dir", str(top / "new")], {0})
    patch.undo()


def test_what_is_needed_to_resume_may_not_unpack(tmp_path):
    torch = pytest.importorskip("torch")
    from audits.training.checkpoints import TrainingState

    with (tmp_path / "resume.state").open("wb") as file:
        torch.save({"schema": 1}, file)
    content = (tmp_path / "resume.state").read_bytes()
    with pytest.raises(InputError, match="is not what is needed to resume"):
        TrainingState.read(tmp_path)
    with (
        zipfile.ZipFile(io.BytesIO(content)) as whole,
        zipfile.ZipFile(tmp_path / "resume.state", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for name in whole.namelist():
            packed.writestr(name, whole.read(name))
    with pytest.raises(
        InputError, match=r"resume\.state cannot be read safely: it is a compressed"
    ):
        TrainingState.read(tmp_path)
    (tmp_path / "resume.state").write_bytes(content[: len(content) // 2])
    with pytest.raises(InputError, match=r"resume\.state cannot be read safely"):
        TrainingState.read(tmp_path)  # fmt: skip


# ---------------------------------------------------------------- journal, tables


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"noise_multiplier": "1.1"}, "noise_multiplier='1.1'"),
        ({"noise_multiplier": True}, "noise_multiplier=True"),
        ({"sample_rate": 1.5}, "sample_rate=1.5"),
        ({"count": 2.5}, "count=2.5"),
        ({"first": -1}, "first=-1"),
        ({"evidence": []}, "evidence=[]"),
        ({"evidence": {"from_step": 0, "seeded": "no"}}, "counts of a session"),
        ({"kind": 3}, "line 6 is damaged"),
        ({"max_grad_norm": {}}, "max_grad_norm={}"),
    ],
)
def test_a_line_of_another_kind_is_named(valid, tmp_path, change, message):
    top = shutil.copytree(valid, tmp_path / "top")
    seal(
        top / "run",
        lambda lines: [
            line
            | (change if line["kind"] in ("steps", *["close"] * ("evidence" in change)) else {})
            for line in lines
        ],
    )
    found = check_outcome(["audit", str(top / "run")])  # fmt: skip
    assert found["code"] == 2
    assert "journal" in found["err"] or "run" in found["err"]
    assert message in found["err"]


@pytest.mark.parametrize(
    "column",
    [
        np.full(N, -1, np.int16),  # 256 levels below what one byte holds would read as small norms
        np.full(N, 256, np.int16),
        np.full(N, 0.5),
        pa.array([None, *[1] * (N - 1)], pa.uint8()),
        np.zeros(N - 1, np.uint8),
        pa.array(["1"] * N),
    ],
)
def test_codes_of_another_type_are_refused(valid, tmp_path, column):
    top = shutil.copytree(valid, tmp_path / "top")
    file = top / "run/records/000000000001.parquet"
    file.write_bytes(parquet_bytes(pa.table({"norm": column})))
    seal(top / "run")
    found = check_outcome(["audit", str(top / "run")])
    assert found["code"] == 2
    assert file.name in found["err"]


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda text: text.replace(b'"noise_multiplier":1.1', b'"noise_multiplier":4.0'), 1),
        (lambda text: text.split(b"\n", 1)[1], 1),
        (lambda text: text.replace(b'"kind"', b'"kin', 1), 2),
        (lambda text: b"", 2),
        (lambda text: b"\xff" + text, 2),
        (lambda text: b"[]\n" + text, 2),
    ],
    ids=["changed", "cut", "broken", "empty", "no text", "no object"],
)
def test_a_failed_check_is_1_and_a_journal_that_cannot_be_read_is_2(valid, tmp_path, change, code):
    top = shutil.copytree(valid, tmp_path / "top")
    journal = top / "run/journal.jsonl"
    journal.write_bytes(change(journal.read_bytes()))
    found = check_outcome(["check", str(top / "run")], {1})
    assert found["code"] == code
    assert ("error:" in found["err"]) == (code == 2)
    (top / "run/journal.jsonl").unlink()
    assert check_outcome(["check", str(top / "run")])["code"] == 2


LINKED = {
    "run/journal.jsonl": "check", "run/journal.jsonl.sig": "check", "run/run.json": "audit",
    "run/examples.parquet": "audit", "run/canaries.parquet": "audit", "run/records/000000000001.parquet": "audit",
    "audit/epsilon.parquet": "gate", "audit/audit.json": "gate",
    "audit/paid.json": "publish", "audit/shareable/release.json": "publish",
}  # fmt: skip


@pytest.mark.parametrize("name", LINKED)
def test_a_link_in_a_directory_is_not_read_and_the_directory_may_be_one(valid, tmp_path, name):
    top = shutil.copytree(valid, tmp_path / "top")
    for folder in ("run", "audit"):
        (top / folder).rename(top / f"the {folder}")
        (top / folder).symlink_to(top / f"the {folder}")
    file = top / name
    file.parent.mkdir(exist_ok=True)
    if file.exists():
        file.rename(top / "elsewhere")
    else:
        (top / "elsewhere").write_bytes(b"a secret of the auditor's")
    words = [word.format(**places(top)) for word in COMMANDS[LINKED[name]][0]]
    if LINKED[name] not in DEAR and (top / "elsewhere").stat().st_size > 30:  # it was there
        shutil.copy(top / "elsewhere", file)
        assert outcome(words)["code"] in COMMANDS[LINKED[name]][1]
        file.unlink()
    file.symlink_to(top / "elsewhere")
    found = check_outcome(words)
    assert found["code"] == 2
    assert Path(name).name in found["err"]
    assert "is a link" in found["err"] or "record files" in found["err"]


def test_links_among_checkpoints_signals_and_arrays_are_not_read(tmp_path):
    pytest.importorskip("torch")
    import plain_opacus
    from audits.training.checkpoints import TrainingState
    from indpriv._folders import named_by_person
    from indpriv._reading import read_npz
    from indpriv.attack_signals import AttackSignals, add_model, new_folder
    from indpriv.recording.checkpoints.saved_models import discover
    from runs import blobs, mlp

    saved = tmp_path / "saved"
    plain_opacus.train(mlp(), blobs(), saved, epochs=1, batch_size=12, save_every=5)
    found = discover(saved)
    (saved / "last.pt").symlink_to("step_10.pt")
    assert discover(saved) == found
    (tmp_path / "link").symlink_to(saved)
    assert len(discover(tmp_path / "link").models) == len(found.models)
    (saved / "step_5.pt").rename(tmp_path / "elsewhere.pt")
    (saved / "step_5.pt").symlink_to(tmp_path / "elsewhere.pt")
    assert "step_5.pt is a link" in " ".join(discover(saved).problems)
    folder = tmp_path / "signals"
    new_folder(folder, np.arange(3), {})
    add_model(folder, {"confidence": np.zeros(3, "f4")}, np.zeros(3, bool))
    named_by_person(folder)
    for name, read in (
        ("ids.npz", lambda: read_npz(folder / "ids.npz")),
        ("confidence.f32", lambda: AttackSignals.open(folder)),
        ("member.u8", lambda: AttackSignals.open(folder)),
        ("resume.state", lambda: TrainingState.read(folder)),
    ):
        file = folder / name
        if file.exists():
            file.rename(tmp_path / name)
        else:
            (tmp_path / name).write_bytes(b"x")
        file.symlink_to(tmp_path / name)
        with pytest.raises(InputError, match=f"{name} is a link"):
            read()
        file.unlink()
        (tmp_path / name).rename(file)


# ---------------------------------------------------------------- gate


def gate(top, *options):
    found = check_outcome(
        ["gate", str(top / "run/audit"), "--json", *(options or ("--max", "delta=1"))], {0, 1}
    )
    return found["code"], json.loads(found["out"])["conditions"] if found["code"] < 2 else found


@pytest.fixture
def inside(valid, tmp_path):
    """An audit in its run."""
    top = shutil.copytree(valid, tmp_path / "top")
    shutil.move(top / "audit", top / "run/audit")
    return top


def edited(top, change):
    path = top / "run/audit/audit.json"
    content = read_json(path)
    change(content)
    path.write_text(json.dumps(content))
    return top


def state(conditions):
    return {one["name"]: (one["passed"], one["known"]) for one in conditions}


ALL = ["--max", "worst_case_epsilon=8", "--max", "delta=1e-4", "--max", "median_epsilon=8", "--max", "p95_epsilon=8",
       "--max", "p99_epsilon=8", "--max", "epsilon=8", "--max", "group_ratio=9", "--min", "coverage=1",
       "--min", "test_accuracy=0.1", "--require", "unit=example,exact,verified"]  # fmt: skip


def test_a_gate_says_what_it_computed_again(inside):
    code, conditions = gate(inside, *ALL)
    assert code == 0
    found = state(conditions)
    believed = {name for name, (_, known) in found.items() if known == "believed"}
    assert "epsilon that canaries prove" in believed
    assert believed <= {one.watched for one in findings()} - {"guarantee", "evidence"}
    assert len(found) > 14
    table = check_outcome(["gate", str(inside / "run/audit"), "--max", "delta=1"], {0})["out"]
    assert "recomputed" in table
    assert "believed" in table


def test_without_the_run_the_log_is_believed_unless_it_is_passed(valid, tmp_path):
    top = shutil.copytree(valid, tmp_path / "top")
    words = [
        "gate",
        str(top / "audit"),
        "--json",
        "--max",
        "worst_case_epsilon=8",
        "--max",
        "epsilon=8",
    ]
    found = state(json.loads(check_outcome(words, {0})["out"])["conditions"])
    assert found["worst-case epsilon"][1] == found["evidence"][1] == "believed"
    assert {known for _, known in found.values()} == {"believed"}
    found = state(
        json.loads(check_outcome([*words, "--run", str(top / "run")], {0})["out"])["conditions"]
    )
    assert found["worst-case epsilon"][1] == found["evidence"][1] == "recomputed"
    assert found["individual epsilon, max (exact)"][1] == "recomputed"
    check_outcome([*words, "--run", str(top / "nowhere")], {2})  # not believed in silence
    for name in ("epsilon.parquet", "examples.parquet"):
        (top / "audit" / name).unlink()
    found = state(json.loads(check_outcome(words, {0})["out"])["conditions"])
    assert {known for _, known in found.values()} == {"believed"}  # fmt: skip
    for more in ([], ["--signed-by", str(TOML)]):  # a missing table switches nothing off
        error = check_outcome([*words, "--run", str(top / "run"), *more], {2})["err"]
        assert "holds no epsilon.parquet, so nothing in it can be compared with the log" in error


def test_a_gate_says_when_the_audit_is_of_another_log(inside):
    """With the same figures too: a line more at the end of a closed log changes none."""
    with JournalWriter(inside / "run") as journal:
        last = {
            name: one for name, one in journal.entries[-1].items() if name not in ("seq", "kind")
        }
        journal.append("close", **last)
    code, conditions = gate(inside, "--max", "worst_case_epsilon=8", "--max", "epsilon=8")
    assert [one["found"] for one in conditions if not one["passed"]] == ["another log"]
    assert code == 1


EDITS = {
    "worst case": (lambda a: a["guarantee"].update(worst_case_epsilon=0.5), ["--max", "worst_case_epsilon=1"], "worst-case epsilon"),
    "status": (lambda a: a["guarantee"].update(status="declared"), [], None),
    "delta": (lambda a: a["guarantee"].update(delta=1e-9), ["--max", "delta=1e-8"], "delta"),
    "median": (lambda a: a["individual"].update(median=0.01), ["--max", "median_epsilon=0.1"], "individual epsilon, median (exact)"),
    "p99": (lambda a: a["individual"].update(p99=0.01), ["--max", "p99_epsilon=0.1"], "individual epsilon, p99 (exact)"),
    "relation": (lambda a: a["account"].update(neighbouring="zero_out"), [], None),
    "sampler": (lambda a: a["account"].update(sampler="shuffled"), [], None),
    "participation": (lambda a: a["account"].update(participation="known"), [], None),
    "account's delta": (lambda a: a["account"].update(delta=1e-9), [], None),
    "max": (lambda a: a["individual"].update(max=0.01), ["--max", "epsilon=0.1"], "individual epsilon, max (exact)"),
    "claim": (lambda a: a.update(claim="estimate"), [], None),
    "accuracy": (lambda a: a["run"].update(test_accuracy=1.0), ["--min", "test_accuracy=0.99"], "test accuracy"),
    "coverage": (lambda a: a["run"].update(recorded_share=0.25), [], None),
}  # fmt: skip


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_audit_fails(inside, name):
    change, limits, failing = EDITS[name]
    code, conditions = gate(edited(inside, change), *limits)
    assert code == 1
    found = state(conditions)
    assert found["audit.json agrees with tables and log"] == (False, "recomputed")
    if failing is not None:
        assert found[failing] == (False, "recomputed")


def forged(folder, factor=0.1):
    """An audit whose table and audit.json say the same of everybody, and less than there was."""
    frame = read_parquet(folder / "epsilon.parquet")
    for name in ("epsilon", "epsilon_lower", "epsilon_upper"):
        frame[name] *= factor
    write_private_parquet(frame, folder / "epsilon.parquet")
    content = read_json(folder / "audit.json")
    for name in content["individual"]:
        if name in ("median", "p95", "p99", "max", "mean", "min"):
            content["individual"][name] *= factor
    for group in content["groups"]:
        group["ratio"]["value"] = 1.0
    write_json(folder / "audit.json", content)


@pytest.mark.parametrize("limit", ["median", "p95", "p99", ""])
def test_a_table_that_was_forged_with_audit_json_is_seen_through_or_believed_in_words(
    valid, tmp_path, inside, limit
):
    option = "--max", f"{limit}_epsilon=1".removeprefix("_")
    forged(inside / "run/audit")
    code, conditions = gate(inside, *option)
    assert code == 1
    name = f"individual epsilon, {limit or 'max'} (exact)"
    assert state(conditions)[name] == (False, "recomputed")
    assert state(conditions)["audit.json agrees with tables and log"] == (False, "recomputed")
    shutil.move(inside / "run/audit", tmp_path / "alone")
    found = check_outcome(["gate", str(tmp_path / "alone"), "--json", *option], {0})
    assert {one["known"] for one in json.loads(found["out"])["conditions"]} == {"believed"}


@pytest.mark.slow
def test_by_the_pld_accountant_the_worst_case_is_recomputed_and_people_are_believed(
    valid, tmp_path
):
    top = shutil.copytree(valid, tmp_path / "top")
    audit(top / "run", top / "run/audit", accountant="pld")
    found = state(gate(top, "--max", "epsilon=8", "--max", "worst_case_epsilon=8")[1])
    assert found["worst-case epsilon"][1] == "recomputed"
    assert {known for name, (_, known) in found.items() if "individual" in name} == {"believed"}


def test_a_group_ratio_is_computed_again(inside):
    ratio = read_json(inside / "run/audit/audit.json")["groups"][0]["ratio"]["value"]
    assert ratio > 1.05
    edited(inside, lambda a: a["groups"][0]["ratio"].update(value=1.0))
    name = "mean epsilon of the worst-off over the best-off group by sex"
    assert state(gate(inside, "--max", "group_ratio=1.05")[1])[name] == (False, "recomputed")


def test_a_failed_check_that_was_edited_away(inside):
    """The log says that noise was twice drawn from the same state; audit.json no longer does."""

    def repeated(lines):
        for line in lines:
            if "evidence" in line:
                line["evidence"] |= {"guessable_seed": True, "repeated_draws": 2}
        return lines

    seal(inside / "run", repeated)
    code, conditions = gate(inside)
    assert code == 1
    assert state(conditions)["evidence"] == (False, "recomputed")


def test_a_reconstruction_above_its_ceiling_fails(inside):
    one = {"method": "an attack", "adversary": "gradients"}
    edited(inside, lambda a: a["reconstruction"].append(one))
    assert gate(inside)[0] == 2  # it lacks what a reconstruction has


# ---------------------------------------------------------------- texts on the way out

EVIL = "x\x1b]0;owned\x07\x1b[2J\x9b31m\u202e\u2066\r\x08y"
BAD = set("\x1b\x07\x9b\u202e\u2066\r\x08")


@pytest.mark.parametrize("plain", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_no_text_of_a_file_reaches_a_terminal_or_a_page_as_it_is(valid, tmp_path, plain):
    """Names of files, samplers, runs, groups and columns, caveats and what somebody said."""
    top = shutil.copytree(valid, tmp_path / "top")
    run_dir = top / "run"
    facts = read_json(run_dir / "run.json")
    told = dict.fromkeys(("name", "released", "preprocessing", "tuning", "trust_model"), EVIL)
    facts |= {**told, "on_trust": {EVIL: EVIL}, "groups": [f"c{EVIL}"]}
    facts["data"]["class_names"] = [EVIL, "b"]
    facts["config"] = {}
    write_json(run_dir / "run.json", facts)
    frame = pd.read_parquet(run_dir / "examples.parquet")
    frame[f"c{EVIL}"] = np.where(frame["sex"] == "Male", EVIL, "b")
    write_private_parquet(frame, run_dir / "examples.parquet")

    def change(lines):
        lines[0]["run"] |= {"sampler_class": EVIL, "optimizer": EVIL, "versions": {EVIL: EVIL}}
        for line in lines:
            if "evidence" in line:
                line["evidence"] |= {"sampler_class": EVIL, "caveats": [EVIL], "source": EVIL}
        return lines

    seal(run_dir, change)
    new = top / "new"
    texts = {}
    for name, words in {
        "audit": ["audit", str(run_dir), "--output-dir", str(new)],
        "verify": ["check", str(run_dir)],
        "gate": ["gate", str(new), "--max", "delta=1", "--figures"],
        "groups": ["show", str(new)],
        "compare": ["show", str(new), str(top / "audit")],
        "model-card": ["publish", "card", str(top / "audit")],
        "statement": ["publish", "statement", str(new), "--example", "3"],
        "error": ["show", str(new), "--by", EVIL],
        "no run": ["audit", str(top / EVIL.replace("/", ""))],
    }.items():
        found = check_outcome(words, {0, 1, 3}, plain=plain)
        texts[name] = found["out"] + found["err"]  # fmt: skip
    assert "owned" in texts["audit"]
    assert "owned" in texts["verify"]
    for file in ("audit.md", "statements/example-3.txt", *(() if plain else ("report.html",))):
        texts[file] = (new / file).read_text(encoding="utf-8")
    for name, text in texts.items():
        assert not BAD & set(text), (name, BAD & set(text))


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_whatever_pyarrow_writes_is_read_back(data, tmp_path):
    """Empty row groups, unknown values, dictionaries, any compression and version of the pages."""
    n = data.draw(st.sampled_from([0, 0, 1, 3, 3000]))
    unknown = data.draw(st.sampled_from([0.0, 0.5, 1.0]))
    hidden = np.random.default_rng(n).random(n) < unknown
    columns = {
        "floats": pa.array(np.linspace(0, 1, n), pa.float32(), mask=hidden),
        "whole": pa.array(np.arange(n) % 7, pa.int64(), mask=hidden),
        "flags": pa.array(np.arange(n) % 2 == 0, mask=hidden),
        "texts": pa.array([f"group {number % 5}" for number in range(n)], pa.string(), mask=hidden),
    }
    table, path = pa.table(columns), tmp_path / "table.parquet"
    options = {
        "compression": data.draw(st.sampled_from(["none", "snappy", "zstd", "gzip", "lz4"])),
        "use_dictionary": data.draw(st.booleans()),
        "data_page_version": data.draw(st.sampled_from(["1.0", "2.0"])),
        "write_statistics": data.draw(st.booleans()),
        "write_page_checksum": data.draw(st.booleans()),
    }
    with pq.ParquetWriter(path, table.schema, **options) as writer:
        for _ in range(data.draw(st.integers(1, 3))):
            writer.write_table(table, row_group_size=data.draw(st.sampled_from([1000, 100_000])))
    pd.testing.assert_frame_equal(read_parquet(path), pq.read_table(path).to_pandas())
