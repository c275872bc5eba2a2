"""The options of `run`: each reaches the engine under its name, and bad ones are told at once."""

from __future__ import annotations

import subprocess
import sys

import pytest

from cbviz import cli, headless
from engine.config import EngineConfig
from engine.request import SamplingParams


@pytest.fixture
def told(monkeypatch, capsys):
    """Run the command line without an engine: its exit code, what it would run, its last line."""
    calls = []

    def run_prompts(config, prompts, **_):
        calls.append((config, prompts))
        return 0

    def call(*arguments: str) -> tuple[object, list, str]:
        calls.clear()
        with pytest.raises(SystemExit) as end:
            cli.main(["run", "--prompt", "a", *arguments])
        lines = capsys.readouterr().err.splitlines()
        return end.value.code, list(calls), lines[-1] if lines else ""

    monkeypatch.setattr(headless, "run_prompts", run_prompts)
    return call


def test_every_option_reaches_the_request(told):
    code, ((_, ((prompt, params),)),), _ = told(
        "--max-tokens", "30", "--min-tokens", "2", "--temperature", "0.5", "--top-k", "7",
        "--top-p", "0.9", "--min-p", "0.05", "--repetition-penalty", "1.1",
        "--presence-penalty", "-0.5", "--frequency-penalty", "0.25", "--stop", "END",
        "--stop", "\n\n", "--stop-token-id", "3", "--stop-token-id", "4", "--ignore-eos",
        "--logprobs", "5", "--n", "3", "--logit-bias", "8=-5", "--logit-bias", "9=1.5",
        "--logit-bias", "8=2", "--priority", "-1",
    )  # fmt: skip
    assert (code, prompt) == (0, "a")
    assert params == SamplingParams(
        max_tokens=30, min_tokens=2, temperature=0.5, top_k=7, top_p=0.9, min_p=0.05,
        repetition_penalty=1.1, presence_penalty=-0.5, frequency_penalty=0.25,
        stop=("END", "\n\n"), stop_token_ids=(3, 4), ignore_eos=True, logprobs=5, n=3,
        logit_bias={8: 2.0, 9: 1.5}, priority=-1,
    )  # fmt: skip
    default = SamplingParams()
    for name in cli.SHARED_PARAMS:
        assert getattr(params, name) != getattr(default, name)


def test_every_option_reaches_the_engine(told):
    _, ((config, _),), _ = told(
        "--scheduling-policy", "priority", "--long-prefill-token-threshold", "8",
        "--max-num-partial-prefills", "2", "--watermark", "3", "--no-chunked-prefill",
        "--skip-blocked-head", "4", "--no-prefix-caching", "--check",
    )  # fmt: skip
    assert config == EngineConfig(
        scheduling_policy="priority", long_prefill_token_threshold=8, max_num_partial_prefills=2,
        watermark=3, chunked_prefill=False, skip_blocked_head=4, prefix_caching=False, check=True,
    )  # fmt: skip


def test_without_options_everything_is_as_in_the_library(told):
    _, ((config, ((_, params),)),), _ = told()
    assert config == EngineConfig()
    assert params == SamplingParams()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--min-tokens 65", "min_tokens (65) must not be above max_tokens (64)"),
        ("--top-k -1", "top_k (0 = all) must be a whole number from 0 to"),
        ("--top-p nan", "top_p must be above 0 and at most 1, not nan"),
        ("--min-p 2", "min_p must lie between 0 and 1, not 2.0"),
        ("--repetition-penalty 0", "repetition_penalty (1 = none) must lie between"),
        ("--presence-penalty x", "'x' is not a valid float"),
        ("--frequency-penalty 1e9", "frequency_penalty must lie between"),
        ("--stop=", "a stop string must be text and not empty"),
        ("--stop \udcff", "--stop must be UTF-8 text"),
        ("--stop-token-id -2", "a stop token id must be a whole number from 0"),
        ("--logprobs 21", "logprobs must be a whole number from 0 to 20, not 21"),
        ("--n 0", "n must be a whole number from 1 to 1024, not 0"),
        ("--logit-bias 5", "--logit-bias takes ID=BIAS, such as 42=-5, not '5'"),
        ("--logit-bias x=1", "--logit-bias takes ID=BIAS, such as 42=-5, not 'x=1'"),
        ("--logit-bias 5=inf", "logit_bias must lie between -100.0 and 100.0, not inf"),
        ("--priority 9999999999", "priority must be a whole number from"),
        ("--scheduling-policy lifo", "'lifo' is not one of 'fcfs', 'prefill-first', 'priority'"),
        ("--watermark -1", "watermark must lie between 0 and"),
        ("--long-prefill-token-threshold -1", "long prefill token threshold must lie between 0"),
        ("--max-num-partial-prefills -1", "max num partial prefills must lie between 0"),
        ("--skip-blocked-head -1", "skip blocked head must lie between 0"),
    ],
)
def test_a_bad_value_is_one_line_before_anything_runs(told, arguments, message):
    code, calls, line = told(*arguments.split(" "))
    assert (code, calls) == (2, [])
    assert line.startswith("cbviz: ")
    assert message in line


def test_a_bad_value_does_not_wait_for_torch():
    code = (
        "import sys; from cbviz import cli\n"
        "try: cli.main(['run', '--prompt', 'a', '--watermark', '-1', '--min-p', '2'])\n"
        "except SystemExit as end: print(end.code, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "2 False\n"


def test_engine_options_before_a_command_are_named_as_they_are_typed(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["cbviz"])
    for flag in ("--check", "--no-prefix-caching", "--prompts"):
        with pytest.raises(SystemExit) as end:
            cli.main([flag, *(["x"] if flag == "--prompts" else []), "info"])
        assert end.value.code == 2
        expected = flag.replace("--no-", "--")
        assert f"{expected} goes after 'info'" in capsys.readouterr().err
