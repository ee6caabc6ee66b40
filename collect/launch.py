"""Turns a command into the same command recorded: prepares its environment, runs it, packs what it recorded.

The job keeps its standard streams, its exit code and its signals. The launcher waits beside it, hands on the signals it
gets, and when the job was killed by one, dies of the same. It works on the files in a thread at low priority.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType

from scaletrace.collect import manifest
from scaletrace.collect.clocks import Responder
from scaletrace.collect.fake_world import variables
from scaletrace.collect.ranks import check_spec
from scaletrace.collect.settings import VARIABLE, Settings
from scaletrace.collect.trigger import REQUEST
from scaletrace.collect.upload import Packed, finish, pack
from scaletrace.errors import InputError, UsageError

HANDED_ON = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2, signal.SIGQUIT)
POLL_S = 0.5
NETWORK_FILE_SYSTEMS = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb", "fuse", "9p", "wekafs", "afs")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the job ended (as subprocess says it: negative for a signal) and what was recorded."""

    returncode: int
    folder: str
    captures: dict[str, list[int]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def default_folder(environment: Mapping[str, str] = os.environ) -> str:
    """Where a capture goes when nobody says: by the batch system's job, so that all nodes agree, else by time."""
    for name, variable in (
        ("slurm", "SLURM_JOB_ID"),
        ("pbs", "PBS_JOBID"),
        ("lsf", "LSB_JOBID"),
        ("run", "TORCHELASTIC_RUN_ID"),
    ):
        job = "".join(c if c.isalnum() or c in "._-" else "_" for c in environment.get(variable, ""))
        if job:
            step = environment.get("SLURM_STEP_ID", "")
            return f"capture-{name}-{job}" + (f".{step}" if name == "slurm" and step.isdigit() else "")
    return time.strftime("capture-%Y%m%d-%H%M%S")


def hook_folder() -> str:
    """The folder that goes first on PYTHONPATH; as a part of the package `scaletrace`, so that it can load the rest."""
    import scaletrace

    inside = Path(scaletrace.__file__).parent / "collect" / "hook"
    return str(inside if inside.is_dir() else Path(__file__).parent / "hook")


def environment_for(settings: Settings, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The job's environment: the hook first on PYTHONPATH, and the settings."""
    path = environment.get("PYTHONPATH")
    found = {**environment, VARIABLE: settings.to_json()}
    found["PYTHONPATH"] = hook_folder() + (os.pathsep + path if path else "")
    if settings.fake_world:
        found.update(variables(settings))
    return found


def spool_for(folder: str, mounts: str | None = None) -> str:
    """A local folder for raw files: inside `folder`, or in the temporary folder where `folder` is on the network.

    `mounts` is the text of /proc/mounts. A rank that writes to slow mounted storage makes the others wait for it.
    """
    if mounts is None:
        with contextlib.suppress(OSError):
            mounts = Path("/proc/mounts").read_text()
    path, best, kind = os.path.realpath(folder), "", ""
    for line in (mounts or "").splitlines():
        parts = line.split()
        if len(parts) > 2 and len(parts[1]) >= len(best) and (path + "/").startswith(parts[1].rstrip("/") + "/"):
            best, kind = parts[1], parts[2]
    base = tempfile.gettempdir() if kind.startswith(NETWORK_FILE_SYSTEMS) else folder
    name = f".spool-{os.uname().nodename}-{os.getpid()}"
    return os.path.join(base, ("scaletrace" + name) if base != folder else name)


def prepare(settings: Settings, overwrite: bool = False) -> Settings:
    """Check what was asked, make the folder, and settle where raw files go.

    Raises UsageError for settings that make no sense, InputError where the folder holds a capture already.
    """
    check_spec(settings.ranks)
    if not settings.command:
        raise UsageError("no command to record; write it after `--`, as in: scaletrace collect -- torchrun train.py")
    old = manifest.read(Path(settings.folder))
    if old and not overwrite and not old["ranks"]["missing"]:
        raise InputError(f"{settings.folder}: holds a complete capture; choose another --out, or say --overwrite")
    if overwrite:
        for pattern in ("manifest.json", "rank*_of*.json.*", "fr_rank*.json.gz", "collect.log"):
            for path in Path(settings.folder).rglob(pattern):
                path.unlink()
    return replace(settings, folder=os.path.abspath(settings.folder), spool=spool_for(os.path.abspath(settings.folder)))


def run(settings: Settings, overwrite: bool = False, stdout_to_stderr: bool = False) -> Outcome:
    """Run `settings.command` and record it. The job runs even where nothing can be recorded; the notes say why.

    With `stdout_to_stderr`, what the job prints leaves stdout free for the caller's own answer.
    Raises UsageError or InputError before the job has started, InputError where the command can't be started.
    """
    stdout = sys.stderr.fileno() if stdout_to_stderr else None
    settings = replace(prepare(settings, overwrite), launched=True)
    packed = Packed()
    try:
        Path(settings.folder).mkdir(parents=True, exist_ok=True)
        Path(settings.spool).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        packed.notes.append(f"{settings.folder}: nothing was recorded, the folder can't be made: {error.strerror}")
        return Outcome(_run_job(settings, None, packed, None, stdout), settings.folder, {}, tuple(packed.notes))
    with contextlib.ExitStack() as stack:
        responder = None
        with contextlib.suppress(OSError):
            responder = stack.enter_context(Responder())
            settings = replace(settings, probe_port=responder.port)
        returncode = _run_job(settings, environment_for(settings), packed, responder, stdout)
    _carefully(lambda: finish(settings, packed), packed)
    return Outcome(returncode, settings.folder, dict(packed.ranks), tuple(dict.fromkeys(packed.notes)))


def _run_job(
    settings: Settings,
    environment: Mapping[str, str] | None,
    packed: Packed,
    responder: Responder | None,
    stdout: int | None,
) -> int:
    """Run the command to its end, packing in the meantime; with no environment, run it as it is."""
    try:
        # no thread has been started yet, so the function that runs in the child is safe
        job = subprocess.Popen(settings.command, env=environment, stdout=stdout, preexec_fn=_die_with_launcher)  # noqa: PLW1509
    except OSError as error:
        raise InputError(f"{settings.command[0]}: can't be started: {error.strerror}; check the command") from error
    over = threading.Event()
    packer = threading.Thread(target=_pack_until, args=(settings, packed, over), daemon=True)
    with _signals(job, settings):
        if responder is not None:
            responder.start()
        if environment is not None:
            packer.start()
        returncode = job.wait()
        over.set()
        if environment is not None:
            packer.join()
    return returncode


def _pack_until(settings: Settings, packed: Packed, over: threading.Event) -> None:
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
    while not over.wait(POLL_S):
        _carefully(lambda: pack(settings, packed), packed)


def _carefully(work: Callable[[], None], packed: Packed) -> None:
    """Do `work` on the files; whatever goes wrong there becomes a note, since the job's exit code is what counts."""
    try:
        work()
    except Exception as error:  # noqa: BLE001  (the job has ended as it has)
        packed.notes.append(f"packing failed: {error!r}; raw files may be left in the capture folder")


def _die_with_launcher() -> None:
    """In the child before it becomes the job: if the launcher is killed, the job is, as if it had been the job itself."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


@contextlib.contextmanager
def _signals(job: subprocess.Popen[bytes], settings: Settings):  # type: ignore[no-untyped-def]
    """Hand signals on to the job; an interrupt from the terminal reaches it by itself; SIGUSR1 asks for a recording."""

    def hand_on(number: int, _: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            job.send_signal(number)

    def ask(number: int, frame: FrameType | None) -> None:
        if settings.on_demand:
            with contextlib.suppress(OSError):
                (Path(settings.folder) / REQUEST).touch()
        else:
            hand_on(number, frame)

    def interrupt(number: int, frame: FrameType | None) -> None:
        if not _in_foreground():  # no Ctrl-C, which the job gets as well: somebody sent it to us alone
            hand_on(number, frame)

    handlers = {**dict.fromkeys(HANDED_ON, hand_on), signal.SIGUSR1: ask, signal.SIGINT: interrupt}
    old = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def _in_foreground() -> bool:
    """Whether the terminal's interrupts go to our process group, and so to the job too."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


def leave_as(returncode: int) -> int:
    """The exit code to leave with; where the job died of a signal, die of it too (without a core of our own)."""
    if returncode >= 0:
        return returncode
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, ValueError):
        signal.signal(-returncode, signal.SIG_DFL)
    sys.stdout.flush()
    sys.stderr.flush()
    os.kill(os.getpid(), -returncode)
    time.sleep(1)  # until it arrives
    return 128 - returncode


def split_command(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Own arguments and the job's command, parted at the first `--`."""
    if "--" not in arguments:
        return list(arguments), []
    at = list(arguments).index("--")
    return list(arguments[:at]), list(arguments[at + 1 :])
