"""What nccl-tests and rccl-tests print, in every form of theirs, as evidence; what can't be used is counted."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest

from scaletrace.errors import InputError, UsageError
from scaletrace.extrapolate.calibrate import calibrate
from scaletrace.extrapolate.cluster import Cluster
from scaletrace.extrapolate.nccl_tests import read_nccl_tests

NEW = """# nccl-tests version 2.18.3 nccl-headers=23003 nccl-library=23003
# Collective test starting: all_reduce_perf
# nThread 1 nGpus 8 minBytes 8 maxBytes 8589934592 step: 2(factor) warmup iters: 1 iters: 20 validation: 1 graph: 0
#
# Using devices
"""
DEVICES = "".join(
    f"#  Rank {rank:2d} Group  0 Pid   2948 on node-a device {rank:2d} [0000:06:00] H100\n" for rank in range(8)
)
HEADER = """#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)             (us)  (GB/s)  (GB/s)
"""
ROWS = """           8             2     float     sum      -1    36.50    0.00    0.00       0    36.16    0.00    0.00       0
     8388608       2097152     float     sum      -1   112.30   74.70  130.72       0   111.90   74.97  131.19       0
  8589934592    2147483648     float     sum      -1   499500   17.20   30.10       0   490000   17.53   30.68       0
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 6.72901
#
# Collective test concluded: all_reduce_perf
"""
EXPECTED = [("all_reduce", 8, 36.5), ("all_reduce", 8388608, 112.3), ("all_reduce", 8589934592, 499500.0)]


def _read(text: str, ranks: int = 8, name: str = "out.txt") -> list[tuple[str, int, float]]:
    found, _ = read_nccl_tests(text, ranks, name)
    assert {ranks} == {piece.ranks for piece in found}
    return [(piece.kind, int(piece.size_bytes), round(piece.seconds * 1e6, 3)) for piece in found]


def _dropped(text: str, ranks: int = 8, name: str = "out.txt") -> Mapping[str, int]:
    return read_nccl_tests(text, ranks, name)[1].dropped


def test_a_table_of_today_gives_the_time_out_of_place() -> None:
    """Also where a time of half a second is printed without a decimal point."""
    assert EXPECTED == _read(NEW + DEVICES + HEADER + ROWS)


@pytest.mark.parametrize("prefix", ["[1,0]<stdout>:", "0: ", "nccl-worker-0 | ", "2024-05-01T10:00:00Z ", "\x1b[32m"])
def test_what_a_launcher_writes_before_a_line_is_no_matter(prefix: str) -> None:
    """mpirun --tag-output, srun -l, docker compose, kubectl --timestamps, colours."""
    text = "".join(f"{prefix}{line}\n" for line in (NEW + DEVICES + HEADER + ROWS).splitlines())

    assert EXPECTED == _read(text)


def test_warnings_between_the_rows_are_no_matter() -> None:
    """stderr in the same file: NCCL's own log, shell and MPI warnings."""
    noise = "node-a:14:14 [0] NCCL INFO Launch mode Parallel\n[node-a:12569] 15 more processes have sent help message\n"
    text = NEW + DEVICES + HEADER + noise.join(f"{line}\n" for line in ROWS.splitlines())

    assert EXPECTED == _read("bash: warning: setlocale: LC_ALL\n" + noise + text)


@pytest.mark.parametrize(
    ("head", "row", "expected"),
    [
        (
            "# all_reduce_perf\n#  size  count  type  redop  time  algbw  busbw  error  time  algbw  busbw  error\n",
            "1073741824  268435456  float  sum  79531  13.50  23.63  2e-06  79371  13.53  23.67  2e-06",
            ("all_reduce", 1073741824, 79531.0),
        ),
        (
            "all_gather_perf\n#  size  count  type  time  algbw  busbw  error  time  algbw  busbw  error\n",
            "1048576  262144  float  57.46  18.25  15.97  0e+00  57.40  18.27  15.98  0e+00",
            ("all_gather", 1048576, 57.46),
        ),
        (
            "srun -N1 broadcast_perf_mpi -b 1M\n",
            "1048576  262144  float  none  3  100.00  10.49  10.49  N/A  99.00  10.59  10.59  N/A",
            ("broadcast", 1048576, 100.0),
        ),
        (
            "# reduce_scatter_perf  in place only\n",
            "1048576  32768  float  sum  -1                                   50.00  20.97  18.35  N/A",
            ("reduce_scatter", 1048576, 50.0),
        ),
        (
            "# alltoall_perf, out of place only, a time stamp at the end\n",
            "1048576  32768  bfloat16  none  -1  50.00  20.97  18.35  0  N/A  N/A  N/A  N/A  2026-01-02 03:04:05",
            ("all_to_all", 1048576, 50.0),
        ),
        (
            "# sendrecv_perf --per-iteration\n",
            "1048576  262144  fp8_e4m3  none  -1" + 2 * "  50.00  20.97  20.97  0  49.1  51.2  51.0  1.2",
            ("send", 1048576, 50.0),
        ),
        (
            "# reduce_perf: ten seconds and more have two digits\n",
            "17179869184  4294967296  float  sum  0  1.7e+07  1.03  1.03  0  1.7e+07  1.03  1.03  0",
            ("reduce", 17179869184, 16679484.645),
        ),
    ],
)
def test_tables_of_every_version_are_read(head: str, row: str, expected: tuple[str, int, float]) -> None:
    """With and without root, operation, errors, halves, per-iteration columns and time stamps."""
    assert [expected] == _read(head + row)


