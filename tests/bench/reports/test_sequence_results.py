"""The page on sequences: which settings are put forward, and what its tables say."""

from benchmarks.sequences.manpages import plain_text
from benchmarks.sequences.page import chosen, recommended, rows_of, table


def stream(bits):
    """Mean, forgetting, newest, validation of two tasks; the better setting on validation is the worse one on test."""
    values = {
        "plain, a": ("plain", 2.0, 0.4, 2.0, [0.4, 1.0]),
        "plain, b": ("plain", 1.0, 0.2, 1.0, [0.56, 1.04]),
        "lwf, a": ("lwf", 1.0, 0.1, 1.0, [0.3, 1.005]),
        "lwf, b": ("lwf", 1.0, 0.1, 1.0, [0.1, 1.02]),
        "er": ("er", 0.5, 0.5, 0.5, [0.0, 1.0]),
    }
    return {
        "bits": bits,
        "arms": {
            label: {"family": family, "points": {seed: [*numbers, 1.0] for seed in ("0", "10")}}
            for label, (family, *numbers) in values.items()
        },
    }


def test_settings_are_chosen_on_validation_samples():
    assert chosen(rows_of(stream(False)), bits=False) == {"plain, b", "lwf, a", "er"}
    assert chosen(rows_of(stream(True)), bits=True) == {"plain, a", "lwf, b", "er"}, "of bits, fewer are better"


def test_what_is_recommended_for_language_forgets_least_at_one_percent():
    """lwf, b forgets less and costs 2 % on the newest domain; er keeps old text."""
    assert recommended(rows_of(stream(True))).label == "lwf, a"


def test_tables_compare_language_with_plain_training():
    lines = table(rows_of(stream(True)), bits=True)
    assert lines[2] == "| **plain, a** | 2.000 ± 0.000 | 0.400 ± 0.000 | 2.000 ± 0.000 | 100 % | +0.0 % | 2 |"
    assert lines[3] == "| plain, b | 1.000 ± 0.000 | 0.200 ± 0.000 | 1.000 ± 0.000 | 50 % | -50.0 % | 2 |"
    assert table(rows_of(stream(False)), bits=False)[6] == "| **er** | 50.0 ± 0.0 | 50.0 ± 0.0 | 50.0 ± 0.0 | 2 |"


def test_manual_pages_lose_the_type_setter():
    page = '.TH ls 1\n.\\" a comment\nlist \\fBfiles\\fP and \\-a\n.B bold\n\'\\" t\nit\\(aqs \\f(CWcode\\fR\n'
    assert plain_text(page) == "list files and -a\nit's code"
