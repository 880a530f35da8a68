"""What a run tells its user: refusals in a sentence, other errors with their traceback, and progress."""

import io
import os
import sys
import time
from contextlib import contextmanager, redirect_stderr, suppress
from pathlib import Path
from threading import Event, Thread

import tyro
from tqdm import tqdm

ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
# torchrun sets all of these. A shell in which another job has left some of them starts no ranks.
BY_TORCHRUN = ALONE.keys() <= os.environ.keys()
IS_RANK_0 = not BY_TORCHRUN or os.environ["RANK"] == "0"  # There is no World yet.


class Refused(ValueError):
    """What a user gave cannot be used. The text names it, a flag or a file, and says why: a line that needs no
    traceback."""


def require(holds, text):
    """Raise Refused for what does not hold."""
    if not holds:
        raise Refused(text)


@contextmanager
def refuse_errors(where):
    """Refuse what raises an error inside, and say where: a flag, a file, a row."""
    try:
        yield
    except Exception as error:
        raise Refused(f"{where}: {error}") from error


def parse_flags(kind, description):
    """Return the command line as a `kind`, or end with what is wrong with it, said by the first rank. From here on what
    is refused is said in a line."""
    sys.excepthook = print_error
    try:
        with redirect_stderr(sys.stderr if IS_RANK_0 else io.StringIO()):
            return tyro.cli(kind, description=description.partition("\n\n")[0])
    except SystemExit as end:
        if end.code and not IS_RANK_0:
            time.sleep(30)  # torchrun ends all ranks when one ends, and the first rank has something to say.
        raise


def print_error(kind, error, trace):
    """Say in one line what is refused, and show the traceback of everything else."""
    if not IS_RANK_0:
        time.sleep(10)  # as in `parse`; or it fails because the first one has ended
    if not isinstance(error, Refused):
        return sys.__excepthook__(kind, error, trace)
    print(f"\n{Path(sys.argv[0]).name}: {error}\n", file=sys.stderr)


class Progress(tqdm):
    """A bar of what takes ten seconds and more, on the first rank. On a terminal it goes when it is done; elsewhere it
    is a line each half minute, even while nothing moves, so that nothing is silent for longer. For what is done in one
    go write `with Progress(total=1, desc="what it is"):`."""

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
        """Show it each half minute."""
        while not self.ended.wait(30):
            if self.on_terminal:
                self.refresh()
            else:
                print(self, file=sys.stderr)

    def display(self, *args, **how):
        """Show it, unless it is new."""
        if self.format_dict["elapsed"] > 10:
            with suppress(OSError):  # The terminal may be gone.
                super().display(*args, **how)

    def close(self):
        """End it."""
        self.ended.set()
        super().close()
