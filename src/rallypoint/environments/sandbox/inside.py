"""What runs in a local sandbox: a process that forks one for each program, which gives up all rights, then runs it.

A new interpreter would take ten times as long as a fork of one. The server reads nothing of a job: it hands open files
to the fork and waits for its end, so that no program finds anything of another in its memory. It ends when the process
that asks it does.

Sent as text to an interpreter without packages (`python -I -S -c`), so it imports the standard library only. What the
kernel refuses ends the process before the program has begun. System calls by their numbers: Linux on x86_64
and aarch64.
"""

import ctypes
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
import types

CALLS = {  # name: (x86_64, aarch64); None where there is no such call
    "socket": (41, 198),
    "fork": (57, None),
    "vfork": (58, None),
    "execve": (59, 221),
    "execveat": (322, 281),
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "kcmp": (312, 272),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "unshare": (272, 97),
    "setns": (308, 268),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "acct": (163, 89),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "sethostname": (170, 161),
    "setuid": (105, 146),
    "setgid": (106, 144),
    "setreuid": (113, 145),
    "setregid": (114, 143),
    "setresuid": (117, 147),
    "setresgid": (119, 149),
    "setgroups": (116, 159),
    "setfsuid": (122, 151),
    "setfsgid": (123, 152),
    "capset": (126, 91),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "quotactl": (179, 60),
    "syslog": (103, 116),
    "personality": (135, 92),
    "setpriority": (141, 140),  # these reach other processes of the same user
    "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118),
    "sched_setattr": (314, 274),
    "ioprio_set": (251, 30),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "process_mrelease": (448, 448),
    "chmod": (90, None),  # these change files, and Landlock does not know them
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
}
"""System calls that fail with EPERM."""
WITH = {  # name: ((x86_64, aarch64), place of an argument, its values)
    "fcntl": ((72, 25), 1, (8, 10, 15)),  # F_SETOWN, F_SETSIG, F_SETOWN_EX: a pipe would send signals
    "ioctl": ((16, 29), 1, (0x5412, 0x8901, 0x8902)),  # TIOCSTI types on a terminal, the others are as F_SETOWN
}
"""System calls that fail with EPERM for these values of an argument."""
PRLIMIT = (302, 261)
"""Sets the limits of any process of the user; it may be called for this one, 0."""
MACHINES = {"x86_64": (0, 0xC000003E, 56, 126), "aarch64": (1, 0xC00000B7, 220, 91)}
"""Column of CALLS, the kernel's number of the architecture, and the calls `clone` and `capset`."""
CLONE3, CLONE_THREAD = 435, 0x00010000
ALLOW, EPERM, ENOSYS, KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000
LOAD, EQUAL, AT_LEAST, HAS_BITS, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06

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
        resource.RLIMIT_CPU: int(job["time_s"]) + 2,
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


