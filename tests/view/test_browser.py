"""A real Chromium on a real Perfetto UI and on the report: what a reader sees.

Screenshots go to out/screenshots, where CI picks them up.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from scaletrace.errors import MissingExtraError
from scaletrace.parse.build import build
from scaletrace.parse.load import load
from scaletrace.replay.critical_path import critical_path
from scaletrace.replay.engine import replay
from scaletrace.view.perfetto import WriteReport, write_timeline
from scaletrace.view.report import write_report
from scaletrace.view.serve import TraceServer
from scaletrace.view.webui import web_folder
from tests.view.answers import HOSTILE, curve_answer, replay_answer
from tests.view.chromium import BINARY, Page, chromium

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BINARY is None, reason="no chromium on PATH (apt-get install chromium)"),
]

ROOT = Path(__file__).resolve().parents[2]
SHOTS = ROOT / "out" / "screenshots"
SAMPLES = sorted(p.name for p in (ROOT / "traces" / "samples").iterdir() if p.is_dir())


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with chromium() as browser:
        yield browser


@contextmanager
def served(trace: Path) -> Iterator[TraceServer]:
    try:
        web_folder()
    except MissingExtraError as error:
        pytest.skip(str(error))
    server = TraceServer(trace)
    stop = threading.Event()
    thread = threading.Thread(target=server.serve, args=(stop.is_set,))
    thread.start()
    try:
        yield server
    finally:
        stop.set()
        thread.join()
        server.close()


def drawn(capture: Path, target: Path) -> WriteReport:
    built = build(load(capture))
    timeline = replay(built.graph)
    return write_timeline(target, timeline, measured=built.measured, critical_path=critical_path(timeline))


def ask(page: Page, sql: str) -> int:
    """The number that the page's own trace processor answers."""
    return int(page.evaluate(f"app.trace.engine.query({sql!r}).then(r => Number(r.firstRow({{n: 0}}).n))"))


@pytest.mark.parametrize("sample", SAMPLES)
def test_every_sample_opens_in_the_perfetto_ui(page: Page, tmp_path: Path, sample: str) -> None:
    """No import error, the critical path is pinned, and the page counts what we wrote; a screenshot is kept."""
    report = drawn(ROOT / "traces" / "samples" / sample, tmp_path / f"{sample}.pftrace")
    with served(report.path) as server:
        page.size(1600, 1000)
        page.open(server.url)
        page.wait_for("!!globalThis.app?.trace && app.trace.workspace.pinnedTracks.length >= 3")
        page.wait_for("document.body.innerText.includes('Query result')")
        names = page.evaluate("app.trace.workspace.pinnedTracks.map(t => t.name)")
        roots = page.evaluate("app.trace.workspace.children.map(t => t.name).filter(n => n.startsWith('rank'))")
        counts = [ask(page, f"select count(*) as n from {what}") for what in ("slice", "flow", "process where pid > 0")]
        page.screenshot(SHOTS / f"perfetto-{sample}.png")

        assert page.evaluate("app.trace.traceInfo.importErrors") == 0
        assert names[:2] == ["Critical path", "What it is"]
        assert roots == [f"rank {rank:02d}" for rank in range(report.processes)]
        assert counts == [report.slices, report.flows, report.processes]
        assert page.evaluate("document.querySelectorAll('.pf-query-table, .query-table, table').length") > 0


