"""Trains one small layer in one process and then does what its first argument says, at step 6 of 12.

Run plain and under the collector by test_faults.py; what it prints and how it ends must be the same.
"""

from __future__ import annotations

import faulthandler
import os
import resource
import signal
import sys
import threading
import warnings

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

STEPS, WHEN = 12, 6
torch.manual_seed(0)
model = nn.Linear(8, 8)
data = torch.randn(64, 8)


def train(step=None, steps=STEPS, at_fault=lambda: None, optimizer=None):
    """An ordinary loop; `at_fault` is called once, in the middle of step WHEN."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.01)
    for number in range(steps):
        loss = model(data).square().mean()
        if number == WHEN:
            at_fault()
        loss.backward()
        (step or optimizer.step)()
        optimizer.zero_grad()
        print(number, f"{loss.item():.9f}", flush=True)


def error():
    raise RuntimeError("the job's own failure")


def kill(number):
    return lambda: os.kill(os.getpid(), number)


def in_backward():
    optimizers = {p: torch.optim.SGD([p], lr=0.01) for p in model.parameters()}

    def hook(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    train(step=lambda: None)


def off_thread():
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step():
        thread = threading.Thread(target=optimizer.step)
        thread.start()
        thread.join()

    train(step=step, optimizer=optimizer)


def own_profiler():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        train()
    print("events", sum(event.key == "aten::linear" for event in profiler.key_averages()))


def profiler_begins_in_window():
    kept = []

    def begin():
        profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
        profiler.start()
        kept.append(profiler)

    train(at_fault=begin)
    kept[0].stop()
    print("linear calls", sum(event.count for event in kept[0].key_averages() if event.key == "aten::linear"))


def scheduled_profiler():
    schedule = torch.profiler.schedule(wait=5, warmup=1, active=2, repeat=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    cpu = [torch.profiler.ProfilerActivity.CPU]
    ready = lambda profiler: print("ready", len(profiler.key_averages()) > 0)
    with torch.profiler.profile(activities=cpu, schedule=schedule, on_trace_ready=ready) as profiler:

        def step():
            optimizer.step()
            profiler.step()

        train(step=step, optimizer=optimizer)


def no_optimizer():
    for number in range(STEPS):
        print(number, f"{model(data).sum().item():.6f}")


def hand_written_optimizer():
    def step():
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.01 * parameter.grad

    train(step=step)


def two_optimizers():
    first = torch.optim.SGD([model.weight], lr=0.01)
    second = torch.optim.AdamW([model.bias], lr=0.01)
    train(step=lambda: (first.step(), second.step()), optimizer=first)


def loader(context):
    def go():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        batches = DataLoader(TensorDataset(data), batch_size=8, num_workers=2, multiprocessing_context=context)
        for (batch,) in batches:
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        print(f"{model.weight.sum().item():.9f}")

    return go


def forked_child():
    def fork():
        child = os.fork()
        if child == 0:
            print("child leaves", flush=True)
            sys.exit(3)
        print("child left with", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    train(at_fault=fork)


def own_handlers():
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM):
        signal.signal(number, lambda n, _: print("got", signal.Signals(n).name, flush=True))
    train(at_fault=lambda: [os.kill(os.getpid(), n) for n in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)])


def compiled(fullgraph):
    def go():
        optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.01))
        step = torch.compile(lambda: optimizer.step(), fullgraph=fullgraph, backend="eager")
        train(step=step, optimizer=optimizer)

    return go


def scaler():
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scale = torch.amp.GradScaler("cpu")
    for number in range(STEPS):
        scale.scale(model(data).square().mean()).backward()
        scale.step(optimizer)
        scale.update()
        optimizer.zero_grad()
        print(number, f"{model.weight.sum().item():.9f}")


def closure():
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def again():
        optimizer.zero_grad()
        loss = model(data).square().mean()
        loss.backward()
        return loss

    for number in range(STEPS):
        print(number, f"{optimizer.step(again).item():.9f}")


def accumulation_and_schedule():
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for number in range(2 * STEPS):
        loss = model(data).square().mean()
        loss.backward()
        if number % 2:
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            print(number, f"{loss.item():.9f}")


def disk_full():
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    train()


def no_descriptors():
    def exhaust():
        resource.setrlimit(resource.RLIMIT_NOFILE, (8, 8))
        held = []
        while True:
            try:
                held.append(os.open("/dev/null", os.O_RDONLY))
            except OSError:
                return

    train(at_fault=exhaust)


def broken_torch_profiler():
    class Broken:
        def __init__(self, *_, **__):
            raise RuntimeError("no profiler here")

    torch.profiler.profile = Broken
    train()


def strict_warnings():
    warnings.simplefilter("error")
    train()


def closed_streams():
    sys.stdout.flush()
    os.close(2)
    train()


def lingering_thread():
    threading.Thread(target=lambda: threading.Event().wait(0.5), daemon=False).start()
    train()


def cleaned_meta_path():
    sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != "_Finder"]
    train()


def changed_directory():
    os.chdir("/")
    train()


def modules_of_mine():
    import guards  # the user's own, next to the script's PYTHONPATH

    print("my guards:", guards.VALUE)
    train()


FAULTS = {
    "none": train,
    "error": lambda: train(at_fault=error),
    "exit": lambda: train(at_fault=lambda: sys.exit(7)),
    "os_exit": lambda: train(at_fault=lambda: os._exit(9)),
    "sigterm": lambda: train(at_fault=kill(signal.SIGTERM)),
    "sigkill": lambda: train(at_fault=kill(signal.SIGKILL)),
    "sigint": lambda: train(at_fault=kill(signal.SIGINT)),
    "segfault": lambda: train(at_fault=faulthandler._sigsegv),
    "in_backward": in_backward,
    "off_thread": off_thread,
    "own_profiler": own_profiler,
    "profiler_begins_in_window": profiler_begins_in_window,
    "scheduled_profiler": scheduled_profiler,
    "too_few_steps": lambda: train(steps=3),
    "ends_in_window": lambda: train(steps=WHEN + 1),
    "no_optimizer": no_optimizer,
    "hand_written_optimizer": hand_written_optimizer,
    "two_optimizers": two_optimizers,
    "loader_fork": loader("fork"),
    "loader_spawn": loader("spawn"),
    "forked_child": forked_child,
    "own_handlers": own_handlers,
    "compiled_step": compiled(fullgraph=False),
    "compiled_fullgraph_step": compiled(fullgraph=True),
    "scaler": scaler,
    "closure": closure,
    "accumulation_and_schedule": accumulation_and_schedule,
    "disk_full": disk_full,
    "no_descriptors": no_descriptors,
    "broken_torch_profiler": broken_torch_profiler,
    "strict_warnings": strict_warnings,
    "closed_streams": closed_streams,
    "lingering_thread": lingering_thread,
    "cleaned_meta_path": cleaned_meta_path,
    "changed_directory": changed_directory,
    "modules_of_mine": modules_of_mine,
}

if __name__ == "__main__":
    FAULTS[sys.argv[1]]()
    print("done")
