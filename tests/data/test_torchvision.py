"""The guarded import of torchvision and timm."""

import subprocess
import sys
import types

import pytest
import torch

from infssm import _torchvision as guarded
from infssm.errors import ConfigError


def test_both_packages_import_and_transform():
    assert guarded.torchvision("transforms").CenterCrop(2)(torch.zeros(1, 4, 4)).shape == (1, 2, 2)
    assert guarded.timm("data").create_transform is not None
    assert guarded.timm() is sys.modules["timm"]


def test_others_import_torchvision_after_mending():
    """In a process of its own, where nothing has imported it yet."""
    code = (
        "from infssm.integrations import mend_torchvision; first = mend_torchvision()\n"
        "import torchvision, timm\n"
        "from transformers import MambaForCausalLM\n"
        "assert mend_torchvision() == first"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_mending_what_is_not_there(monkeypatch):
    monkeypatch.setattr(guarded, "find_spec", lambda _: None)
    monkeypatch.setattr(guarded, "_declared", set())
    assert not guarded.mend()


@pytest.mark.parametrize(("call", "package"), [("torchvision", "torchvision"), ("timm", "timm")])
def test_absence_names_the_extra(monkeypatch, call, package):
    real = guarded.importlib.import_module

    def absent(name):
        if name.split(".")[0] == package:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)
        return real(name)

    monkeypatch.setattr(guarded.importlib, "import_module", absent)
    with pytest.raises(ConfigError, match=r"pip install 'infssm\[bench\]'"):
        getattr(guarded, call)("")


def test_missing_operators_are_declared_one_after_the_other(monkeypatch):
    """Stands in for the mix of wheels: each attempt stops at an operator that nobody has defined."""
    wanted = ["infssm_probe_a", "infssm_probe_b"]
    result = types.ModuleType("torchvision")
    seen = []

    def stopping(name):
        seen.append("torchvision.half" in sys.modules)
        for operator in wanted:
            if not hasattr(torch.ops.torchvision, operator):
                monkeypatch.setitem(sys.modules, "torchvision.half", result)
                raise RuntimeError(f"operator torchvision::{operator} does not exist")
        return result

    for module in [m for m in sys.modules if m.split(".")[0] == "torchvision"]:
        monkeypatch.setitem(sys.modules, module, sys.modules[module])
    monkeypatch.setattr(guarded.importlib, "import_module", stopping)
    assert guarded.torchvision() is result
    assert seen == [False, False, False]
    with pytest.raises(NotImplementedError):
        torch.ops.torchvision.infssm_probe_a(torch.zeros(1, 4), torch.zeros(1), 0.5)


@pytest.mark.parametrize("message", ["something else broke", "operator torchvision::nms does not exist"])
def test_what_cannot_be_mended_is_raised(monkeypatch, message):
    def broken(name):
        raise RuntimeError(message)

    for module in [m for m in sys.modules if m.split(".")[0] == "torchvision"]:  # dropped, and put back after the test
        monkeypatch.setitem(sys.modules, module, sys.modules[module])
    monkeypatch.setattr(guarded, "_declared", set())
    monkeypatch.setattr(guarded.torch.library, "define", lambda *_: None)
    monkeypatch.setattr(guarded.importlib, "import_module", broken)
    with pytest.raises(RuntimeError, match=message):
        guarded.torchvision()


def test_a_broken_dependency_is_not_called_absent(monkeypatch):
    def broken(name):
        raise ModuleNotFoundError("No module named 'zzz'", name="zzz")

    monkeypatch.setattr(guarded.importlib, "import_module", broken)
    with pytest.raises(ModuleNotFoundError, match="zzz"):
        guarded.torchvision()
