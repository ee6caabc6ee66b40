"""scaletrace synth: a described job becomes a capture that the other commands read."""

from __future__ import annotations

import json
from inspect import signature
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from scaletrace.cli.described import Interference, calibrated
from scaletrace.cli.inspect import inspect
from scaletrace.cli.synth import synth
from scaletrace.extrapolate.anatomy import dissect
from scaletrace.extrapolate.curve import extrapolate
from scaletrace.extrapolate.described.constants import costs_on, device
from scaletrace.extrapolate.described.expand import distinct_ranks
from scaletrace.extrapolate.described.models import load_model
from scaletrace.extrapolate.described.planned import Described
from scaletrace.extrapolate.layout import Layout
from scaletrace.extrapolate.overlap import measure, operands, overlap_share
from scaletrace.extrapolate.stragglers import Noise
from scaletrace.parse.build import build
from scaletrace.parse.load import load
from scaletrace.replay.accuracy import step_errors, without_stalls
from scaletrace.replay.engine import replay
from scaletrace.traces.synth import SynthJob, plan, write_capture

TINY = "family: llama\nlayers: 4\nhidden: 512\nheads: 8\nffn: 1408\nvocab: 1024\nseq: 512\ntied: false\n"
EXPERTS = TINY.replace("llama", "moe") + "experts: 8\nexperts_per_token: 2\n"


@pytest.fixture
def app() -> typer.Typer:
    """The one command, in this process."""
    program = typer.Typer()
    program.command()(synth)
    return program


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A model small enough to write whole captures in a second."""
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    return path


def ask(app: typer.Typer, *arguments: str | Path) -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize(
    "layout",
    [
        "fsdp=4,mbs=2",
        "dp=2,fsdp=2,mbs=2",
        "dp=4",
        "dp=2,zero=1,tp=2",
        "tp=2,sp=1,fsdp=2",
        "pp=2,microbatches=4,dp=2",
        "pp=2,chunks=2,microbatches=4",
        "pp=2,microbatches=4,schedule=GPipe",
        "pp=2,chunks=2,microbatches=4,schedule=BFS,fsdp=2",
        "pp=4,microbatches=8,schedule=zb1p",
        "pp=2,chunks=2,microbatches=4,schedule=zbv,recompute=full",
        "pp=2,chunks=2,microbatches=4,schedule=dualpipev,tp=2",
        "cp=2,fsdp=2",
        "fsdp=4,recompute=full",
    ],
)
def test_every_axis_gives_a_trace_that_replays(app: typer.Typer, tiny: Path, tmp_path: Path, layout: str) -> None:
    """All ranks of a small world: collectives match, the graph is clean, strict replay is within 1 %."""
    folder = tmp_path / "run"
    code, _, err = ask(app, "--model", tiny, "--layout", layout, "--ranks", "all", "--out", folder, "--steps", "2")
    assert (0, "") == (code, err)

    job = load(folder, workers=1)
    built = build(job)
    errors = step_errors(built.graph, built.measured, replay(built.graph, without_stalls(built.graph)))

    assert not job.health.unmatched
    assert job.collectives.matched.all()
    assert not built.health.unmatched
    assert 0.01 > max(abs(error.error) for error in errors)


@pytest.mark.parametrize("slowdown", [0.2, 0.8])
def test_the_stated_slowdown_is_found_in_the_trace(app: typer.Typer, tmp_path: Path, slowdown: float) -> None:
    """κ given to synth is what replay measures on kernels that ran with and without a collective beside them."""
    options = ("--layout", "fsdp=8,mbs=2", "--overlap-slowdown", str(slowdown), "--steps", "2", "--json")
    code, text, _ = ask(app, "--model", "llama2-1b", "--out", tmp_path / "run", *options)
    built = build(load(tmp_path / "run", workers=1))
    graph, timeline = built.graph, replay(built.graph)
    share = overlap_share(graph, timeline.start_ns, timeline.end_ns)

    found = measure(graph, share, prior=0.5, operands=operands(built.job, graph))

    assert (0, slowdown) == (code, json.loads(text)["overlap_slowdown"])
    assert found.pairs > 0
    assert slowdown == pytest.approx(found.by_name["void rms_norm_kernel<c10::BFloat16, float>"][1], abs=0.005)
    assert abs(found.default[1] - slowdown) < abs(0.5 - slowdown)


def test_no_slowdown_leaves_kernels_alone(app: typer.Typer, tmp_path: Path) -> None:
    """With 0 neither kernels nor transfers are slower, so the step is shorter than with the device's own κ."""
    base = ("--model", "llama2-1b", "--layout", "fsdp=8,mbs=2", "--steps", "2", "--json")
    free, usual = (
        json.loads(ask(app, *base, "--out", tmp_path / name, *more)[1])
        for name, more in (("free", ("--overlap-slowdown", "0")), ("usual", ()))
    )

    assert 0 == free["overlap_slowdown"]
    assert usual["overlap_slowdown"] == pytest.approx(1.03, abs=0.01)
    assert free["step_time_s"] < usual["step_time_s"]


