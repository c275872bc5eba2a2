"""The command line: `cbviz`, `cbviz run`, `cbviz replay`, `cbviz info`.

Only what a command needs is imported, when it needs it: the window must not wait for torch.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from cbviz.bench_commands import bench
from engine.config import EngineConfig, parse_bytes
from engine.errors import InvalidInput, ModelUnavailable
from engine.knobs import POLICY_NAMES
from engine.locate import local_model
from engine.request import SamplingParams
from engine.version import __version__

if TYPE_CHECKING:
    from cbviz.palette import Palette

F = TypeVar("F", bound=Callable[..., Any])
WINDOW_TEMPERATURE = 0.7
SLOWEST = 0.01
"""Steps a second."""


def main(arguments: list[str] | None = None) -> None:
    """Entry point.

    Exit codes: 0, 1 when output cannot be written, 2 for anything a user can mend, 130 when
    interrupted.
    """
    try:
        code = cli.main(args=arguments, prog_name="cbviz", standalone_mode=False)
    except click.exceptions.Exit as stop:
        code = stop.exit_code
    except (click.Abort, KeyboardInterrupt):
        code = 130
    except click.ClickException as error:
        code = fail(error.format_message())
    except (InvalidInput, ModelUnavailable) as error:
        code = fail(str(error))
    except OSError as error:
        fail(f"{error.strerror or error}" + (f": {error.filename}" if error.filename else ""))
        # What could not be written stays in the buffer: nothing may try again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    sys.exit(code if isinstance(code, int) else 0)


def fail(message: str) -> int:
    """Say what is wrong in one line on stderr; the exit code for it."""
    from cbviz.sanitize import one_line

    click.echo(f"cbviz: {one_line(message)}", err=True)
    return 2


def _die_by_broken_pipe() -> None:
    """When the reader of our output leaves, leave without a word, as other filters do."""
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)


def calm_threads(environment: MutableMapping[str, str]) -> None:
    """Let OpenMP threads sleep while they wait, before torch is imported: where others want the
    cores, threads that spin at a barrier wait for one that cannot run."""
    environment.setdefault("OMP_WAIT_POLICY", "passive")


def options(*decorators: Callable[[F], F]) -> Callable[[F], F]:
    """Several options as one decorator, in the order in which help shows them."""

    def apply(function: F) -> F:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return apply


engine_options = options(
    click.option("--model", default="embedded", show_default=True, metavar="NAME|PATH",
                 help="Hub name (gpt2), local Hugging Face directory or .gguf file."),
    click.option("--revision", metavar="REV", help="Branch, tag or commit on the hub."),
    click.option("--trust-remote-code", is_flag=True, help="Run code that comes with the model."),
    click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto"),
    click.option("--dtype", default="auto",
                 type=click.Choice(["auto", "float32", "bfloat16", "float16"])),
    click.option("--attention", type=click.Choice(["auto", "dense", "paged", "triton"]),
                 default="auto", help="dense: one boolean mask over the packed batch. paged: the "
                 "fast one on CPU. triton: on CUDA."),
    click.option("--token-budget", "--max-num-batched-tokens", type=int, metavar="M",
                 help="Tokens in a step at most. [default: 32 on CPU, 512 on CUDA]"),
    click.option("--max-num-seqs", type=int, metavar="N",
                 help="Running requests at most. [default: 8 on CPU, 64 on CUDA]"),
    click.option("--block-size", type=int, default=16, show_default=True, metavar="TOKENS"),
    click.option("--num-blocks", type=int, metavar="N", help="KV blocks in the pool."),
    click.option("--kv-memory", metavar="SIZE", help="Memory of the pool, such as 512MiB."),
    click.option("--max-model-len", type=int, metavar="TOKENS",
                 help="Prompt and output of a request at most. [default: the model's context]"),
    click.option("--scheduling-policy", type=click.Choice(POLICY_NAMES), default="fcfs",
                 show_default=True, help="Who goes first in a step."),
    click.option("--chunked-prefill/--no-chunked-prefill", default=True, show_default=True,
                 help="Split prompts to fit the budget, or let them wait until they fit whole."),
    click.option("--long-prefill-token-threshold", type=int, default=0, metavar="TOKENS",
                 help="Prefill tokens of one request in a step at most; 0 = no cap."),
    click.option("--max-num-partial-prefills", type=int, default=0, metavar="N",
                 help="Prompts begun but not finished at most; 0 = any."),
    click.option("--watermark", type=int, default=0, metavar="BLOCKS",
                 help="Blocks that an admission must leave free, while others run."),
    click.option("--skip-blocked-head", type=int, default=0, metavar="N",
                 help="How many requests may pass one that cannot be admitted; 0 = none."),
    click.option("--prefix-caching/--no-prefix-caching", default=True, show_default=True,
                 help="Share full blocks among requests that begin alike."),
    click.option("--check", is_flag=True,
                 help="Prove queues, tables and pool against each other after every step."),
    click.option("--seed", type=int, default=0, show_default=True,
                 help="Seeds every request without a seed of its own."),
    click.option("--threads", type=int, metavar="N", help="CPU threads of the forward pass."),
)  # fmt: skip

prompt_options = options(
    click.option("--prompt", "prompt", multiple=True, metavar="TEXT", help="May be given again."),
    click.option("--prompts", "prompt_file", metavar="FILE",
                 help="One prompt a line, or .jsonl with a `prompt` field; - is stdin."),
    click.option("--max-tokens", type=int, default=64, show_default=True, metavar="N",
                 help="Tokens generated for each prompt at most."),
)  # fmt: skip


def _biases(
    context: click.Context, parameter: click.Parameter, values: tuple[str, ...]
) -> dict[int, float]:
    """`ID=BIAS` options as a mapping; of two for the same token the last one counts."""
    found = {}
    for text in values:
        token_id, _, bias = text.partition("=")
        try:
            found[int(token_id)] = float(bias)
        except ValueError:
            raise InvalidInput(f"--logit-bias takes ID=BIAS, such as 42=-5, not {text!a}") from None
    return found


sampling_options = options(
    click.option("--min-tokens", type=int, default=0, show_default=True, metavar="N",
                 help="Neither end token nor stop string counts before so many tokens."),
    click.option("--top-k", type=int, default=0, show_default=True, metavar="K",
                 help="Draw among the K likeliest tokens; 0 = all."),
    click.option("--top-p", type=float, default=1.0, show_default=True, metavar="P",
                 help="Draw among the likeliest tokens that together have this probability."),
    click.option("--min-p", type=float, default=0.0, show_default=True, metavar="P",
                 help="Draw among tokens at least this fraction as likely as the likeliest."),
    click.option("--repetition-penalty", type=float, metavar="X",
                 help="Above 1: tokens that were there get less likely. [default: the model's]"),
    click.option("--presence-penalty", type=float, default=0.0, show_default=True, metavar="X",
                 help="Taken off the logits of tokens that were there."),
    click.option("--frequency-penalty", type=float, default=0.0, show_default=True, metavar="X",
                 help="Taken off the logits of tokens for each time they were there."),
    click.option("--logit-bias", multiple=True, callback=_biases, metavar="ID=BIAS",
                 help="Added to the logit of a token. May be given again."),
    click.option("--stop", multiple=True, metavar="TEXT",
                 help="End the output where this begins. May be given again."),
    click.option("--stop-token-id", "stop_token_ids", type=int, multiple=True, metavar="ID",
                 help="End the output with this token. May be given again."),
    click.option("--ignore-eos", is_flag=True, help="Go on after an end token."),
    click.option("--logprobs", type=int, metavar="N",
                 help="With --json, the N likeliest tokens beside each one drawn."),
    click.option("--n", type=int, default=1, show_default=True, metavar="N",
                 help="Samples of each prompt."),
    click.option("--priority", type=int, default=0, show_default=True, metavar="N",
                 help="Lower goes first, under --scheduling-policy priority."),
)  # fmt: skip
SHARED_PARAMS = tuple(
    name for name in SamplingParams.__struct_fields__ if name not in ("seed", "cache_salt")
)
"""What the command line can say for all prompts; `--seed` is that of the engine."""


def temperature_option(default: float) -> Callable[[F], F]:
    """`--temperature`, whose default differs between the window and `run`."""
    return click.option("--temperature", type=float, default=default, show_default=True,
                        help="0 = greedy.")  # fmt: skip


trace_option = click.option("--trace", metavar="FILE", help="Record every step in this file.")
break_option = click.option(
    "--break-on", multiple=True, metavar="WHAT",
    help="Pause where this happens: preemption, chunk, hit, eviction, finish, refusal, error, "
    "budget, kv>80%, step=120, running, A:finished, … May be given again.",
)  # fmt: skip
ascii_option = click.option("--ascii", "ascii_only", is_flag=True, help="Draw with ASCII only.")


@click.group(invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@engine_options
@prompt_options
@temperature_option(WINDOW_TEMPERATURE)
@trace_option
@click.option(
    "--speed",
    type=float,
    default=8.0,
    show_default=True,
    help="Steps a second at most; 0 = as fast as it goes.",
)
@click.option("--paused", is_flag=True, help="Do not start to run.")
@break_option
@click.option("--no-demo", is_flag=True, help="Start without the demo workload.")
@ascii_option
@click.version_option(__version__, message="cbviz %(version)s")
@click.pass_context
def cli(context: click.Context, /, **given: Any) -> None:
    """Watch continuous batching at work: a live explorer over a real engine.

    Without a command, opens the explorer (on the embedded model, offline, unless --model says
    otherwise).
    """
    if context.invoked_subcommand is not None:
        _refuse_misplaced(context)
        return
    from cbviz.window import open_live

    config, trace = _config(given), _trace(given)
    prompts = _prompts(given)
    _check_speed(given["speed"])
    break_on = _breakpoints(given["break_on"])
    _need_terminal()
    context.exit(
        open_live(
            config,
            trace=trace,
            prompts=prompts,
            demo=not prompts and not given["no_demo"],
            speed=given["speed"],
            paused=given["paused"],
            params=SamplingParams(max_tokens=given["max_tokens"], temperature=given["temperature"]),
            palette=_palette(given["ascii_only"]),
            break_on=break_on,
        )
    )


@cli.command()
@engine_options
@prompt_options
@temperature_option(0.0)
@sampling_options
@click.option("--json", "as_json", is_flag=True, help="One JSON object a request, then a summary.")
@click.option(
    "--explain",
    is_flag=True,
    help="A line a request a step on stderr: what it did, or why it waited.",
)
@trace_option
@click.pass_context
def run(context: click.Context, /, **given: Any) -> None:
    """Run prompts without a window: data on stdout, narration on stderr."""
    _die_by_broken_pipe()
    prompts = _prompts(given)
    if not prompts:
        raise InvalidInput("nothing to run: give --prompt TEXT or --prompts FILE")
    config, trace = _config(given), _trace(given)
    calm_threads(os.environ)
    # What is wrong so far is said at once; only now is torch worth waiting for.
    from cbviz.headless import run_prompts

    context.exit(
        run_prompts(
            config, prompts, as_json=given["as_json"], trace=trace, explain=given["explain"]
        )
    )


@cli.command()
@click.argument("file", metavar="FILE")
@click.option("--speed", type=float, default=8.0, show_default=True, help="Steps a second.")
@break_option
@ascii_option
@click.pass_context
def replay(
    context: click.Context, file: str, speed: float, break_on: tuple[str, ...], ascii_only: bool
) -> None:
    """Open the explorer on a recorded trace; no model and no torch needed."""
    from cbviz.window import open_replay
    from engine.trace import TraceReader

    _check_speed(speed)
    breaks = _breakpoints(break_on)
    # Whether it is a trace at all is told before the terminal is taken.
    TraceReader(Path(file)).close()
    _need_terminal()
    palette = _palette(ascii_only)
    context.exit(open_replay(Path(file), speed=speed, palette=palette, break_on=breaks))


@cli.command()
@engine_options
@click.option("--json", "as_json", is_flag=True, help="As one JSON object.")
def info(as_json: bool, **given: Any) -> None:
    """Versions, device, attention implementations, and the memory plan for a model."""
    _die_by_broken_pipe()
    config = _config(given)
    from cbviz.headless import print_info

    print_info(config, as_json=as_json)


cli.add_command(bench)


def _refuse_misplaced(context: click.Context) -> None:
    """Options before a command would be silently lost."""
    for parameter in context.command.params:
        source = parameter.name and context.get_parameter_source(parameter.name)
        if source is click.core.ParameterSource.COMMANDLINE:
            flag = parameter.opts[0]
            raise click.UsageError(f"{flag} goes after {context.invoked_subcommand!r}")


def _config(given: dict[str, Any]) -> EngineConfig:
    names = EngineConfig.__struct_fields__
    values = {name: given[name] for name in names if name in given}
    if values.get("kv_memory") is not None:
        values["kv_memory"] = parse_bytes(values["kv_memory"])
    for name in ("model", "revision"):
        _utf8(f"--{name}", values.get(name) or "")
    config = EngineConfig(**values)
    local_model(config.model)
    return config


def _prompts(given: dict[str, Any]) -> list[tuple[str, SamplingParams]]:
    from cbviz.prompts import read_prompts

    shared = {name: given[name] for name in SHARED_PARAMS if name in given}
    for text in shared.get("stop", ()):
        _utf8("--stop", text)
    params = SamplingParams(**shared)
    # Bytes of an argument that are no UTF-8 come as lone surrogates: show them as U+FFFD.
    texts = [text.encode("utf-8", "replace").decode("utf-8") for text in given["prompt"]]
    found = [(text, params) for text in texts]
    if given["prompt_file"] is not None:
        found += read_prompts(given["prompt_file"], lambda own: SamplingParams(**{**shared, **own}))
    return found


def _trace(given: dict[str, Any]) -> Path | None:
    """The trace file, if its folder is there: better said now than after the model is loaded."""
    if given["trace"] is None:
        return None
    path = Path(_utf8("--trace", given["trace"]))
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise InvalidInput(f"cannot write the trace {path}: not a file in a folder that exists")
    return path.absolute()


def _check_speed(speed: float) -> None:
    if not (speed == 0 or SLOWEST <= speed < float("inf")):
        raise InvalidInput(f"--speed must be 0 (unlimited) or at least {SLOWEST}, not {speed}")


def _breakpoints(texts: tuple[str, ...]) -> tuple[str, ...]:
    """What `--break-on` says, if it can be read."""
    from engine.breakpoints import parse_all

    return tuple(point.text for point in parse_all([_utf8("--break-on", text) for text in texts]))


def _utf8(flag: str, text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidInput(f"{flag} must be UTF-8 text: {text!a}") from None
    return text


def _need_terminal() -> None:
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise InvalidInput("the explorer needs a terminal; without one, use `cbviz run`")


def _palette(ascii_only: bool) -> Palette:
    from cbviz.palette import Palette

    # Set but empty means nothing (no-color.org); Textual takes it for a wish.
    if os.environ.get("NO_COLOR") == "":
        del os.environ["NO_COLOR"]
    if "NO_COLOR" in os.environ:
        color = "none"
    elif os.environ.get("COLORTERM") in ("truecolor", "24bit"):
        color = "truecolor"
    else:
        color = "256" if "256" in os.environ.get("TERM", "") else "16"
    encoding = (sys.stdout.encoding or "").lower().replace("-", "")
    return Palette.make(ascii=ascii_only or encoding != "utf8", color=color)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
