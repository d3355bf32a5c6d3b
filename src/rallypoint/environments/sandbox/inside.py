"""What runs in a local sandbox: a process that forks one for each program, which gives up all rights, then runs it.

A new interpreter would take ten times as long as a fork of one. The server reads nothing of a job: it hands open files
to the fork and waits for its end, so that no program finds anything of another in its memory. It ends when the process
that asks it does.

Sent as text to an interpreter without packages (`python -I -S -c`), so it imports the standard library only. What the
kernel refuses ends the process before the program has begun. What a program may call is decided in `local.py`.
"""

import _sitebuiltins
import builtins
import contextlib
import ctypes
import errno
import fcntl
import gc
import json
import os
import platform
import resource
import select
import signal
import socket
import struct
import sys
import time
import types

SECCOMP = {"x86_64": 317, "aarch64": 277}
"""The system call that returns a listener, which the C library does not have."""
NEXT_CALL, ANSWER = 0xC0502100, 0xC0182101
"""What a listener is asked for: a call that waits, and its answer."""
MAX_THREADS = 256
"""Threads that a program may start in all. Their memory is the kernel's, which no limit of a process counts."""

libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> int:
    """Return the result of a system call; end the process if the kernel refused it."""
    if result < 0:
        sys.exit(f"sandbox: {what}: {os.strerror(ctypes.get_errno())}")
    return result


def limit(job: dict[str, float]) -> None:
    """Set limits that a process without capabilities cannot raise again."""
    limits = {
        resource.RLIMIT_AS: int(job["memory_mib"]) << 20,
        resource.RLIMIT_FSIZE: int(job["output_kib"]) << 10,
        resource.RLIMIT_CPU: int(job["time_s"]) + 2,  # where its server is late
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
    }
    for kind, most in limits.items():
        resource.setrlimit(kind, (most, most))


def see_only(paths: list[str]) -> None:
    """Allow reading below these paths, and nothing else of any file (Landlock)."""
    abi = check(libc.syscall(444, None, 0, 1), "Landlock")
    rights = (1 << (13 if abi < 2 else 14 if abi < 3 else 15 if abi < 5 else 16)) - 1
    attributes = struct.pack("=QQQ", rights, 3 if abi >= 4 else 0, 3 if abi >= 6 else 0)
    size = 8 if abi < 4 else 16 if abi < 6 else 24
    rules = check(libc.syscall(444, attributes, size, 0), "Landlock's rules")
    read_file, read_folder, execute = 1 << 2, 1 << 3, 1 << 0
    for path in filter(os.path.exists, paths):
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
        allowed = read_file | ((read_folder | execute) if os.path.isdir(path) else execute)
        check(libc.syscall(445, rules, 1, struct.pack("=Qi", allowed, opened), 0), f"a rule for {path}")
        os.close(opened)
    check(libc.syscall(446, rules, 0), "Landlock's restriction")
    os.close(rules)


def call_only(program: bytes, *, listens: bool = False) -> int:
    """Have the kernel refuse system calls; return where it asks about those that it is not to decide.

    A kernel that can ask nobody (before Linux 5.0, or if somebody above listens) refuses these: no threads.
    """
    text = ctypes.create_string_buffer(program)
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(text))
    if listens and (listener := libc.syscall(SECCOMP[platform.machine()], 1, 1 << 3, header)) >= 0:
        return listener
    check(libc.prctl(22, 2, header, 0, 0), "seccomp")
    return os.pipe()[0]  # nothing will ever be asked there


def own_files(size_mib: int) -> None:
    """Put a /tmp over that of the server, where there are namespaces, that holds what /dev/stdin leads to."""
    check(libc.unshare(0x00020000), "a mount namespace")
    given = os.fstat(0).st_size
    # Empty files have no size, and take memory of the kernel: 200,000 can be made in three seconds.
    options = f"size={(size_mib << 10) + given // 1024 + 8}k,nr_inodes={256 * size_mib + 2},mode=0700"
    check(libc.mount(b"tmpfs", b"/tmp", b"tmpfs", 6, options.encode()), "a /tmp of its own")
    os.chdir("/tmp")
    with open("stdin", "wb") as file:
        while given > file.tell() and os.sendfile(file.fileno(), 0, file.tell(), given):
            file.seek(0, os.SEEK_END)


def main() -> None:
    """Serve until nobody asks any more; in a fork, run the program that was asked for as `__main__`."""
    has_namespaces, allowed, watch, *readable = sys.argv[2:]
    check(libc.prctl(38, 1, 0, 0, 0), "no new privileges")
    if readable:
        see_only(readable)
    listener = call_only(bytes.fromhex(watch), listens=True)
    code = serve(socket.socket(fileno=int(sys.argv[1])), listener, bytes.fromhex(allowed), has_namespaces == "yes")
    if code is not None:
        sys.argv[:] = ["program.py"]
        os.environ.clear()
        builtins.exit, builtins.quit = _sitebuiltins.Quitter("exit", "Ctrl-D"), _sitebuiltins.Quitter("quit", "Ctrl-D")
        run(code)


