"""The flow of the house: two halves that meet in the artifacts, imports one way, no torch on the audit side."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import indpriv

PACKAGE = Path(indpriv.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))

# Lower stages know nothing of higher ones. The run side (torch) and the audit side meet only in the artifacts.
STAGES = {
    "helpers": {
        "errors",
        "_types",
        "_checks",
        "_columns",
        "_facts",
        "_files",
        "_folders",
        "_formatting",
        "_plain",
        "_reading",
        "_storage",
    },
    "artifacts": {
        "norm_log",
        "round_recorder",
        "example_table",
        "epsilon_table",
        "attack_scores",
        "attack_signals",
    },
    "accountant": {"accountant"},
    "attacks": {"attacks"},
    "analysis": {"analysis"},
    "report": {"report"},
    "audit": {"audit"},
    "release": {"release"},
    "recording": {"recording"},
    "integrations": {"integrations"},
    "leakage": {"leakage"},
    "demo": {"demo"},
    "cli": {"cli", "__main__"},
}  # fmt: skip
MAY_IMPORT = {
    "helpers": set(),
    "artifacts": {"helpers"},
    "accountant": {"helpers", "artifacts"},
    "attacks": {"helpers", "artifacts"},
    "analysis": {"helpers", "artifacts", "accountant", "attacks"},
    "report": {"helpers", "artifacts", "analysis"},
    "audit": {"helpers", "artifacts", "accountant", "analysis", "attacks", "report"},
    "release": {"helpers", "artifacts", "accountant", "analysis", "report", "audit"},
    "recording": {"helpers", "artifacts", "attacks"},
    "leakage": {"helpers", "artifacts", "recording"},
    "integrations": {"helpers", "artifacts", "accountant", "analysis"},
    "demo": {"helpers", "artifacts", "recording"},
    "cli": set(STAGES) - {"cli"},
}
RUN_SIDE = {"recording", "leakage", "demo"}


def stage_of(module: str) -> str:
    defined_in = indpriv._MODULES.get(module.removeprefix("indpriv."), module)
    part = defined_in.split(".")[1]
    return next(stage for stage, parts in STAGES.items() if part in parts)


def imports(path: Path, *, top_level_only: bool) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = tree.body if top_level_only else list(ast.walk(tree))
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module)
            found |= {
                f"{node.module}.{alias.name}"
                for alias in node.names
                if node.module.startswith("indpriv")
            }
    return found


def name_of(path: Path) -> str:
    return ".".join(("indpriv", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(
        ".__init__"
    )


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_go_one_way(path):
    module = name_of(path)
    if module == "indpriv":
        return
    stage = stage_of(module)
    for imported in imports(path, top_level_only=False):
        if imported.startswith("indpriv."):
            other = stage_of(imported)
            assert other == stage or other in MAY_IMPORT[stage], (
                f"{module} ({stage}) imports {imported} ({other})"
            )


def test_the_package_never_imports_the_experiments():
    """audits/ and reports/ are built on indpriv, and are not in its wheel."""
    for path in MODULES:
        roots = {imported.split(".")[0] for imported in imports(path, top_level_only=False)}
        assert not {"audits", "reports"} & set(roots), path


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_only_the_run_side_imports_torch(path):
    module = name_of(path)
    if module != "indpriv" and stage_of(module) in RUN_SIDE:
        return
    roots = {imported.split(".")[0] for imported in imports(path, top_level_only=True)}
    assert not roots & {"torch", "opacus"}


def test_every_module_is_imported_by_another():
    used: set[str] = set()
    for path in MODULES:
        for imported in imports(path, top_level_only=False):
            used.add(imported)
    entry_points = {
        "indpriv",
        "indpriv.__main__",
        "indpriv.integrations",
        "indpriv.integrations.callbacks",
        "indpriv.integrations.flower",
    }  # read as files, run by hand, or for programs of users (audits/docs/secrets-and-attributes.md)
    commands = tomllib.loads((PACKAGE / "cli/commands.toml").read_text(encoding="utf-8"))[
        "commands"
    ]
    entry_points |= {f"indpriv.cli.{about['run'].partition(':')[0]}" for about in commands.values()}
    for path in MODULES:
        module = name_of(path)
        parents = {".".join(other.split(".")[: module.count(".") + 1]) for other in used}
        if module.startswith("indpriv.analysis.") and {"FINDING", "FINDINGS"} & defined_in(path):
            continue  # found by `indpriv.analysis.summary.findings`
        assert module in entry_points or module in used or module in parents, (
            f"{module} is imported by nobody"
        )


def defined_in(path):
    """Names that a module defines or imports at its top level."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found.update((name.asname or name.name).split(".")[0] for name in node.names)
    return found


