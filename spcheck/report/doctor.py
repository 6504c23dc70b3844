"""What `spcheck doctor` found, as text for a person and as JSON for a program."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from dataclasses import asdict

from spcheck import __version__
from spcheck.doctor.machine import Cores, Machine
from spcheck.doctor.torch_facts import Torch
from spcheck.doctor.trial import Backend, Diagnosis
from spcheck.launch.memory import Memory
from spcheck.report.printable import printable

SCHEMA = "spcheck.doctor/1"
_LABEL = 12
_WIDTH = 80


def doctor_json(d: Diagnosis) -> str:
    """The whole of it."""
    document = {"schema": SCHEMA, "spcheck": __version__, "exit_code": d.exit_code, **asdict(d)}
    for found, backend in zip(document["backends"], d.backends, strict=True):
        found["works"] = backend.works
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


def doctor_text(d: Diagnosis) -> str:
    """The page: what is there, what runs, and a last line that says it all."""
    lines = [line for label, text in _facts(d.machine, d.torch) for line in _entry(label, text)]
    lines += ["", *(line for b in d.backends for line in _entry(b.name, _backend(b))), "", _conclusion(d)]
    return "\n".join(lines) + "\n"


def _entry(label: str, text: str) -> Iterator[str]:
    """A label and its text, in as many lines as it takes."""
    room = _WIDTH - _LABEL - 1
    wrapped = textwrap.wrap(printable(text), room, break_on_hyphens=False) or [""]
    for first, line in zip([label, *[""] * len(wrapped)], wrapped, strict=False):
        yield f"{first:<{_LABEL}} {line}".rstrip()


def _facts(m: Machine, torch: Torch) -> Iterator[tuple[str, str]]:
    yield "spcheck", f"{__version__}, from {m.code}"
    yield "python", f"{m.python} on {m.platform}"
    yield "torch", torch.problem or f"{torch.version}, {f'CUDA {torch.cuda}' if torch.cuda else 'without CUDA'}"
    others = {name: version for name, version in m.packages.items() if name != "torch"}
    yield "packages", ", ".join(f"{name} {version or 'MISSING'}" for name, version in others.items())
    yield "gpus", "; ".join(torch.gpus) or "none that torch can use"
    yield "cores", _cores(m.cores)
    yield "memory", _memory(m.memory)
    t = m.temporary
    yield (
        "temporary",
        f"{t.folder} cannot be written: {t.problem}" if t.problem else f"{t.folder}, {_size(t.free)} free",
    )
    yield "network", m.network or f"interface {m.interface} works"


def _cores(c: Cores) -> str:
    text = f"{c.usable} of {c.machine} may be used"
    return text if c.quota is None else f"{text}, and a cgroup leaves the time of {c.quota:g}"


def _memory(m: Memory) -> str:
    text = f"{_size(m.available)} free of {_size(m.total)}"
    return text if m.limit is None else f"{text}, and a cgroup allows {_size(m.limit)}"


def _size(size: int | None) -> str:
    return "unknown" if size is None else f"{size / 2**30:.1f} GiB"


def _backend(b: Backend) -> str:
    if b.reason:
        return f"cannot  {b.reason}"
    ranks = f"{b.ranks} rank{'s' if b.ranks > 1 else ''}"
    state = "works " if b.works else "BROKEN"
    return f"{state}  {b.outcome} with {ranks} in {b.seconds:.1f} s" + (f": {b.problem}" if b.problem else "")


def _conclusion(d: Diagnosis) -> str:
    working = [b.name for b in d.backends if b.works]
    if broken := [b.name for b in d.backends if b.reason is None and not b.works]:
        return f"{', '.join(broken)} should work here and did not."
    if not working:
        return "No backend works here."
    return f"spcheck diff runs here on {', '.join(working)}."
