"""A few cases of every fuzzer; ``make fuzz`` runs thousands."""

import importlib

import pytest

from tests.fuzz.__main__ import NAMES


@pytest.mark.parametrize("name", NAMES)
def test_damaged_files_end_in_one_line_errors(name):
    importlib.import_module(f"tests.fuzz.{name}").run(40, seed=1)
