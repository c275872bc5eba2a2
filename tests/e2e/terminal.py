"""The real program in a real pseudo-terminal, read through a terminal emulator.

Nothing sleeps: `until` reads what the program writes until the screen shows what is wanted.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pexpect
import psutil
import pyte

ROOT = Path(__file__).parents[2]
KEYS = {
    "left": "\x1b[D", "right": "\x1b[C", "up": "\x1b[A", "down": "\x1b[B", "home": "\x1b[H",
    "end": "\x1b[F", "enter": "\r", "escape": "\x1b", "space": " ", "ctrl+c": "\x03",
}  # fmt: skip
_TERMINAL_VARIABLES = {"COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TERM_PROGRAM"}
# Questions to the terminal and private modes that the emulator would print instead of skipping.
_UNKNOWN = re.compile(
    r"\x1b\[[<>=?][0-9;]*[a-zA-Z$]p?"
    r"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)"
    r"|\x1b[_P][^\x1b]*\x1b\\"
)
_WHOLE = re.compile(r"\x1b\[[0-9;?<>=$]*[@-~]")


class Terminal:
    """`cbviz …` (or another command) in a terminal of a given size."""

    def __init__(
        self,
        *arguments: str,
        size: tuple[int, int] = (120, 40),
        env: dict[str, str] | None = None,
        command: list[str] | None = None,
        preexec: Callable[[], None] | None = None,
    ) -> None:
        self.width, self.height = size
        self.screen = pyte.Screen(self.width, self.height)
        self.stream = pyte.Stream(self.screen)
        self.raw = ""
        self._held = ""
        # Of the surroundings' idea of the terminal, nothing may leak in (xdist sets COLUMNS).
        inherited = {k: v for k, v in os.environ.items() if k not in _TERMINAL_VARIABLES}
        environment = {
            **inherited,
            "TERM": "xterm-256color",
            "COLORTERM": "truecolor",
            "PYTHONPATH": str(ROOT),
            **(env or {}),
        }
        words = command or [sys.executable, "-m", "cbviz.cli", *arguments]
        self.process = pexpect.spawn(
            words[0], words[1:], dimensions=(self.height, self.width), env=environment,
            encoding="utf-8", codec_errors="replace", timeout=60, preexec_fn=preexec,
        )  # fmt: skip

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        if psutil.pid_exists(self.process.pid):
            for child in psutil.Process(self.process.pid).children(recursive=True):
                child.kill()
        with contextlib.suppress(OSError):  # A test may have closed the terminal itself.
            self.process.close(force=True)

    @property
    def text(self) -> str:
        """The whole screen."""
        return "\n".join(self.screen.display)

    @property
    def status(self) -> str:
        """The first line."""
        return self.screen.display[0]

    @property
    def step(self) -> int:
        """The step that the status line names; -1 when it names none."""
        match = re.search(r"step (\d+)", self.status)
        return int(match[1]) if match else -1

    def read(self, timeout: float) -> bool:
        """Take in what the program wrote; False at its end."""
        try:
            data = self.process.read_nonblocking(65536, timeout)
        except pexpect.TIMEOUT:
            return True
        except pexpect.EOF:
            return False
        self.raw += data
        self._held += data
        # A sequence cut in half by the read waits for its other half.
        cut = self._held.rfind("\x1b", max(0, len(self._held) - 64))
        end = cut if cut >= 0 and not _WHOLE.match(self._held[cut:]) else len(self._held)
        ready, self._held = self._held[:end], self._held[end:]
        self.stream.feed(_UNKNOWN.sub("", ready))
        return True

    def until(self, wanted: str | Callable[[], bool], timeout: float = 60) -> None:
        """Read until the screen shows a text, or a condition holds."""
        deadline = time.monotonic() + timeout
        holds = (lambda: wanted in self.text) if isinstance(wanted, str) else wanted
        while not holds():
            alive = self.read(0.1)
            if holds():
                return
            assert alive, f"the program ended; its last screen:\n{self.text}\n{self.raw[-2000:]}"
            assert time.monotonic() < deadline, f"waited for {wanted!r}; the screen:\n{self.text}"

    def press(self, *keys: str) -> None:
        """Press keys by name, or type text."""
        for key in keys:
            self.process.send(KEYS.get(key, key))

    def leave_help(self) -> None:
        """Close the help screen. (Escape with a key right behind it would be alt and that key.)"""
        self.press("escape")
        self.until(lambda: "esc closes" not in self.text)

    def wait_for_end(self, timeout: float = 30) -> int:
        """Read to the end; the exit status (negative: a signal)."""
        deadline = time.monotonic() + timeout
        while self.read(0.1):
            assert time.monotonic() < deadline, f"it does not end; its screen:\n{self.text}"
        self.process.wait()
        if self.process.exitstatus is not None:
            return self.process.exitstatus
        return -self.process.signalstatus

    def engine(self) -> psutil.Process:
        """The engine's process."""
        for child in psutil.Process(self.process.pid).children(recursive=True):
            if "engine.worker" in " ".join(child.cmdline()):
                return child
        raise AssertionError("there is no engine process")

    def assert_restored(self) -> None:
        """The terminal was given back as it was: main screen, cursor, no mouse."""
        assert self.raw.rfind("\x1b[?1049l") > self.raw.rfind("\x1b[?1049h")
        assert self.raw.rfind("\x1b[?25h") > self.raw.rfind("\x1b[?25l")
        assert self.raw.rfind("\x1b[?1000l") > self.raw.rfind("\x1b[?1000h")
