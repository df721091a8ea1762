"""The names of the public surface are promises: each must load from its room."""

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
