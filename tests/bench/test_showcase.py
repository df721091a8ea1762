"""The commands that the main job prints at its end can be pasted."""

import re
import shlex

from infssm.bench.running import run
from infssm.cli.app import invoke
from infssm.cli.run import _invite
from tests.learner.tiny import tiny_config


def test_the_printed_commands_teach_a_class_and_find_it(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    results = [run(tiny_config("runs", name, benchmark="digits-5"), quiet=True) for name in ("seq", "frozen+gda")]
    _invite(results)
    _invite(results)  # the job is run again: the learner stays
    commands = re.findall(r"^  infssm (.*)$", capfd.readouterr().out, re.MULTILINE)
    assert len(commands) == 4
    for command in commands[:2]:
        assert invoke(shlex.split(command)) == 0
    assert "plus.png: plus" in capfd.readouterr().out
    _invite(results)
    assert invoke(["predict", "runs/digits-5/learner", "runs/digits-5/plus.png"]) == 0
    assert "plus.png: plus" in capfd.readouterr().out


def test_without_a_frozen_backbone_nothing_is_printed(tmp_path, capfd):
    _invite([run(tiny_config(tmp_path, "seq", benchmark="digits-5"), quiet=True)])
    assert "infssm learn" not in capfd.readouterr().out
