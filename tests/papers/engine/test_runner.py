"""The lab: cells are carried out once, those that cannot be carried out here say why."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moesaic.papers.engine.runner import Runner
from moesaic.training import NoProgress, ResultCache


@dataclass(frozen=True)
class Squares:
    up_to: int
    needs: str | None = None

    @property
    def steps(self) -> int:
        return self.up_to

    def missing_requirement(self, runner: Runner) -> str | None:
        return self.needs if runner.device == "cpu" else None

    def spec(self, runner: Runner) -> dict[str, Any]:
        return {"up_to": self.up_to, "seed": runner.seed}

    def measure(self, runner: Runner) -> dict[str, Any]:
        log.append(self.up_to)
        return {"squares": [i * i for i in range(self.up_to)]}

    def result(self, stored: dict[str, Any]) -> int:
        return sum(stored["squares"])


log: list[int] = []


class RecordingProgress(NoProgress):
    def __init__(self) -> None:
        self.begun: list[tuple[str, int]] = []

    def begin(self, name: str, total: int, done: int = 0) -> None:
        self.begun.append((name, total))


def runner_in(folder: Path, progress: NoProgress | None = None, device: str = "cpu") -> Runner:
    return Runner(ResultCache(folder), None, device=device, seed=0, progress=progress or NoProgress())


def test_a_cell_is_carried_out_once_under_whatever_name(tmp_path: Path):
    log.clear()
    done = runner_in(tmp_path).run({"a": Squares(4), "b": Squares(3), "c": Squares(4)})
    assert {name: each.result for name, each in done.items()} == {"a": 14, "b": 5, "c": 14}
    assert log == [4, 3]
    again = runner_in(tmp_path).run({"d": Squares(4)})
    assert again["d"] == done["a"]
    assert log == [4, 3]


def test_progress_counts_the_work_that_is_left(tmp_path: Path):
    runner_in(tmp_path).run({"a": Squares(4)})
    progress = RecordingProgress()
    runner_in(tmp_path, progress).run({"a": Squares(4), "b": Squares(3), "c": Squares(2), "d": Squares(3)})
    assert progress.begun == [("all experiments", 5), ("b", 3), ("c", 2)]


def test_what_is_in_the_way_counts_until_the_cell_is_done_elsewhere(tmp_path: Path):
    cell = Squares(4, needs="needs a GPU")
    assert runner_in(tmp_path).missing_requirement("a", cell) == "needs a GPU"
    gpu = runner_in(tmp_path, device="cuda")
    assert gpu.missing_requirement("a", cell) is None
    gpu.run({"a": cell})
    assert runner_in(tmp_path).missing_requirement("a", cell) is None


def test_each_result_is_reported_when_it_is_there_and_finished_ones_first(tmp_path: Path):
    runner_in(tmp_path).run({"old": Squares(4)})
    log.clear()
    seen: list[tuple[str, int, list[int]]] = []
    named = {"a": Squares(3), "b": Squares(4), "c": Squares(2), "d": Squares(3)}
    runner_in(tmp_path).run(named, lambda name, cell: seen.append((name, cell.result, list(log))))
    assert seen == [("b", 14, []), ("a", 5, [3]), ("d", 5, [3]), ("c", 1, [3, 2])]
