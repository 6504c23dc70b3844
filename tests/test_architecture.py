"""The import table: who may know whom. Data flows one way, and the two subjects share no computing code."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("spcheck", "reference", "optimized")

# What each part may import of the other parts, by prefix; parts of one package see each other unless listed.
ALLOWED = {
    "reference": set(),
    "optimized": {"reference.config", "reference.checkpoint"},
    "spcheck": {"reference.config", "reference.checkpoint"},
}

# Inside the tool: each module may import only from rows above its own (and its own row).
LAYERS = [
    {"spcheck", "spcheck.errors", "spcheck.printable"},
    {
        "spcheck.place",
        "spcheck.case",
        "spcheck.subject",
        "spcheck.comm",
        "spcheck.exact",
        "spcheck.memory",
        "spcheck.scale",
    },
    {"spcheck.steps"},
    {"spcheck.phases"},
    {"spcheck.judge", "spcheck.guard", "spcheck.model", "spcheck.schemes"},
    {"spcheck.dispatch"},
    {"spcheck.checks"},
    {"spcheck.plan", "spcheck.merge"},
    {
        "spcheck.contracts",
        "spcheck.diagnose",
        "spcheck.clues",
        "spcheck.forward_rows",
        "spcheck.matching",
        "spcheck.separation",
        "spcheck.notes",
        "spcheck.rounding",
        "spcheck.sentences",
        "spcheck.worker",
        "spcheck.failure",
        "spcheck.generation",
    },
    {"spcheck.exercised", "spcheck.findings"},
    {"spcheck.verdict", "spcheck.launch"},
    {"spcheck.run"},
    {"spcheck.doctor"},
    {"spcheck.report"},
    {"spcheck.output", "spcheck.internal", "spcheck.options"},
    {"spcheck.cli"},
    {"spcheck.__main__"},
]

# Parts of the tool that must run without torch: the parent and everything it imports.
TORCH_FREE = {
    "spcheck.__main__",
    "spcheck.cli",
    "spcheck.comm.trace",
    "spcheck.doctor.torch_facts",
    "spcheck.doctor.trial",
    "spcheck.exercised",
    "spcheck.launch.interface",
    "spcheck.launch.parent",
    "spcheck.report.accounting",
    "spcheck.report.doctor",
    "spcheck.report.exercised",
    "spcheck.report.json",
    "spcheck.report.probes",
    "spcheck.report.text",
    "spcheck.run",
    "spcheck.verdict",
}


def modules():
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def imports_of(path):
    """(module, is it a typing-only import) for every import of our own packages, function-level ones included."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    known = {name for name, _ in modules()}
    return {name for name in found if name in known}


@pytest.fixture(scope="module")
def graph():
    return {name: imports_of(path) - {name} for name, path in modules()}


def test_packages_know_only_what_the_table_allows(graph):
    for name, targets in graph.items():
        package = name.split(".")[0]
        foreign = {t for t in targets if t.split(".")[0] != package}
        assert foreign <= ALLOWED[package], f"{name} imports {foreign - ALLOWED[package]}"


def test_the_subjects_share_no_computing_code(graph):
    """What `optimized` reaches through `reference` is sizes and files; none of it computes."""
    reached = set()
    todo = [t for name in graph if name.startswith("optimized") for t in graph[name] if t.startswith("reference.")]
    while todo:
        name = todo.pop()
        if name not in reached:
            reached.add(name)
            todo += [t for t in graph[name] if t.startswith("reference.")]
    files = {"reference.config", "reference.rope_config", "reference.checkpoint", "reference.layout"}
    files |= {"reference.config_keys", "reference.overrides", "reference.model_folder"}
    assert reached == files | {"reference.mistakes"}


def test_the_subjects_import_by_name_only():
    """No `importlib` or `__import__`: the table would not see what they reach."""
    for name, path in modules():
        if not name.startswith("spcheck"):
            text = path.read_text(encoding="utf-8")
            assert "importlib" not in text, name
            assert "__import__" not in text, name


def test_the_tool_is_layered(graph):
    def layer(name):
        return next(
            i
            for i, names in enumerate(LAYERS)
            for n in names
            if name == n or (name.startswith(n + ".") and n != "spcheck")
        )

    for name, targets in graph.items():
        if name.startswith("spcheck"):
            for target in targets:
                if target.startswith("spcheck"):
                    assert layer(target) <= layer(name), f"{name} imports {target}"


def test_no_import_cycle(graph):
    TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("module", sorted(TORCH_FREE))
def test_the_parent_imports_no_torch(module):
    code = f"import sys, {module}; sys.exit(any(m.split('.')[0] == 'torch' for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0


def test_only_the_edge_does_io():
    """`print`, `click.echo` and the like live in the CLI alone."""
    for name, path in modules():
        calls = [n for n in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(n, ast.Call)]
        names = {c.func.id for c in calls if isinstance(c.func, ast.Name)}
        names |= {c.func.attr for c in calls if isinstance(c.func, ast.Attribute)}
        if name not in ("spcheck.cli", "spcheck.output"):
            assert not names & {"echo", "secho"}, name
            assert not {"print"} & {c.func.id for c in calls if isinstance(c.func, ast.Name)}, name