@pytest.mark.parametrize("folder", ["audits", "benchmarks", "reports", "docs/tools"])
def test_scripts_import_what_there_is(folder):
    missing = []
    for script in sorted((PACKAGE.parent / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith(
                ("indpriv", "audits", "reports")
            ):
                continue
            module = PACKAGE.parent.joinpath(*node.module.split("."))
            names = {name.name for name in node.names}
            names -= {path.stem for path in module.glob("*")}  # modules of a package
            file = module / "__init__.py" if module.is_dir() else module.with_suffix(".py")
            missing += [
                f"{script.name}: {node.module}.{name}"
                for name in sorted(names - (defined_in(file) if file.is_file() else set()))
            ]
    assert not missing


def test_the_names_of_the_audit_side():
    assert set(indpriv.__all__) == set(indpriv._MODULES)
    for name, module in indpriv._MODULES.items():
        found = getattr(indpriv, name)
        assert found.__name__ == name
        assert found.__module__.startswith(module)
    with pytest.raises(AttributeError, match="no attribute 'recorder'"):
        indpriv.recorder  # noqa: B018


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["audit", "--help"]])
def test_help_imports_nothing_slow(arguments):
    code = (
        "import sys\n"
        "from indpriv.cli import run\n"
        f"assert run({arguments!r}) == 0\n"
        "print({name.split('.')[0] for name in sys.modules}, file=sys.stderr)\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], check=True, timeout=120, capture_output=True, text=True
    )
    slow = {"torch", "opacus", "numpy", "pandas", "scipy", "pyarrow", "jinja2"}
    assert not slow & ast.literal_eval(found.stderr.splitlines()[-1])


AUDIT_WITHOUT_TORCH = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "opacus", "audits"):
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Blocked())
import importlib, pathlib, numpy as np, indpriv
for path in pathlib.Path(indpriv.__file__).parent.rglob("*.py"):
    module = ".".join(("indpriv", *path.relative_to(pathlib.Path(indpriv.__file__).parent).with_suffix("").parts))
    if not module.startswith(("indpriv.recording", "indpriv.leakage", "indpriv.demo")):
        importlib.import_module(module.removesuffix(".__init__"))
log = indpriv.NormLog.from_arrays(np.full((2, 3), 0.5), [0, 1], total_steps=2, noise_multiplier=1.0,
                                  max_grad_norm=1.0, sample_rate=0.1)
table = indpriv.account(log, delta=1e-5)
assert (table.epsilon > 0).all() and table.claim == "exact"
"""


def test_the_audit_side_runs_without_torch():
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", AUDIT_WITHOUT_TORCH], check=True, timeout=120
    )


def test_the_package_keeps_its_budget():
    """Lines of *.py, which may rise only where an issue says so; they fall from wave to wave."""
    budget = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text("utf-8"))["tool"]["house"]
    lines = sum(len(path.read_text("utf-8").splitlines()) for path in MODULES)
    assert lines <= budget["lines"]


def test_no_files_import_each_other_in_a_circle():
    """Imports for type checkers count: a circle of names is a circle of ideas."""
    names = {name_of(path): path for path in MODULES}
    uses = {}
    for name, path in names.items():
        found = {one for one in imports(path, top_level_only=False) if one in names} - {name}
        parents = {one.rpartition(".")[0] for one in found}  # `from package import module`
        uses[name] = {one for one in found if one not in parents}
    while free := {name for name, used in uses.items() if not used}:
        uses = {name: used - free for name, used in uses.items() if name not in free}
    ends = set(uses) - {used for each in uses.values() for used in each}
    assert not uses, f"in a circle, or above one: {sorted(set(uses) - ends)}"
