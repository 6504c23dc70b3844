"""What a rank did last, in memory that another process can read after the rank is gone. No torch.

The memory is an anonymous mapping, shared by a fork, or that of a file without a name; nothing of it is left. A rank
writes where it is, its running module, its last probe, and a ring of its last collectives. A rank that is killed while
it writes leaves at worst one entry whose checksum is wrong, and a reader skips it.
"""

from __future__ import annotations

import mmap
import struct
import threading
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

OWN_GROUP = "spcheck"
"""The group name of the tool's own exchanges."""

WITHIN_DP_RANK = "tp"
"""The group name of calls that stay within a data-parallel rank."""

RING = 1024  # collectives kept: more than two forwards of a model of 61 layers
_SLOT = 256  # bytes of one entry; a longer module name loses its end
_HEADER = struct.Struct("<HI")  # length and checksum of the text behind it
_COUNT = struct.Struct("<Q")
_TIME = struct.Struct("<d")
_WHERE, _MODULE, _PROBE, _ENTERED, _LEFT, _THREAD, _BEGUN = (_SLOT * i for i in range(7))
_FIRST = 7 * _SLOT
_PAGE = 1 << 16  # the largest page there is: a mapping can begin at no other place
SIZE = -(-(_FIRST + RING * _SLOT) // _PAGE) * _PAGE
"""Bytes of one trace; in a file, traces stand one after the other."""

_SEPARATOR = "\x1f"


@dataclass(frozen=True, slots=True)
class Entry:
    """One collective as a rank called it: its ``number`` counts all of the rank's calls in all groups from 0.

    ``across`` counts those that join data-parallel ranks, and is None for the others.
    """

    number: int
    across: int | None
    subject: str
    step: str
    kind: str
    group: str
    shape: tuple[int, ...]
    dtype: str
    module: str


class Trace:
    """The trace of one rank, at ``index`` in the ``file``. Only that rank writes; anyone may read, at any moment."""

    def __init__(self, file: int = -1, index: int = 0) -> None:
        self._memory = mmap.mmap(file, SIZE, offset=index * SIZE)
        self._place = _SEPARATOR
        self._count = 0
        self._across = 0

    def begin(self, subject: str, step: str) -> None:
        """From here on the rank is in this step of this subject ("" is the tool itself), in none of its modules."""
        self._place = f"{subject}{_SEPARATOR}{step}"
        self._put(_WHERE, self._place)
        self._put(_MODULE, "")
        self._memory[_BEGUN : _BEGUN + 8] = _TIME.pack(time.monotonic())

    @property
    def begun(self) -> float:
        """When the rank began its step, by ``time.monotonic``, which is the same clock in every process; else 0."""
        return float(_TIME.unpack_from(self._memory, _BEGUN)[0])

    @property
    def place(self) -> tuple[str, str]:
        """The subject and the step that the rank is in, as :meth:`begin` was told them."""
        subject, _, step = self._get(_WHERE).partition(_SEPARATOR)
        return subject, step

    @property
    def subject(self) -> str:
        """The subject whose code runs, "" for the tool itself."""
        return self._place.partition(_SEPARATOR)[0]

    def module(self, name: str) -> None:
        """The innermost watched module that runs."""
        self._put(_MODULE, name)

    def probe(self, name: str) -> None:
        """The probe that has just been captured."""
        self._put(_PROBE, name)

    def enter(self, kind: str, group: str, shape: tuple[int, ...] = (), dtype: str = "", module: str = "") -> None:
        """The rank is about to call a collective; until :meth:`leave` it waits there for the others."""
        sizes = ",".join(map(str, shape))
        across = "" if group == WITHIN_DP_RANK else str(self._across)
        text = _SEPARATOR.join((str(self._count), across, self._place, kind, group, sizes, dtype, module))
        self._put(_FIRST + self._count % RING * _SLOT, text)
        self._count += 1
        self._across += bool(across)
        self._memory[_ENTERED : _ENTERED + 8] = _COUNT.pack(self._count)

    def leave(self) -> None:
        """The collective has come back."""
        self._memory[_LEFT : _LEFT + 8] = _COUNT.pack(self._count)

    @contextmanager
    def waiting(self, kind: str) -> Iterator[None]:
        """Around one of the tool's own exchanges. One that raises is never left: it was the last thing done."""
        self.enter(kind, OWN_GROUP)
        yield
        self.leave()

    def thread(self) -> None:
        """The calling thread is the rank's: which one it is among those of its process."""
        self._memory[_THREAD : _THREAD + 8] = _COUNT.pack(threading.get_ident())

    @property
    def thread_id(self) -> int:
        """As told by :meth:`thread`, else 0."""
        return int(_COUNT.unpack_from(self._memory, _THREAD)[0])

    def waits_in(self) -> int | None:
        """The number of the collective that the rank is in; None while it is in none."""
        entered, left = self._counts()
        return entered - 1 if entered > left else None

    def read(self) -> dict[str, Any]:
        """All of it as plain data.

        ``waits`` says whether the rank is in the last of ``collectives``; ``began`` whether it got as far as a step.
        """
        subject, step = self.place
        entered, left = self._counts()
        return {
            "began": bool(step),
            "subject": subject,
            "step": step,
            "module": self._get(_MODULE),
            "last_probe": self._get(_PROBE) or None,
            "waits": entered > left,
            "collectives": [asdict(entry) for entry in self._entries(entered)],
        }

    def _counts(self) -> tuple[int, int]:
        """How many collectives were entered, and left: the second is read first, so that it is never the larger one."""
        left = _COUNT.unpack_from(self._memory, _LEFT)[0]
        return _COUNT.unpack_from(self._memory, _ENTERED)[0], left

    def _entries(self, count: int) -> Iterator[Entry]:
        for number in range(max(count - RING, 0), count):
            entry = _entry(self._get(_FIRST + number % RING * _SLOT))
            if entry is not None and entry.number == number:
                yield entry

    def _put(self, at: int, text: str) -> None:
        packet = _packet(text)
        self._memory[at : at + len(packet)] = packet

    def _get(self, at: int) -> str:
        """The text there, or nothing where it is torn."""
        length, checksum = _HEADER.unpack_from(self._memory, at)
        data = self._memory[at + _HEADER.size : at + min(_HEADER.size + length, _SLOT)]
        return data.decode(errors="replace") if zlib.crc32(data) == checksum else ""


@lru_cache(maxsize=1 << 14)
def _packet(text: str) -> bytes:
    """As it is written; names of modules and probes come again and again."""
    data = text.encode(errors="replace")[: _SLOT - _HEADER.size]
    return _HEADER.pack(len(data), zlib.crc32(data)) + data


def _entry(text: str) -> Entry | None:
    """A cut entry has lost the end of its module's name, or, if it is odd beyond that, cannot be used."""
    parts = text.split(_SEPARATOR, 8)
    if len(parts) != 9:
        return None
    number, across, subject, step, kind, group, sizes, dtype, module = parts
    shape = tuple(int(size) for size in sizes.split(",") if size)
    return Entry(int(number), int(across) if across else None, subject, step, kind, group, shape, dtype, module)


def collective_text(entry: Mapping[str, Any]) -> str:
    """``all_gather [9, 768] float64 on tp``; an exchange of the tool says so."""
    if entry["group"] == OWN_GROUP:
        return f"{entry['kind']} (spcheck's own)"
    return f"{entry['kind']} {list(entry['shape'])} {entry['dtype']} on {entry['group']}".replace("  ", " ")


def last_collective(trace: Mapping[str, Any]) -> dict[str, Any] | None:
    """The last collective of a subject; the tool's own exchanges are no help to its author."""
    return next((c for c in reversed(trace["collectives"]) if c["group"] != OWN_GROUP), None)
