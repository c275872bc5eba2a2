"""How long until something is on the screen: cbviz against the least that Textual can do.

    python -m cbviz.bench.first_frame [--rounds N] [--json]

Both programs are started in turn in a pseudo-terminal of 120×40, and the time is taken from the
start of the process until a word of its first frame has been written. Both include starting
Python and importing Textual; what cbviz takes beyond the bare program is its own. Unix only.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import pty
import signal
import statistics
import struct
import sys
import termios
import time

BARE = """
from textual.app import App
from textual.widgets import Static
class Bare(App):
    def compose(self):
        yield Static("the first frame")
Bare().run()
"""
PROGRAMS = {
    "bare textual": (["-c", BARE], b"the first frame"),
    "cbviz": (["-m", "cbviz.cli"], b"Loading"),
}
"""What is run, and what its first frame shows."""
GIVE_UP_S = 30.0


def first_frame_s(arguments: list[str], mark: bytes) -> float:
    """Seconds from the start of a program until the mark is on its terminal."""
    started = time.perf_counter()
    child, terminal = pty.fork()
    if child == 0:
        os.environ.update(TERM="xterm-256color", COLORTERM="truecolor")
        for name in ("COLUMNS", "LINES", "NO_COLOR"):
            os.environ.pop(name, None)
        os.execv(sys.executable, [sys.executable, *arguments])
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    try:
        written = b""
        while mark not in written:
            written += os.read(terminal, 65536)
            if time.perf_counter() - started > GIVE_UP_S:
                raise TimeoutError(f"no first frame from {arguments}")
        return time.perf_counter() - started
    finally:
        os.kill(child, signal.SIGTERM)
        _drain(terminal)
        os.waitpid(child, 0)


def _drain(terminal: int) -> None:
    """Let the program write its goodbye."""
    try:
        while os.read(terminal, 65536):
            pass
    except OSError:
        os.close(terminal)


def measure(rounds: int) -> dict[str, list[float]]:
    """Seconds to the first frame of each program, run in turn."""
    times: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    for _ in range(rounds + 1):
        for name, (arguments, mark) in PROGRAMS.items():
            times[name].append(first_frame_s(arguments, mark))
    # The first round only warms the disk's cache.
    return {name: taken[1:] for name, taken in times.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true", dest="as_json")
    args = parser.parse_args()
    times = measure(args.rounds)
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    beyond = medians["cbviz"] - medians["bare textual"]
    if args.as_json:
        print(json.dumps({"seconds": times, "median_s": medians, "beyond_s": beyond}))
        return
    for name, taken in times.items():
        print(f"{name:14}{medians[name]:7.3f} s   ({min(taken):.3f} to {max(taken):.3f})")
    print(f"{'beyond':14}{beyond:7.3f} s")


if __name__ == "__main__":
    main()
