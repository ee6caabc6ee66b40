"""The health report counts by kind and prints as a short table."""

from __future__ import annotations

from scaletrace.parse.health import Health


def test_adding_sums_counts_and_keeps_each_note_once() -> None:
    """Folding two reports adds their counts; a sentence both hold stands once."""
    one, two = Health(), Health()
    one.repaired["names"] += 2
    one.note("cut")
    two.repaired["names"] += 3
    two.dropped["events"] += 1
    two.note("cut")

    one.add(two)

    assert {"names": 5} == one.repaired
    assert {"events": 1} == one.dropped
    assert ["cut"] == one.notes


def test_a_report_prints_as_a_table_with_the_largest_count_first() -> None:
    """One line a reason, kinds in a fixed order, then the notes."""
    health = Health()
    health.dropped["b"] += 1
    health.dropped["a"] += 12000
    health.repaired["c"] += 3
    health.note("the file was cut")

    expected = "repaired           3  c\ndropped       12,000  a\ndropped            1  b\nnote: the file was cut"
    assert expected == health.to_text()


def test_a_clean_report_says_so() -> None:
    """No counts and no notes: clean, and the text says that there is nothing."""
    assert Health().clean
    assert "nothing to report" == Health().to_text()
