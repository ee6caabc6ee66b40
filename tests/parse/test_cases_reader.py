"""The published faults of single files: each case gives the answer that expected.json names.

Cases about ranks, jobs, collectives over ranks and dependencies are pinned where those are built.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scaletrace.errors import CorruptTraceError, NotATraceError
from scaletrace.parse import intervals, kernels, links, survey
from scaletrace.parse.events import TIME_UNKNOWN, Events, IntArray
from scaletrace.parse.reader import TraceFile, read_file

US = 1000


@pytest.fixture(scope="module")
def cases(shared_data: Path) -> Path:
    """The folder of small inputs."""
    return shared_data / "cases"


@pytest.fixture(scope="module")
def answers(cases: Path) -> dict[str, Any]:
    """The right answers by case number."""
    loaded: dict[str, Any] = json.loads((cases / "expected.json").read_text())
    return loaded


def first(cases: Path, number: str, name: str = "rank0.json") -> TraceFile:
    """The trace of a case."""
    return read_file(cases / number / name)


def row(events: Events, name: str) -> int:
    """The row of the only event with this name."""
    (found,) = np.flatnonzero(events.named(name)).tolist()
    return int(found)


def names(events: Events, rows: IntArray) -> list[str | None]:
    """Names of rows, None for -1."""
    return [events.name_of(k) if k >= 0 else None for k in rows.tolist()]


def busy_us(events: Events, rows: IntArray) -> float:
    """Covered time of rows in microseconds."""
    return intervals.busy_ns(events.ts_ns[rows], events.end_ns[rows]) / US


def communication(events: Events) -> IntArray:
    """Rows of communication kernels."""
    rules = kernels.default_rules()
    return np.flatnonzero(np.isin(kernels.classes_of(events), rules.codes_of("communication")))


def test_01_unescaped_quotes(cases: Path, answers: dict[str, Any]) -> None:
    """All events are kept, the name is as meant, the repair is counted, strict names the byte."""
    trace = first(cases, "01")

    assert answers["01"]["events_kept"] == trace.records
    assert answers["01"]["name"] in [trace.events.name_of(k) for k in range(len(trace.events))]
    assert {"event names with unescaped quotes": 1} == trace.health.repaired
    with pytest.raises(CorruptTraceError, match="byte 1,689") as error:
        read_file(cases / "01" / "rank0.json", strict=True)
    assert 1689 == error.value.offset


def test_02_control_characters(cases: Path, answers: dict[str, Any]) -> None:
    """A raw tab inside a name is accepted and counted."""
    trace = first(cases, "02")

    assert answers["02"]["events_kept"] == trace.records
    assert 5 == len(trace.events)
    assert trace.events.named("A\tB").any()
    assert {"strings with raw control characters": 1} == trace.health.repaired


def test_04_broken_header_block(cases: Path, answers: dict[str, Any]) -> None:
    """Events load although a header key can't be read; the key is named."""
    trace = first(cases, "04")

    assert answers["04"]["events_kept"] == trace.records
    assert any("unreadable top-level key INFO ignored" in note for note in trace.health.notes)
    assert "t.json" == trace.header["traceName"]


def test_05_unquoted_value(cases: Path, answers: dict[str, Any]) -> None:
    """N/A is a missing value."""
    trace = first(cases, "05")
    (arguments,) = trace.arguments([row(trace.events, "aten::add")])

    assert answers["05"]["events_kept"] == trace.records
    assert answers["05"]["field"] == {key: arguments[key] for key in answers["05"]["field"]}


def test_06_invalid_utf8(cases: Path, answers: dict[str, Any]) -> None:
    """Bytes that are no UTF-8 are replaced and counted."""
    trace = first(cases, "06")

    assert answers["06"]["events_kept"] == trace.records
    assert any("\ufffd" in trace.events.name_of(k) for k in range(len(trace.events)))
    assert {"texts that are not UTF-8": 1} == trace.health.repaired