def instruction(code: int, k: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """Return an instruction of the kernel's packet filter."""
    return struct.pack("=HBBI", code, if_true, if_false, k)


def refusals() -> bytes:
    """Return a filter of system calls that start or reach processes, reach the network, or change rights."""
    column, machine, clone, _ = MACHINES[platform.machine()]
    program = [
        instruction(LOAD, 4),
        instruction(EQUAL, machine, 1, 0),
        instruction(RETURN, KILL),
        instruction(LOAD, 0),
        instruction(AT_LEAST, 0x40000000, 0, 1),
        instruction(RETURN, KILL),
        instruction(EQUAL, CLONE3, 0, 1),
        instruction(RETURN, ENOSYS),  # the C library then asks for `clone`, whose flags can be seen
        instruction(EQUAL, clone, 0, 4),
        instruction(LOAD, 16),
        instruction(HAS_BITS, CLONE_THREAD, 0, 1),
        instruction(RETURN, ALLOW),
        instruction(RETURN, EPERM),
    ]
    program += [
        instruction(EQUAL, PRLIMIT[column], 0, 4),
        instruction(LOAD, 16),
        instruction(EQUAL, 0, 0, 1),
        instruction(RETURN, ALLOW),
        instruction(RETURN, EPERM),
    ]
    for numbers, place, values in WITH.values():
        program += [instruction(EQUAL, numbers[column], 0, 2 * len(values) + 2), instruction(LOAD, 16 + 8 * place)]
        for value in values:
            program += [instruction(EQUAL, value, 0, 1), instruction(RETURN, EPERM)]
        program.append(instruction(RETURN, ALLOW))
    for numbers in CALLS.values():
        if numbers[column] is not None:
            program += [instruction(EQUAL, numbers[column], 0, 1), instruction(RETURN, EPERM)]
    program.append(instruction(RETURN, ALLOW))
    return b"".join(program)


def call_only(refused: bytes) -> None:
    """Have the kernel refuse system calls."""
    text = ctypes.create_string_buffer(refused)
    header = struct.pack("HxxxxxxP", len(refused) // len(instruction(0, 0)), ctypes.addressof(text))
    check(libc.prctl(22, 2, header, 0, 0), "seccomp")


def own_files(size_mib: int) -> None:
    """Put an empty /tmp over that of the server, where there are namespaces."""
    check(libc.unshare(0x00020000), "a mount namespace")
    # Empty files have no size, and take memory of the kernel: 200,000 can be made in three seconds.
    options = f"size={size_mib}m,nr_inodes={256 * size_mib},mode=0700"
    check(libc.mount(b"tmpfs", b"/tmp", b"tmpfs", 6, options.encode()), "a /tmp of its own")
    os.chdir("/tmp")


def main() -> None:
    """Serve until nobody asks any more; in a fork, run the program that was asked for as `__main__`."""
    has_namespaces, *readable = sys.argv[2:]
    check(libc.prctl(38, 1, 0, 0, 0), "no new privileges")
    if readable:
        see_only(readable)
    code = serve(socket.socket(fileno=int(sys.argv[1])), refusals(), has_namespaces == "yes")
    if code is not None:
        sys.argv[:] = ["program.py"]
        os.environ.clear()
        run(code)


def serve(channel: socket.socket, refused: bytes, has_namespaces: bool) -> str | None:
    """Fork for each job; return its program in the fork, and None in the server when nobody asks any more.

    Consumes: a deadline in seconds, with the files of a job: what it is, and its standard input, output and error.
    Produces: the exit status, None at the deadline, and whether the program has begun.
    """
    server = os.getpid()
    gc.freeze()  # a collection in a fork would copy pages that it shares
    while True:
        asked, files, _, _ = socket.recv_fds(channel, 64, 4)
        if not asked:
            return None
        has_begun, tell = os.pipe()
        child = os.fork()
        if not child:
            channel.detach()
            return become(server, files, tell, refused, has_namespaces)
        for file in (*files, tell):
            os.close(file)
        status = wait(child, float(asked), channel)
        channel.send(json.dumps([status, bool(os.read(has_begun, 1))]).encode())
        os.close(has_begun)


def wait(child: int, time_s: float, channel: socket.socket) -> int | None:
    """Return the status of a process; None if it had to be ended."""
    ended = os.pidfd_open(child)
    found = select.select([ended, channel], [], [], time_s)[0]
    os.close(ended)
    if ended not in found:
        os.kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return status if ended in found else None


def become(server: int, files: list[int], tell: int, refused: bytes, has_namespaces: bool) -> str:
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
    check(libc.syscall(MACHINES[platform.machine()][3], *no_capabilities), "capabilities")
    check(libc.prctl(4, 0, 0, 0, 0), "no dumps")
    call_only(refused)
    os.write(tell, b"+")
    os.closerange(3, 1024)
    return job["code"]


def run(code: str) -> None:
    """Run the program; an error is shown by the interpreter."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    exec(compile(code, "program.py", "exec"), vars(module))


if __name__ == "__main__":
    main()
