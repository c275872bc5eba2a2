"""The engine's own process, driven through its pipes as the explorer does it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from engine.config import EngineConfig
from engine.protocol import (
    Add,
    Broke,
    Cancel,
    Command,
    Fatal,
    Load,
    Message,
    Notice,
    Pause,
    Pending,
    Ready,
    ResetPrefixCache,
    Run,
    RunState,
    SetBreakpoints,
    SetKnob,
    SetSpeed,
    Shutdown,
    Stage,
    Step,
    Stepped,
    encode,
    read_message,
)
from engine.record import Added, CacheReset, Cancelled, KnobChanged, Refused
from engine.request import SamplingParams
from engine.trace import TraceReader
from engine.world import World

GREEDY = SamplingParams(max_tokens=6, ignore_eos=True)


class WorkerProcess:
    """The process and everything it has said."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "engine.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.said: list[Message] = []

    def send(self, *commands: Command) -> None:
        assert self.process.stdin is not None
        for command in commands:
            self.process.stdin.write(encode(command))
        self.process.stdin.flush()

    def next(self) -> Message | None:
        assert self.process.stdout is not None
        message = read_message(self.process.stdout)
        if message is not None:
            self.said.append(message)
        return message

    def until(self, wanted: Callable[[Message], bool]) -> Message:
        while (message := self.next()) is not None:
            if wanted(message):
                return message
        pytest.fail(f"the worker ended; it said {self.said[-3:]}")

    def until_a(self, kind: type) -> Message:
        return self.until(lambda message: isinstance(message, kind))

    def finish(self) -> int:
        self.send(Shutdown())
        while self.next() is not None:
            pass
        return self.process.wait(20)


@pytest.fixture
def worker() -> Iterator[WorkerProcess]:
    made = WorkerProcess()
    yield made
    made.process.kill()
    made.process.wait()
    for pipe in (made.process.stdin, made.process.stdout, made.process.stderr):
        if pipe is not None:
            pipe.close()


@pytest.fixture
def config(model_path) -> EngineConfig:
    return EngineConfig(model=model_path("tiny-llama"), token_budget=8, num_blocks=32)


def test_from_load_to_shutdown(worker, config, tmp_path):
    """Stages, pending events, single steps, a new budget, a cancellation, and the whole trace."""
    trace = tmp_path / "run.trace"
    worker.send(Load(config, trace=str(trace)), Add("the cat sat on the mat", GREEDY))
    ready = worker.until_a(Ready)
    assert isinstance(ready, Ready)
    stages = [message.name for message in worker.said if isinstance(message, Stage)]
    assert stages == ["import", "weights", "memory plan"]
    pending = worker.until_a(Pending)
    assert [type(event) for event in pending.events] == [Added]

    world = World(ready.header)
    worker.send(Step(2))
    for number in range(2):
        stepped = worker.until_a(Stepped)
        assert stepped.record.step == number
        assert stepped.record.num_tokens <= 8
        world.apply(stepped.record)
    worker.send(SetKnob("token_budget", 3), Add("", GREEDY), Add("the dog", GREEDY, "dog"))
    refusal = worker.until_a(Notice)
    assert refusal.level == "error"
    assert "the prompt is empty" in refusal.message
    worker.send(Step(1))
    record = worker.until_a(Stepped).record
    world.apply(record)
    assert record.num_tokens <= 3
    assert {type(event) for event in record.events} >= {KnobChanged, Refused, Added}
    worker.send(Cancel("dog"), Cancel("nobody"))
    assert "no live request nobody" in worker.until_a(Notice).message
    assert worker.finish() == 0

    reader = TraceReader(trace)
    records = list(reader)
    assert reader.damage == ""
    assert [record.step for record in records] == [0, 1, 2, 3]
    assert any(isinstance(event, Cancelled) for event in records[-1].events)


def test_settings_change_and_the_cache_is_reset_between_steps(worker, config):
    long = SamplingParams(max_tokens=40, ignore_eos=True)
    prompt = "the cat sat on the mat and the dog sat on the cat"
    worker.send(Load(config), Add(prompt, long), Step(12))
    worker.until(lambda m: isinstance(m, Stepped) and m.record.step == 11)
    worker.send(ResetPrefixCache())
    assert "held by running requests" in worker.until_a(Notice).message
    worker.send(SetKnob("scheduling_policy", "lottery"))
    assert "is one of fcfs, prefill-first, priority" in worker.until_a(Notice).message
    worker.send(SetKnob("no such", 1))
    assert "there is no knob 'no such'" in worker.until_a(Notice).message
    worker.send(ResetPrefixCache(force=True), SetKnob("scheduling_policy", "priority"), Step(1))
    events = worker.until_a(Stepped).record.events
    assert CacheReset in {type(event) for event in events}
    assert KnobChanged("scheduling_policy", "fcfs", "priority") in events


