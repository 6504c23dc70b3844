"""The reference's choices in place of the candidate's own, so that what follows a near tie stays comparable."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from spcheck.subjects.protocol import Tap


class Replay:
    """Hooks on the choice modules of one subject, put on behind the hooks that capture: a probe shows its own choice.

    Ids are global experts and groups, key positions within a request, and tokens; rows are matched by (request,
    position). Padded rows keep what they chose. ``told`` gets the ids [rows, k] that the subject goes on with.
    """

    def __init__(self, root: nn.Module, taps: Mapping[str, Tap], told: Callable[[str, Tensor], None]) -> None:
        self._told = told
        self._chosen: Mapping[str, Tensor] = {}
        self._rows: Mapping[str, Sequence[slice]] = {}
        self._firings: Counter[str] = Counter()
        modules = dict(root.named_modules())
        self.probes = {probe: tap for probe, tap in taps.items() if is_choice(probe, taps) or tap.steers}
        for probe, tap in self.probes.items():
            modules[tap.module].register_forward_hook(lambda _, __, output, probe=probe: self._replaced(probe, output))

    def expect(self, rows: Mapping[str, Sequence[slice]], chosen: Mapping[str, Tensor]) -> None:
        """Says what to choose in the next forward: all real rows' ids [rows, k] per probe, none for no replay.

        ``rows`` are those of each firing of a probe, in order.
        """
        self._chosen, self._rows = chosen, rows
        self._firings.clear()

    def _replaced(self, probe: str, output: Any) -> Any:
        if probe not in self._chosen:
            return output
        rows, firing = self._rows[probe], self._firings[probe]
        self._firings[probe] += 1
        ids = self._chosen[probe][rows[firing] if firing < len(rows) else slice(0)].to(output.device, output.dtype)
        own = output.unsqueeze(-1) if output.ndim == 1 else output
        if ids.shape[0] > own.shape[0] or bool((ids[:, own.shape[1] :] >= 0).any()):
            return output  # rows or columns are missing here: a finding of its own
        replaced, ids = own.clone(), ids[:, : own.shape[1]]  # a request alone may have fewer keys than the longest
        replaced[: ids.shape[0]] = F.pad(ids, (0, own.shape[1] - ids.shape[1]), value=-1)
        self._told(probe, replaced)
        return replaced.reshape(output.shape)


def is_choice(probe: str, taps: Mapping[str, Tap]) -> bool:
    """Whether a probe shows what a module chose from scores that are probed too."""
    return taps[probe].choice and scores_of(probe) in taps and scores_of(probe) != probe


def scores_of(choice: str) -> str:
    """The probe of the scores that a choice was made from."""
    return choice.removesuffix(".out") + ".in"
