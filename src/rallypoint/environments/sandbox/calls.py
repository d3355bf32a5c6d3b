"""Which system calls a program in a local sandbox may make: the filter that the kernel applies to each (seccomp).

Owns: the list. It names what is allowed: a list of what is refused would miss the next way out, as kernels gain system
calls, and Landlock learned of some (`truncate`) years after the others. Must not know: how a filter is applied.
Calls by their numbers on Linux, x86_64 and aarch64.
"""

from __future__ import annotations

import platform
import struct

from rallypoint.environments.sandbox.program import SandboxError

_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Column of the tables below, and the kernel's number of the architecture."""

# Each is `name x86_64 aarch64`, - where the architecture has no such call. Which files: Landlock or the mounts say.
_ALLOWED = """
read 0 63, write 1 64, readv 19 65, writev 20 66, pread64 17 67, pwrite64 18 68, preadv 295 69, pwritev 296 70,
preadv2 327 286, pwritev2 328 287, lseek 8 62, close 3 57, close_range 436 436, dup 32 23, dup2 33 -, dup3 292 24,
pipe 22 -, pipe2 293 59, stat 4 -, fstat 5 80, lstat 6 -, newfstatat 262 79, statx 332 291, statfs 137 43,
fstatfs 138 44, access 21 -, faccessat 269 48, faccessat2 439 439, readlink 89 -, readlinkat 267 78, getdents 78 -,
getdents64 217 61, getcwd 79 17, chdir 80 49, fchdir 81 50, umask 95 166, ftruncate 77 46, fallocate 285 47,
fadvise64 221 223, fsync 74 82, fdatasync 75 83, mkdir 83 -, mkdirat 258 34, rmdir 84 -, unlink 87 -, unlinkat 263 35,
rename 82 -, renameat 264 38, renameat2 316 276, link 86 -, linkat 265 37, symlink 88 -, symlinkat 266 36,

mmap 9 222, munmap 11 215, mprotect 10 226, mremap 25 216, madvise 28 233, brk 12 214, msync 26 227, mincore 27 232,

exit 60 93, exit_group 231 94, futex 202 98, set_robust_list 273 99, set_tid_address 218 96, rseq 334 293,
sched_yield 24 124, sched_getaffinity 204 123, sched_getparam 143 121, sched_getscheduler 145 120,
sched_get_priority_max 146 125, sched_get_priority_min 147 126, getcpu 309 168, gettid 186 178,

time 201 -, times 100 153, gettimeofday 96 169, clock_gettime 228 113, clock_getres 229 114, nanosleep 35 101,
clock_nanosleep 230 115, restart_syscall 219 128, getitimer 36 102, setitimer 38 103, alarm 37 -, pause 34 -,
rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139, rt_sigpending 127 136, rt_sigtimedwait 128 137,
rt_sigsuspend 130 133, sigaltstack 131 132,

poll 7 -, ppoll 271 73, select 23 -, pselect6 270 72, epoll_create 213 -, epoll_create1 291 20, epoll_ctl 233 21,
epoll_wait 232 -, epoll_pwait 281 22, epoll_pwait2 441 441, eventfd 284 -, eventfd2 290 19, sendto 44 206,
recvfrom 45 207, shutdown 48 210, getsockname 51 204, getpeername 52 205, getsockopt 55 209,

getpid 39 172, getppid 110 173, getuid 102 174, geteuid 107 175, getgid 104 176, getegid 108 177, getresuid 118 148,
getresgid 120 150, getgroups 115 158, getpgrp 111 -, getpgid 121 155, getsid 124 156, uname 63 160, sysinfo 99 179,
getrusage 98 165, getrlimit 97 163, getrandom 318 278
"""
_ALL_BITS = 0xFFFFFFFF
_READ_OR_WRITE = (0, 1, 2, 0x201, 0x202)
_THREAD = 0x3D0F00
_CONDITIONS = {
    # `name x86_64 aarch64`: of each argument its place, the bits that are looked at, and the values that they may have.
    # Access mode 3 opens a file for neither reading nor writing, and O_TRUNC empties what is opened for reading:
    # Landlock of kernels before 6.2 asks no right for either.
    "open 2 -": ((1, 0x203, _READ_OR_WRITE),),
    "openat 257 56": ((2, 0x203, _READ_OR_WRITE),),
    # Of streams, which asyncio wakes up by. A pair of datagrams can be sent from to any address.
    "socketpair 53 199": ((0, _ALL_BITS, (1,)), (1, 0xF, (1,))),
    # Copies, flags and locks of descriptors; not who is signalled (F_SETOWN), nor leases.
    "fcntl 72 25": ((1, _ALL_BITS, (0, 1, 2, 3, 4, 5, 6, 7, 1030, 1031, 1032)),),
    # Whether it is a terminal and how wide, bytes that wait, and flags of descriptors.
    "ioctl 16 29": ((1, _ALL_BITS, (0x5401, 0x802C542A, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)),),
    "prctl 157 167": ((0, _ALL_BITS, (15, 16)),),  # the name of a thread
    "prlimit64 302 261": ((0, _ALL_BITS, (0,)),),  # of this process
    "clone 56 220": ((0, _ALL_BITS & ~0x400000, (_THREAD,)),),  # the flags of every C library's threads
}
"""System calls that are allowed for some arguments."""
_FIRST_NEW = 424
"""Newer calls are answered as by a kernel without them (ENOSYS), so C libraries take older ones: clone3, openat2."""
_ALLOW, _WATCH, _EPERM, _ENOSYS, _KILL = 0x7FFF0000, 0x7FC00000, 0x00050001, 0x00050026, 0x80000000
_LOAD, _AND, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06