def serve(channel: socket.socket, listener: int, allowed: bytes, has_namespaces: bool) -> str | None:
    """Fork for each job; return its program in the fork, and None in the server when nobody asks any more.

    Consumes: seconds to begin in, of CPU time, and to end in, with the files of a job: what it is, and its standard
    input, output and error. Produces: the exit status, None at a limit, the seconds of CPU time, and whether the
    program has begun.
    """
    server = os.getpid()
    gc.freeze()  # a collection in a fork would copy pages that it shares
    while True:
        asked, files, _, _ = socket.recv_fds(channel, 64, 4)
        if not asked:
            return None
        begins, tell = os.pipe()
        child = os.fork()
        if not child:
            channel.detach()
            return become(server, files, tell, allowed, has_namespaces)
        for file in (*files, tell):
            os.close(file)
        start_s, time_s, wall_s = json.loads(asked)
        channel.send(json.dumps(wait(child, start_s, time_s, wall_s, begins, listener, channel)).encode())
        os.close(begins)


def wait(
    child: int, start_s: float, time_s: float, wall_s: float, begins: int, listener: int, channel: socket.socket
) -> tuple[int | None, float, bool]:
    """Return the status of a process, None if it took too long, its CPU time, and whether it has begun."""
    clock = (~child << 3) | 2  # that of the CPU time of a process, as clock_getcpuclockid makes it
    ended, poll = os.pidfd_open(child), select.poll()
    for file in (ended, begins, listener, channel.fileno()):
        poll.register(file, select.POLLIN)
    latest, has_begun, num_threads, ready = time.monotonic() + start_s, False, 0, set[int]()
    left_s = start_s
    while not ready & {ended, channel.fileno()} and left_s > 0:
        ready = {file for file, _ in poll.poll(max(left_s * 1000, 1))}
        if begins in ready:
            latest, has_begun = time.monotonic() + wall_s, bool(os.read(begins, 1))
            poll.unregister(begins)
        if listener in ready:
            num_threads += 1
            answer(listener, num_threads <= MAX_THREADS)
        left_s = latest - time.monotonic()
        if has_begun:
            left_s = min(left_s, time_s - time.clock_gettime(clock))
    if ended not in ready:
        os.kill(child, signal.SIGKILL)
    os.close(ended)
    _, status, used = os.wait4(child, 0)
    cpu_s = used.ru_utime + used.ru_stime
    return os.waitstatus_to_exitcode(status) if ended in ready and cpu_s < time_s else None, cpu_s, has_begun


def answer(listener: int, may_start: bool) -> None:
    """Let a thread be started, or not."""
    asked = bytearray(80)
    with contextlib.suppress(OSError):  # the program, or a signal to it, took the question back
        fcntl.ioctl(listener, NEXT_CALL, asked)
        (number,) = struct.unpack_from("=Q", asked)
        let_it, refuse = struct.pack("=QqiI", number, 0, 0, 1), struct.pack("=QqiI", number, 0, -errno.EAGAIN, 0)
        try:
            fcntl.ioctl(listener, ANSWER, let_it if may_start else refuse)
        except OSError:  # Linux before 5.5 cannot go on with a call: no threads there
            fcntl.ioctl(listener, ANSWER, refuse)


def become(server: int, files: list[int], tell: int, allowed: bytes, has_namespaces: bool) -> str:
    """Give up every right, in a fork; return the program to run."""
    check(libc.prctl(1, signal.SIGKILL, 0, 0, 0), "the signal at the server's death")
    if os.getppid() != server:
        sys.exit("sandbox: the server has gone")
    for place, file in enumerate(files[1:]):
        os.dup2(file, place)
    with open(files[0], "rb") as file:
        job = json.load(file)
    if has_namespaces:
        own_files(job["files_mib"])
    limit(job)
    version_3 = 0x20080522
    no_capabilities = (struct.pack("=Ii", version_3, 0), struct.pack("=6I", *[0] * 6))
    check(libc.capset(*no_capabilities), "capabilities")
    check(libc.prctl(4, 0, 0, 0, 0), "no dumps")
    call_only(allowed)
    os.write(tell, b"+")
    os.closerange(3, 1024)
    return job["code"]


def run(code: str) -> None:
    """Run the program; an error is shown by the interpreter."""
    module = types.ModuleType("__main__")
    module.__file__ = "program.py"
    sys.modules["__main__"] = module
    exec(compile(code, "program.py", "exec"), vars(module))


if __name__ == "__main__":
    main()
