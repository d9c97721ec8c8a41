import io

from rich.console import Console

from rlpost.tracking.base import RunInfo
from rlpost.tracking.config import TrackingConfig
from rlpost.tracking.console import CELL_CHARS, ConsoleTracker, headline


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def tracker(tmp_path, *, terminal=False, total_steps=100, clock=None):
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=120, _environ={"TERM": "xterm"})
    run = RunInfo(folder=tmp_path, total_steps=total_steps)
    return ConsoleTracker(TrackingConfig(), run, console, clock or Clock()), out


def test_headline_averages_validation_over_data_sources():
    scalars = {"val/gsm8k/accuracy": 0.5, "val/math/accuracy": 0.25, "val/math/reward": 9.0, "reward/mean": 0.1234}
    assert headline(scalars) == {"reward": "0.123", "val": "0.375"}


def test_headline_is_empty_without_known_names():
    assert headline({"actor/grad_norm": 1.0}) == {}


def test_console_without_a_terminal_writes_one_plain_line_a_step(tmp_path):
    clock = Clock()
    console, out = tracker(tmp_path, clock=clock)
    console.log(1, {"reward/mean": 0.25, "throughput/tokens_per_s": 12345.0})
    clock.now = 10.0
    console.log(2, {"reward/mean": 0.5, "reward/accuracy": 0.75})
    console.close()
    assert out.getvalue() == (
        "step 1/100  reward 0.250  tok/s 12,345\nstep 2/100  reward 0.500  accuracy 0.750  0:16:20 left\n"
    )


def test_console_time_left_after_a_resume_counts_only_steps_of_this_run(tmp_path):
    clock = Clock()
    console, out = tracker(tmp_path, clock=clock)
    console.rewind(90)
    console.log(91, {"reward/mean": 0.0})
    clock.now = 5.0
    console.log(92, {"reward/mean": 0.0})
    assert out.getvalue().splitlines()[-1] == "step 92/100  reward 0.000  0:00:40 left"


def test_console_without_a_known_length_shows_no_time_left(tmp_path):
    console, out = tracker(tmp_path, total_steps=None)
    console.log(1, {"reward/mean": 0.0})
    console.log(2, {"reward/mean": 0.0})
    assert out.getvalue() == "step 1  reward 0.000\nstep 2  reward 0.000\n"


def test_console_shows_answers_that_look_like_markup_as_they_are(tmp_path):
    rows = [{"prompt": "say [/red] and [bold]x", "answer": "line\nbreak"}]
    plain, plain_out = tracker(tmp_path)
    plain.table(3, rows)
    assert plain_out.getvalue() == "step 3 sample  prompt='say [/red] and [bold]x'  answer='line\\nbreak'\n"
    live, live_out = tracker(tmp_path, terminal=True)
    live.table(3, rows)
    live.close()
    assert "say [/red] and [bold]x" in live_out.getvalue()


def test_console_cuts_long_answers(tmp_path):
    console, out = tracker(tmp_path)
    console.table(1, [{"answer": "a" * (CELL_CHARS + 1)}])
    assert "a" * (CELL_CHARS - 3) + "..." in out.getvalue()
    assert "a" * (CELL_CHARS - 2) not in out.getvalue()


def test_console_on_a_terminal_draws_a_bar_with_the_last_readings(tmp_path):
    console, out = tracker(tmp_path, terminal=True)
    console.log(1, {"val/gsm8k/accuracy": 0.5})
    console.log(2, {"reward/mean": 0.25})
    console.note("saving")
    console.close()
    text = out.getvalue()
    assert "saving" in text
    last_frame = text[text.rindex("step ") :]
    assert "2/100" in last_frame and "reward 0.250" in last_frame and "val 0.500" in last_frame


def test_console_leaves_standard_output_alone(tmp_path, capsys):
    console = ConsoleTracker(TrackingConfig(), RunInfo(folder=tmp_path, total_steps=2))
    console.log(1, {"reward/mean": 0.25})
    console.table(1, [{"answer": "4"}])
    console.close()
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "step 1/2" in captured.err
