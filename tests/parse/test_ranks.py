"""Which files form a job, whose they are, and which capture they belong to."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path
from typing import Any

import pytest

from scaletrace.errors import InputError, UsageError
from scaletrace.parse.health import Health
from scaletrace.parse.peek import sniff
from scaletrace.parse.ranks import choose, discover, ranks_from_names


def write(path: Path, rank: int | None = None, world: int = 2, ts: int = 0, **extra: Any) -> Path:
    """A minimal Kineto file."""
    header: dict[str, Any] = {"schemaVersion": 1, "baseTimeNanoseconds": 10**18, **extra}
    if rank is not None:
        header["distributedInfo"] = {"backend": "nccl", "rank": rank, "world_size": world}
    op = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": ts, "dur": 1}
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**header, "traceEvents": [op]}).encode()
    if path.suffix == ".zst":
        import zstandard

        path.write_bytes(zstandard.ZstdCompressor().compress(text))
    else:
        path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def names(*stems: str) -> list[Path]:
    """Paths with these names."""
    return [Path(stem) for stem in stems]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (("rank0_trace.json.gz", "rank1_trace.json.gz"), [0, 1]),
        (("rank-3.json.gz", "rank-12.json.gz"), [3, 12]),
        (("rank00000_of00002.json.zst", "rank00001_of00002.json.zst"), [0, 1]),
        (("r7-2024-1-1.1708722576381804.pt.trace.json.gz", "r8-2024-1-1.1708722576381805.pt.trace.json.gz"), [7, 8]),
        (("profile_0.json", "profile_1.json"), [0, 1]),
        (("nccl_trace_rank_container-node02_5.json", "nccl_trace_rank_container-node07_40.json"), [5, 40]),
        (("Base - 12-11 - 220ff-rank6-chrome.json", "Base - 12-11 - 6bd4b-rank1-chrome.json"), [6, 1]),
        (("fit-[Strategy]DDP.rank0.json", "fit-[Strategy]DDP.rank1.json"), [0, 1]),
        (("libkineto_trace_nodeA_7605.json", "libkineto_trace_nodeA_7606.json"), [None, None]),
        (("node01_30.1743406976912802812.pt.trace.json", "node01_31.1743406976916608951.pt.trace.json"), [None, None]),
        (("worker.json",), [None]),
    ],
)
def test_ranks_from_names(files: tuple[str, ...], expected: list[int | None]) -> None:
    """A labelled number wins, then the only one that differs everywhere; host and process id are no rank."""
    assert expected == ranks_from_names(names(*files))[0]


def test_two_numbers_that_qualify_are_a_question() -> None:
    """The caller is asked for --rank-regex and sees the candidates."""
    with pytest.raises(UsageError, match=r"\[1, 2\] or \[3, 4\].*--rank-regex"):
        ranks_from_names(names("job_3_1.json", "job_4_2.json"))


def test_content_beats_names(tmp_path: Path) -> None:
    """A header that states the rank wins over another number in the name."""
    write(tmp_path / "rank1.json", rank=0)
    write(tmp_path / "rank0.json", rank=1)
    capture = choose(discover(tmp_path, Health()), None, Health())

    assert {"rank1.json": 0, "rank0.json": 1} == {file.path.name: file.rank for file in capture.files}


def test_names_beat_headers_that_all_say_the_same(tmp_path: Path) -> None:
    """Two headers that both state rank 0 can't be right; the names after "rank" are."""
    write(tmp_path / "rank0.json", rank=0)
    write(tmp_path / "rank1.json", rank=0)
    capture = choose(discover(tmp_path, Health()), None, Health())

    assert (0, 1) == capture.ranks
    assert {"file name (after “rank”), since several headers state the same rank"} == {
        f.rank_rule for f in capture.files
    }


def test_cycles_of_one_folder_stay_apart(tmp_path: Path) -> None:
    """Files of one rank that differ in a number which ranks share are captures by that number."""
    for cycle in (10, 20):
        for rank in (0, 1):
            write(tmp_path / f"step{cycle}_rank{rank}.json", rank=rank, ts=cycle)
    captures = discover(tmp_path, Health())

    assert {"#10": (0, 1), "#20": (0, 1)} == {name: capture.ranks for name, capture in captures.items()}


def test_an_attempt_that_lost_a_rank_is_not_mixed_with_the_next(tmp_path: Path) -> None:
    """Attempt 0 has one rank, attempt 1 both: the complete one is used and holds its own files only."""
    write(tmp_path / "rank0_a0.json", rank=0, ts=1)
    write(tmp_path / "rank0_a1.json", rank=0, ts=9)
    write(tmp_path / "rank1_a1.json", rank=1, ts=9)
    health = Health()
    best = choose(discover(tmp_path, health), None, health)

    assert ["rank0_a1.json", "rank1_a1.json"] == sorted(file.path.name for file in best.files)
    assert health.guessed["captures chosen among several"] == 1


def test_series_of_other_names_are_other_captures(tmp_path: Path) -> None:
    """Lightning writes one file a rank for training and one for validation; neither replaces the other."""
    for rank in (0, 1):
        write(tmp_path / f"fit-train.rank{rank}.json", rank=rank, ts=5)
        write(tmp_path / f"fit-val.rank{rank}.json", rank=rank, ts=1)
    captures = discover(tmp_path, Health())

    assert [(0, 1), (0, 1)] == [capture.ranks for capture in captures.values()]
    assert "fit-train.rank#" in choose(captures, None, Health()).name


