"""The names of the public surface are promises: each must load from its package."""

import subprocess
import sys

import pytest

import infssm


@pytest.mark.parametrize("name", infssm.__all__)
def test_public_name_loads_and_is_documented(name):
    assert getattr(infssm, name).__doc__


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        infssm.nothing  # noqa: B018


def test_import_does_no_work():
    code = "import sys, infssm; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_packages_load_neither_torchs_compiler_nor_optional_packages():
    """Torch's compiler takes as long to import as torch itself; only recording and optimizers need it."""
    code = (
        "import sys, infssm.cli, infssm.learner, infssm.bench.studies, infssm.integrations\n"
        "slow = 'torch._dynamo lightning_fabric sklearn matplotlib timm torchvision transformers wandb'.split()\n"
        "sys.exit(' '.join(name for name in slow if name in sys.modules) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("enabled", [True, False])
def test_loading_a_name_leaves_the_garbage_collector_as_it_was(enabled):
    change = "enable" if enabled else "disable"
    code = f"import gc, sys, infssm; gc.{change}(); infssm.attach; sys.exit(gc.isenabled() != {enabled})"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