def test_08_two_writers(cases: Path, answers: dict[str, Any]) -> None:
    """An interleaving is an error, never partial numbers."""
    with pytest.raises(CorruptTraceError, match=answers["08"]["error"]):
        first(cases, "08", "trace.json")


def test_09_truncated_files(cases: Path) -> None:
    """The readable prefix is kept and the file flagged, plain or gzip."""
    plain, packed = first(cases, "09"), first(cases, "09", "rank1.json.gz")

    assert [True, True] == [plain.truncated, packed.truncated]
    assert ["ProfilerStep#1", "aten::mm", "cudaLaunchKernel"] == [plain.events.name_of(k) for k in range(3)]
    assert (3, 4) == (len(plain.events), len(packed.events))
    assert any("gzip data ends early" in note for note in packed.health.notes)


def test_10_list_at_the_root(cases: Path, answers: dict[str, Any]) -> None:
    """The legacy profiler's form loads and is marked as not alignable."""
    trace = first(cases, "10", "legacy.json")

    assert answers["10"]["events_kept"] == len(trace.events)
    assert trace.legacy
    assert any("not alignable across ranks" in note for note in trace.health.notes)
    assert {"CPU functions"} == {lane.pid for lane in trace.events.lanes}


def test_11_execution_trace(cases: Path) -> None:
    """It is recognised by name; the trace beside it loads."""
    with pytest.raises(NotATraceError, match="execution trace"):
        first(cases, "11", "et.json")
    assert len(first(cases, "11").events)


def test_13_raw_newline_in_metadata(cases: Path, answers: dict[str, Any]) -> None:
    """Metadata with a raw newline is read."""
    trace = first(cases, "13")

    assert answers["13"]["events_kept"] == trace.records
    assert "a\nb" == trace.header["note"]
    assert {"header texts with raw control characters": 1} == trace.health.repaired


def test_16_other_files_are_named(cases: Path, answers: dict[str, Any]) -> None:
    """Of the files in the folder one loads and the others are refused with a reason."""
    loaded, refused = [], []
    for path in sorted((cases / "16").rglob("*.json")):
        try:
            read_file(path)
            loaded.append(str(path.relative_to(cases / "16")))
        except NotATraceError as error:
            refused.append(str(error))

    assert answers["16"]["loaded"] == loaded
    assert answers["16"]["skipped"] == len(refused)