@pytest.mark.parametrize("counts", ["attention", "parameters"])
@pytest.mark.parametrize("layout", ["fsdp=8,mbs=2", "pp=2,microbatches=4,dp=2", "tp=2,cp=2,fsdp=2"])
def test_synth_and_extrapolate_give_one_mfu_and_one_step(
    app: typer.Typer, tmp_path: Path, layout: str, counts: str
) -> None:
    """The same trace has the same MFU, tokens a second and step in both commands, whatever is counted."""
    base = ("--model", "llama2-1b", "--layout", layout, "--mfu", "0.2", "--mfu-counts", counts, "--json")
    answer = json.loads(ask(app, *base, "--steps", "2", "--out", tmp_path / "run")[1])
    curve = extrapolate(load(tmp_path / "run", workers=1), sizes=[answer["world_size"]])
    point = curve.points[0]

    assert 0.2 == pytest.approx(answer["mfu"], rel=2e-3)
    assert answer["mfu"] == pytest.approx(point.mfu, rel=0.01)
    assert answer["tokens_per_s_per_gpu"] == pytest.approx(point.tokens_per_s_per_gpu, rel=0.01)
    assert answer["step_time_s"] == pytest.approx(point.p50_s, rel=0.01)


@pytest.mark.parametrize(
    ("layout", "bound"), [("fsdp={},mbs=2", 0.03), ("dp={},mbs=2", 0.05), ("dp={},mbs=2,zero=1", 0.03)]
)
def test_a_stretched_small_job_is_the_described_large_one(tmp_path: Path, layout: str, bound: float) -> None:
    """The trace of eight ranks, stretched to 64, has the step of the same job described at 64."""
    on = device("h100")

    def described(gpus: int, steps: int) -> SynthJob:
        of = Described(load_model("llama2-1b"), Layout.parse(layout.format(gpus)), on, costs_on(on))
        return calibrated(of, [0], steps, None, Interference(), {})[1]

    write_capture(described(8, 2), tmp_path)
    curve = extrapolate(load(tmp_path, workers=1), sizes=[64], noise=Noise(0.0, 0.0, "normal", 4.0))

    assert plan(described(64, 2)).step_ns(1) / 1e9 == pytest.approx(curve.points[0].p50_s, rel=bound)


@pytest.mark.parametrize(
    ("measured", "asked", "bound"),
    [
        ("fsdp=8,mbs=2", "tp=2,fsdp=4,mbs=2", 0.09),
        ("fsdp=8,mbs=2", "pp=2,fsdp=4,mbs=2,microbatches=4", 0.05),
        ("pp=2,dp=2,mbs=1,microbatches=8", "pp=4,dp=2,mbs=1,microbatches=8", 0.05),
        ("pp=2,dp=2,mbs=1,microbatches=8", "pp=2,dp=2,mbs=1,microbatches=8,chunks=2", 0.05),
        ("pp=2,dp=2,mbs=1,microbatches=8", "pp=2,dp=2,mbs=1,microbatches=8,chunks=2,schedule=ZBV", 0.05),
    ],
)
def test_a_rewritten_layout_is_the_described_one(tmp_path: Path, measured: str, asked: str, bound: float) -> None:
    """The trace of one layout, rewritten to another, has the step of the same model described in that layout.

    Tensor parallelism changes every product's shape, so its bound is wider.
    """
    on = device("h100")

    def described(text: str) -> SynthJob:
        of = Described(load_model("llama2-1b"), Layout.parse(text), on, costs_on(on))
        return calibrated(of, distinct_ranks(of.layout), 2, None, Interference(), {})[1]

    write_capture(described(measured), tmp_path)
    target = Layout.parse(asked)
    noise = Noise(0.0, 0.0, "normal", 4.0)
    curve = extrapolate(load(tmp_path, workers=1), sizes=[target.ranks], layout=target, noise=noise)

    assert plan(described(asked)).step_ns(1) / 1e9 == pytest.approx(curve.points[0].p50_s, rel=bound)


