"""The command line as a person types it, in processes of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from engine.trace import TraceReader
from engine.version import __version__
from engine.world import World

README = Path(__file__).parents[2] / "README.md"


def cbviz(*arguments: str, **more: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cbviz.cli", *arguments],
        capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, **more,
    )  # fmt: skip


def test_json_output_holds_a_request_a_line_and_a_summary(tmp_path):
    trace = tmp_path / "run.trace"
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("The dog was\n\nOnce upon a time\n")
    done = cbviz(
        "run", "--prompt", "Lily", "--prompts", str(prompts), "--max-tokens", "6", "--json",
        "--trace", str(trace), "--token-budget", "5", "--block-size", "4",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    *requests, last = map(json.loads, done.stdout.splitlines())
    assert [request["prompt"] for request in requests] == [
        "Lily",
        "The dog was",
        "Once upon a time",
    ]
    for request in requests:
        assert set(request) == {
            "request_id", "prompt", "text", "token_ids", "prompt_tokens", "finish_reason",
            "ttft_s", "e2e_s",
        }  # fmt: skip
        assert 0 < request["ttft_s"] <= request["e2e_s"]
    summary = last["summary"]
    reader = TraceReader(trace)
    world = World(reader.header)
    peak = 0
    for record in reader:
        world.apply(record)
        assert record.num_tokens <= 5
        peak = max(peak, record.blocks_held)
    assert reader.damage == ""
    assert summary["steps"] == world.step + 1
    assert summary["prefill_tokens"] == sum(request["prompt_tokens"] for request in requests)
    assert summary["output_tokens"] == sum(len(request["token_ids"]) for request in requests)
    assert summary["peak_kv_blocks"] >= peak > 0
    for request in requests:
        assert world.requests[request["request_id"]].text == request["text"]


def test_plain_output_is_the_texts_and_nothing_else():
    plain = cbviz("run", "--prompt", "Once upon a time", "--max-tokens", "12", "--seed", "3")
    as_json = cbviz("run", "--prompt", "Once upon a time", "--max-tokens", "12", "--json")
    assert plain.stdout == json.loads(as_json.stdout.splitlines()[0])["text"] + "\n"
    assert "cbviz: " in plain.stderr


def test_explain_says_for_every_step_why_each_request_did_or_did_not_run():
    done = cbviz(
        "run", "--explain", "--token-budget", "6", "--max-num-seqs", "2", "--max-tokens", "2",
        "--prompt", "The dog", "--prompt", "Once upon a time", "--prompt", "One day",
        "--prompt", "Lily", "--ignore-eos",
    )  # fmt: skip
    lines = [line.split(maxsplit=3) for line in done.stderr.splitlines() if line[:5] == "step "]
    first = {request_id: words for _, step, request_id, words in lines if step == "0"}
    assert first == {
        "A": "prefill: all 3 tokens",
        "B": "prefill chunk 1: 3 tokens, 2 to go (the budget of 6 is spent)",
        "C": "budget spent: 0 of 6 left, 3 tokens to compute",
        "D": "behind C",
    }
    assert ["step", "1", "C", "max sequences: 2 of 2 running"] in lines
    steps = [int(step) for _, step, _, _ in lines]
    assert sorted(set(steps)) == list(range(max(steps) + 1))


def test_the_same_seed_gives_the_same_text():
    texts = [
        cbviz("run", "--prompt", "One day", "--temperature", "1", "--seed", seed).stdout
        for seed in ("1", "1", "2")
    ]
    assert texts[0] == texts[1] != texts[2]


def test_a_refused_prompt_is_told_and_the_others_run():
    done = cbviz("run", "--prompt", "", "--prompt", "The cat", "--max-tokens", "3", "--json")
    assert done.returncode == 2
    refused, ran, summary = map(json.loads, done.stdout.splitlines())
    assert refused == {
        "request_id": None,
        "prompt": "",
        "error": "the prompt is empty: it needs at least one token",
    }
    assert len(ran["token_ids"]) == 3
    assert summary["summary"]["refused"] == 1


def test_an_interrupt_keeps_what_was_done(tmp_path):
    trace = tmp_path / "run.trace"
    process = subprocess.Popen(
        [sys.executable, "-m", "cbviz.cli", "run", "--json", "--trace", str(trace), "--ignore-eos",
         *["--prompt", "Once upon a time"] * 40, "--max-tokens", "500"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    while not trace.exists() or trace.stat().st_size < 20_000:
        assert process.poll() is None, process.stderr.read()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "interrupted after" in err
    assert "Traceback" not in err
    lines = [json.loads(line) for line in out.splitlines()]
    assert lines[-1]["summary"]["steps"] > 0
    assert len(lines) == 41
    reader = TraceReader(trace)
    assert len(list(reader)) == lines[-1]["summary"]["steps"]
    assert reader.damage == ""


def test_a_reader_that_leaves_is_no_error():
    done = subprocess.run(
        f"{sys.executable} -m cbviz.cli run --prompt a --prompt b --json --max-tokens 2 | true; "
        "echo ${PIPESTATUS[0]}",
        shell=True, executable="/bin/bash", capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout == f"{128 + signal.SIGPIPE}\n"
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("run", "nothing to run: give --prompt TEXT or --prompts FILE"),
        ("run --model /nowhere --prompt a", "there is no directory /nowhere"),
        ("--model /nowhere", "there is no directory /nowhere"),
        ("run --model {tmp} --prompt a", "is not a Hugging Face model directory"),
        ("--token-budget 0", "token budget must lie between 1 and 1048576, not 0"),
        ("run --max-num-batched-tokens -3 --prompt a", "token budget must lie between"),
        ("run --num-blocks 0 --prompt a", "number of blocks must lie between 1"),
        ("run --block-size 0 --prompt a", "block size must lie between 1"),
        ("run --kv-memory lots --prompt a", "'lots' is not a size"),
        ("run --kv-memory 1MiB --num-blocks 3 --prompt a", "not both"),
        ("run --temperature -1 --prompt a", "temperature must be 0 or more"),
        ("run --max-tokens 0 --prompt a", "max_tokens must be a whole number from 1 to"),
        ("run --prompts {tmp}/none", "cannot read"),
        ("run --prompts {tmp}/empty.txt", "holds no prompt"),
        ("run --prompts {tmp}/bad.jsonl", "line 2:"),
        ("run --prompts {tmp}/latin1.txt", "is not UTF-8 text (byte 1)"),
        ("run --prompt a --trace {tmp}", "cannot write the trace"),
        ("run --prompt a --trace {tmp}/no/such/x.trace", "cannot write the trace"),
        ("run --prompt a --trace /dev/full", "No space left on device"),
        ("replay {tmp}/none", "cannot read the trace"),
        ("replay {tmp}/empty.txt", "is not a cbviz trace"),
        ("--model gpt2 run --prompt a", "--model goes after 'run'"),
        ("frobnicate", "No such command"),
        ("--speed 1e-12", "--speed must be 0 (unlimited) or at least"),
        ("run --max-tokens 99999999999999999999999 --prompt a", "max_tokens must be a whole"),
        ("run --prompt a --trace t\udce9.trace", "--trace must be UTF-8 text"),
        ("--model caf\udce9", "--model must be UTF-8 text"),
        ("run --device tpu", "Invalid value for '--device'"),
        ("", "the explorer needs a terminal"),
    ],
)
def test_bad_input_is_one_clear_line_and_exit_code_2(tmp_path, arguments, message):
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\n{"prompt": 3}\n')
    (tmp_path / "latin1.txt").write_bytes(b"a\xe9")
    done = cbviz(*arguments.format(tmp=tmp_path).split())
    assert done.returncode == 2
    assert message in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_hostile_text_does_not_reach_the_terminal_in_an_error():
    done = cbviz("run", "--model", "/tmp/\x1b[31mred\x1b[0m", "--prompt", "a")
    assert done.returncode == 2
    assert "\x1b" not in done.stderr


def test_output_that_cannot_be_written_is_told_in_one_line():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "cbviz.cli", "run", "--prompt", "a", "--max-tokens", "2"],
            stdout=full, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "cbviz: No space left on device"
    assert "Traceback" not in done.stderr


def test_bytes_that_are_no_text_are_replaced():
    done = cbviz("run", "--prompt", "caf\udce9", "--max-tokens", "2", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[0])["prompt"] == "caf?"


def test_version_and_info_answer_without_a_window():
    assert cbviz("--version").stdout == f"cbviz {__version__}\n"
    found = json.loads(cbviz("info", "--json", "--num-blocks", "7").stdout)
    assert found["versions"]["cbviz"] == __version__
    assert found["memory"]["num_blocks"] == 7
    plain = cbviz("info").stdout
    for word in ("torch", "transformers", "cpu", "dense", "paged", "a token", "a block", "pool"):
        assert word in plain


def test_the_example_in_the_readme_runs_as_printed(tmp_path):
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(example.strip().splitlines()) <= 12
    done = subprocess.run(
        [sys.executable, "-c", example], capture_output=True, text=True, check=False, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(README.parent)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("0 [('A', 'prefill', ")
    assert lines[-1].endswith(("stop", "length"))


def test_samples_log_probabilities_and_the_prefix_cache(tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    story = "Once upon a time there was a little girl named Lily"
    prompts.write_text(
        json.dumps({"prompt": story, "n": 2, "seed": 5, "temperature": 2, "logprobs": 3}) + "\n"
        + json.dumps({"prompt": story + " who", "stop": [" a", " the"]}) + "\n"
    )  # fmt: skip
    done = cbviz(
        "run", "--prompts", str(prompts), "--max-tokens", "12", "--ignore-eos", "--json",
        "--max-num-seqs", "1", "--block-size", "4", "--check",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, second, stopped, last = map(json.loads, done.stdout.splitlines())
    assert [r["request_id"] for r in (first, second, stopped)] == ["A", "A.2", "B"]
    assert first["token_ids"] != second["token_ids"]
    for request in (first, second):
        assert len(request["logprobs"]) == len(request["top_logprobs"]) == 12
        for token_id, logprob, top in zip(
            request["token_ids"], request["logprobs"], request["top_logprobs"], strict=True
        ):
            assert len(top) == 3
            assert top[0][1] >= top[1][1] >= top[2][1]
            assert dict(top).get(token_id, logprob) == pytest.approx(logprob, abs=1e-5)
            assert logprob <= top[0][1] + 1e-5
    assert stopped["finish_reason"] == "stop"
    assert not re.search(" a| the", stopped["text"])
    assert not {"logprobs", "top_logprobs", "error"} & set(stopped)
    summary = last["summary"]
    assert summary["requests"] == 3
    assert 0 < summary["hit_tokens"] < summary["queried_tokens"]
    assert summary["evictions"] == summary["recomputed_tokens"] == 0


def test_a_request_that_cannot_be_drawn_fails_alone_and_the_exit_code_says_so(tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    # No token of the vocabulary may come: all of them end the output, and none may yet.
    everything = list(range(2048))
    prompts.write_text(
        json.dumps({"prompt": "The cat", "stop_token_ids": everything, "min_tokens": 1}) + "\n"
        + json.dumps({"prompt": "The dog"}) + "\n"
    )  # fmt: skip
    done = cbviz("run", "--prompts", str(prompts), "--max-tokens", "3", "--json")
    assert done.returncode == 1
    failed, ran, _ = map(json.loads, done.stdout.splitlines())
    assert failed["finish_reason"] == "error"
    assert "no token is left to draw" in failed["error"]
    assert len(ran["token_ids"]) == 3
    assert "cbviz: request A ended with an error: " in done.stderr
