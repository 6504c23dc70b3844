"""What can go wrong between ranks.

CommunicatorError          a spcheck.errors.RunFailed
|- CollectiveArgumentError  one rank's own argument does not fit the call (also a ValueError)
|- CollectiveMismatch       two ranks of a group wait for different collectives
|- RankLost                 a rank that others wait for has ended or raised
|- Deadlock                 every rank that is left waits, none for what another waits for
|- CollectiveFailed         the backend gave up: a lost peer, a timeout
`- WorldFailed              what the ranks' run as a whole came to, with one outcome per rank
"""

from dataclasses import dataclass

from spcheck.errors import RunFailed


class CommunicatorError(RunFailed):
    """Anything raised by a communicator or a world."""


class CollectiveArgumentError(CommunicatorError, ValueError):
    """The argument of one rank cannot be right, whatever the other ranks pass."""


class CollectiveMismatch(CommunicatorError):
    """Two ranks of one group wait for different collectives; the message names both ranks, kinds and shapes."""


class RankLost(CommunicatorError):
    """A rank has ended or raised; the message names it and what this rank waited for."""


class Deadlock(CommunicatorError):
    """All ranks that are left wait in collectives that can never be complete; the message lists them."""


class CollectiveFailed(CommunicatorError):
    """torch.distributed gave up on a collective; the message names the collective, the cause is torch's own error."""


@dataclass(frozen=True)
class RankOutcome:
    """How one rank's main ended.

    `state` is "returned", "raised", "stopped" (by another rank's failure) or "never started". `waited_for` is the
    collective the rank was in when it was stopped, else empty.
    """

    rank: int
    state: str
    exception: BaseException | None = None
    traceback: str = ""
    waited_for: str = ""

    def __str__(self) -> str:
        text = f"rank {self.rank} {self.state}"
        if self.exception is not None and self.state == "raised":
            text += f" {type(self.exception).__name__}: {self.exception}"
        return f"{text}, waiting for {self.waited_for}" if self.state == "stopped" else text


class WorldFailed(CommunicatorError):
    """At least one rank did not return; `primary` is the outcome of the rank that failed first."""

    def __init__(self, outcomes: tuple[RankOutcome, ...], primary: RankOutcome) -> None:
        super().__init__(outcomes, primary)  # both in args, so that the error can be pickled
        self.outcomes = outcomes
        self.primary = primary

    def __str__(self) -> str:
        others = [str(outcome) for outcome in self.outcomes if outcome is not self.primary]
        return "; ".join([str(self.primary), *others])
