from __future__ import annotations

from benchmarks.frameworks.page import PAGE, table, with_table
from benchmarks.frameworks.subject import SUBJECTS, UNetSizes, data


def test_the_table_is_that_of_the_result_file() -> None:
    text = PAGE.read_text()
    assert with_table(text) == text
    assert text.count("<!-- frameworks: ") == 1


def test_a_row_says_what_was_measured() -> None:
    case = {"model": "U-Net", "framework": "jittor", "budget_bytes": 2**20, "losses": [1.0, 0.25], "step_seconds": 0.5}
    peaks = {"own_peak_bytes": 2**21, "process_peak_bytes": 2**22}
    result = {"cases": [case | peaks], "command": "it", "machine": {"description": "this"}, "date": "today"}
    row = "| U-Net | Jittor | planned for 1.0 MiB | 2.0 MiB | 4.0 MiB | 500.0 ms | 0.25000 |"
    assert row in table(result)


def test_subjects_have_data_of_their_shape() -> None:
    for subject in SUBJECTS.values():
        arrays = data(subject)
        assert arrays["x"].shape == subject.shape
        labels = (subject.shape[0], *subject.shape[2:]) if isinstance(subject.sizes, UNetSizes) else subject.shape
        assert arrays["y"].shape == labels
