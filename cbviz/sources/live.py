"""The engine in its own process: commands into its standard input, records out of its output."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue
from threading import Lock, Thread
from typing import IO, BinaryIO, cast

import msgspec

import engine
from cbviz.sources.base import OnMessage
from engine.config import EMBEDDED, EngineConfig
from engine.protocol import Command, Fatal, Load, Notice, Shutdown, encode, read_message

# `-P`: a directory `engine` in the user's working directory must not be taken for ours.
WORKER = (sys.executable, "-P", "-m", "engine.worker")
GRACE_S = 1.0
"""Given to the process to leave in order; longer with a trace, which it has to finish."""
GRACE_WITH_TRACE_S = 3.0
KEPT_LOGS = 10


class LiveSource:
    """Runs `engine.worker` and talks to it.

    Args:
        config: how the engine is built.
        trace: also record every step in this file.
        argv: another program that speaks `engine.protocol` (for tests).
    """

    def __init__(
        self, config: EngineConfig, trace: Path | None = None, *, argv: Sequence[str] = WORKER
    ) -> None:
        self._config = config
        self._trace = trace
        self._argv = tuple(argv)
        self._process: _EngineProcess | None = None
        self._lock = Lock()
        self._runs = 0

    @property
    def can_drive(self) -> bool:
        """A live engine takes commands."""
        return True

    @property
    def title(self) -> str:
        """The model's name, or the last part of its path."""
        name = self._config.model
        return "embedded model" if name == EMBEDDED else name.rstrip("/").rsplit("/", 1)[-1]

    @property
    def pid(self) -> int | None:
        """Process id of the engine, while there is one."""
        return self._process.pid if self._process else None

    def start(self, on_message: OnMessage) -> None:
        """Start the engine's process and send it `Load`."""
        self.close()
        try:
            process = _EngineProcess(self._argv, on_message)
        except OSError as error:
            on_message(Fatal(f"the engine's process cannot be started: {error.strerror}"))
            return
        trace = self._next_trace()
        if trace is not None and trace != self._trace:
            on_message(Notice(f"recording goes on in {trace.name}: the first run's trace is kept"))
        process.send(Load(self._config, str(trace) if trace else None))
        self._process = process

    def _next_trace(self) -> Path | None:
        """`run.trace`, then `run.2.trace`, …: what an engine recorded before it died is wanted."""
        self._runs += 1
        if self._trace is None or self._runs == 1:
            return self._trace
        return self._trace.with_name(f"{self._trace.stem}.{self._runs}{self._trace.suffix}")

    def send(self, command: Command) -> None:
        """Hand a command to the engine's process, if there is one."""
        if self._process is not None:
            self._process.send(command)

    def close(self) -> None:
        """End the process: ask, then terminate, then kill."""
        with self._lock:
            process, self._process = self._process, None
            if process is not None:
                process.end(GRACE_WITH_TRACE_S if self._trace else GRACE_S)


class _EngineProcess:
    """One run of the engine's process, with a thread for each direction."""

    def __init__(self, argv: Sequence[str], on_message: OnMessage) -> None:
        self._on_message = on_message
        self._leaving = False
        self._commands: SimpleQueue[Command | None] = SimpleQueue()
        self._log, self._log_path = _open_log()
        try:
            # A session of its own: ctrl+c and a closing terminal reach us alone, and we end it.
            self._popen = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=self._log or subprocess.DEVNULL, env=_environment(),
                start_new_session=True,
            )  # fmt: skip
        finally:
            if self._log is not None:
                self._log.close()
        self._reader = Thread(target=self._read, name="engine-reader", daemon=True)
        self._writer = Thread(target=self._write, name="engine-writer", daemon=True)
        self._reader.start()
        self._writer.start()

    @property
    def pid(self) -> int:
        return self._popen.pid

    def send(self, command: Command) -> None:
        self._commands.put(command)

    def end(self, grace_s: float) -> None:
        """Returns when the process is gone."""
        self._leaving = True
        self._commands.put(Shutdown())
        self._commands.put(None)
        if not self._gone(grace_s):
            self._popen.terminate()
            if not self._gone(0.5):
                self._popen.kill()
                self._popen.wait()
        self._forget_log()

    def _gone(self, timeout_s: float) -> bool:
        try:
            self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _write(self) -> None:
        """Commands wait here, not in the window, when the process is too busy to read them."""
        pipe = cast(IO[bytes], self._popen.stdin)
        try:
            while (command := self._commands.get()) is not None:
                frame = self._encoded(command)
                pipe.write(frame)
                pipe.flush()
            pipe.close()
        except (OSError, ValueError):
            return  # It is gone: the reader says how.

    def _encoded(self, command: Command) -> bytes:
        """A frame; nothing for a command that cannot be said (half a character in a prompt)."""
        try:
            return encode(command)
        except (ValueError, OverflowError, TypeError) as error:
            self._on_message(Notice(f"this cannot be sent to the engine: {error}", "error"))
            return b""

    def _read(self) -> None:
        pipe = cast(BinaryIO, self._popen.stdout)
        try:
            while (message := read_message(pipe)) is not None:
                if not self._leaving:
                    self._on_message(message)
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            self._report(f"the engine's process sent something unreadable ({error})")
            self._popen.kill()
        code = self._popen.wait()
        self._commands.put(None)
        pipe.close()
        self._report(f"the engine's process {_how_it_ended(code)}{self._last_words()}")

    def _report(self, text: str) -> None:
        if not self._leaving:
            self._on_message(Fatal(text))

    def _last_words(self) -> str:
        """The last line it wrote on standard error, and where all of them are."""
        if self._log_path is None:
            return ""
        try:
            lines = self._log_path.read_text(errors="replace").strip().splitlines()
        except OSError:
            return ""
        return f": {lines[-1].strip()[:200]} (log: {self._log_path})" if lines else ""

    def _forget_log(self) -> None:
        """An empty log is of no use to anybody."""
        try:
            if self._log_path is not None and self._log_path.stat().st_size == 0:
                self._log_path.unlink()
        except OSError:
            pass


def _environment() -> dict[str, str]:
    env = dict(os.environ)
    # Spinning OpenMP threads would take the cores that the window draws on.
    env.setdefault("OMP_WAIT_POLICY", "passive")
    ours = str(Path(engine.__file__).parent.parent)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [ours, env.get("PYTHONPATH")]))
    return env


def _how_it_ended(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = ", perhaps for want of memory" if name == "SIGKILL" else ""
    return f"was ended by {name}{hint}"


def _open_log() -> tuple[IO[bytes] | None, Path | None]:
    """A new file for what the process writes on standard error; none if no disk takes it."""
    try:
        from platformdirs import user_log_path

        folder = user_log_path("cbviz", appauthor=False)
        folder.mkdir(parents=True, exist_ok=True)
        _prune(folder)
        number, path = tempfile.mkstemp(prefix="engine-", suffix=".log", dir=folder)
        return os.fdopen(number, "wb"), Path(path)
    except OSError:
        return None, None


def _prune(folder: Path) -> None:
    logs = sorted(folder.glob("engine-*.log"), key=lambda path: path.stat().st_mtime)
    for path in logs[: max(0, len(logs) - KEPT_LOGS + 1)]:
        path.unlink(missing_ok=True)
