"""What the filter of system calls refuses alone, and what ordinary programs need of it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from rallypoint.environments.sandbox import Limits, local

HEADERS = {
    "x86_64": "/usr/include/x86_64-linux-gnu/asm/unistd_64.h",
    "aarch64": "/usr/include/asm-generic/unistd.h",
}


@pytest.mark.parametrize("machine", HEADERS)
def test_the_numbers_of_system_calls_are_those_of_the_kernel(machine):
    header = Path(HEADERS[machine])
    if not header.exists():
        pytest.skip(f"{header} is not here")
    found = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", header.read_text())
    kernels = {name: int(number) for name, number in found}
    kernels |= {"newfstatat": kernels["fstatat"]} if "fstatat" in kernels else {}
    allowed = {entry.split()[0]: local._number(entry, local._MACHINES[machine][0])
               for entry in (*local._ALLOWED, *local._CONDITIONS)}  # fmt: skip
    wrong = {name: (number, kernels.get(name)) for name, number in allowed.items() if number is not None}
    assert {name: both for name, both in wrong.items() if both[0] != both[1]} == {}


ALONE = """
import contextlib, os, socket, sys
from rallypoint.environments.sandbox.local import call_filter
from rallypoint.environments.sandbox.inside import call_only, libc
libc.prctl(38, 1, 0, 0, 0)
call_only(call_filter())
path = sys.argv[1]
for attempt in (
    lambda: os.truncate(path, 0),
    lambda: os.open(path, os.O_TRUNC),
    lambda: os.open(path, 3),
    lambda: os.open(path, 3 | os.O_TRUNC),
    lambda: os.chmod(path, 0o777),
    lambda: os.utime(path),
    lambda: os.setxattr(path, "user.x", b""),
    lambda: os.mkfifo(path + "-fifo"),
    lambda: socket.socket(socket.AF_UNIX),
    lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM),
    os.fork,
    lambda: os.kill(os.getpid(), 0),
    lambda: os.pidfd_open(os.getpid()),
    lambda: os.setpriority(os.PRIO_PROCESS, 0, 19),
    lambda: os.memfd_create("x"),
    lambda: os.execv(sys.executable, [sys.executable, "-c", "print('another program')"]),
):
    with contextlib.suppress(OSError):
        print("not refused:", attempt())
with open(path, "r+") as file:
    print(file.read())
