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

# Inside the tool, a folder or a module at the top: each may import from the lines above its own, and from itself.
LAYERS = [
    "errors",
    "case",
    "comm",
    "subjects",
    "plan",
    "families",
    "worker",
    "launch",
    "judge",
    "run",
    "doctor",
    "report",
    "cli",
    "__main__",
]
MOST_EDGES = 70


def _in_folder(folder):
    paths = (ROOT / "spcheck" / folder).rglob("*.py")
    return [".".join(p.relative_to(ROOT / "spcheck").with_suffix("").parts) for p in paths if p.name != "__init__.py"]


# Parts of the tool that must run without torch: the parent and everything it imports.
TORCH_FREE = {
    "spcheck.__main__",
    "spcheck.comm.trace",
    "spcheck.doctor.torch_facts",
    "spcheck.doctor.trial",
    "spcheck.launch.interface",
    "spcheck.launch.parent",
    "spcheck.run",
    *(
        f"spcheck.{name}"
        for folder in ("case", "cli", "plan", "families", "judge", "report")
        for name in _in_folder(folder)
    ),
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


def step_of(name):
    """The folder, or the module at the top, that a module of the tool lies in; None for the package's own version."""
    return name.split(".")[1] if "." in name else None


def edges_of_steps(graph):
    edges = set()
    for name, targets in graph.items():
        for target in targets:
            if name.startswith("spcheck.") and target.startswith("spcheck."):
                edges.add((step_of(name), step_of(target)))
    return {(here, there) for here, there in edges if here != there}


def test_the_tool_is_layered(graph):
    upward = [(a, b) for a, b in edges_of_steps(graph) if LAYERS.index(a) < LAYERS.index(b)]
    assert not upward


def test_few_steps_know_each_other(graph):
    assert len(edges_of_steps(graph)) <= MOST_EDGES


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
        if not name.startswith("spcheck.cli."):
            assert not names & {"echo", "secho"}, name
            assert not {"print"} & {c.func.id for c in calls if isinstance(c.func, ast.Name)}, name
