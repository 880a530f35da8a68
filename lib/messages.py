"""Messages to the user of a run: flags or files that are refused, other errors, and progress.

A refusal is printed as one line. Any other error is printed with its traceback.
"""

import io
import os
import sys
import time
from contextlib import contextmanager, redirect_stderr, suppress
from pathlib import Path
from threading import Event, Thread

import tyro
from tqdm import tqdm

# The variables of torchrun, with their values for a run of one process.
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
# torchrun sets all of these variables. If only some are set, another job has left them in the shell, and torchrun has
# not started this process.
BY_TORCHRUN = ALONE.keys() <= os.environ.keys()
IS_RANK_0 = not BY_TORCHRUN or os.environ["RANK"] == "0"  # Flags are parsed before the ranks can communicate.


class Refused(ValueError):
    """The error for a flag or a file that cannot be used. Its text names the flag or the file and gives the reason, so
    that the user needs no traceback."""


def require(holds, text):
    """Raise Refused with this text if the condition `holds` is false."""
    if not holds:
        raise Refused(text)


@contextmanager
def refuse_errors(where):
    """Turn any exception of the `with` block into Refused. The text of the new error is `where`, a colon, and the text
    of the exception. `where` names a flag, a file or a row, or gives advice."""
    try:
        yield
    except Exception as error:
        raise Refused(f"{where}: {error}") from error


def parse_flags(kind, description):
    """Return the flags of the command line as an instance of the dataclass `kind`. --help begins with the first
    paragraph of `description`. If the flags are wrong, rank 0 prints the reason and every rank exits (SystemExit). From
    this call on, an uncaught Refused is printed as one line."""
    sys.excepthook = print_error
    try:
        with redirect_stderr(sys.stderr if IS_RANK_0 else io.StringIO()):
            return tyro.cli(kind, description=description.partition("\n\n")[0])
    except SystemExit as end:
        if end.code and not IS_RANK_0:
            # As soon as one rank exits, torchrun kills the others, and rank 0 must print its reason first.
            time.sleep(30)
        raise


def print_error(kind, error, trace):
    """Print an uncaught error: Refused without a traceback, any other error with it. The parameters are those of
    sys.excepthook."""
    if not IS_RANK_0:
        # Rank 0 must print first, as in `parse_flags`. If this rank fails only because rank 0 has exited, torchrun
        # kills this rank while it sleeps, and its misleading error is never printed.
        time.sleep(10)
    if not isinstance(error, Refused):
        return sys.__excepthook__(kind, error, trace)
    print(f"\n{Path(sys.argv[0]).name}: {error}\n", file=sys.stderr)


class Progress(tqdm):
    """A progress bar on rank 0, with the arguments of tqdm. On a terminal it appears at the first advance after ten
    seconds, or after 30 seconds if nothing advances, and it disappears when the work is done. If stderr is a file or a
    pipe, the bar is printed there as a line every 30 seconds, even while it does not advance, so that the log shows
    that the run is alive. For work that has no parts to count, write `with Progress(total=1, desc="the model is
    read"):`."""

    def __init__(self, *args, **how):
        self.ended = Event()
        self.on_terminal = sys.stderr.isatty()
        if not self.on_terminal:
            how["file"] = io.StringIO()
            how["bar_format"] = "{desc}: {n_fmt} of {total_fmt}, {elapsed} so far, {remaining} left"
        super().__init__(*args, **how, leave=False, disable=not IS_RANK_0)
        if IS_RANK_0:
            Thread(target=self.keep_showing, daemon=True).start()

    def keep_showing(self):
        """Show the bar every 30 seconds until it is closed. This runs in a thread."""
        while not self.ended.wait(30):
            if self.on_terminal:
                self.refresh()
            else:
                print(self, file=sys.stderr)

    def display(self, *args, **how):
        """Draw the bar if it is older than ten seconds: short work needs no bar."""
        if self.format_dict["elapsed"] > 10:
            with suppress(OSError):  # The terminal may be closed.
                super().display(*args, **how)

    def close(self):
        """End the bar and the thread that shows it."""
        self.ended.set()
        super().close()
