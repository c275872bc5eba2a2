"""All keys of the window, each with an id (so that it can be remapped) and a tooltip (its help)."""

from __future__ import annotations

from textual.binding import Binding

_STEP = Binding.Group("step", compact=True)
_BUDGET = Binding.Group("budget", compact=True)
_SPEED = Binding.Group("speed", compact=True)

# In the order in which the footer shows them; a narrow terminal shows the first ones.
KEYS: tuple[Binding, ...] = (
    Binding("space", "run_or_pause", "run/pause", id="run_or_pause",
            tooltip="Run or pause: the engine, or a replay"),
    Binding("left", "step_back(1)", "back", id="back", group=_STEP, key_display="←",
            tooltip="Look one step back"),
    Binding("right,n", "step_on(1)", "step", id="forward", group=_STEP, key_display="→",
            tooltip="One step on: through history, and at its end a new one"),
    Binding("shift+left", "step_back(10)", "10 back", id="back_10", show=False,
            tooltip="Look ten steps back"),
    Binding("shift+right", "step_on(10)", "10 on", id="forward_10", show=False,
            tooltip="Ten steps on"),
    Binding("home", "to_start", "oldest", id="to_start", show=False,
            tooltip="Look at the oldest step there is"),
    Binding("end", "to_end", "live", id="to_end", show=False,
            tooltip="Live again: look at the newest step, and follow"),
    Binding("g", "ask_step", "go to", id="go_to", show=False, priority=True,
            tooltip="Go to a step by its number"),
    Binding("left_square_bracket", "budget(-1)", "smaller", id="budget_down", group=_BUDGET,
            key_display="[", tooltip="A smaller token budget m, from the next step on"),
    Binding("right_square_bracket", "budget(1)", "larger", id="budget_up", group=_BUDGET,
            key_display="]", tooltip="A larger token budget m, from the next step on"),
    Binding("minus", "speed(-1)", "slower", id="slower", group=_SPEED, key_display="-",
            tooltip="Fewer steps per second"),
    Binding("plus,equals_sign", "speed(1)", "faster", id="faster", group=_SPEED, key_display="+",
            tooltip="More steps per second (1, 2, 4, 8, 16, 32, unlimited)"),
    Binding("i", "inject", "prompt", id="inject", priority=True,
            tooltip="Type a prompt, and queue it while the others run"),
    Binding("x", "cancel", "cancel", id="cancel", show=False,
            tooltip="Cancel the selected request"),
    Binding("up", "select(-1)", "request up", id="select_up", show=False,
            tooltip="Select the request above"),
    Binding("down", "select(1)", "request down", id="select_down", show=False,
            tooltip="Select the request below"),
    Binding("1", "panel('batch')", "batch", id="panel_1", show=False,
            tooltip="Focus the packed batch"),
    Binding("2", "panel('mask')", "mask", id="panel_2", show=False,
            tooltip="Focus the attention mask"),
    Binding("3", "panel('kv')", "KV cache", id="panel_3", show=False,
            tooltip="Focus the KV cache"),
    Binding("4", "panel('throughput')", "throughput", id="panel_4", show=False,
            tooltip="Focus throughput"),
    Binding("5", "panel('requests')", "requests", id="panel_5", show=False,
            tooltip="Focus the requests"),
    Binding("6", "inject", "prompt line", id="panel_6", show=False, tooltip="Type a prompt"),
    Binding("7", "panel('timeline')", "timeline", id="panel_7", show=False,
            tooltip="Focus the timeline (alone where there is no room beside the others)"),
    Binding("8", "panel('events')", "events", id="panel_8", show=False,
            tooltip="Focus the event log (alone where there is no room beside the others)"),
    Binding("r", "restart", "restart", id="restart", show=False,
            tooltip="Start the engine anew as it was first set (history stays until it is ready)"),
    Binding("question_mark", "help", "help", id="help", key_display="?",
            tooltip="All keys"),
    Binding("q", "quit", "quit", id="quit", tooltip="Leave, and end the engine"),
    Binding("z", "maximise", "max", id="maximise",
            tooltip="The focused panel alone, and back"),
    Binding("ctrl+q,ctrl+c", "quit", "quit", id="interrupt", show=False, priority=True,
            tooltip="Leave, and end the engine"),
)  # fmt: skip
