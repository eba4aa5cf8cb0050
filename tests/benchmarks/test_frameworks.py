from __future__ import annotations

from benchmarks.frameworks.page import PAGE, keras_table, table, with_table
from benchmarks.frameworks.subject import SUBJECTS, UNetSizes, data


def test_the_table_is_that_of_the_result_file() -> None:
    text = PAGE.read_text()
    assert with_table(text) == text
    assert text.count("<!-- frameworks: ") == text.count("<!-- keras: ") == 1


def test_a_row_says_what_was_measured() -> None:
    case = {"model": "U-Net", "framework": "jittor", "budget_bytes": 2**20, "losses": [1.0, 0.25], "step_seconds": 0.5}
    peaks = {"own_peak_bytes": 2**21, "process_peak_bytes": 2**22}
    result = {"cases": [case | peaks], "command": "it", "machine": {"description": "this"}, "date": "today"}
    row = "| U-Net | Jittor | planned for 1.0 MiB | 2.0 MiB | 4.0 MiB | 500.0 ms | 0.25000 |"
    assert row in table(result)


def test_a_way_in_keras_is_held_against_the_plain_step() -> None:
    plain = {
        **{"model": "U-Net", "way": "plain", "budget_bytes": 0, "predicted_peak_bytes": None, "step_seconds": 0.5},
        **{"own_peak_bytes": 2**22, "gradient_difference": 0.0, "statistics_difference": 0.0},
    }
    planned = plain | {"way": "planned", "budget_bytes": 2**21, "predicted_peak_bytes": 2**20, "own_peak_bytes": 2**20}
    other = planned | {"step_seconds": 1.0, "statistics_difference": 0.99}
    machine = {"description": "this"}
    summary = {"versions": {"keras": "3", "tensorflow": "2"}}
    result = {"cases": [plain, other], "command": "it", "machine": machine, "date": "today", "summary": summary}
    made = keras_table(result)
    cells = "planned for 2.0 MiB | 1.0 MiB | 1.0 MiB | ×0.25 | 1.00 s | ×2.00 | same bits | 1e+00 apart"
    assert f"| U-Net | {cells} |" in made


def test_subjects_have_data_of_their_shape() -> None:
    for subject in SUBJECTS.values():
        arrays = data(subject)
        assert arrays["x"].shape == subject.shape
        labels = (subject.shape[0], *subject.shape[2:]) if isinstance(subject.sizes, UNetSizes) else subject.shape
        assert arrays["y"].shape == labels