def test_counting_attention_or_not_is_said_and_matters(app: typer.Typer, tmp_path: Path) -> None:
    """At one step time the MFU with attention is above 6 N by the attention's share."""
    base = ("--model", "llama2-7b", "--layout", "fsdp=8,mbs=1", "--steps", "1", "--json", "--step-time", "1")
    whole, plain = (
        json.loads(ask(app, *base, "--out", tmp_path / counts, "--mfu-counts", counts)[1])
        for counts in ("attention", "parameters")
    )
    model = load_model("llama2-7b")
    attention = 12 * model.layers * model.hidden * 4096

    assert ("attention", "parameters") == (whole["mfu_counts"], plain["mfu_counts"])
    assert whole["mfu"] / plain["mfu"] == pytest.approx((6 * (model.parameters - 32000 * 4096) + attention) / (6 * model.parameters), rel=1e-3)  # fmt: skip


FAMILIES = {
    "llama": ("llama2-1b", "fsdp=4,mbs=1", 16),
    "gpt": ("gpt2-small", "dp=2,mbs=4", 12),
    "moe": ("moe.yaml", "fsdp=4,ep=2,mbs=2", 4),
    "own": ("tiny.yaml", "tp=2,fsdp=2,mbs=4", 4),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_read_replayed_stretched_and_its_layers_are_found(
    app: typer.Typer, tiny: Path, tmp_path: Path, family: str
) -> None:
    """Strict replay within 1 %, as many layers as described with their parameters, and a curve that never falls."""
    (tmp_path / "moe.yaml").write_text(EXPERTS)
    name, layout, layers = FAMILIES[family]
    model = tmp_path / name if name.endswith(".yaml") else name
    ask(app, "--model", model, "--layout", layout, "--ranks", "all", "--out", tmp_path / "run", "--steps", "2")
    built = build(load(tmp_path / "run", workers=1))
    errors = step_errors(built.graph, built.measured, replay(built.graph, without_stalls(built.graph)))
    anatomy = dissect(built)
    points = extrapolate(built, sizes=[8, 64, 512]).points
    described = load_model(str(model))
    # Experts are products of several matrices at once, which name no weight of a linear layer.
    linear = described.attention_parameters + (described.expert_parameters if described.experts == 1 else 0)
    own = linear / Layout.parse(layout).tp

    assert 0.01 > max(abs(error.error) for error in errors)
    assert layers == anatomy.layers
    assert own == pytest.approx(float(anatomy.parameters[2]), rel=0.01)
    assert sorted(point.p50_s for point in points) == [point.p50_s for point in points]


def test_a_bubble_filled_with_weight_gradients_is_shorter(app: typer.Typer, tmp_path: Path) -> None:
    """On four stages with eight micro batches GPipe and 1F1B last as long, and zero bubble is faster than both."""
    model = tmp_path / "slow.yaml"
    model.write_text(TINY.replace("hidden: 512", "hidden: 2048").replace("seq: 512", "seq: 4096"))
    steps = {}
    for schedule in ("GPipe", "1F1B", "InterleavedZeroBubble"):
        layout = f"pp=4,microbatches=8,schedule={schedule}"
        answer = ask(app, "--model", model, "--layout", layout, "--steps", "1", "--json", "--out", tmp_path / schedule)
        steps[schedule] = json.loads(answer[1])["step_time_s"]

    assert steps["GPipe"] == pytest.approx(steps["1F1B"], rel=0.05)
    assert steps["InterleavedZeroBubble"] < 0.93 * steps["1F1B"]


def test_power_and_cost_follow_the_price_table(app: typer.Typer, tiny: Path, tmp_path: Path) -> None:
    """Watts lie between idle and TDP; money is hours of the GPU over tokens, from a number or a table."""
    table = tmp_path / "prices.yaml"
    table.write_text("gpu_hour: {H100 SXM: 3.6}\nkwh: 0.0\n")
    base = ("--model", tiny, "--layout", "fsdp=2", "--steps", "1", "--json")
    plain, number, named = (
        json.loads(ask(app, *base, "--out", tmp_path / name, *more)[1])
        for name, more in (("a", ()), ("b", ("--price", "3.6")), ("c", ("--price", str(table))))
    )

    assert 0.17 * 700 < plain["power_W_per_gpu"] <= 700
    assert plain["tokens_per_J"] == pytest.approx(plain["tokens_per_s_per_gpu"] / plain["power_W_per_gpu"])
    assert plain["money_per_million_tokens"] is None
    assert number["money_per_million_tokens"] == pytest.approx(1e3 / number["tokens_per_s_per_gpu"])
    assert named["money_per_million_tokens"] == number["money_per_million_tokens"]


FOUND = {
    "slow:3:1.5": lambda a: 3 == a["stragglers"][0]["rank"] and a["stragglers"][0]["extra_compute_ns"] > 0,
    "jitter:2:0.5": lambda a: any(s["rank"] == 2 and s["caused_wait_ns"] > 0 for s in a["stragglers"]),
    "delay:1:20000000": lambda a: 1 == a["stragglers"][0]["rank"],
    "loader-stall:1:20000000": lambda a: 1 == a["stragglers"][0]["rank"],
    "late-launch:2:500000": lambda a: 2 == a["stragglers"][0]["rank"],
    "clock:1:2000000": lambda a: a["clocks"]["1"]["low_ns"] <= 2_000_000 <= a["clocks"]["1"]["high_ns"],
    "drift:1:1000": lambda a: 5_000 < a["clocks"]["1"]["offset_ns"] < 500_000,
    "missing:2": lambda a: [2] == a["ranks"]["missing"],
    "late-start:1:1": lambda a: a["health"]["unmatched"]["steps that not every rank recorded"],
    "lost-kernels:1:0.1": lambda a: a["health"]["unmatched"]["launches without GPU records"],
    "lost-launches:1:0.1": lambda a: a["health"]["unmatched"]["GPU records without a launch"],
    "lost-ops:1:0.3": lambda a: a["health"]["unmatched"]["communication kernels without a host record"],
    "crossing:1:0.3": lambda a: a["health"]["unmatched"]["host spans that cross instead of nesting"],
    "truncated:1:0.6": lambda a: a["health"]["dropped"]["events cut off by the end of the file"],
    "twice:1": lambda a: 1 < len(a["captures"]) or a["health"]["notes"],
}


@pytest.mark.parametrize("fault", FOUND)
def test_inspect_finds_every_fault_again(app: typer.Typer, tmp_path: Path, fault: str) -> None:
    """The rank, the offset or the loss that synth was asked for is what inspect reports."""
    (tmp_path / "mid.yaml").write_text(TINY.replace("hidden: 512", "hidden: 2048").replace("seq: 512", "seq: 2048"))
    options = ("--layout", "fsdp=4,mbs=2", "--ranks", "all", "--cluster", "dgx_h100", "--steps", "2", "--fault", fault)
    ask(app, "--model", tmp_path / "mid.yaml", "--out", tmp_path / "run", *options)
    program = typer.Typer()
    program.command()(inspect)
    result = CliRunner().invoke(program, [str(tmp_path / "run"), "--json"])

    assert 0 == result.exit_code, result.stderr
    assert FOUND[fault](json.loads(result.stdout))


NUMBERS = {
    "--steps": ("0", "-1", "1.5", "nan", "inf", "1e300", "9" * 400),
    "--step-time": ("0", "-1", "nan", "inf", "-inf", "1e300", "1e-300"),
    "--mfu": ("0", "-0.1", "1.5", "nan", "inf", "1e300"),
    "--overlap-slowdown": ("-0.1", "nan", "inf", "1e300"),
    "--price": ("-1", "nan", "inf", "-inf", "many"),
    "--mfu-counts": ("everything", ""),
    "--fault": ("clock:0:nan", "slow:0:inf", "slow:0:-1", "delay:0:1e300", "drift:0:-inf", "truncated:0:2", "slow:-1:2"),
    "--layout": ("mbs=0", "seq=0", "microbatches=0", "m=0,fsdp=2", "fsdp=0", "mbs=-1", "mbs=nan", "mbs=1e9", "fsdp=2,sequence=00"),
}  # fmt: skip


def test_every_numeric_option_is_among_those_tried() -> None:
    """A new option with a number comes with its bounds."""
    parameters = signature(synth).parameters
    kinds = {name: str(p.annotation).split("[")[1] for name, p in parameters.items()}

    assert {"--" + name.replace("_", "-") for name, kind in kinds.items() if kind.startswith(("int", "float"))} <= set(
        NUMBERS
    )


@pytest.mark.parametrize(("option", "value"), [(o, v) for o, values in NUMBERS.items() for v in values])
def test_numbers_that_can_not_be_are_one_sentence_and_exit_code_two(
    app: typer.Typer, tiny: Path, tmp_path: Path, option: str, value: str
) -> None:
    """No option takes a default, a traceback or an endless run for an impossible number, and nothing is written."""
    layout = () if option == "--layout" else ("--layout", "fsdp=2")
    code, out, err = ask(app, "--model", tiny, "--out", tmp_path / "run", *layout, f"{option}={value}")

    assert (2, "") == (code, out)
    assert err.strip()
    assert "Traceback" not in err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("layers: 99999999999", "layers is too large; no size of a model is above 10,000,000"),
        ("kv_heads: 3", "kv_heads 3 do not divide heads 8"),
        ("ffn: -8", "ffn is -8; at least 0"),
        ("hidden: .nan", "hidden is nan; it must be int"),
        ("vocab: 1.0e+9", "vocab is 1000000000.0; it must be int"),
    ],
)
def test_models_that_can_not_be_are_refused(app: typer.Typer, tmp_path: Path, line: str, message: str) -> None:
    """The file's dimension is named with what it may be."""
    path = tmp_path / "bad.yaml"
    key = line.split(":")[0]
    path.write_text("".join(f"{x}\n" for x in TINY.splitlines() if not x.startswith(f"{key}:")) + line + "\n")
    code, _, err = ask(app, "--model", path, "--layout", "fsdp=2", "--out", tmp_path / "run")

    assert 2 == code
    assert message in " ".join(err.split())


