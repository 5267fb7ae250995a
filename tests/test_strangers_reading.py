"""Files from strangers: whatever is in them, a command ends in a right result or in one message, within a GiB and a minute.

Each case runs in a forked child, whose memory and time are limited, and in which a crash of a library shows.
"""

import contextlib
import faulthandler
import hashlib
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
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import indpriv.audit.audit_directory
import indpriv.audit.variants
from indpriv._files import write_json, write_private_parquet
from indpriv._journal import read_journal
from indpriv.attack_scores import AttackScores
from indpriv.attacks.attribute_knowledge import write_knowledge
from indpriv.audit import audit
from indpriv.cli import run as run_command
from synthetic import knowledge, small_run, write_run

pytestmark = pytest.mark.skipif(os.name == "nt", reason="forks")

N, GIB, SECONDS = 60, 1 << 30, 60
RELEASE = ["--mean", "--epsilon", "0.5", "--quantiles", "0.5"]
TOML = Path(indpriv.__file__).parents[1] / "audits/digits.toml"
WITH_EXTRAS = ("COARSER", "RULES", "FIDELITY_EPOCHS")  # further accounts, which take long


# What a command may end with, beside one message and 2.
COMMANDS = {
    "verify": (["verify", "{run}"], {0, 1, 3}),
    "verify --json": (["verify", "{run}", "--json"], {0, 1, 3}),
    "audit": (["audit", "{run}", "--output-dir", "{new}"], {0}),
    "gate": (["gate", "{audit}", "--max-epsilon", "8", "--min-coverage", "0.5", "--figures"], {0, 1}),
    "groups": (["groups", "{audit}"], {0}),
    "compare": (["compare", "{audit}", "{other}"], {0}),
    "release": (["release", "{audit}", *RELEASE], {0}),
    "model-card": (["model-card", "{audit}"], {0}),
    "statement": (["statement", "create", "{audit}", "--example", "3", "--output-dir", "{new}"], {0}),
    "lint": (["lint", "{run}"], {0}),
    "lint file": (["lint", "{toml}"], {0}),
    "attack": (["attack", "--scores", "{csv}"], {0}),
    "attack run": (["attack", "run", "{run}"], {0}),
    "convert": (["convert", "{npz}", "--run", "{settings}", "--output-dir", "{new}"], {0}),
    "convert parquet": (["convert", "{norms}", "--run", "{settings}", "--output-dir", "{new}"], {0}),
}  # fmt: skip
READ_BY = {
    "journal": ["verify", "verify --json", "audit", "lint"],
    "ids": ["verify", "audit"],
    "record": ["verify", "audit"],
    "run.json": ["verify", "audit", "lint", "attack run"],
    "run tables": ["audit", "attack run"],
    "audit.json": ["gate", "groups", "compare", "release", "model-card", "statement"],
    "audit tables": ["gate", "groups", "compare", "release", "statement"],
    "ledger": ["release"],
    "release.json": ["model-card"],
    "toml": ["lint file"],
    "csv": ["attack"],
    "npz": ["convert"],
    "norms": ["convert parquet"],
    "settings": ["convert", "convert parquet"],
}
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
    top = tmp_path_factory.mktemp("valid")
    log, examples = small_run(N, steps=4)
    with pytest.MonkeyPatch.context() as patch:
        for name in WITH_EXTRAS:
            patch.setattr(indpriv.audit.variants, name, ())
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
    assert run_command(["release", str(top / "audit"), *RELEASE, "--budget", "2"]) == 0
    return top


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
                line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines()
            )
            room = int(status["VmData"].split()[0]) * 1024 + memory
            resource.setrlimit(resource.RLIMIT_DATA, (room, room))
            signal.alarm(SECONDS)
            try:
                found = work()
            except BaseException:
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


def outcome(arguments, **limits):
    def work():
        out, err = io.StringIO(), io.StringIO()
        for name in WITH_EXTRAS:
            setattr(indpriv.audit.variants, name, ())
        indpriv.audit.audit_directory.render_html = lambda summary, *_: summary.name
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
    text = json.dumps(value)
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
        text = json.dumps(body, sort_keys=True, separators=(",", ":"))
        chain = hashlib.sha256(f"{chain}\n{text}".encode()).hexdigest()
        texts.append(json_text({**body, "chain": chain}).replace(" ", ""))
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
        command = rng.choice(READ_BY[kind])
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
        begin = time.monotonic()
        found = outcome([word.format(**places(top)) for word in words])
        print(name, round(time.monotonic() - begin, 2))
        assert found["code"] in allowed, (name, found)
        assert found["code"] != 1, (name, found)


def test_a_hundred_strange_files(valid, tmp_path):
    fuzz(valid, tmp_path, 100)


@pytest.mark.slow
def test_two_thousand_strange_files(valid, tmp_path):
    fuzz(valid, tmp_path, 2000)