def test_a_selected_path_piece_shows_its_arrow_and_reason(page: Page, tmp_path: Path) -> None:
    """Selecting a piece of the path shows what it waited for, and an arrow to the slice it stands for."""
    report = drawn(ROOT / "traces" / "samples" / "ddp_straggler_w4", tmp_path / "t.pftrace")
    with served(report.path) as server:
        page.size(1600, 1000)
        page.open(server.url)
        page.wait_for("!!globalThis.app?.trace && app.trace.workspace.pinnedTracks.length >= 3")
        longest = ask(
            page,
            "select s.id as n from slice s join track t on s.track_id = t.id "
            "where t.name = 'Critical path' and s.name not like 'gap%' order by s.dur desc limit 1",
        )
        page.evaluate("app.trace.workspace.flatTracks.forEach(t => t.expand())")
        page.evaluate(f"app.trace.selection.selectSqlEvent('slice', {longest}, {{scrollToSelection: true}})")
        page.wait_for("document.body.innerText.includes('Arguments')")
        shown = page.wait_for("document.body.innerText.includes('why') && document.body.innerText")
        page.screenshot(SHOTS / "perfetto-selected.png")

        assert "after " in shown
        assert "rank 3" in shown


def test_a_hostile_name_is_only_text_in_the_ui(page: Page, tmp_path: Path) -> None:
    """A kernel whose name is HTML neither runs nor breaks the page."""
    from scaletrace.parse.graph import GraphLane, NodeKind
    from tests.view.graphs import Node, make_graph

    graph = make_graph([GraphLane(0, HOSTILE, False)], [Node(NodeKind.HOST, 0, HOSTILE, 1000, release_ns=0)], [])
    report = write_timeline(tmp_path / "hostile.pftrace", replay(graph))
    with served(report.path) as server:
        page.size(1200, 800)
        page.open(server.url)
        page.wait_for("!!globalThis.app?.trace")
        page.evaluate("globalThis.hit = 0; globalThis.alert = () => { globalThis.hit = 1 }")
        slice_id = ask(page, "select id as n from slice where category = 'host'")
        page.evaluate(f"app.trace.selection.selectSqlEvent('slice', {slice_id}, {{scrollToSelection: true}})")
        page.wait_for("document.body.innerText.includes('<script>')")

        assert page.evaluate("globalThis.hit") == 0
        assert page.evaluate("document.querySelectorAll('img[src=\"x\"]').length") == 0


@pytest.mark.parametrize(
    ("name", "width", "height", "phone", "dark"),
    [("desktop", 1280, 900, False, False), ("phone", 390, 844, True, True)],
)
def test_the_report_opens_from_disk_without_errors_or_requests(
    page: Page, tmp_path: Path, name: str, width: int, height: int, phone: bool, dark: bool
) -> None:
    """Nothing is fetched, nothing is logged, nothing is wider than the screen, and dark readers get a dark page."""
    report = write_report(tmp_path / "r.html", [curve_answer(), replay_answer(), replay_answer(HOSTILE, ranks=64)])
    page.size(width, height, phone, dark)
    page.open(report.path.as_uri())
    page.wait_for("document.readyState === 'complete' && document.querySelectorAll('svg.plot').length")
    page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    page.screenshot(SHOTS / f"report-{name}.png", whole=True)
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")

    assert page.console == []
    assert page.requests == [report.path.as_uri()]
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert background == ("rgb(20, 22, 26)" if dark else "rgb(255, 255, 255)")
    assert (
        page.evaluate(
            "Math.min(...[...document.querySelectorAll('svg.plot')].map(s => s.getBoundingClientRect().width))"
        )
        > 250
    )


def test_the_report_can_be_used_by_keyboard(page: Page, tmp_path: Path) -> None:
    """Tab reaches the skip link, the sections, the points of a plot and the numbers, and Enter opens the numbers."""
    report = write_report(tmp_path / "r.html", [curve_answer()])
    page.size(1280, 900)
    page.open(report.path.as_uri())
    page.wait_for("document.readyState === 'complete' && document.querySelectorAll('svg.plot').length")
    visited = []
    for _ in range(40):
        page.press("Tab")
        visited.append(
            page.evaluate(
                "(document.activeElement.getAttribute('aria-label') || document.activeElement.innerText || '')"
            )
        )
        if visited[-1] == "Numbers":
            break
    page.press("Enter")

    assert visited[:2] == ["to the results", "Scaling"]
    assert any("512 GPUs" in words for words in visited)
    assert page.evaluate("document.activeElement.parentElement.open") is True