def test_experts_exchange_tokens(app: typer.Typer, tmp_path: Path) -> None:
    """A mixture of experts over two expert ranks has all-to-alls on the ep axis."""
    model = tmp_path / "moe.yaml"
    model.write_text(EXPERTS)
    code, _, _ = ask(app, "--model", model, "--layout", "fsdp=2,ep=2", "--ranks", "all", "--out", tmp_path / "run")
    job = load(tmp_path / "run", workers=1)

    assert 0 == code
    assert "ep" in {group.axis for group in job.groups}
    assert "all_to_all" in set(job.collectives.to_frame()["kind"])


def test_a_step_time_or_an_mfu_is_met(app: typer.Typer, tiny: Path, tmp_path: Path) -> None:
    """The written step lasts what was asked for, within 0.1 %, and says that it is calibrated."""
    base = ("--model", tiny, "--layout", "fsdp=8,mbs=4", "--out", tmp_path / "run", "--json")

    timed = json.loads(ask(app, *base, "--step-time", "0.05")[1])
    rated = json.loads(ask(app, *base, "--mfu", "0.02")[1])

    assert timed["step_time_s"] == pytest.approx(0.05, rel=1e-3)
    assert rated["mfu"] == pytest.approx(0.02, rel=1e-3)
    assert "calibrated" == rated["provenance"]
    assert "scaletrace.synth/1" == rated["schema"]


