"""Imports run one way, and the torch-free part of the engine is free of torch."""

from __future__ import annotations

import subprocess
import sys

TORCH_FREE = [
    "block_pool", "config", "core", "errors", "explain", "free_queue", "knobs", "locate", "mask",
    "plan", "planner", "policies", "prefix_cache", "protocol", "record", "request", "scheduler",
    "stop", "trace", "version", "waiting_queue", "worker", "world",
]  # fmt: skip


def modules_after(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return {name.split(".")[0] for name in done.stdout.split()}


def test_the_torch_free_modules_are_free_of_torch():
    names = ", ".join(f"engine.{name}" for name in TORCH_FREE)
    loaded = modules_after(f"import {names}")
    assert not loaded & {"torch", "transformers", "tokenizers", "textual"}


def test_the_explorer_imports_neither_torch_nor_transformers():
    loaded = modules_after(
        "import cbviz.app, cbviz.cli, cbviz.window, cbviz.demo, cbviz.sources.live, "
        "cbviz.sources.replay, cbviz.screens.help"
    )
    assert "textual" in loaded
    assert not loaded & {"torch", "transformers", "tokenizers"}


def test_the_contracts_between_the_packages_hold():
    done = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Contracts: " in done.stdout
