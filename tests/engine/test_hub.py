"""Models by hub name, against a hub on this machine. Each case has a process of its own, since
`huggingface_hub` reads its environment when it is imported."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.protocol import Load, encode, read_message
from tests.engine.fake_hub import FakeHub, Files

NOTHING_THERE = "http://127.0.0.1:9"
"""The discard port: connections are refused at once."""
RUN = ["--prompt", "the cat", "--max-tokens", "3", "--device", "cpu", "--json"]
SIDE_FILES = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}

DOWNLOAD = """
import json, sys
from engine import hub
from engine.errors import ModelUnavailable

def progress(detail, done, total):
    print(json.dumps([detail, done, total]), flush=True)

hub.PATIENCE_S = tuple(min(1.0, seconds) for seconds in hub.PATIENCE_S)
try:
    path = hub.download(sys.argv[1], None, progress, weights=True)
    assert "torch" not in sys.modules
    print(json.dumps(sorted(file.name for file in path.iterdir())))
except ModelUnavailable as error:
    sys.exit(str(error))
"""

INTERRUPTED = """
import os, signal, threading
from engine.hub import download

caught = threading.Event()
pressed = threading.Lock()

def progress(detail, done, total):
    # Once: a second ctrl+c would meet the interpreter on its way out.
    if done > 2 and pressed.acquire(blocking=False):
        os.kill(os.getpid(), signal.SIGINT)
        caught.wait()

try:
    download("large", None, progress, weights=True)
except KeyboardInterrupt:
    caught.set()
    print("interrupted")
"""

SEVERAL = """
import sys
from cbviz.cli import main
for arguments in sys.argv[1].split(";"):
    try:
        sys.argv = ["cbviz", *arguments.split()]
        main()
    except SystemExit as end:
        print(end.code, flush=True)
