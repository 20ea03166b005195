"""A terminal gets progress bars, a file gets a line every ten seconds; both show the remaining time."""

import io

import pytest
from rich.console import Console

from moesaic.report.progress_bars import Bars, Lines, watch_progress
from moesaic.training import Progress


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def lines() -> tuple[Lines, Clock, io.StringIO]:
    file, clock = io.StringIO(), Clock()
    return Lines(Console(file=file, width=40), clock=clock), clock, file


def test_what_is_no_terminal_gets_lines_and_a_terminal_bars():
    with watch_progress(Console(file=io.StringIO())) as plain:
        assert isinstance(plain, Lines)
    with watch_progress(Console(file=io.StringIO(), force_terminal=True)) as fancy:
        assert isinstance(fancy, Bars)


def test_a_line_comes_every_ten_seconds_with_share_rate_and_time_left():
    progress, clock, file = lines()
    progress.begin("joint training, 300 samples", total=1000)
    for second in range(1, 26):
        clock.now = float(second)
        progress.advance(20, note="trial 3")
    progress.end()
    assert file.getvalue().splitlines() == [
        "joint training, 300 samples: 20 %, 20 epochs/s, 40 s left; trial 3",
        "joint training, 300 samples: 40 %, 20 epochs/s, 30 s left; trial 3",
    ]


def test_what_was_done_before_counts_for_the_share_and_not_for_the_rate():
    progress, clock, file = lines()
    progress.begin("cell", total=1000, done=500)
    clock.now = 10.0
    progress.advance(100)
    assert file.getvalue() == "cell: 60 %, 10 epochs/s, 40 s left\n"


def test_what_is_skipped_counts_for_the_share_and_not_for_the_rate():
    progress, clock, file = lines()
    progress.begin("compare", total=2000)
    progress.begin("network", total=1000)
    progress.skip(500)
    clock.now = 10.0
    progress.advance(100)
    assert file.getvalue() == "compare: 30 %, 10 epochs/s, 2 min left; network: 60 %, 10 epochs/s, 40 s left\n"


def test_what_advances_a_cell_advances_the_run_around_it():
    progress, clock, file = lines()
    progress.begin("figure 4", total=400)
    progress.begin("cell", total=100)
    clock.now = 10.0
    progress.advance(100)
    progress.end()
    progress.begin("next cell", total=300)
    clock.now = 20.0
    progress.advance(100)
    assert file.getvalue().splitlines() == [
        "figure 4: 25 %, 10 epochs/s, 30 s left; cell: 100 %, 10 epochs/s, 0 s left",
        "figure 4: 50 %, 10 epochs/s, 20 s left; next cell: 33 %, 10 epochs/s, 20 s left",
    ]


def test_long_times_are_told_in_minutes_and_hours():
    progress, clock, file = lines()
    progress.begin("cell", total=10_000)
    for now in (10.0, 1000.0):
        clock.now = now
        progress.advance(10)
    assert "2.8 h left" in file.getvalue()
    progress.begin("other", total=100)
    clock.now = 1100.0
    progress.advance(10)
    assert "other: 10 %, 15 min left" in file.getvalue()


@pytest.mark.parametrize(
    ("remaining", "shown"), [(89, "89 s"), (90, "2 min"), (5399, "90 min"), (5400, "1.5 h"), (36_000, "10.0 h")]
)
def test_seconds_end_at_a_minute_and_a_half_and_minutes_at_an_hour_and_a_half(remaining: int, shown: str):
    progress, clock, file = lines()
    progress.begin("cell", total=10 + remaining)
    clock.now = 10.0
    progress.advance(10)
    assert file.getvalue().endswith(f" %, 1 epochs/s, {shown} left\n")


def test_a_rate_below_one_per_second_is_not_shown_and_nothing_is_left_beyond_the_total():
    progress, clock, file = lines()
    progress.begin("cell", total=8)
    clock.now = 10.0
    progress.advance(9)
    assert file.getvalue() == "cell: 112 %, 0 s left\n"


def test_without_anything_done_or_any_time_there_is_the_share_alone():
    progress, clock, file = lines()
    progress.begin("nothing done", total=4, done=1)
    clock.now = 10.0
    progress.advance(0)
    progress.end()
    clock.now = 20.0
    progress.begin("no time", total=4)
    progress.advance(1)
    progress.end()
    progress.begin("one done", total=4)
    clock.now = 30.0
    progress.advance(1)
    progress.end()
    progress.begin("empty", total=0)
    clock.now = 40.0
    progress.advance(0)
    assert file.getvalue().splitlines() == [
        "nothing done: 25 %",
        "no time: 25 %",
        "one done: 25 %, 30 s left",
        "empty: 100 %",
    ]


def test_a_bar_begins_at_zero_and_without_a_rate():
    file = io.StringIO()
    bars = Bars(Console(file=file, force_terminal=True, width=120, legacy_windows=False))
    bars.begin("cell", total=100)
    bars.display.refresh()
    assert "epochs/s" not in file.getvalue(), "no rate before anything is done"
    assert bars.display.tasks[0].completed == 0


def test_messages_are_shown_at_once_and_as_they_are():
    progress, _, file = lines()
    progress.log("damaged cell set aside: [bold]x[/bold] " + "y" * 60)
    assert file.getvalue() == "damaged cell set aside: [bold]x[/bold] " + "y" * 60 + "\n"


def test_bars_show_name_share_and_note_and_leave_when_done():
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=120, legacy_windows=False)
    with watch_progress(console) as progress:
        assert isinstance(progress, Bars)
        progress.begin("everything [x]", total=200)
        progress.begin("cell", total=100, done=20)
        progress.advance(30, note="trial 3")
        tasks = {task.description: task for task in progress.display.tasks}
        assert {name: task.completed for name, task in tasks.items()} == {"everything [x]": 30, "cell": 50}
        progress.display.refresh()
        assert "everything [x]" in file.getvalue()
        assert "50%" in file.getvalue()
        progress.advance(0)
        assert [task.fields["note"] for task in progress.display.tasks] == ["", "trial 3"]  # the last note stays
        progress.skip(40)
        assert [task.completed for task in progress.display.tasks] == [70, 90]
        assert "trial 3" in file.getvalue()
        progress.log("a message")
        progress.end()
        progress.end()
        assert not progress.display.tasks
    assert "a message" in file.getvalue()


def test_both_are_what_training_reports_to():
    console = Console(file=io.StringIO())
    watchers: list[Progress] = [Bars(console), Lines(console)]
    for watcher in watchers:
        watcher.begin("nothing to do", total=0)
        watcher.advance(0)
        watcher.skip(0)
        watcher.end()
        watcher.end()  # one too many does no harm