def call_filter() -> bytes:
    """Return the filter that allows what a program needs, and refuses everything else.

    Raises:
        SandboxError: the numbers of this machine's system calls are not known.
    """
    column, program = _opening()
    for name, conditions in _CONDITIONS.items():
        if (number := _number(name, column)) is not None:
            checked = b"".join(_one_of(place, bits, values) for place, bits, values in conditions)
            program += _only(number, checked + _instruction(_RETURN, _ALLOW))
    for name in _ALLOWED.split(","):
        if (number := _number(name, column)) is not None:
            program += _only(number, _instruction(_RETURN, _ALLOW))
    program += _instruction(_AT_LEAST, _FIRST_NEW, 0, 1) + _instruction(_RETURN, _ENOSYS)
    return program + _instruction(_RETURN, _EPERM)


def thread_watch() -> bytes:
    """Return a filter that asks another process before a thread is started; `call_filter` comes on top.

    Raises:
        SandboxError: as above.
    """
    column, program = _opening()
    clone = next(name for name in _CONDITIONS if name.startswith("clone "))
    number = _number(clone, column)
    assert number is not None
    flags = _instruction(_LOAD, 16) + _only(_THREAD, _instruction(_RETURN, _WATCH)) + _instruction(_RETURN, _ALLOW)
    return program + _only(number, flags) + _instruction(_RETURN, _ALLOW)


def numbers(machine: str) -> dict[str, int]:
    """Return each call that is allowed at all, by name, with its number on an architecture."""
    found = {name.split()[0]: _number(name, _MACHINES[machine][0]) for name in (*_ALLOWED.split(","), *_CONDITIONS)}
    return {name: number for name, number in found.items() if number is not None}


def _number(entry: str, column: int) -> int | None:
    number = entry.split()[1 + column]
    return None if number == "-" else int(number)


def _opening() -> tuple[int, bytes]:
    """Return the column of this machine, and a filter that ends a process which makes calls of another architecture."""
    if platform.machine() not in _MACHINES:
        raise SandboxError(f"system calls of {platform.machine()} are not known, only of {' and '.join(_MACHINES)}")
    column, machine = _MACHINES[platform.machine()]
    program = _instruction(_LOAD, 4) + _instruction(_EQUAL, machine, 1, 0) + _instruction(_RETURN, _KILL)
    program += _instruction(_LOAD, 0) + _instruction(_AT_LEAST, 0x40000000, 0, 1) + _instruction(_RETURN, _KILL)
    return column, program


def _only(number: int, then: bytes) -> bytes:
    """Return what runs instructions for a call of this number only."""
    return _instruction(_EQUAL, number, 0, len(then) // 8) + then


def _one_of(place: int, bits: int, values: tuple[int, ...]) -> bytes:
    """Return what refuses a call unless these bits of an argument are one of the values."""
    program = _instruction(_LOAD, 16 + 8 * place) + _instruction(_AND, bits)
    for left, value in zip(range(len(values), 0, -1), values, strict=True):
        program += _instruction(_EQUAL, value, left, 0)
    return program + _instruction(_RETURN, _EPERM)


def _instruction(code: int, k: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """Return an instruction of the kernel's packet filter."""
    return struct.pack("=HBBI", code, if_true, if_false, k)
