"""The program: its verbs, which of them is meant, and how errors are printed.

`ucconvert SRC DST --to FORMAT` means `ucconvert convert …`: whatever does not start with a verb is a conversion.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

import typer

from ucformat.cli.convert import convert
from ucformat.cli.diff import diff
from ucformat.cli.fingerprint import fingerprint
from ucformat.cli.index import index
from ucformat.cli.inspect import inspect
from ucformat.cli.prune import prune
from ucformat.cli.reindex import reindex
from ucformat.cli.screen import is_leader, listen, sweep_up, tell_error
from ucformat.cli.slots import slots
from ucformat.cli.validate import validate
from ucformat.cli.verify import verify
from ucformat.errors import UcformatError

FAILED = 1
"""Exit status of an error, of damage found, and of a difference found. Wrong usage is 2."""

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it."""

EPILOG = """
**Examples**

`ucconvert inspect runs/a`: what is in it

`ucconvert runs/ds/global_step100 out --to native`: DeepSpeed to native

`ucconvert runs/a out --to hf --dtype bf16`: the model for `from_pretrained`

`ucconvert runs/a out --to dcp --select 'model/*' --dry-run`: what would be read and written

`ucconvert diff runs/a out`: are they equal, bit for bit?

`torchrun --nproc-per-node 8 -m ucformat.cli runs/a out --to hf`: the work spread over 8 processes
"""

app = typer.Typer(
    name="ucconvert",
    help="Convert, inspect, verify and compare checkpoints of large-model training, whoever wrote them.\n\n"
    "`ucconvert SRC DST --to FORMAT` converts; the kind of SRC is found out. Paths may be local or any fsspec URL.",
    epilog=EPILOG,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    add_completion=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for verb in (convert, inspect, verify, diff, fingerprint, index, reindex, prune, slots, validate):
    app.command(no_args_is_help=verb is not slots)(verb)  # without a directory, `slots` lists all
VERBS = ("convert", "inspect", "verify", "diff", "fingerprint", "index", "reindex", "prune", "slots", "validate")
_OWN = ("-h", "--help", "--version")


def _print_version(wanted: bool) -> None:
    if wanted:
        try:
            typer.echo(f"ucformat {version('ucformat')}")
        except PackageNotFoundError:
            typer.echo("ucformat (not installed)")
        raise typer.Exit


@app.callback()
def options(
    show_version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
    debug: bool = typer.Option(False, "--debug", help="Show the traceback of an error; works with every command."),
) -> None:
    """Options of every command. `--debug` was taken out by `run` already: it may stand anywhere."""


def run(argv: Sequence[str]) -> int:
    """Run the program on arguments (without its name); the exit status."""
    debug = "--debug" in argv
    args = [arg for arg in argv if arg != "--debug"]
    if args and args[0] not in (*VERBS, *_OWN):
        args.insert(0, "convert")
    listen()
    try:
        app(args=args, prog_name="ucconvert")
    except SystemExit as stop:
        if stop.code == INTERRUPTED and is_leader():
            typer.echo("interrupted", err=True)
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except Exception as error:
        if debug:
            raise
        if is_leader():
            tell_error(error, expected=isinstance(error, UcformatError))
        return FAILED
    finally:
        sweep_up()
    return 0


def main() -> None:
    """The entry point."""
    sys.exit(run(sys.argv[1:]))