def test_several_collectives_in_one_file_keep_their_names() -> None:
    """Each row belongs to the program named last above it."""
    row = "1048576  32768  float  sum  -1  50.00  20.97  {}  0\n"
    text = (
        f"reduce_scatter_perf\n{row.format(18.35)}all_reduce_perf\n{row.format(36.7)}reduce_perf\n{row.format(20.97)}"
    )

    assert ["reduce_scatter", "all_reduce", "reduce"] == [kind for kind, *_ in _read(text)]


def test_a_file_may_name_the_collective_or_its_bandwidths_may_tell() -> None:
    """An old table names no program: all_gather.txt does, and bus over algorithm bandwidth of a sum; else it is refused."""
    row = "1048576  32768  float  sum  50.00  20.97  36.70  0e+00\n"
    plain = "1048576  32768  float  50.00  20.97  18.35  0e+00\n"

    assert [("all_gather", 1048576, 50.0)] == _read(plain, name="runs/all_gather_h100.txt")
    assert [("all_reduce", 1048576, 50.0)] == _read(row)
    assert {"collectives of nccl-tests rows, from their bandwidths": 1} == read_nccl_tests(row, 8)[1].guessed
    with pytest.raises(InputError, match=r"^out\.txt: nothing to use: 1 .*not named; .*all_reduce\.txt$"):
        _read(plain)


REPORT = {
    "version": 2,
    "args": ["/opt/nccl-tests/build/all_gather_perf_mpi", "-b", "8"],
    "config": {"ngpus": 1, "devices": [{"rank": rank, "group": 0} for rank in range(8)]},
    "results": [
        {
            "size": 1048576, "count": 32768, "type": "float", "redop": "none", "root": "    -1",
            "out_of_place": {"time": 50.0, "alg_bw": 20.97, "bus_bw": 18.35, "nwrong": 0.0},
            "in_place": {"time": 49.0, "alg_bw": 21.4, "bus_bw": 18.72, "nwrong": 0.0},
        },
        {
            "size": 2097152, "count": 65536, "type": "float", "redop": "none", "root": "    -1", "out_of_place": None,
            "in_place": {"time": 80.0, "alg_bw": 26.21, "bus_bw": 22.94, "nwrong": None},
        },
    ],
}  # fmt: skip


@pytest.mark.parametrize("text", [json.dumps(REPORT), json.dumps([REPORT]), json.dumps(REPORT, indent=1) + "\n\n"])
def test_json_reports_are_read(text: str) -> None:
    """nccl-tests --json, out of place or in place where that alone is there."""
    assert [("all_gather", 1048576, 50.0), ("all_gather", 2097152, 80.0)] == _read(text)


def test_reports_one_after_the_other_are_read() -> None:
    """JSON lines, or files put together."""
    assert 4 == len(_read(json.dumps(REPORT) + "\n" + json.dumps(REPORT)))


CSV = """numCycle,collective,ranks,rankspernode,gpusperrank,size,type,redop,inplace,time,algbw,busbw,#wrong
0,AllReduce,1,8,8,1,1048576,float,sum,0,50.0,20.97,36.7,0
0,AllReduce,1,8,8,1,1048576,float,sum,1,49.0,21.4,37.45,0
"""
FLAT = """[
{"numCycle":0, "name":"AllReduce", "nodes":1, "ranks":8, "size":1048576, "type":"float", "redop":"sum", "inPlace":0,
 "time":50.0, "algBw":20.97, "busBw":36.7, "wrong":N/A}
]"""
MINE = "size_bytes,time_us\n1048576,50\n\n2097152,80\n"


