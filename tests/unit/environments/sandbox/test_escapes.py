"""Fifty ways out of a sandbox and around a grader, tried in every tier that this machine has."""

import contextlib
import json
import os
import platform
import re
import select
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from rallypoint.environments.sandbox import Limits, Ran, SandboxError, open_sandbox
from rallypoint.environments.sandbox.choose import Remote, first_that_holds, local_tiers, probe
from rallypoint.environments.sandbox.local import Interpreter, Landlock
from rallypoint.environments.shipped.code import run_tests

SECRET = "a-secret-of-the-parent"
TIME_S = 60.0
"""Seconds that a program may take where its end is not what is tested."""


FAILS = {
    "network": "import socket; socket.create_connection(('127.0.0.1', PORT), timeout=5)",
    "datagrams": "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', 53))",
    "unix sockets": "import socket; socket.socket(socket.AF_UNIX)",
    "a fork": "import os; os.fork()",
    "a fork bomb": "import os\nwhile True: os.fork()",
    "a daemon": "import subprocess; subprocess.Popen(['sleep', '600'], start_new_session=True)",
    "another program": "import os; os.execv('/bin/sh', ['sh', '-c', 'echo out'])",
    "memory": "x = bytearray(4 * 2**30)",
    "memory in small pieces": "x = []\nwhile True: x.append(bytearray(2**20))",
    "memory behind a descriptor": "import os; os.memfd_create('x')",
    "a file elsewhere": "open('/var/tmp/rallypoint-escape', 'w')",
    "a file of the system": "open('/etc/passwd').read()",
    "the answers on the parent's disk": "open('ANSWERS').read()",
    "a symlink to them": "import os; os.symlink('ANSWERS', '/tmp/link'); open('/tmp/link').read()",
    "the parent's memory": "open('/proc/PARENT/mem', 'rb')",
    "the parent's environment": "open('/proc/PARENT/environ').read()",
    "its server's memory": "import os; open(f'/proc/{os.getppid()}/mem', 'rb')",
    "the rights of a file": "import os; os.chmod('ANSWERS', 0o777)",
    "a signal to the parent": "import os; os.kill(PARENT, 0)",
    "a signal to its own parent": "import os, signal; os.kill(os.getppid() or 1, signal.SIGTERM)",
    "a higher limit": "import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1)); x = bytearray(4 * 2**30)",
    "emptying a file by name": "import os; os.truncate('WRITABLE', 0)",
    "emptying a file that is read": "import os; os.open('WRITABLE', os.O_RDONLY | os.O_TRUNC)",
    "emptying a file that is neither read nor written": "import os; os.open('WRITABLE', 3 | os.O_TRUNC)",
    "a file that is neither read nor written": "import os; os.open('/usr/lib/os-release', 3)",
    "datagrams to a path": "import socket\n"
    "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b'x', '/dev/log')",
    "datagrams to a name": "import socket\n"
    "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b'x', '\\0name')",
    "packets to a name": "import socket; socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)",
    "a name for a stream": "import socket; socket.socketpair()[0].bind('\\0name')",
    "sending descriptors": "import socket; socket.send_fds(socket.socketpair()[0], [b'x'], [1])",
    "a lease on a file": "import fcntl; fcntl.fcntl(open('/usr/lib/os-release'), fcntl.F_SETLEASE, fcntl.F_RDLCK)",
    "attributes of a file": "import os; os.removexattr('WRITABLE', 'user.x')",
    "a pipe that sends signals": "import fcntl, os; fcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, PARENT)",
    "another user": "import os; os.setuid(0); open('/etc/shadow')",
}
NAMED = {
    "ptrace": "ctypes.CDLL(None).ptrace(16, PARENT, 0, 0)",
    "a new namespace": "ctypes.CDLL(None).unshare(0x10000000)",
    "the parent's limits": "ctypes.CDLL(None).prlimit(PARENT, 7, (ctypes.c_ulong * 2)(4, 4), None)",
    "the parent's priority": "ctypes.CDLL(None).setpriority(0, PARENT, 19)",
    "the parent's cores": "ctypes.CDLL(None).sched_setaffinity(PARENT, 8, (ctypes.c_ulong * 1)(1))",
    "a mount": "ctypes.CDLL(None).mount(b'none', b'/tmp', b'tmpfs', 0, None)",
    "reading another process": "ctypes.CDLL(None).process_vm_readv(PARENT, 0, 0, 0, 0, 0)",
    "a life after its server": "ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)",
    "being traced": "ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)",
    "kernel memory for reads": "ctypes.CDLL(None).syscall(IO_SETUP, 60000, ctypes.byref(ctypes.c_ulong()))",
    "watching a folder": "ctypes.CDLL(None).inotify_add_watch(ctypes.CDLL(None).inotify_init(), b'/tmp', 0xFFF)",
    "attributes of a file by its name": "ctypes.CDLL(None).lremovexattr(b'ANSWERS', b'user.x')",
    "attributes of an open file": "ctypes.CDLL(None).fremovexattr(1, b'user.x')",
    "a ring of calls": "ctypes.CDLL(None).syscall(425, 8, ctypes.create_string_buffer(120))",
    "a process by clone3": "ctypes.CDLL(None).syscall(435, ctypes.create_string_buffer(88), 88)",
    "a call that no kernel has yet": "ctypes.CDLL(None).syscall(999)",
    "a call of the 32-bit kind": "ctypes.CDLL(None).syscall(0x40000000 + 57)",
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    path = tmp_path_factory.mktemp("answers") / "answers.json"
    path.write_text(SECRET)
    path.chmod(0o644)
    path.with_name("writable").write_text(SECRET)
    path.with_name("writable").chmod(0o666)
    for folder in list(path.parents)[:2]:  # so that another user meets the sandbox, not the folders' rights
        folder.chmod(0o755)
    return path


IO_SETUP = {"x86_64": 206, "aarch64": 0}[platform.machine()]


def filled(text, answers, port=9):
    text = text.replace("ANSWERS", str(answers)).replace("WRITABLE", str(answers.with_name("writable")))
    return text.replace("PARENT", str(os.getpid())).replace("PORT", str(port)).replace("IO_SETUP", str(IO_SETUP))


@pytest.mark.parametrize("what", FAILS)
def test_what_would_lead_out_fails(sandbox, answers, what):
    ran = sandbox.run(filled(FAILS[what], answers), limits=Limits(time_s=TIME_S, memory_mib=256))
    assert ran.status == "failed", ran
    assert re.search(r"(OSError|PermissionError|FileNotFoundError|MemoryError|ValueError)[^\n]*\s*$", ran.stderr), ran
    assert SECRET not in ran.stdout + ran.stderr
    assert not Path("/var/tmp/rallypoint-escape").exists()
    assert answers.with_name("writable").read_text() == SECRET


@pytest.mark.parametrize("what", NAMED)
def test_calls_of_the_kernel_that_would_lead_out_are_refused(sandbox, answers, what):
    program = f"import ctypes, sys\nsys.exit(0 if {filled(NAMED[what], answers)} == -1 else 7)"
    ran = sandbox.run(program, limits=Limits(time_s=TIME_S))
    assert ran.exit_status in (0, -signal.SIGSYS, 128 + signal.SIGSYS), ran


def test_the_environment_is_empty_and_nothing_of_the_parent_is_open(sandbox, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    program = (
        "import os, json\nfound = []\nfor fd in range(3, 60):\n"
        "    try: os.fstat(fd); found.append(fd)\n    except OSError: pass\n"
        "print(json.dumps([dict(os.environ), found]))"
    )
    assert json.loads(sandbox.run(program, limits=Limits(time_s=TIME_S)).stdout) == [{}, []]


def test_a_gigabyte_of_output_is_cut_and_costs_no_memory_here(sandbox):
    program = "import sys\nwhile True: sys.stdout.write('x' * 2**20)"
    ran = sandbox.run(program, limits=Limits(time_s=TIME_S, output_kib=64))
    assert (ran.status, len(ran.stdout)) == ("failed", 2**16)
    assert "File too large" in ran.stderr


def test_disk_is_limited(sandbox):
    program = (
        "import itertools\ntry:\n    for n in itertools.count():\n"
        "        open(f'/tmp/{n}', 'wb').write(bytes(2**17))\n"
        "except OSError as error:\n    print(n)"
    )
    ran = sandbox.run(program, limits=Limits(time_s=TIME_S, files_mib=4))
    assert ran.status == "ok", ran
    assert int(ran.stdout) <= 32, "of 128 KiB in 4 MiB, or none at all"
    empty = sandbox.run(program.replace("bytes(2**17)", "b''"), limits=Limits(time_s=TIME_S, files_mib=4))
    assert int(empty.stdout) <= 1024, "of nothing: 256 a MiB"


def test_a_program_that_does_not_end_is_ended(sandbox):
    for program in ("while True: pass", "import time; time.sleep(600)", "import signal\nsignal.pause()"):
        ran = sandbox.run(program, limits=Limits(time_s=0.2, wall_s=0.4 if "while" not in program else 600.0))
        assert ran.status == "timeout"
        assert (ran.cpu_s >= 0.2) == ("while" in program)


def test_the_time_of_a_program_is_that_of_its_work_however_busy_the_machine_is(sandbox):
    ran = sandbox.run("import time; time.sleep(0.7); print(1)", limits=Limits(time_s=0.5))
    assert (ran.status, ran.stdout) == ("ok", "1\n"), ran
    spins = "import hashlib, threading\nfor _ in range(4):\n"
    spins += "    threading.Thread(target=lambda: [hashlib.sha256(bytes(2**20)) for _ in range(10**6)]).start()"
    assert sandbox.run(spins, limits=Limits(time_s=0.3)).status == "timeout", "threads count together"


def test_threads_work_and_end_with_the_program(sandbox):
    program = (
        "import threading, time\ndone = []\nthread = threading.Thread(target=lambda: done.append(1))\n"
        "thread.start(); thread.join(); print(done)\n"
        "threading.Thread(target=time.sleep, args=(600,), daemon=True).start()"
    )
    assert sandbox.run(program, limits=Limits(time_s=TIME_S)).stdout == "[1]\n"


SMALL_THREADS = """
import threading, time
threading.stack_size(2**15)
started = 0
try:
    while started < 1000:
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
        started += 1
except RuntimeError:
    pass
print(started)
"""
CLONE_LOOP = """
import ctypes, mmap, os
code = bytes.fromhex(
    "bba00f0000"        # ebx = 4000
    "b838000000"        # eax = clone
    "bf000f3d00"        # the flags of a thread
    "31f631d24d31d24d31c00f05"  # no stack of its own
    "85c0740b7806"      # the new thread: pause; refused: out
    "ffcb75e09090"
    "89d8c3"
    "b8220000000f05ebf7"
)
page = mmap.mmap(-1, 4096, prot=7)
page.write(code)
left = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
print(4000 - left, flush=True)
os._exit(0)  # before the page is freed, in which the threads are
"""


@pytest.mark.parametrize("bomb", [SMALL_THREADS, CLONE_LOOP], ids=["threads", "calls"])
def test_a_thread_bomb_ends_after_256_also_for_root(sandbox, bomb):
    if bomb == CLONE_LOOP and platform.machine() != "x86_64":
        pytest.skip("machine code for x86_64")
    ran = sandbox.run(bomb, limits=Limits(time_s=TIME_S))
    assert (ran.status, ran.stdout) == ("ok", "256\n"), ran


def test_a_program_that_never_began_is_no_wrong_program(sandbox):
    with pytest.raises(SandboxError, match="could not be started in 0 s: the machine is too busy"):
        sandbox.run("print(1)", limits=Limits(start_s=0.0))
    assert sandbox.run("print(1)", limits=Limits(time_s=TIME_S)).stdout == "1\n"


def test_nothing_of_a_program_is_there_for_the_next(sandbox):
    leave = (
        "import builtins, json, os, sys\nsys.path.append(sys.argv[0]); json.mark = builtins.mark = 'left behind'\n"
        "try: open('/tmp/mark', 'w').write('left behind')\nexcept OSError: pass\nprint(input())"
    )
    look = (
        "import builtins, json, os\n"
        "print(vars(json).get('mark'), vars(builtins).get('mark'), os.path.exists('/tmp/mark'))"
    )
    assert sandbox.run(leave, stdin="of one program", limits=Limits(time_s=TIME_S)).stdout == "of one program\n"
    assert sandbox.run(look, limits=Limits(time_s=TIME_S)).stdout == "None None False\n"


def test_programs_run_at_once_and_a_server_that_was_ended_is_replaced(sandbox):
    with ThreadPoolExecutor(2) as threads:
        asked = [f"print({n})" for n in range(6)]
        found = list(threads.map(lambda code: sandbox.run(code, limits=Limits(time_s=TIME_S)).stdout, asked))
    assert found == [f"{n}\n" for n in range(6)]
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    servers = [
        int(pid) for pid in children.read_text().split() if b"MAX_THREADS" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    assert servers
    for pid in servers:
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert sandbox.run("print(7)", limits=Limits(time_s=TIME_S)).stdout == "7\n"


ASKS = """
import sys
from rallypoint.environments.sandbox.choose import local_tiers
from rallypoint.environments.sandbox import Limits
tier = next(one for one in local_tiers() if repr(one) == sys.argv[1])
print(tier.run("import os; print(os.getppid())").status, flush=True)
tier.run("import time; time.sleep(600)", limits=Limits(time_s=600))
"""


def test_programs_end_with_the_process_that_asked_for_them_however_it_ends(sandbox):
    with subprocess.Popen([sys.executable, "-c", ASKS, repr(sandbox)], stdout=subprocess.PIPE, text=True) as asking:
        assert asking.stdout is not None
        assert asking.stdout.readline() == "ok\n"
        family = [asking.pid]
        for pid in family:
            with contextlib.suppress(OSError):
                family += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        assert len(family) > 1
        opened = [os.pidfd_open(pid) for pid in family[1:]]
        asking.kill()
    for each in opened:
        assert select.select([each], [], [], 60.0)[0], "a server or a program outlived who asked"
        os.close(each)


ADD = ["assert add(1, 2) == 3", "assert add(2, 2) == 4"]
READ = {"inputs": ["1 2", "2 2"], "outputs": ["3", "4"]}
CLOSE = [
    "assert math.isclose(add(1, 2), 3.0)",
    "import math",
    "assert isclose(4.0, add(2, 2), rel_tol=0.1, abs_tol=0.1)",
]
CHEATS = {
    "sys.exit(0)": "import sys\nsys.exit(0)",
    "os._exit(0) before the tests": "import os\nos._exit(0)",
    "an __eq__ that is always true": "class Yes:\n    __eq__ = lambda *_: True\n    __repr__ = lambda _: 'Yes()'\n"
    "def add(a, b): return Yes()",
    "an int that is equal to all": "class Yes(int):\n    __eq__ = lambda *_: True\ndef add(a, b): return Yes(9)",
    "patching json": 'import json\njson.dumps = lambda *_, **__: \'["True", "True"]\'\ndef add(a, b): return 0',
    "patching unittest": "import unittest\nunittest.TestCase.assertEqual = lambda *_: None\ndef add(a, b): return 0",
    "patching builtins": "import builtins\nbuiltins.repr = lambda _: 'True'\ndef add(a, b): return 0",
    "an early answer": "print('PASSED 2/2')\nimport os; os._exit(0)",
    "looking for the answers": "import gc, sys\ndef add(a, b):\n"
    "    return next((x for x in gc.get_objects() if isinstance(x, dict) and 'outputs' in x), 0)",
    "raising": "def add(a, b): raise SystemExit(0)",
    "no program": "I cannot do that.",
    "equal to everything": "class Yes:\n    __eq__ = __ne__ = __lt__ = __gt__ = lambda *_: True\n"
    "    __sub__ = __abs__ = lambda *_: 0\ndef add(a, b): return Yes()",
    "patching what compares": "import builtins, math\nmath.isclose = builtins.isinstance = lambda *_, **__: True\n"
    "isinstance = abs = all = math.isclose\ndef add(a, b): return 0",
    "writing results itself": "import sys\nvars(sys.modules['__main__']).update(written=lambda _: 'True')\n"
    "def add(a, b): return 0",
    "a huge number": "def add(a, b): return 10 ** (10 ** 6)",
    "deep nesting": "def add(a, b):\n    class X:\n        __repr__ = lambda _: '[' * 10**5\n    return X()",
}


@pytest.mark.parametrize("what", CHEATS)
def test_a_program_that_works_on_its_grader_is_wrong(sandbox, what):
    for tests in (ADD, READ, CLOSE):
        assert run_tests(sandbox, f"```python\n{CHEATS[what]}\n```", tests, Limits(time_s=TIME_S)) == [False, False]


JUDGES_ITSELF = [
    "assert isinstance(add(1, 2), int)",
    "assert isinstance(add(1, 2), int) == True",
    "assert [isinstance(add(1, 2), int)] == [True]",
    "assert not add(1, 2) != 3",
    "assert (add(1, 2) == 3) == True",
    "assert (add(1, 2) in [3]) == True",
    "assert (abs(add(1, 2) - 3) < 1e-6) is True",
    "assert abs(add(1, 2) - 3) == 0",
    "assert (add(1, 2) == 3 and 1) == 1",
    "assert (1 if add(1, 2) == 3 else 0) == 1",
    "assert [x - 3 for x in [add(1, 2)]] == [0]",
    "assert add(1, 2) == 3 or False",
    "assert add('a', 'b').startswith('ab')",
    "assert math.isclose(add(1, 2), 3) == True",
    "assert all(add([True], []))",
    "assert any(map(add, [1], [2]))",
    "assert callable(add)",
    "assert operator.eq(add(1, 2), 3)",
    "assert True",
    "def check(add): assert add(1, 2) == 3",
    "add = print",
]


@pytest.mark.parametrize("line", JUDGES_ITSELF)
def test_an_assert_in_which_a_program_would_judge_itself_is_refused(line):
    with pytest.raises(ValueError, match=r"expected.*; what a program compares itself cannot be trusted"):
        run_tests(Slow(), "x", [line], Limits())


def test_a_right_program_is_right(sandbox):
    assert run_tests(sandbox, "def add(a, b): return a + b", CLOSE, Limits(time_s=TIME_S)) == [True, True]
    function, program = "```\ndef add(a, b): return a + b\n```", "a, b = map(int, input().split())\nprint(a + b)"
    assert run_tests(sandbox, function, ADD, Limits(time_s=TIME_S)) == [True, True]
    assert run_tests(sandbox, program, READ, Limits(time_s=TIME_S)) == [True, True]
    by_name = {"inputs": [[1, 2], "2\n5"], "outputs": [3, "8"], "fn_name": "add"}
    assert run_tests(sandbox, function, by_name, Limits(time_s=TIME_S)) == [True, False]


class Slow:
    """A sandbox whose programs take a second each, and do not end if they are asked for 0."""

    name = "slow"

    def __init__(self):
        self.asked = []

    def run(self, code, *, stdin="", limits=None):
        self.asked.append(stdin)
        return Ran("timeout", "", "", None) if stdin == "0" else Ran("ok", stdin, "", 0, 1.0)


def test_a_program_that_does_not_end_fails_what_is_left_and_a_slow_one_what_has_not_begun():
    tests = {"inputs": ["1", "0", "2"], "outputs": ["1", "0", "2"]}
    sandbox = Slow()
    assert run_tests(sandbox, "x", tests, Limits()) == [True, False, False]
    assert sandbox.asked == ["1", "0"]
    tests = {"inputs": ["1", "2", "3"], "outputs": ["1", "2", "3"]}
    assert run_tests(Slow(), "x", tests, Limits(), total_s=1.5) == [True, True, False]
    assert run_tests(Slow(), "x", tests, Limits(), total_s=3.5) == [True, True, True]


class Server(ThreadingHTTPServer):
    busy = 0
    """Requests that it answers with 503 before it serves."""


class Service(BaseHTTPRequestHandler):
    """Answers as SandboxFusion does; it runs nothing."""

    def do_POST(self):
        assert isinstance(self.server, Server)
        if self.server.busy:
            self.server.busy -= 1
            self.send_error(503)
            return
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/run_code"
        assert asked["language"] == "python"
        key = self.headers["Authorization"]
        results = {
            "print(6 * 7)": {"status": "Finished", "return_code": 0, "stdout": "42\n", "stderr": ""},
            "limits": {"status": "Finished", "return_code": 0, "stdout": f"{asked['memory_limit_MB']} {key}"},
            "hang": {"status": "TimeLimitExceeded", "return_code": None, "stdout": "", "stderr": None},
        }
        found = results.get(asked["code"], {"status": "Finished", "return_code": 1, "stdout": asked["stdin"]})
        status = "SandboxError" if asked["code"] == "broken" else "Success"
        answer = json.dumps({"status": status, "message": "no place", "run_result": found}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format, *args):  # noqa: A002
        pass


@pytest.fixture
def service():
    server = Server(("127.0.0.1", 0), Service)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def address(service):
    return f"http://127.0.0.1:{service.server_port}"


def test_a_remote_sandbox_speaks_the_protocol_of_sandboxfusion(service):
    remote = open_sandbox(address(service))
    assert isinstance(remote, Remote)
    assert remote.run("hang").status == "timeout"
    ran = remote.run("x", stdin="given")
    assert (ran.status, ran.stdout, ran.exit_status) == ("failed", "given", 1)
    with pytest.raises(SandboxError, match="no place"):
        remote.run("broken")
    assert remote.run("limits", limits=Limits(memory_mib=64)).stdout == "64 None"


def test_a_remote_sandbox_is_given_the_key_of_a_variable(service, monkeypatch):
    with pytest.raises(SandboxError, match="the environment variable SANDBOX_KEY is not set"):
        open_sandbox(address(service), "SANDBOX_KEY")
    monkeypatch.setenv("SANDBOX_KEY", SECRET)
    remote = open_sandbox(address(service), "SANDBOX_KEY")
    assert remote.run("limits").stdout == f"512 Bearer {SECRET}"
    assert SECRET not in repr(remote)


def test_a_remote_sandbox_that_is_busy_is_asked_again(service):
    slept = []
    remote = Remote(address(service), pauses_s=(1.0, 2.0), sleep=slept.append)
    service.busy = 2
    assert remote.run("print(6 * 7)").stdout == "42\n"
    assert slept == [1.0, 2.0]
    service.busy = 3
    with pytest.raises(SandboxError, match="503"):
        remote.run("print(6 * 7)")
    with pytest.raises(SandboxError, match="no place"):
        remote.run("broken")
    assert slept == [1.0, 2.0] * 2, "not after an answer"


def test_a_remote_sandbox_that_is_not_there_is_an_error():
    with pytest.raises(SandboxError, match="refused"):
        open_sandbox("http://127.0.0.1:9")


class Leaky:
    """A sandbox that holds nothing."""

    name = "leaky"

    def run(self, code, *, stdin="", limits=None):
        import subprocess
        import sys

        from rallypoint.environments.sandbox import Ran

        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        return Ran("ok" if not done.returncode else "failed", done.stdout, done.stderr, done.returncode)


def test_a_sandbox_that_lets_a_program_out_is_not_used():
    problem = str(probe(Leaky()))
    assert problem.startswith("it does not hold ")
    assert {"files", "writing", "processes", "datagrams", "truncation"} <= set(re.findall(r"\w+", problem))
    Path("/var/tmp/rallypoint-probe").unlink(missing_ok=True)


class Broken:
    """A sandbox that runs nothing."""

    name = "broken"

    def run(self, code, *, stdin="", limits=None):
        raise SandboxError("no such kernel")


def test_without_a_sandbox_that_holds_the_error_says_what_each_lacked():
    with pytest.raises(SandboxError) as raised:
        first_that_holds([Broken(), Broken()], "linux")
    problem = str(raised.value)
    assert problem.startswith("model-written code is run in a sandbox only, and none works here. Install bubblewrap")
    assert "\n  - Broken: no such kernel\n  - Broken: no such kernel" in problem
    assert list(local_tiers("darwin")) == []
    with pytest.raises(SandboxError, match="they need Linux, and this is darwin"):
        first_that_holds(local_tiers("darwin"), "darwin")


def test_a_python_without_files_in_memory_has_no_sandbox(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    assert "no files in memory" in str(probe(Landlock(Interpreter("/no/such/python", ()), None)))
