"""Building the kernel on the machine that runs it, once, with the compiler that is there.

The shared object is kept in the user's cache folder under a name that holds the source, the
compiler, its flags and the processor: a change of any of them builds another. It is written beside
its final name and then renamed, so a half-written one is never loaded, whoever builds at the same
time.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from platformdirs import user_cache_path

SOURCE = Path(__file__).with_name("paged.cpp")
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fopenmp", "-w")
NATIVE = ("-march=native",)
"""Safe, because what is built here runs here."""
LONGEST_BUILD_S = 120


class BuildFailed(Exception):
    """No compiler, or it would not; one line says which."""


def shared_object() -> Path:
    """The built kernel; builds it if need be.

    Raises:
        BuildFailed: there is no compiler, it fails, or there is no place for the result.
    """
    compiler = find_compiler()
    if compiler is None:
        raise BuildFailed("no C++ compiler (c++, g++ or clang++)")
    try:
        path = user_cache_path("cbviz") / "kernels" / f"paged-{_key(compiler)}.so"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            _build(compiler, path)
    except OSError as error:
        raise BuildFailed(f"no place to keep it: {error.strerror or error}") from error
    return path


def find_compiler() -> str | None:
    """The path of `$CXX`, or of the first C++ compiler on the path."""
    names = [os.environ.get("CXX", ""), "c++", "g++", "clang++"]
    return next((found for name in names if name and (found := shutil.which(name))), None)


def _build(compiler: str, path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        built = Path(folder) / "kernel.so"
        try:
            _compile(compiler, NATIVE, built)
        except BuildFailed:
            _compile(compiler, (), built)
        built.replace(path)


def _compile(compiler: str, more: tuple[str, ...], to: Path) -> None:
    """Compile and link, against the OpenMP runtime that torch has brought with it if there is one:
    two of them in a process would have a pool of threads each."""
    unlinked = to.with_suffix(".o")
    _run([compiler, *FLAGS, *more, "-c", str(SOURCE), "-o", str(unlinked)])
    runtime = _torch_openmp()
    openmp = [str(runtime), "-lstdc++"] if runtime else ["-fopenmp"]
    _run([compiler, "-shared", str(unlinked), *openmp, "-o", str(to)])


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=LONGEST_BUILD_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildFailed(f"{command[0]} cannot be run: {error}") from error
    if done.returncode != 0:
        first = next((line for line in done.stderr.splitlines() if line.strip()), "no reason given")
        raise BuildFailed(f"{command[0]} failed: {first}")


def _torch_openmp() -> Path | None:
    return next(iter(sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))), None)


def _key(compiler: str) -> str:
    """Everything that the built code depends on."""
    parts = [
        SOURCE.read_bytes(),
        _version_of(compiler).encode(),
        repr((FLAGS, NATIVE, str(_torch_openmp()))).encode(),
        _processor().encode(),
    ]
    return hashlib.blake2b(b"\0".join(parts), digest_size=10).hexdigest()


def _version_of(compiler: str) -> str:
    """Path, size and time of the compiler: as telling as its version and no process to start."""
    stat = Path(compiler).resolve().stat()
    return f"{compiler} {stat.st_size} {stat.st_mtime_ns}"


def _processor() -> str:
    """What decides which instructions there are."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    telling = ("model name", "flags", "Features", "CPU part")
    found = [line for line in lines if line.startswith(telling)]
    return "\n".join([platform.machine(), platform.processor(), *dict.fromkeys(found)])
