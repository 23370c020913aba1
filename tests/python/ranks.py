"""Checks that several processes make together. The processes of each number of ranks are started once and serve all tests of a run."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # whose default arguments would hold on to the group that there is when it is first imported

import tandem

SECONDS = 300  # for a check, on a machine that does much besides
SECONDS_BEHIND_A_FAILURE = 10  # those who wait for the rank that failed are ended

_ranks: dict[int, Ranks] = {}


def on_ranks(size: int, check: Callable[..., None], *arguments: Any) -> None:
    """Runs `check(rank, size, *arguments)` on `size` processes that know each other; what a rank raises is told here."""
    if size not in _ranks:
        _ranks[size] = Ranks(size)
    told = _ranks[size].run(check, arguments)
    if told:
        _ranks.pop(size).kill()  # what a check that failed has left behind is nobody's concern
        pytest.fail(f"{check.__name__}{arguments} on {size} ranks\n" + "\n".join(told), pytrace=False)


def end_ranks() -> None:
    """Lets all processes end by themselves; one that cannot is an error."""
    ended = [_ranks.pop(size).end() for size in [*_ranks]]
    told = [line for lines in ended for line in lines]
    assert not told, "\n".join(told)


@contextlib.contextmanager
def group_of_one(folder: Path) -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Ranks:
    """Processes that know each other and wait for checks. All are forks of one that has imported torch and has no threads."""

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch._dynamo", "torch._inductor.compile_fx", "torch.distributed.fsdp", "torch.distributed.checkpoint", "tandem"])
        self.size = size
        self.folder = tempfile.TemporaryDirectory()
        self.pipes, self.processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, self.folder.name, theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, check: Callable[..., None], arguments: tuple[Any, ...]) -> list[str]:
        """What went wrong, by rank."""
        for pipe in self.pipes:
            with contextlib.suppress(BrokenPipeError):  # whose rank has ended, which is told below
                pipe.send((check, arguments))
        told, left, limit = [], {*range(self.size)}, time.monotonic() + SECONDS
        while left:
            ready = connection.wait([self.pipes[rank] for rank in left], max(0.0, limit - time.monotonic()))
            if not ready:
                told += [f"rank {rank}: no answer" for rank in sorted(left)]
                break
            for rank in [rank for rank in sorted(left) if self.pipes[rank] in ready]:
                left.remove(rank)
                try:
                    error = self.pipes[rank].recv()
                except (EOFError, ConnectionResetError):
                    error = self.how_it_ended(rank)
                if error is not None:
                    told.append(f"rank {rank}: {error}")
                    limit = min(limit, time.monotonic() + SECONDS_BEHIND_A_FAILURE)
        return told

    def how_it_ended(self, rank: int) -> str:
        process = self.processes[rank]
        process.join(60)
        code = process.exitcode
        how = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit status {code}"
        return f"ended with {how}\n{_output(self.folder.name, rank).read_text(errors='replace')[-5000:]}"

    def end(self) -> list[str]:
        for pipe in self.pipes:
            with contextlib.suppress(BrokenPipeError):
                pipe.send(None)
        for process in self.processes:
            process.join(60)
        told = [f"rank {rank} of {self.size} {self.how_it_ended(rank)}" for rank in range(self.size) if self.processes[rank].exitcode != 0]
        self.kill()
        return told

    def kill(self) -> None:
        for process, pipe in zip(self.processes, self.pipes, strict=True):
            process.kill()
            process.join()
            pipe.close()
        self.folder.cleanup()


def _output(folder: str, rank: int) -> Path:
    return Path(folder) / f"output-{rank}.txt"


def _serve(rank: int, size: int, folder: str, pipe: connection.Connection) -> None:
    output = os.open(_output(folder, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.enable()  # a rank that a signal ends says where all its threads were
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    while (requested := pipe.recv()) is not None:
        check, arguments = requested
        pipe.send(_error_of(check, rank, size, arguments))
        torch.compiler.reset()
        gc.collect()  # cycles of modules hold on to their group
    dist.destroy_process_group()
    if threads_of_gloo():  # parts of torch hold on to the group: a thread of it that lets go of a tensor while Python ends aborts the process
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _error_of(check: Callable[..., None], rank: int, size: int, arguments: tuple[Any, ...]) -> str | None:
    torch.manual_seed(20240)
    try:
        check(rank, size, *arguments)
        assert tandem._C.active_recipe() is None, "a check left an autocast region open"
    except (Exception, pytest.fail.Exception):
        return traceback.format_exc()
    return None


def threads_of_gloo() -> list[str]:
    names = [task.read_text().strip() for task in Path("/proc/self/task").glob("*/comm")]
    return [name for name in names if "gloo" in name]
