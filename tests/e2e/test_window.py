"""The window in a real terminal, driven by keys."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys

import psutil
import pytest

from .terminal import Terminal

SIZES = [(80, 24), (120, 40), (200, 50)]


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
def test_the_demo_runs_by_itself_and_the_keys_do_what_the_footer_says(size):
    with Terminal(size=size) as terminal:
        terminal.until("import")
        assert "Batch" in terminal.text, "the panels are there before torch is"
        terminal.until(lambda: terminal.step >= 8)
        assert "space run/pause" in terminal.screen.display[-1], "keys are told from the start"
        assert "q quit" in terminal.screen.display[-1]
        terminal.press("space")
        terminal.until("paused")
        for title in ("Batch", "Mask", "KV", "Requests"):
            assert title in terminal.text
        assert "once upon" in terminal.text.lower() or "decode" in terminal.text
        check_boxes(terminal)

        here = terminal.step
        terminal.press("right")
        terminal.until(lambda: terminal.step == here + 1)
        terminal.press("left", "left")
        terminal.until(lambda: terminal.step == here - 1)
        assert "history" in terminal.status
        terminal.press("home")
        terminal.until(lambda: terminal.step == 0)
        terminal.press("end")
        terminal.until(lambda: terminal.step == here + 1 and "history" not in terminal.status)

        terminal.press("]", "]", "right")
        terminal.until(lambda: "m = 32" not in terminal.status and "m = " in terminal.status)
        terminal.press("?")
        terminal.until("esc closes")
        terminal.leave_help()
        check_boxes(terminal)
        engine = terminal.engine()
        terminal.press("q")
        assert terminal.wait_for_end() == 0
        terminal.assert_restored()
        assert not engine.is_running()


def check_boxes(terminal: Terminal) -> None:
    """Every panel is a whole box: what opens in a row of corners closes below it."""
    rows = terminal.screen.display
    for y, row in enumerate(rows):
        for match in re.finditer("╭[^╮]*╮", row):
            left, right = match.start(), match.end() - 1
            below = y + 1
            while rows[below][left] == "│":
                assert rows[below][right] in "│▁▂▃▄▅▆▇█", f"row {below}:\n{terminal.text}"
                below += 1
            assert rows[below][left] == "╰", f"the box of row {y} is broken:\n{terminal.text}"
            assert rows[below][right] == "╯", f"the box of row {y} is broken:\n{terminal.text}"


def test_prompts_can_be_injected_and_cancelled_while_others_run():
    with Terminal("--no-demo", "--prompt", "Once upon a time", "--max-tokens", "400") as terminal:
        terminal.until(lambda: terminal.step >= 3)
        terminal.press("i")
        terminal.press("the q dog [x] ran", "enter")
        terminal.until(lambda: re.search(r"B (decode|prefill)", terminal.text) is not None)
        assert "▶" in terminal.status, "typed letters are not keys"
        terminal.press("down", "down", "x")
        terminal.until("✗ cancel")


def test_keys_that_come_in_one_burst_belong_to_the_line_that_was_opened():
    with Terminal() as terminal:
        terminal.until(lambda: terminal.step >= 12)
        terminal.press("space")
        terminal.until("paused")
        terminal.process.send("g5\r")
        terminal.until(lambda: terminal.step == 5)
        terminal.process.send("iquiet q\r")
        terminal.until(lambda: "wait 1" in terminal.status)
        terminal.press("q")
        assert terminal.wait_for_end() == 0


def test_ascii_means_ascii():
    with Terminal("--ascii") as terminal:
        terminal.until(lambda: terminal.step >= 9)
        terminal.press("space")
        terminal.until("paused")
        terminal.press("?")
        terminal.until("esc closes")
        terminal.leave_help()
        assert terminal.text.isascii(), [c for c in terminal.text if not c.isascii()]


def test_a_terminal_that_is_closed_leaves_no_process_behind():
    with Terminal() as terminal:
        terminal.until(lambda: terminal.step >= 2)
        ours = [psutil.Process(terminal.process.pid), terminal.engine()]
        # Nobody reads any more, and the other side is gone: what is written may never end.
        os.close(terminal.process.child_fd)
        gone, alive = psutil.wait_procs(ours, timeout=20)
        assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE], gone


def test_an_engine_that_dies_leaves_the_window_usable():
    with Terminal() as terminal:
        terminal.until(lambda: terminal.step >= 5)
        terminal.engine().kill()
        terminal.until("SIGKILL")
        assert "Traceback" not in terminal.raw
        terminal.press("home")
        terminal.until(lambda: terminal.step == 0)
        terminal.press("end")
        terminal.until(lambda: terminal.step >= 5)
        terminal.press("r")
        terminal.until("import")
        terminal.until(lambda: "SIGKILL" not in terminal.status and 0 <= terminal.step < 5)
        terminal.press("q")
        assert terminal.wait_for_end() == 0
        terminal.assert_restored()


def test_keys_are_answered_while_a_step_takes_long():
    """A stopped process stands for a step of any length."""
    with Terminal() as terminal:
        terminal.until(lambda: terminal.step >= 3)
        engine = terminal.engine()
        engine.suspend()
        terminal.press("left")
        terminal.until(lambda: "history" in terminal.status)
        terminal.press("?")
        terminal.until("esc closes")
        terminal.leave_help()
        terminal.press("q")
        assert terminal.wait_for_end() == 0
        terminal.assert_restored()
        assert not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "no/such-model"], "no/such-model is not in the local cache"),
        (["--num-blocks", "1"], "the pool has 1"),
        (["--prompt", "word " * 2000], "tokens and the context 512"),
        (["--prompt", ""], "the prompt is empty"),
    ],
)
def test_what_cannot_run_is_said_in_the_window(arguments, message):
    env = {"HF_HUB_OFFLINE": "1"}
    with Terminal(*arguments, env=env) as terminal:
        terminal.until(lambda: message in re.sub(r"[\s│]+", " ", terminal.text))
        assert "Traceback" not in terminal.raw
        terminal.press("?")
        terminal.until("esc closes")
        terminal.leave_help()
        terminal.press("q")
        assert terminal.wait_for_end() == 0
        terminal.assert_restored()


def test_a_full_disk_under_the_trace_is_said_and_the_run_goes_on(tmp_path):
    def small_files_only() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (9_000, 9_000))

    trace = tmp_path / "run.trace"
    with Terminal("--trace", str(trace), preexec=small_files_only) as terminal:
        terminal.until("recording stopped after")
        here = terminal.step
        terminal.until(lambda: terminal.step > here + 2)


def test_hostile_text_never_reaches_the_terminal():
    evil = "\x1b]0;evil\x07 \x1b[2J [/b] [bold]x \u202eoved\u200b \x9b31m"
    with Terminal("--no-demo", "--prompt", evil, "--max-tokens", "30") as terminal:
        terminal.until(lambda: terminal.step >= 4)
        terminal.press("space")
        terminal.until("paused")
        assert "]0;evil" in terminal.text
        for sequence in ("\x1b]0;evil", "\x1b[2J", "\u202e", "\u200b", "\x9b"):
            assert sequence not in terminal.raw


def test_without_colour_no_colour_is_sent():
    with Terminal(env={"NO_COLOR": "1"}) as terminal:
        terminal.until(lambda: terminal.step >= 5)
        sequences = set(re.findall(r"\x1b\[([0-9;]*)m", terminal.raw))
        codes = {int(code) for sequence in sequences for code in sequence.split(";") if code}
        assert codes <= {0, 1, 2, 3, 4, 7, 9}, f"attributes only, not {codes}"


@pytest.mark.parametrize("key", ["ctrl+c", "q"])
def test_it_can_be_left_before_the_model_is_loaded(key):
    with Terminal() as terminal:
        terminal.until("import")
        terminal.press(key)
        assert terminal.wait_for_end() == 0
        terminal.assert_restored()


def test_a_terminate_signal_restores_the_terminal_and_ends_the_engine():
    with Terminal() as terminal:
        terminal.until(lambda: terminal.step >= 1)
        engine = terminal.engine()
        terminal.process.kill(signal.SIGTERM)
        terminal.wait_for_end()
        terminal.assert_restored()
        psutil.wait_procs([engine], timeout=10)
        assert not engine.is_running()


def test_a_replay_needs_no_torch_and_says_where_a_trace_breaks_off(tmp_path):
    trace = tmp_path / "run.trace"
    subprocess.run(
        [sys.executable, "-m", "cbviz.cli", "run", "--prompt", "Once upon a time", "--prompt",
         "The dog", "--max-tokens", "30", "--trace", str(trace)],
        check=True, capture_output=True,
    )  # fmt: skip
    data = trace.read_bytes()
    trace.write_bytes(data[: len(data) * 3 // 4])
    with Terminal("replay", str(trace)) as terminal:
        terminal.until("breaks off after")
        terminal.until(lambda: terminal.step >= 0)
        terminal.press("end")
        terminal.until(lambda: terminal.step > 5)
        terminal.press("home")
        terminal.until(lambda: terminal.step == 0)
        terminal.press("right")
        terminal.until(lambda: terminal.step == 1)
        (pid,) = [terminal.process.pid]
        assert not psutil.Process(pid).children()
        libraries = {entry.path for entry in psutil.Process(pid).memory_maps()}
        assert not [path for path in libraries if "torch" in path]
        terminal.press("q")
        assert terminal.wait_for_end() == 0
