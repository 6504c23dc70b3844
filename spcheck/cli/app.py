"""The command line: the group of all commands, and how each of them ends. No torch is imported here."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import click

from spcheck import __version__
from spcheck.cli.diff import diff
from spcheck.cli.doctor import doctor
from spcheck.cli.output import echo
from spcheck.errors import SpcheckError, UsageError

_INTERRUPTED = 130
_INTERNAL = 70


@click.group(
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, message="spcheck %(version)s")
@click.pass_context
def cli(context: click.Context) -> None:
    """Proves that a sequence-parallel model still computes what its reference computes.

    It runs the two as a pair, on the same ranks, weights and tokens, and compares every layer.

    \b
    Start with:
      spcheck doctor                        what this machine can run
      spcheck diff --tp 2 --tokens 17       compare the pair on one request
      spcheck diff --help                   all that a case can be made of

    \b
    Exit codes:
      0 EQUAL or EQUIVALENT    1 DIVERGED    2 usage, impossible case
      3 INCONCLUSIVE           4 FAILED      70 internal error, 130 interrupted
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


cli.add_command(diff)
cli.add_command(doctor)


def main() -> None:
    """The console script: every ending has its exit code, and a traceback is never exit 1."""
    try:
        code = _run()
    except KeyboardInterrupt:  # a second Ctrl-C, while the first was being told
        code = _INTERRUPTED
    sys.exit(code)


def _run() -> int:
    try:
        _check_packages()
        result = cli.main(prog_name="spcheck", standalone_mode=False)
    except click.ClickException as error:
        return _say(_one_sentence(error.format_message()), error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        return _say("interrupted", _INTERRUPTED)
    except Exception as error:
        if isinstance(error, SpcheckError) and error.exit_code != _INTERNAL:
            return _say(str(error), error.exit_code)
        return _say(_internal(error), _INTERNAL)
    return result if isinstance(result, int) else 0


def _internal(error: Exception) -> str:
    from spcheck.cli.internal import internal_error

    return internal_error(error)


def _say(message: str, code: int) -> int:
    from spcheck.report.printable import sentence

    echo(f"spcheck: {sentence(message)}\n", err=True)
    return code


def _check_packages() -> None:
    """The subjects are packages of common names: another one on the path must not be taken for ours.

    Raises:
        UsageError: it would be; the message names the folder.
    """
    here = Path(__file__).resolve().parents[2]
    for name in ("reference", "optimized"):
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None or Path(spec.origin).resolve().parents[1] != here:
            found = "nowhere" if spec is None else spec.origin
            raise UsageError(f"the package {name!r} is found at {found}, not beside spcheck in {here}: mend PYTHONPATH")


def _one_sentence(text: str) -> str:
    return " ".join(text.split())


if __name__ == "__main__":
    main()
