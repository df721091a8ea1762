"""The order of jobs and their ends, with processes that are played."""

import io
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from infssm.bench.executors import Experiment, Finished, LostError
from infssm.bench.executors.schedule import Schedule
from infssm.bench.executors.worker import Died, Done, Failed, Message, Order
from infssm.learner.events import Interrupted, LiveScreen, Note, RunBegan, Screen, StepDone, TaskEnded
from tests.learner.tiny import tiny_config


class Played:
    """A pool of workers whose jobs say what a script has for them, one message each time that anybody listens."""

    def __init__(self, script: dict[Experiment, list[list[Message]]], slots: int = 2) -> None:
        self.slots, self.script = slots, script
        self.at_work: dict[int, tuple[Experiment, list[Message]]] = {}
        self.started: list[tuple[Experiment, bool]] = []
        self.answers: list[bool] = []
        self.stopped = self.closed = False

    def start(self, number: int, order: Order) -> None:
        self.started.append((order.experiment, order.overwrite))
        self.at_work[number] = (order.experiment, list(self.script[order.experiment].pop(0)))

    def receive(self) -> list[tuple[int, Message]]:
        heard: list[tuple[int, Message]] = []
        for number, (job, messages) in list(self.at_work.items()):
            message = Died("told to stop") if self.stopped else messages.pop(0)
            if isinstance(message, TaskEnded):
                make_model(job)
            if isinstance(message, Done | Failed | Died):
                del self.at_work[number]
            heard.append((number, message))
        return heard

    def reply(self, number: int, answer: bool | None) -> None:  # noqa: ARG002
        if answer is None:
            self.stopped = True
        else:
            self.answers.append(answer)

    def close(self) -> None:
        self.closed = True


FAIL: list[Message] = [RunBegan("", 2, 0), Failed(ValueError("no"))]
FIRST: list[Message] = [
    RunBegan("", 2, 0),
    TaskEnded(0, 0.5),
    StepDone(1, 0, 1, 0, 1, {}, 1.0),
    Failed(ValueError("later")),
]
DEAD: list[Message] = [RunBegan("", 2, 0), Died("killed")]


def ends(
    pool: Played, jobs: list[Experiment] | Iterator[Experiment], screen: Screen | None = None, **options
) -> list[Finished]:
    chosen = {"overwrite": False, "retries": 2, "watch": None} | options
    return list(Schedule(pool, screen or Screen(quiet=True), **chosen).run(jobs))


def make(out: Path, count: int, seed: int = 0) -> list[Experiment]:
    """Experiments with a task-0 model each."""
    return [Experiment.of(tiny_config(out, seed=seed + number)) for number in range(count)]


def share(out: Path, count: int) -> list[Experiment]:
    """Experiments that start from one task-0 model."""
    return [Experiment.of(tiny_config(out, "lwf-ac", {"weight": 1.0 + number})) for number in range(count)]


def make_model(experiment: Experiment) -> None:
    assert experiment.task0_weights is not None
    experiment.task0_weights.parent.mkdir(parents=True, exist_ok=True)
    experiment.task0_weights.touch()


def test_a_job_starts_when_its_task_0_is_there_not_when_all_is_over(tmp_path: Path) -> None:
    [other] = make(tmp_path, 1, seed=1)
    first, after = share(tmp_path, 2)
    pool = Played({first: [[*FIRST[:2], *[Note("")] * 9, FIRST[-1]]], other: [FAIL], after: [FAIL]})
    found = ends(pool, [first, after, other])
    assert [job for job, _ in pool.started] == [first, other, after]
    assert [end.experiment for end in found] == [other, after, first]
    assert pool.closed


def test_where_the_maker_of_task_0_fails_the_next_makes_it(tmp_path: Path) -> None:
    jobs = share(tmp_path, 3)
    pool = Played({job: [FAIL] for job in jobs})
    assert [end.experiment for end in ends(pool, jobs)] == jobs


def test_no_more_jobs_wait_than_could_run(tmp_path: Path) -> None:
    first, *after = share(tmp_path, 6)
    pool, asked = Played({first: [FIRST]} | {job: [FAIL] for job in after}), []

    def ask() -> Iterator[Experiment]:
        for job in (first, *after):
            asked.append(len(pool.started))
            yield job

    assert len(ends(pool, ask())) == 6
    assert asked[:4] == [0, 1, 1, 3]  # two wait for the first to have its task 0; nobody asks for more until they run