def test_a_run_paces_itself_pauses_and_takes_requests_at_their_step(worker, config):
    later = Add("the dog sat", GREEDY, "later", at_step=4)
    worker.send(Load(config), SetSpeed(0), Add("the cat", GREEDY), later, Run())
    first_with = worker.until(
        lambda m: isinstance(m, Stepped) and any(isinstance(e, Added) and e.request_id == "later"
                                                 for e in m.record.events)
    )  # fmt: skip
    assert first_with.record.step == 4
    last = worker.until(lambda m: isinstance(m, Stepped) and m.record.num_finished == 2)
    assert last.record.num_running == 0
    worker.send(Pause())
    state = worker.until(lambda m: isinstance(m, RunState) and not m.running)
    assert state == RunState(running=False, steps_per_s=0.0)
    worker.send(Add("again", GREEDY))
    worker.until_a(Pending)
    worker.send(Step(1))
    assert worker.until_a(Stepped).record.step == last.record.step + 1


def test_closing_the_pipe_ends_the_process(worker, config):
    worker.send(Load(config), Add("the cat", SamplingParams(max_tokens=40)), Run())
    worker.until_a(Stepped)
    worker.process.stdin.close()
    worker.process.stdout.close()
    assert worker.process.wait(20) == 0


def test_a_full_disk_stops_the_recording_and_not_the_run(worker, config, tmp_path):
    """A limit on file size stands in for a full disk: writing fails in the middle of the run."""
    worker.process.kill()
    worker.process.communicate()
    limited = "import resource, runpy, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); " \
              "resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000)); " \
              "runpy.run_module('engine.worker', run_name='__main__')"  # fmt: skip
    worker.process = subprocess.Popen(
        [sys.executable, "-c", limited], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    trace = tmp_path / "run.trace"
    long = SamplingParams(max_tokens=60, ignore_eos=True)
    worker.send(Load(config, trace=str(trace)), Add("the cat sat", long), Run())
    notice = worker.until_a(Notice)
    assert notice.level == "error"
    assert "the run goes on: cannot write" in notice.message
    worker.until(lambda m: isinstance(m, Stepped) and m.record.num_finished == 1)
    assert worker.finish() == 0
    reader = TraceReader(trace)
    assert len(list(reader)) > 2
    assert "breaks off" in reader.damage


def test_what_cannot_be_loaded_is_told_in_one_line(worker, tmp_path):
    worker.send(Load(EngineConfig(model=str(tmp_path))))
    fatal = worker.until_a(Fatal)
    assert fatal.message == (
        f"{tmp_path} is not a Hugging Face model directory: it holds no config.json"
    )
    assert worker.process.wait(20) == 2
    assert b"Traceback" not in worker.process.stderr.read()


def test_what_is_not_ours_on_the_pipe_ends_the_process(worker):
    worker.process.stdin.write(b"\x05\0\0\0hello")
    worker.process.stdin.flush()
    assert worker.process.wait(20) == 0


def test_pending_events_are_told_once(worker, config):
    """However many requests are added while it stands still, each is sent one time."""
    worker.send(Load(config))
    worker.until_a(Ready)
    seen = 0
    for number in range(40):
        worker.send(Add(f"prompt {number}", GREEDY))
        while seen <= number:
            pending = worker.until_a(Pending)
            assert pending.first == seen
            seen += len(pending.events)
    worker.send(Step(1))
    added = [e for e in worker.until_a(Stepped).record.events if isinstance(e, Added)]
    assert len(added) == 40


def test_a_run_pauses_at_a_breakpoint_and_goes_on(worker, config):
    worker.send(Load(config), SetBreakpoints(["finish", "step=1"]), Add("the cat", GREEDY), Run())
    broke = worker.until_a(Broke)
    assert (broke.step, broke.paused) == (1, True)
    assert [hit.words for hit in broke.hits] == ["step=1: it has run"]
    records = [message.record for message in worker.said if isinstance(message, Stepped)]
    assert [record.step for record in records] == [0, 1]
    assert worker.until_a(RunState).running is False
    worker.send(Run())
    broke = worker.until_a(Broke)
    assert broke.hits[0].words == "finish: A ended (length)"
    last = [message.record for message in worker.said if isinstance(message, Stepped)][-1]
    assert (broke.step, last.num_finished) == (last.step, 1)


def test_single_steps_meet_breakpoints_and_are_not_held_up(worker, config):
    worker.send(Load(config), SetBreakpoints(["A:running", "finish"]), Add("the cat", GREEDY))
    worker.send(Step(20), Add("a dog", GREEDY), Step(20))
    finished = worker.until(lambda m: isinstance(m, Stepped) and m.record.num_finished == 2)
    worker.until(lambda m: isinstance(m, Broke) and m.step == finished.record.step)
    broke = [message for message in worker.said if isinstance(message, Broke)]
    assert (broke[0].hits[0].text, broke[0].paused) == ("A:running", False)
    assert len(broke) >= 2
    assert not any(isinstance(message, Notice) for message in worker.said)


def test_breakpoints_that_cannot_be_read_leave_the_others_alone(worker, config):
    worker.send(Load(config), SetBreakpoints(["finish"]), SetBreakpoints(["budget", "nonsense"]))
    notice = worker.until_a(Notice)
    assert notice.level == "error"
    assert "there is no breakpoint 'nonsense'" in notice.message
    worker.send(Add("the cat sat on the mat", GREEDY), Run())
    assert worker.until_a(Broke).hits[0].text == "finish"
    worker.send(SetBreakpoints([]), Add("the cat", GREEDY), Run())
    worker.until(lambda m: isinstance(m, Stepped) and m.record.num_finished == 2)
    worker.send(Pause())
    worker.until_a(RunState)
    assert sum(isinstance(message, Broke) for message in worker.said) == 1