"""


def test_the_filter_alone_holds_what_landlock_learned_late(tmp_path):
    (tmp_path / "kept").write_text("kept")
    done = subprocess.run(
        [sys.executable, "-c", ALONE, str(tmp_path / "kept")], capture_output=True, text=True, check=False
    )
    assert done.stdout == "kept\n", done


ORDINARY = {
    "abc": "import abc\nclass A(abc.ABC): pass\nprint(A())",
    "argparse": "import argparse; print(argparse.ArgumentParser().parse_args([]))",
    "array": "import array; print(array.array('i', [1, 2]))",
    "asyncio": "import asyncio\nasync def f(): await asyncio.sleep(0.001); return 7\n"
    "async def all(): return await asyncio.gather(f(), f())\nprint(asyncio.run(all()))",
    "asyncio with threads": "import asyncio; print(asyncio.run(asyncio.to_thread(sum, [1, 2])))",
    "asyncio with a queue": "import asyncio\nasync def f():\n    q = asyncio.Queue(); await q.put(1)\n"
    "    print(await asyncio.wait_for(q.get(), 1))\nasyncio.run(f())",
    "base64": "import base64; print(base64.b64encode(b'x'))",
    "bisect": "import bisect; print(bisect.bisect([1, 3], 2))",
    "buffered output": "import sys; sys.stdout.buffer.write(b'x' * 100_000)",
    "calendar": "import calendar; print(calendar.month(2026, 1))",
    "classes": "class A:\n    __slots__ = ('x',)\na = A(); a.x = 1; print(a.x)",
    "collections": "import collections; print(collections.Counter('abca'))",
    "concurrent.futures": "from concurrent.futures import ThreadPoolExecutor\n"
    "with ThreadPoolExecutor(4) as pool: print(list(pool.map(abs, range(-9, 0))))",
    "contextlib": "import contextlib\nwith contextlib.suppress(KeyError): {}[0]\nprint(1)",
    "standard input by its name": "print(open('/dev/stdin').read())",
    "standard input by its name, in bytes": "print(open('/dev/stdin', 'rb').read())",
    "copy": "import copy; print(copy.deepcopy([[1]]))",
    "csv": "import csv, io; print(list(csv.reader(io.StringIO('a,b'))))",
    "ctypes": "import ctypes; print(ctypes.CDLL(None).abs(-3))",
    "dataclasses": "import dataclasses\n@dataclasses.dataclass\nclass A: x: int = 1\nprint(A())",
    "datetime": "import datetime; print(datetime.datetime.now().year)",
    "decimal": "import decimal; print(decimal.Decimal(1) / 7)",
    "difflib": "import difflib; print(list(difflib.ndiff(['a'], ['b'])))",
    "enum": "import enum\nclass A(enum.Enum): X = 1\nprint(A.X)",
    "files of descriptors": "import os; r, w = os.pipe(); os.write(w, b'x'); print(os.read(r, 1), os.fstat(0).st_size)",
    "files of their own": "import sys; print(open(sys.modules['os'].__file__).readline())",
    "folders": "import os; print(len(os.listdir(os.path.dirname(os.__file__))) > 10, os.getcwd())",
    "fractions": "import fractions; print(fractions.Fraction(1, 3) + 1)",
    "functools": "import functools\n@functools.cache\ndef f(n): return n if n < 2 else f(n - 1) + f(n - 2)\n"
    "print(f(80))",
    "generators": "print(sum(x * x for x in range(1000)))",
    "getpass": "import os; print(os.getuid() >= 0, os.getpid() > 0)",
    "glob": "import glob, os; print(len(glob.glob(os.path.dirname(os.__file__) + '/js*')))",
    "gzip": "import gzip; print(gzip.decompress(gzip.compress(b'x')))",
    "hashlib": "import hashlib; print(hashlib.sha256(b'x').hexdigest())",
    "heapq": "import heapq; h = []; heapq.heappush(h, 1); print(h)",
    "input": "import sys; print(input(), sys.stdin.read())",
    "input by number": "import os; print(os.read(0, 100))",
    "inspect": "import inspect; print(inspect.signature(lambda x: x))",
    "io": "import io; print(io.StringIO('x').read(), sum(map(int, open(0).read().split())))",
    "isatty": "import sys, os; print(sys.stdout.isatty(), os.isatty(0))",
    "itertools": "import itertools; print(list(itertools.permutations([1, 2, 3])))",
    "json": "import json; print(json.loads(json.dumps({'a': [1, None]})))",
    "locale": "import locale; print(locale.getlocale())",
    "logging": "import logging; logging.warning('x')",
    "lzma": "import bz2, zlib; print(bz2.decompress(bz2.compress(b'x')), zlib.crc32(b'x'))",
    "mmap": "import mmap; m = mmap.mmap(-1, 4096); m[:2] = b'ab'; print(m[:2])",
    "numbers": "print(2 ** 1000 % (10**9 + 7), divmod(7, 2), round(2.5))",
    "operator": "import operator; print(operator.itemgetter(0)([1]))",
    "pathlib": "import pathlib, os; print(pathlib.Path(os.__file__).name)",
    "pickle": "import pickle; print(pickle.loads(pickle.dumps([1])))",
    "platform": "import platform; print(platform.system())",
    "pprint": "import pprint; pprint.pprint({'a': 1})",
    "queue": "import queue, threading\nq = queue.Queue()\nthreading.Thread(target=q.put, args=(1,)).start()\n"
    "print(q.get(timeout=60))",
    "random": "import random; random.seed(1); print(random.random(), random.SystemRandom().random() < 1)",
    "re": "import re; print(re.findall(r'\\d+', '1 a 22'))",
    "recursion": "import sys, threading\nsys.setrecursionlimit(10**5)\nthreading.stack_size(2**26)\n"
    "def f(n): return n and f(n - 1)\nt = threading.Thread(target=lambda: print(f(50_000))); t.start(); t.join()",
    "resource": "import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])\n"
    "resource.setrlimit(resource.RLIMIT_STACK, (2**23, 2**23)); print(resource.getrusage(0).ru_maxrss > 0)",
    "secrets": "import secrets; print(len(secrets.token_hex()))",
    "select": "import select, os; r, w = os.pipe(); os.write(w, b'x'); print(select.select([r], [], [], 1)[0] == [r])",
    "selectors": "import selectors, socket; a, b = socket.socketpair(); b.send(b'x')\n"
    "s = selectors.DefaultSelector(); s.register(a, 1); print(len(s.select(1)), a.recv(1))",
    "standard input by its path": "print(open('/dev/stdin').read())",
    "exit": "print(1); exit()",
    "quit": "print(1); quit(0)",
    "shutil": "import shutil; print(shutil.which('python3'), shutil.get_terminal_size())",
    "signal": "import signal\nsignal.signal(signal.SIGALRM, lambda *_: print('rang'))\n"
    "signal.setitimer(signal.ITIMER_REAL, 0.001); signal.pause()",
    "statistics": "import statistics; print(statistics.mean([1, 2]))",
    "string": "import string; print(string.Template('$x').substitute(x=1))",
    "struct": "import struct; print(struct.pack('>I', 1))",
    "sqlite3": "import sqlite3; print(sqlite3.connect(':memory:').execute('select 1').fetchall())",
    "textwrap": "import textwrap; print(textwrap.fill('a b', 1))",
    "threading": "import threading\nlock, n = threading.Lock(), [0]\ndef f():\n    with lock: n[0] += 1\n"
    "ts = [threading.Thread(target=f) for _ in range(20)]\n[t.start() for t in ts]; [t.join() for t in ts]; print(n)",
    "time": "import time; time.sleep(0.001); print(time.time() > 0, time.perf_counter() > 0, time.process_time() > 0)",
    "traceback": "import traceback\ntry: 1 / 0\nexcept ZeroDivisionError: traceback.print_exc()",
    "typing": "from typing import NamedTuple\nclass A(NamedTuple): x: int\nprint(A(1))",
    "unittest": "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(1, 1)\n"
    "unittest.main(exit=False)",
    "urllib.parse": "import urllib.parse; print(urllib.parse.quote('a b'))",
    "uuid": "import uuid; print(len(str(uuid.uuid4())))",
    "warnings": "import warnings; warnings.warn('x')",
    "weakref": "import weakref\nclass A: pass\na = A(); print(weakref.ref(a)() is a)",
    "xml": "import xml.etree.ElementTree as e; print(e.fromstring('<a>x</a>').text)",
    "zoneinfo": "import zoneinfo; print(zoneinfo.ZoneInfo('UTC'))",
}
IN_TMP = {  # where there is a /tmp of its own
    "files": "open('/tmp/x', 'w').write('abc')\nprint(open('/tmp/x').read(), open('/tmp/x', 'a+').tell())",
    "files cut": "with open('/tmp/x', 'w+') as f: f.write('abc'); f.truncate(1); f.flush()\n"
    "print(open('/tmp/x').read())",
    "files renamed": "import os; open('/tmp/x', 'w').close(); os.rename('/tmp/x', '/tmp/y'); print(os.listdir('/tmp'))",
    "shutil": "import shutil; open('/tmp/x', 'w').write('a')\n"
    "shutil.copyfile('/tmp/x', '/tmp/y'); print(open('/tmp/y').read())",
    "sqlite3": "import sqlite3\nc = sqlite3.connect('/tmp/d'); c.execute('create table t (x)'); c.commit(); print(1)",
    "tempfile": "import tempfile\nwith tempfile.TemporaryDirectory() as d: open(d + '/x', 'w').close()\n"
    "with tempfile.TemporaryFile() as f: f.write(b'x'); print(f.tell())\n"
    "with tempfile.NamedTemporaryFile() as f: print(f.name)",
    "zipfile": "import zipfile\nwith zipfile.ZipFile('/tmp/z', 'w') as z: z.writestr('a', 'b')\n"
    "print(zipfile.ZipFile('/tmp/z').namelist())",
}


def test_ordinary_programs_run(sandbox):
    programs = ORDINARY | ({f"{name} in /tmp": IN_TMP[name] for name in IN_TMP} if "bubblewrap" in sandbox.name else {})
    problems = {}
    for name, program in programs.items():
        ran = sandbox.run(program, stdin="1\n2\n", limits=Limits(time_s=60.0))
        if ran.status != "ok" or not ran.stdout + ran.stderr:
            problems[name] = ran
    assert problems == {}