"""
"""Run cbviz for each of several command lines and print the exit codes: torch is imported once."""


def read_files(folder: str) -> Files:
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


@pytest.fixture(scope="module")
def repos(tiny_models, tmp_path_factory) -> dict[str, dict[str, Files]]:
    import torch
    from safetensors.torch import load_file

    gpt2, llama = read_files(tiny_models["tiny-gpt2"]), read_files(tiny_models["tiny-llama"])
    old = tmp_path_factory.mktemp("old") / "pytorch_model.bin"
    torch.save(load_file(Path(tiny_models["tiny-gpt2"]) / "model.safetensors"), old)
    without = {name: data for name, data in gpt2.items() if name != "model.safetensors"}
    other_formats = {
        "pytorch_model.bin": b"bin", "tf_model.h5": b"h5", "onnx/model.onnx": b"onnx",
        "onnx/config.json": b"{}", "consolidated.safetensors": b"same again",
    }  # fmt: skip
    return {
        "org/tiny": {"main": gpt2 | other_formats, "v2/llama": llama},
        "org/old": {"main": without | {"pytorch_model.bin": old.read_bytes(), "x.bin": b"x"}},
        "org/gated": {"main": gpt2},
        "large": {"main": {"config.json": b"{}", "model.safetensors": os.urandom(25_000_000)}},
    }


@pytest.fixture
def hub(repos) -> Iterator[FakeHub]:
    with FakeHub() as hub:
        hub.repos = repos
        hub.gated = {"org/gated"}
        yield hub


@pytest.fixture
def environment(tmp_path, hub) -> dict[str, str]:
    """Of a process that knows no hub but ours, and has an empty cache."""
    own = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("HF_", "HUGGING", "TRANSFORMERS_")) and "proxy" not in key.lower()
    }
    return own | {"HF_HOME": str(tmp_path / "hf"), "HF_ENDPOINT": hub.url}


def python(*arguments: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env=env, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def cbviz(*arguments: str, env: dict[str, str]) -> list[dict]:
    """The JSON objects that cbviz printed; it must have had no trouble."""
    done = python("-m", "cbviz.cli", *arguments, env=env)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def download(name: str, env: dict[str, str]) -> tuple[list, list[str]]:
    """What `engine.hub.download` reported and returned, and its lines on stderr."""
    done = python("-c", DOWNLOAD, name, env=env)
    assert done.returncode == (1 if done.stderr else 0)
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr.splitlines()


def messages_of_worker(model: str, env: dict[str, str]) -> list[str]:
    """The kinds of the messages of the engine's own process, until the model is loaded."""
    with subprocess.Popen(
        [sys.executable, "-m", "engine.worker"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env,
    ) as worker:  # fmt: skip
        assert worker.stdin is not None
        assert worker.stdout is not None
        worker.stdin.write(encode(Load(config=EngineConfig(model=model, device="cpu"))))
        worker.stdin.flush()
        kinds: list[str] = []
        while kinds[-1:] != ["Ready"] and (message := read_message(worker.stdout)) is not None:
            kinds.append(type(message).__name__)
        worker.stdin.close()
    return kinds


def test_a_model_is_downloaded_run_and_run_again_offline(hub, environment):
    first = cbviz("run", "--model", "org/tiny", *RUN, env=environment | {"HF_TOKEN": "hf_secret"})

    assert len(first[0]["token_ids"]) == 3
    assert hub.fetched() == SIDE_FILES | {"model.safetensors"}
    assert {asked.authorization for asked in hub.asked if "org/tiny" in asked.path} == {
        "Bearer hf_secret"
    }
    assert {asked.authorization for asked in hub.asked if "/cdn/" in asked.path} == {None}

    hub.asked.clear()
    offline = environment | {"HF_HUB_OFFLINE": "1"}
    again = cbviz("run", "--model", "org/tiny", *RUN, env=offline)
    assert again[0]["token_ids"] == first[0]["token_ids"]
    assert hub.asked == []


def test_info_fetches_no_weights_and_the_revision_that_was_asked_for(hub, environment):
    [found] = cbviz(
        "info", "--model", "org/tiny", "--revision", "v2/llama", "--json", env=environment
    )

    assert found["model"]["architecture"] == "LlamaForCausalLM"
    assert hub.fetched() == SIDE_FILES


def test_a_repository_without_safetensors_is_read_from_bin(hub, environment):
    [result, _] = cbviz("run", "--model", "org/old", *RUN, env=environment)

    assert len(result["token_ids"]) == 3
    assert hub.fetched() == SIDE_FILES | {"pytorch_model.bin"}


def test_what_is_local_asks_nothing_of_the_hub(hub, environment, tiny_models):
    cbviz("run", "--model", tiny_models["tiny-gpt2"], *RUN, env=environment)
    assert messages_of_worker("embedded", env=environment)[-1] == "Ready"

    assert hub.asked == []


def test_each_refusal_of_the_hub_is_one_line(hub, environment):
    done = python(
        "-c",
        SEVERAL,
        "info --model org/missing;info --model org/tiny --revision v9;info --model org/gated",
        env=environment,
    )

    assert done.stdout.split() == ["2", "2", "2"]
    assert done.stderr.splitlines() == [
        "cbviz: the hub has no model org/missing (or it is private: set HF_TOKEN)",
        "cbviz: org/tiny has no revision 'v9'",
        "cbviz: org/gated is gated: ask for access on the hub, then set HF_TOKEN",
    ]


def test_a_hub_out_of_reach_is_told_soon_in_one_line(environment):
    alone = environment | {"HF_ENDPOINT": NOTHING_THERE}
    started = time.monotonic()
    done = python(
        "-c", SEVERAL, f"info --model org/a;info --model org/b --revision {'0' * 40}", env=alone
    )

    assert done.stdout.split() == ["2", "2"]
    assert done.stderr.splitlines() == [
        f"cbviz: org/{name} is not in the local cache and {NOTHING_THERE} cannot be reached"
        for name in "ab"
    ]
    assert time.monotonic() - started < 20


def test_offline_without_a_cache_is_one_line(hub, environment):
    _, lines = download("gpt2", environment | {"HF_HUB_OFFLINE": "1"})

    assert lines == ["gpt2 is not in the local cache, and HF_HUB_OFFLINE forbids fetching it"]
    assert hub.asked == []


def test_a_hub_that_never_answers_is_given_up(environment):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        _, lines = download("gpt2", environment | {"HF_ENDPOINT": url})

    assert lines == [f"gpt2 is not in the local cache and {url} cannot be reached"]


def test_a_download_reports_bytes_also_where_progress_bars_are_off(hub, environment):
    said, lines = download("large", environment | {"HF_HUB_DISABLE_PROGRESS_BARS": "1"})

    assert lines == []
    *reports, files = said
    assert files == ["config.json", "model.safetensors"]
    assert reports[0] == ["large", 0, 0]
    assert {detail for detail, *_ in reports} == {"large"}
    done = [n for _, n, _ in reports]
    assert done == sorted(set(done))
    assert len(done) >= 4
    assert reports[-1][1:] == [25_000_002, 25_000_002]


def test_a_download_that_breaks_off_is_one_line_and_can_be_repeated(hub, environment):
    hub.breaks_after = 12_000_000
    _, lines = download("large", environment)
    assert len(lines) == 1
    assert lines[0].startswith("the hub refused large: ")
    assert "503" in lines[0]

    hub.breaks_after, hub.down = None, False
    [*_, last, files], lines = download("large", environment)
    assert lines == []
    assert files == ["config.json", "model.safetensors"]
    assert last == ["large", 25_000_000, 25_000_000]

    [*reports, files], lines = download("large", environment | {"HF_ENDPOINT": NOTHING_THERE})
    assert (lines, reports) == ([], [["large", 0, 0]])
    assert files == ["config.json", "model.safetensors"]


def test_an_interrupted_download_ends_with_its_next_bytes(environment):
    done = python("-c", INTERRUPTED, env=environment)

    assert (done.stdout, done.stderr) == ("interrupted\n", "")
    files = [path for path in Path(environment["HF_HOME"]).rglob("*") if path.is_file()]
    assert files
    assert all(path.stat().st_size < 1_000_000 for path in files)