def test_an_incomplete_newest_capture_gives_way_to_a_complete_one(tmp_path: Path) -> None:
    """The newest complete capture is the default, not the newest."""
    for rank in (0, 1):
        write(tmp_path / "iteration_10" / f"rank{rank}_trace.json.gz", rank=rank, ts=1)
    write(tmp_path / "iteration_20" / "rank0_trace.json.gz", rank=0, ts=2)

    assert "iteration_10" == choose(discover(tmp_path, Health()), None, Health()).name


def test_a_regex_overrides_everything_and_must_fit(tmp_path: Path) -> None:
    """--rank-regex decides, and says what is wrong with it."""
    write(tmp_path / "n3_w7.json", rank=0)
    write(tmp_path / "n4_w8.json", rank=0)
    capture = choose(discover(tmp_path, Health(), r"_w(\d+)"), None, Health())

    assert (7, 8) == capture.ranks
    for broken in ("(", r"\d+", r"x(\d+)", r"(x)?\d", "a{99999999999999999999}"):
        with pytest.raises(UsageError, match="--rank-regex"):
            discover(tmp_path, Health(), broken)


def test_globs_lists_and_compressed_files(tmp_path: Path) -> None:
    """A glob, a list of files and zstd or gzip files all give the same job."""
    files = [write(tmp_path / f"rank{r}.json{end}", rank=r) for r, end in enumerate(("", ".gz", ".zst"))]

    for source in (tmp_path, str(tmp_path / "rank*"), files):
        assert (0, 1, 2) == choose(discover(source, Health()), None, Health()).ranks
    with pytest.raises(InputError, match="no such file"):
        discover(tmp_path / "nothing", Health())


@pytest.mark.parametrize(
    ("name", "host"),
    [
        ("node01_30.1743406976912802812.pt.trace.json", "node01"),
        ("libkineto_activities_gpu-a_7605.json", "gpu-a"),
        ("worker0_step_12.1694128201545.pt.trace.json", ""),
        ("job_rank_3.1694128201545.pt.trace.json", ""),
        ("trace_7.json", ""),
    ],
)
def test_hosts_are_read_from_names_of_host_and_process(tmp_path: Path, name: str, host: str) -> None:
    """A number that counts steps or ranks is no process, so what stands before it is no host."""
    assert host == sniff(write(tmp_path / name, 0)).host


def test_a_file_beside_its_own_packing_counts_once(tmp_path: Path) -> None:
    """After `gzip -k` the plain file is read and the copy counted; a packed file of other content is a capture apart."""
    for rank in range(2):
        write(tmp_path / f"rank{rank}.json", rank)
        write(tmp_path / f"rank{rank}.json.gz", rank)
    health = Health()
    (capture,) = discover(tmp_path, health).values()

    assert ["rank0.json", "rank1.json"] == [file.path.name for file in capture.files]
    assert health.dropped["files that lie here in another packing too"] == 2

    for rank in range(2):
        write(tmp_path / f"rank{rank}.json.gz", rank, ts=5)
    assert len(discover(tmp_path, Health())) == 2


def test_strict_refuses_an_empty_file(tmp_path: Path) -> None:
    """A rank whose file has no bytes is skipped and counted, and an error where nothing may be lost."""
    write(tmp_path / "rank0.json", 0)
    (tmp_path / "rank1.json").touch()

    assert len(discover(tmp_path, Health())) == 1
    with pytest.raises(InputError, match=r"rank1\.json: the file is empty"):
        discover(tmp_path, Health(), strict=True)


def test_only_head_and_tail_are_read(tmp_path: Path) -> None:
    """A file of a gigabyte is known from its two ends, in no time."""
    path = tmp_path / "big.json"
    with path.open("wb") as file:
        file.write(b'{"schemaVersion": 1, "traceEvents": [\n')
        file.seek(1 << 30)
        file.write(b'], "distributedInfo": {"backend": "nccl", "rank": 3, "world_size": 8}, "baseTimeNanoseconds": 5}')
    begin = time.process_time()
    found = sniff(path)

    assert (3, 8, "distributedInfo") == (found.rank, found.world_size, found.rank_rule)
    assert time.process_time() - begin < 2


def test_a_long_header_is_read_to_its_end(tmp_path: Path) -> None:
    """A world of 40,000 ranks has a header of more than one read."""
    groups = [{"pg_name": "0", "pg_desc": "default_pg", "pg_size": 40_000, "ranks": list(range(40_000))}]
    info = {"backend": "nccl", "rank": 39_999, "world_size": 40_000, "pg_config": groups}
    path = write(tmp_path / "x.json.gz", distributedInfo=info)

    assert 39_999 == sniff(path).rank


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ('{"schema": "1.1.1-chakra.0.0.4", "pid": 1, "nodes": []}', "execution trace"),
        ('{"version": "2.10", "pg_config": {}, "pg_status": {}, "entries": []}', "flight recorder"),
        ('[{"ph": "X", "name": "a", "ts": 0, "dur": 1}]', "kineto"),
        ("[1, 2]", "other"),
        ("", "other"),
        ("{}", "other"),
    ],
)
def test_files_are_told_apart_by_content(tmp_path: Path, text: str, kind: str) -> None:
    """Execution traces, dumps, legacy lists and other JSON."""
    path = tmp_path / "some.json"
    path.write_text(text)

    assert kind == sniff(path).kind