def test_21_time_unknown(cases: Path, answers: dict[str, Any]) -> None:
    """A record at 0 is counted and in no span."""
    trace = first(cases, "21")
    events, work = trace.events, links.gpu_rows(trace.events)
    known = events.ts_ns != TIME_UNKNOWN

    assert answers["21"]["kernels_used"] == len(work)
    assert answers["21"]["kernels_bad_time"] == trace.health.dropped["records without a usable time"]
    span = [int(events.ts_ns[known].min()) // US, int(events.end_ns[known].max()) // US]
    assert answers["21"]["span_us"] == span


def test_23_no_gpu_records(cases: Path) -> None:
    """Launches without any record: GPU figures are absent, and the report says so."""
    trace = first(cases, "23")

    assert 0 == len(links.gpu_rows(trace.events))
    assert any("host launches present, no GPU records" in note for note in trace.health.notes)


def test_24_durations(cases: Path, answers: dict[str, Any]) -> None:
    """Negative is 0, endless is clipped to the last plausible end, both flagged."""
    trace = first(cases, "24")
    durations = (trace.events.dur_ns // US).tolist()

    assert [answers["24"]["dur"][0], 15, answers["24"]["dur"][2]] == durations
    assert 2 == sum(trace.health.clipped.values())


def test_25_rounding(cases: Path, answers: dict[str, Any]) -> None:
    """One microsecond of overhang is rounding; self times add up."""
    events = first(cases, "25").events
    parents = links.parent_of(events)
    own = links.self_ns(events, parents)

    tree = {parent: [child] for child, parent in zip(["parent", "child"], names(events, parents)[1:], strict=True)}
    assert answers["25"]["tree"] == tree
    assert answers["25"]["self_us"] == {events.name_of(k): int(own[k]) // US for k in range(3)}


def test_27_bases_of_two_quarters(cases: Path, answers: dict[str, Any]) -> None:
    """Absolute time is base + ts, wherever and whatever the base."""
    starts = [int(first(cases, "27", f"rank{k}.json").events.ts_ns[0]) for k in range(2)]

    assert [answers["27"]["first_event_ns"]] * 2 == starts


def test_30_clock_inversion(cases: Path, answers: dict[str, Any]) -> None:
    """The call ends after its op, but its External id names the op."""
    events = first(cases, "30").events
    launch, parent = row(events, "hipLaunchKernel"), row(events, "aten::mm")

    assert answers["30"]["parent_of_launch"] == names(events, links.op_of(events))[launch]
    assert answers["30"]["overhang_us"] == (events.end_ns[launch] - events.end_ns[parent]) / US


def test_32_overlap_on_a_stream(cases: Path, answers: dict[str, Any]) -> None:
    """Both kernels count; the overlap counts once as busy."""
    trace = first(cases, "32")
    work = links.gpu_rows(trace.events)
    overlap = intervals.overlap_ns(trace.events.ts_ns[work], trace.events.end_ns[work])

    found = {"kernels": len(work), "busy_us": busy_us(trace.events, work), "overlap_us": overlap / US}
    assert {key: answers["32"][key] for key in found} == found
    assert 1 == trace.health.unmatched[survey.OVERLAPS]


def test_33_stream_sync_row(cases: Path, answers: dict[str, Any]) -> None:
    """The row a million tids on is about stream 7 and is no work."""
    events = first(cases, "33").events
    work = links.gpu_rows(events)

    assert answers["33"]["streams"] == sorted(set(events.stream[work].tolist()))
    assert answers["33"]["sync_row_maps_to_stream"] == links.stream_of_sync(events)[row(events, "Stream Sync")]
    assert answers["33"]["gpu_busy_us"] == busy_us(events, work)
    assert answers["33"]["cpu_wait_us"] == events.dur_ns[row(events, "cudaStreamSynchronize")] / US


def test_34_crossing_annotations(cases: Path, answers: dict[str, Any]) -> None:
    """Two spans that cross are nobody's parent."""
    events = first(cases, "34").events

    assert answers["34"]["partial_overlap_pairs"] == len(links.crossings(events))
    assert [None, None] == names(events, links.parent_of(events))


def test_36_asynchronous_spans(cases: Path, answers: dict[str, Any]) -> None:
    """gloo spans on the caller's thread are siblings."""
    events = first(cases, "36").events

    assert answers["36"]["async_ops"] == len(events)
    assert [None, None] == names(events, links.parent_of(events))


@pytest.mark.parametrize(("number", "kernel"), [("37", "gemm"), ("39", "triton_poi_fused_add_0")])
def test_37_39_launching_op(cases: Path, answers: dict[str, Any], number: str, kernel: str) -> None:
    """Correlation leads to the call, containment to the op; External ids and the API do not matter."""
    events = first(cases, number).events
    work = links.gpu_rows(events)

    assert [kernel] == names(events, work)
    assert [answers[number]["launcher"]] == names(events, links.op_of(events)[work])


def test_39_launch_delay(cases: Path, answers: dict[str, Any]) -> None:
    """From the end of the driver call to the start of the kernel."""
    events = first(cases, "39").events
    work = links.gpu_rows(events)
    delay = events.ts_ns[work] - events.end_ns[links.launch_of(events)[work]]

    assert [answers["39"]["launch_delay_us"]] == (delay // US).tolist()


def test_40_graph_launch(cases: Path, answers: dict[str, Any]) -> None:
    """One launch has all kernels of its graph."""
    events = first(cases, "40").events
    launch = links.launch_of(events)[links.gpu_rows(events)]

    assert 1 == len(set(launch.tolist()))
    assert answers["40"]["kernels_of_launch"] == len(launch)


def test_41_shared_correlation(cases: Path, answers: dict[str, Any]) -> None:
    """ROCm gave two kernels one correlation; the report says that streams can't be trusted."""
    trace = first(cases, "41")
    work = links.gpu_rows(trace.events)
    overlap = intervals.overlap_ns(trace.events.ts_ns[work], trace.events.end_ns[work])

    assert answers["41"]["overlap_same_stream_us"] == overlap // US
    assert any("stream attribution is unreliable" in note for note in trace.health.notes)


def test_43_kernels_belong_to_the_step_of_their_launch(cases: Path, answers: dict[str, Any]) -> None:
    """The annotation on the GPU is too short; the launch decides."""
    events = first(cases, "43").events
    step = np.flatnonzero(events.named("ProfilerStep#1") & events.in_cats("user_annotation"))[0]
    work = links.gpu_rows(events)
    launched = events.ts_ns[links.launch_of(events)[work]]
    inside = work[(launched >= events.ts_ns[step]) & (launched < events.end_ns[step])]

    base = int(events.ts_ns[step])
    span = [(int(events.ts_ns[inside].min()) - base) // US, (int(events.end_ns[inside].max()) - base) // US]
    assert answers["43"]["step1_gpu_span"] == span


def test_44_kernels_without_a_stream(cases: Path, answers: dict[str, Any]) -> None:
    """XPU: the lane is the queue."""
    events = first(cases, "44").events
    (kernel,) = links.gpu_rows(events).tolist()
    lane = events.lanes[events.lane[kernel]]

    assert answers["44"]["queue"] == [f"pid {lane.pid}", f"tid {lane.tid}"]
    assert answers["44"]["gpu_busy_us"] == busy_us(events, np.array([kernel]))
    assert -1 == events.stream[kernel]


def test_54_renamed_nccl_kernels(cases: Path, answers: dict[str, Any]) -> None:
    """Any case and prefix is communication; overlap is measured on unions."""
    events = first(cases, "54").events
    comm = communication(events)
    compute = np.setdiff1d(links.gpu_rows(events), comm)
    spans = [intervals.union(events.ts_ns[rows], events.end_ns[rows]) for rows in (comm, compute)]
    overlap = intervals.length_ns(intervals.intersection(*spans))

    found = {
        "comm_us": busy_us(events, comm),
        "compute_us": busy_us(events, compute),
        "overlap_us": overlap / US,
        "overlap_pct_of_comm": 100 * overlap / US / busy_us(events, comm),
    }
    assert answers["54"] == found


def test_63_no_communication(cases: Path, answers: dict[str, Any]) -> None:
    """Zero, without an exception; a share of it does not exist."""
    events = first(cases, "63").events

    assert answers["63"]["comm_us"] == busy_us(events, communication(events))


def test_65_annotations_are_not_kernels(cases: Path, answers: dict[str, Any]) -> None:
    """Only the kernel counts, neither its host annotation nor its GPU annotation."""
    events = first(cases, "65").events

    assert answers["65"]["comm_us"] == busy_us(events, communication(events))


@pytest.mark.parametrize("name", ["record_param_comms", "ncclDevKernel_AllReduce"])
def test_58_both_records_are_there_to_join(cases: Path, name: str) -> None:
    """Kernel and host record share their External id; the host record has the group."""
    events = first(cases, "58").events
    at = row(events, name)

    assert 1 == events.external_id[at]
    assert ("0" if name.startswith("record") else None) == events.text("Process Group Name", at)


def test_every_case_file_reads_or_is_refused_by_our_own_error(cases: Path) -> None:
    """All inputs, those of other chapters too; strict or not."""
    refused = set()
    for path in sorted(cases.rglob("*.json*")):
        if path.name == "expected.json":
            continue
        try:
            read_file(path)
        except NotATraceError:
            refused.add(str(path.relative_to(cases)))
        except CorruptTraceError:
            refused.add(str(path.relative_to(cases)))

    assert {"08/trace.json", "11/et.json", "16/a/fr_rank0.json", "16/a/notes.json", "16/a/pytorch_et_0.json"} == refused