def test_a_dead_process_is_retried_then_given_up(tmp_path: Path) -> None:
    lucky, lost = make(tmp_path, 2)
    again = [RunBegan("", 2, 1), TaskEnded(1, 0.5), Died("killed")]
    pool = Played({lucky: [DEAD, DEAD, again, DEAD, FAIL], lost: [DEAD, DEAD, [Died("at once")]]})
    found = {end.experiment: end.error for end in ends(pool, [lucky, lost], overwrite=True)}
    assert isinstance(found[lost], LostError)
    assert "ended 3 times in one task, the last time because at once" in str(found[lost])
    assert str(lost.path) in str(found[lost])
    assert str(found[lucky]) == "no"
    assert [o for job, o in pool.started if job is lucky] == [True, False, False, False, False]


def test_watching_answers_every_task(tmp_path: Path) -> None:
    [job] = make(tmp_path, 1)
    pool = Played({job: [[RunBegan("", 2, 0), TaskEnded(0, 0.5), TaskEnded(1, 0.25), *FAIL]]})
    ends(pool, [job], watch=lambda _, task, aa: task + aa < 1)
    assert pool.answers == [True, False]


def test_a_signal_stops_all_and_waits_for_them(tmp_path: Path) -> None:
    jobs = make(tmp_path, 3)
    pool = Played({job: [[RunBegan("", 2, 0), *[TaskEnded(0, 0.5)] * 9]] for job in jobs})

    def interrupt(job: Experiment, *_: object) -> bool:
        if job is jobs[0]:  # a second signal would end this process
            signal.raise_signal(signal.SIGTERM)
        return True

    with pytest.raises(Interrupted, match="all runs are saved"):
        ends(pool, jobs, watch=interrupt)
    assert pool.stopped
    assert pool.closed
    assert not pool.at_work


def test_leaving_early_stops_all(tmp_path: Path) -> None:
    jobs = make(tmp_path, 2)
    pool = Played({jobs[0]: [FAIL], jobs[1]: [[RunBegan("", 2, 0)] * 9]})
    running = Schedule(pool, Screen(quiet=True), overwrite=False, retries=0, watch=None).run(jobs)
    assert next(running).experiment is jobs[0]
    running.close()
    assert pool.stopped
    assert pool.closed


def test_leaving_early_does_not_wait_for_an_end_that_was_heard(tmp_path: Path) -> None:
    jobs = make(tmp_path, 2)
    pool = Played({job: [FAIL] for job in jobs})  # both end at once
    running = Schedule(pool, Screen(quiet=True), overwrite=False, retries=0, watch=None).run(jobs)
    assert next(running).experiment is jobs[0]
    running.close()
    assert pool.closed


def test_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen(every=0.0)
    one, other, alone = screen.open("ewc seed 0"), screen.open("si seed 0"), screen.open()
    other(RunBegan("", 4, 2))
    for message in (RunBegan("", 9, 0), Note("hello"), StepDone(9, 0, 2, 0, 1, {"ce": 1.0}, 5.0), TaskEnded(0, 0.5)):
        one(message)
    one.stop()
    other(StepDone(4, 0, 1, 0, 1, {"ce": 0.5}, 2000.0))
    alone(RunBegan("lwf seed 1", 3, 0))
    alone(Note("alone"))
    assert capsys.readouterr().err.splitlines() == [
        "si seed 0: 4 steps, 2 of them done",
        "ewc seed 0: 9 steps",
        "ewc seed 0: hello",
        "si seed 0: 4 steps, 2 of them done",
        "ewc seed 0: task 1/2 epoch 1/1, step 9/9, ce 1, 5 images/s, 0 s left",
        "si seed 0: task 1/1 epoch 1/1, step 4/4, ce 0.5, 2,000 images/s, 0 s left",
        "lwf seed 1: 3 steps",
        "alone",
    ]


def test_live_lines_are_named_and_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", io.StringIO())
    screen = LiveScreen()
    one, other = screen.open("ewc seed 0"), screen.open()
    one(RunBegan("", 9, 3))
    other(RunBegan("si seed 1", 4, 0))
    one(StepDone(5, 0, 2, 0, 1, {"ce": 1.0}, 5.0))
    assert [(task.description, task.completed, task.total) for task in screen.bars.tasks] == [
        ("ewc seed 0", 5, 9),
        ("si seed 1", 0, 4),
    ]
    other.stop()
    other.stop()
    assert screen.bars.live.is_started
    one(Note("hello"))
    one.stop()
    assert not screen.bars.live.is_started
    assert "ewc seed 0: hello" in sys.stderr.getvalue()