def test_without_an_anchor_the_answer_says_that_times_are_modelled(
    app: typer.Typer, tiny: Path, tmp_path: Path
) -> None:
    """Measured beats modelled, and the reader is told which it is."""
    answer = json.loads(ask(app, "--model", tiny, "--layout", "fsdp=2", "--out", tmp_path / "run", "--json")[1])

    assert "modelled" == answer["provenance"]
    assert {"kernel times without a measured anchor": 1} == answer["health"]["guessed"]
    assert any("not calibrated" in note for note in answer["health"]["notes"])


def test_only_distinct_ranks_are_written_unless_asked(app: typer.Typer, tiny: Path, tmp_path: Path) -> None:
    """A pipeline of two stages over eight ranks has two distinct ones; numbers choose others."""
    layout = "pp=2,dp=4,microbatches=4"
    distinct = json.loads(ask(app, "--model", tiny, "--layout", layout, "--out", tmp_path / "a", "--json")[1])
    chosen = json.loads(
        ask(app, "--model", tiny, "--layout", layout, "--out", tmp_path / "b", "--ranks", "1,5", "--json")[1]
    )

    assert ([0, 4], 8) == (distinct["ranks"], distinct["world_size"])
    assert [1, 5] == chosen["ranks"]


def test_faults_reach_the_files(app: typer.Typer, tiny: Path, tmp_path: Path) -> None:
    """A truncated file is written when asked for."""
    options = ("--model", tiny, "--layout", "fsdp=2", "--ranks", "all", "--out", tmp_path / "run")
    _, stdout, _ = ask(app, *options, "--fault", "truncated:1:0.5")

    assert "injected: truncated on rank 1: 0.5 share of the file that is kept" in stdout
    assert load(tmp_path / "run", workers=1).health.dropped


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--layout", "fsdp=0"), "at least 1"),
        (("--layout", "tp=3"), "tp=3 does not divide heads 8"),
        (("--layout", "pp=8,microbatches=8"), "8 stages for the 4 layers"),
        (("--layout", "fsdp=2", "--mfu", "1.5"), "--mfu 1.5 must lie between 0 and 1"),
        (("--layout", "fsdp=2", "--mfu", "0.4", "--step-time", "1"), "give one of them"),
        (("--layout", "fsdp=2", "--step-time", "1e-6"), "communication alone takes"),
        (("--layout", "fsdp=2", "--ranks", "5"), "the world has ranks 0 to 1"),
        (("--layout", "fsdp=2", "--ranks", "some"), "write distinct, all, or numbers"),
        (("--layout", "fsdp=2", "--fault", "gremlin"), "no fault 'gremlin'"),
        (("--layout", "fsdp=2", "--cluster", "no-such"), "no-such"),
    ],
)
def test_wrong_usage_is_one_sentence_and_exit_code_two(
    app: typer.Typer, tiny: Path, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    """What is wrong, and no traceback."""
    code, out, err = ask(app, "--model", tiny, "--out", tmp_path / "run", *arguments)

    assert 2 == code
    assert "" == out
    assert message in " ".join(err.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--layout", "fsdp=9999999"), "a world of 9,999,999 ranks"),
        (("--layout", "fsdp=1024", "--ranks", "all", "--steps", "1000"), "write fewer ranks"),
        (("--layout", "dp=1,microbatches=99999999"), "write fewer ranks"),
    ],
)
def test_sizes_that_can_not_be_written_are_refused_at_once(
    app: typer.Typer, tiny: Path, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    """A limit is named before memory runs out; exit code 1."""
    code, out, err = ask(app, "--model", tiny, "--out", tmp_path / "run", *arguments)

    assert (1, "") == (code, out)
    assert message in " ".join(err.split())


def test_quiet_prints_nothing(app: typer.Typer, tiny: Path, tmp_path: Path) -> None:
    """The exit code tells."""
    assert (0, "", "") == ask(app, "--model", tiny, "--layout", "fsdp=2", "--out", tmp_path / "run", "--quiet")