@pytest.mark.parametrize(
    ("text", "name", "count"),
    [(CSV, "out", 1), (CSV.replace(",1,8,8,1,", ",8,8,1,"), "out", 1), (FLAT, "out", 1), (MINE, "all_reduce.csv", 2)],
)
def test_comma_separated_and_flat_forms_are_read(text: str, name: str, count: int) -> None:
    """rccl-tests -Z csv with its unnamed column of nodes, its JSON with a bare N/A, and a table of one's own."""
    found = _read(text, name=name)

    assert [("all_reduce", 1048576, 50.0), ("all_reduce", 2097152, 80.0)][:count] == found


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("1048576  32768  float  sum  -1  N/A  N/A  N/A  N/A", "without a readable time"),
        ("1048576  32768  float  sum  -1  nan  0.00  0.00  0", "without a readable time"),
        ("1048576  32768  float  sum  -1  50.00  20.97  36.70  12", "with wrong results"),
        (
            "1048576  32768  float  sum  -1  50.00  20.97  39.32  0",
            "whose bus bandwidth isn't that of all_reduce over 8 ranks",
        ),
    ],
)
def test_rows_that_say_nothing_are_counted_and_named(row: str, reason: str) -> None:
    """One good row is kept, and what is wrong with the other is in the answer."""
    good = "2097152  65536  float  sum  -1  80.00  26.21  45.87  0"
    text = f"# all_reduce_perf\n{row}\n{good}\n"

    assert [("all_reduce", 2097152, 80.0)] == _read(text)
    assert {f"rows of nccl-tests output {reason}": 1} == _dropped(text)


def test_other_programs_cpu_time_and_rows_of_no_bytes_are_left_out() -> None:
    """A gather has no cost model of its own, CPU time is not the transfer's, and 0 bytes say nothing."""
    row = "1048576  32768  float  sum  -1  50.00  20.97  {}  0\n"
    text = (
        f"# scatter_perf\n{row.format(18.35)}# all_reduce_perf\n{row.format(36.7)}"
        f"0 0 float sum -1 5.00 0.00 0.00 0\n#  size  count  cputime  algbw\n{row.format(36.7)}"
    )

    assert [("all_reduce", 1048576, 50.0)] == _read(text)
    assert {
        "rows of nccl-tests output of scatter, which has no cost model of its own": 1,
        "rows of nccl-tests output with CPU time (-C), not the time of the transfer": 1,
    } == _dropped(text)


def test_a_run_over_other_ranks_than_said_is_refused() -> None:
    """The list of devices, or else bus over algorithm bandwidth, gives a wrong RANKS away."""
    with pytest.raises(InputError, match=r"^all\.txt: .*other ranks: 8, not 16; check that 16 is how many ranks ran"):
        _read(NEW + DEVICES + HEADER + ROWS, ranks=16, name="all.txt")
    with pytest.raises(InputError, match="bus bandwidth isn't that of all_reduce over 16 ranks"):
        _read("# all_reduce_perf\n8388608  2097152  float  sum  -1  112.30  74.70  130.72  0", ranks=16)
    with pytest.raises(UsageError, match="at least 2"):
        _read(NEW + ROWS, ranks=1)


def test_the_hosts_of_a_run_say_how_many_ranks_a_node_holds() -> None:
    """Four of eight GPUs on each of two nodes own half of the NICs, 192 GB/s; in NVL72 two hosts share one domain."""
    devices = "".join(
        f"#  Rank {rank:2d} Group  0 Pid   2948 on node-{rank // 4} device {rank % 4:2d} [0000:06:00] H100\n"
        for rank in range(8)
    )
    size, seconds = 1 << 33, (1 << 33) * 7 / 8 / 192e9
    row = f"{size}  1  float  none  -1  {seconds * 1e6:.0f}  {size / seconds / 1e9:.2f}  192.00  0\n"
    (piece,), health = read_nccl_tests("# all_gather_perf\n" + devices + row, 8)

    assert (4, {}) == (piece.per_node, dict(health.dropped))
    hopper, rack = Cluster.load("dgx_h100"), Cluster.load("gb200_nvl72")
    assert 1.0 == pytest.approx(calibrate([piece], hopper).fits["gather", "", True].wire, rel=0.05)
    assert 684 / 192 == pytest.approx(calibrate([piece], rack).fits["gather", "", False].wire, rel=0.1)


def test_a_list_of_devices_that_was_cut_is_not_counted() -> None:
    """nccl-tests ends a list that outgrows its buffer with dots."""
    text = NEW + DEVICES + "#  Rank  8 Group  0 Pid   2948 on no...\n" + HEADER
    row = "1048576  262144  float  sum  -1  50.00  20.97  39.32  0\n"

    assert [("all_reduce", 1048576, 50.0)] == _read(text + row, ranks=16)


@pytest.mark.parametrize(
    "text",
    ["", "\n\n", "no table", "{}", "[]", "null", "[1, 2]", '{"results": [3]}', "size,time\n", "\x00\xff" * 99, "[[[["],
)
def test_other_files_are_refused_by_name(text: str) -> None:
    """One sentence with the file and what is looked for."""
    with pytest.raises(InputError, match=r"^out\.txt: no row of an nccl-tests table found"):
        _read(text)
