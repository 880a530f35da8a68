"""Messages to the user of a run: flags or files that are refused, other errors, and progress.

A refusal is printed without a traceback. Any other error is printed with its traceback.
"""

import io
import os
import signal
import sys
import time
from contextlib import contextmanager, redirect_stderr
from pathlib import Path

import tyro
from tqdm import tqdm

# The variables of torchrun, with their values for a run of one process.
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
# torchrun sets all of these variables. If only some are set, another job has left them in the shell, and torchrun has
# not started this process.
BY_TORCHRUN = ALONE.keys() <= os.environ.keys()
IS_RANK_0 = not BY_TORCHRUN or os.environ["RANK"] == "0"  # Flags are parsed before the ranks can communicate.

if "--help" in sys.argv:
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `--help | head` then ends without a traceback.


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
    paragraph of `description`, and lists the flags that only `kind` has before those of its base class. If the flags
    are wrong, rank 0 prints the reason and every rank exits (SystemExit). From this call on, an uncaught Refused is
    printed without a traceback."""
    sys.excepthook = print_error
    shared = kind.__base__.__dataclass_fields__
    fields = sorted(kind.__dataclass_fields__.items(), key=lambda field: field[0] in shared)
    kind.__dataclass_fields__ = dict(fields)
    try:
        with redirect_stderr(sys.stderr if IS_RANK_0 else io.StringIO()):
            return tyro.cli(kind, description=description.partition("\n\n")[0])
    except SystemExit as end:
        if end.code and not IS_RANK_0:
            # As soon as one rank exits, torchrun kills the others, and rank 0 must print its reason first.
            time.sleep(30)
        raise


def print_error(kind, error, trace):
    """Print an uncaught error, Refused without a traceback, and end the process: on rank 0 at once, on others after ten
    seconds. It ends by os._exit, because in a normal exit vLLM would destroy the process group, which waits
    for all ranks, and some of these may never get there. The parameters are those of sys.excepthook."""
    if not IS_RANK_0:
        # Rank 0 must print first, as in `parse_flags`. If this rank fails only because rank 0 has exited, torchrun
        # kills this rank while it sleeps, and its misleading error is never printed.
        time.sleep(10)
    if isinstance(error, Refused):
        print(f"\n{Path(sys.argv[0]).name}: {error}\n", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)
    sys.stdout.flush()
    os._exit(1)


class Progress(tqdm):
    """A bar of tqdm on rank 0, with tqdm's arguments. Work that ends within ten seconds gets none. If stderr is a file
    or a pipe, the bar is written there at most every 30 seconds."""

    def __init__(self, *args, **how):
        seconds = 0.1 if sys.stderr.isatty() else 30
        super().__init__(*args, **how, leave=False, disable=not IS_RANK_0, delay=10, mininterval=seconds)

    def refresh(self, *args, **how):
        """Draw the bar if the work has taken ten seconds. vLLM also asks for the bar at the end of short work."""
        if self.format_dict["elapsed"] > 10:
            super().refresh(*args, **how)
