"""The live source against programs that behave badly."""

from __future__ import annotations

import sys
from queue import Queue

import pytest

from cbviz.sources import live
from cbviz.sources.live import LiveSource
from engine.config import EngineConfig
from engine.protocol import Add, Fatal, Message, Notice
from engine.request import SamplingParams

ECHO = """
import sys
from engine.protocol import *
while (command := read_command(sys.stdin.buffer)) is not None and not isinstance(command, Shutdown):
    said = command.trace if isinstance(command, Load) else command.prompt
    sys.stdout.buffer.write(encode(Notice(str(said))))
    sys.stdout.buffer.flush()
"""


def started(source: LiveSource) -> Queue[Message]:
    heard: Queue[Message] = Queue()
    source.start(heard.put)
    return heard


def test_what_a_dead_engine_recorded_is_kept(tmp_path):
    trace = tmp_path / "run.trace"
    source = LiveSource(EngineConfig(), trace, argv=(sys.executable, "-c", ECHO))
    try:
        assert started(source).get(timeout=20) == Notice(str(trace))
        heard = started(source)
        assert "recording goes on in run.2.trace" in heard.get(timeout=20).message
        assert heard.get(timeout=20) == Notice(str(tmp_path / "run.2.trace"))
    finally:
        source.close()


def test_a_command_that_cannot_be_said_does_not_close_the_line():
    source = LiveSource(EngineConfig(), argv=(sys.executable, "-c", ECHO))
    try:
        heard = started(source)
        heard.get(timeout=20)
        source.send(Add("caf\udce9", SamplingParams()))
        assert "cannot be sent to the engine" in heard.get(timeout=20).message
        source.send(Add("cafe", SamplingParams()))
        assert heard.get(timeout=20) == Notice("cafe")
    finally:
        source.close()


@pytest.mark.parametrize("noise", ["x" * 100, "\\x00\\x00\\x00\\xff", ""])
def test_a_program_that_speaks_another_language_is_told_in_one_line(noise):
    code = f"import sys; sys.stdout.write('{noise}')"
    source = LiveSource(EngineConfig(), argv=(sys.executable, "-c", code))
    try:
        message = started(source).get(timeout=20)
        assert isinstance(message, Fatal)
        assert "\n" not in message.message
    finally:
        source.close()


def test_without_a_log_nothing_is_written_on_the_terminal(monkeypatch, capfd):
    monkeypatch.setattr(live, "_open_log", lambda: (None, None))
    code = "import sys; print('over the window', file=sys.stderr)"
    source = LiveSource(EngineConfig(), argv=(sys.executable, "-c", code))
    try:
        assert isinstance(started(source).get(timeout=20), Fatal)
    finally:
        source.close()
    assert "over the window" not in capfd.readouterr().err
