"""`cbviz bench`: how fast the engine is here. What a command needs is imported when it runs."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])
SHAPES = ("gpt2-124m", "smollm2-135m")


@click.group()
@click.option("--threads", type=click.IntRange(1, 1024), metavar="N", help="Of the CPU.")
def bench(threads: int | None) -> None:
    """Measure speed: what the machine allows, single steps, a whole workload.

    Models of well-known shapes are made with random weights; nothing is downloaded.
    """
    # As `run` and the explorer's engine set it, for us and for those that we are compared with.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    if threads is not None:
        os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(threads)


def _rounds(default: int) -> Callable[[F], F]:
    return click.option("--rounds", type=click.IntRange(1, 1000), default=default,
                        show_default=True, help="Measurements; the least counts.")  # fmt: skip


_json = click.option("--json", "as_json", is_flag=True, help="One JSON object.")
_shapes = click.option("--shape", "shapes", type=click.Choice(SHAPES), multiple=True,
                       help="May be given again.  [default: both]")  # fmt: skip
_peers = click.option("--peers/--no-peers", default=True, show_default=True,
                      help="Also run transformers' continuous batching.")  # fmt: skip


@bench.command()
@_rounds(10)
@_json
def floor(rounds: int, as_json: bool) -> None:
    """Memory bandwidth and the rate of matrix products, at decode and prefill sizes."""
    from engine.bench import report
    from engine.bench.floor import measure

    found = measure(rounds)
    click.echo(report.as_json(found) if as_json else _titled(report.floor_table(found)))


@bench.command()
@_shapes
@click.option("--only", multiple=True, metavar="NAME",
              help="Steps whose names begin like this, such as 'decode 8'.")  # fmt: skip
@_rounds(7)
@_peers
@_json
def steps(
    shapes: tuple[str, ...], only: tuple[str, ...], rounds: int, peers: bool, as_json: bool
) -> None:
    """Single steps by phase, ms, beside the least time that the machine allows."""
    from engine.bench import models, report
    from engine.bench.steps import measure

    found = {}
    for shape in shapes or SHAPES:
        with models.made(shape) as path:
            found[shape] = measure(path, rounds, only, peers)
        if not as_json:
            click.echo(_titled(f"{shape}\n{report.steps_table(found[shape].steps)}"))
    if as_json:
        click.echo(report.as_json(found))


@bench.command()
@_shapes
@_rounds(3)
@_peers
@_json
def workload(shapes: tuple[str, ...], rounds: int, peers: bool, as_json: bool) -> None:
    """32 requests of mixed lengths to their end, ours and transformers' in turn."""
    from engine.bench import models, report
    from engine.bench.workload import measure

    found = []
    for shape in shapes or SHAPES:
        with models.made(shape) as path:
            found.append(measure(path, rounds, peers))
    click.echo(report.as_json(found) if as_json else _titled(report.workload_table(found)))


def _titled(text: str) -> str:
    from engine.bench import report

    return f"{report.machine_name()}\n{text}\n"


@bench.command()
@click.option("--running", type=click.IntRange(1, 4096), default=256, show_default=True,
              help="Requests that decode.")  # fmt: skip
@_json
def scheduler(running: int, as_json: bool) -> None:
    """What scheduling costs without a model, with 10 to 100,000 requests in the queue."""
    from engine.bench import report
    from engine.bench.scheduler import measure

    found = measure(running)
    click.echo(report.as_json(found) if as_json else _titled(report.scheduler_table(found)))
