"""The policy's code tries to leave its sandbox. Each test fails if the protection that it names is taken away."""

import asyncio
import ctypes
import os
import secrets
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tasks.tools import bubblewrap
from tasks.tools.sandbox import Sandboxes
from tests.support.paths import ROOT
from tests.support.sandbox_helpers import descendants, inside, open_tool, run_code
from tests.support.soak import scaled

ATTEMPT = """
import ctypes, os, socket
libc = ctypes.CDLL(None, use_errno=True)

def attempt(act, *arguments):
    try:
        return act(*arguments)
    except OSError as error:
        return os.strerror(error.errno)

def system_call(number, *arguments):
    result = libc.syscall(number, *arguments)
    return os.strerror(ctypes.get_errno()) if result < 0 else result
"""
"""What most attempts need."""
REFUSED, MISSING = "Operation not permitted", "No such file or directory"


@pytest.fixture
def outside() -> Iterator[Path]:
    """Yield a folder outside of /tmp: a sandbox has a /tmp of its own, which would hide what a test looks for."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        Path(folder).chmod(0o755)  # other users may read it: only the sandbox hides it
        yield Path(folder)


def libraries() -> set[str]:
    """Return the folders of Python's standard library and the system's shared libraries."""
    library = Path(os.__file__).resolve().parent
    if library.parent != Path("/usr/lib"):
        library = library.parent
    return {"/usr/lib64", f"/usr/lib/{sysconfig.get_config_var('MULTIARCH')}", str(library)}


def programs() -> set[str]:
    python = Path(sys.base_prefix, "bin", "python3").resolve()
    return {str(python), str(shutil.which("prlimit"))}


async def test_no_other_files_exist(sandboxes: Sandboxes) -> None:
    """All files that it can find are those of Python and the shared libraries: no store, no home, no repository.

    No path leads around that: /proc is not there, and nothing is above the root.
    """
    code = f"""
import os
for folder, names, files in os.walk("/"):
    names[:] = [name for name in names if os.path.join(folder, name) not in {libraries()}]
    for name in files:
        print(os.path.join(folder, name))
"""
    found = await run_code(sandboxes, code, output_chars=10_000)
    assert set(found.splitlines()) == programs() | {"/etc/ld.so.cache", "/dev/null", "/dev/urandom"}


def test_projects_and_homes_in_a_visible_folder_are_covered(tmp_path: Path) -> None:
    """A project or home in the interpreter's own folder is hidden by an empty one; other folders need none."""
    project, other = tmp_path / "lib" / "project", tmp_path / "other"
    project.mkdir(parents=True)
    other.mkdir()
    assert bubblewrap.hidden([str(tmp_path / "lib")], [project, other, tmp_path / "lib" / "absent"]) == [str(project)]


ATTEMPTS = {
    # Keys of AWS and vLLM are not in its environment.
    "variables": ("sorted(os.environ)", ["HOME", "OPENBLAS_NUM_THREADS", "PWD"]),
    # In /proc/1/mem it could make bubblewrap's process, which has no limits, its own.
    "processes": (
        "[attempt(os.listdir, '/proc'), attempt(open, '/proc/1/mem', 'r+b'), os.getpid()]",
        [MISSING, MISSING, 2],
    ),
    # All sockets but pairs are refused: vsock would reach a virtual machine's host from any namespace.
    "sockets": ("{attempt(socket.socket, getattr(socket, name), socket.SOCK_RAW) for name in FAMILIES}", {REFUSED}),
    # Debugging other processes, inherited keyrings, new namespaces, and what no limit counts.
    "system calls": ("{system_call(*arguments) for arguments in CALLS}", {REFUSED}),
    # clone(CLONE_NEWUSER | SIGCHLD): privileges in a user namespace of its own are what many errors of kernels need.
    "namespaces": ("system_call(56, 0x10000000 | 17, 0, 0, 0, 0)", "No space left on device"),
    "privileges": ("(attempt(os.setuid, 0), os.getuid())", ("Invalid argument", 65534)),
    # With a terminal it could type commands for the user's shell (TIOCSTI).
    "terminal": (
        "[attempt(os.open, '/dev/tty', os.O_RDWR), os.getsid(0) == 0, *(os.isatty(fd) for fd in (0, 1, 2))]",
        [MISSING, *[False] * 4],
    ),
}
GIVEN = """
FAMILIES = ["AF_UNIX", "AF_INET", "AF_INET6", "AF_NETLINK", "AF_PACKET", "AF_VSOCK", "AF_ALG"]
CALLS = [
    (101, 0, 0, 0, 0),  # ptrace
    (310, 1, 0, 0, 0, 0, 0),  # process_vm_readv
    (250, 0, -3, 0, 0, 0),  # keyctl
    (272, 0x10000000),  # unshare a user namespace
    (165, b"none", b"/tmp", b"tmpfs", 0, 0),  # mount
    (321, 0, 0, 0),  # bpf
    (425, 1, 0),  # io_uring_setup
    (206, 1000, 0),  # io_setup
    (29, 0, 4096, 0o1600),  # shmget
    (319, b"x", 0),  # memfd_create
    # What holds memory that no limit counts: pages in pipes, what waits in queues of sockets, rules, a hash table.
    (278, 1, 0, 0, 0),  # vmsplice
    (49, 0, 0, 0),  # bind
    (54, 0, 1, 7, 0, 0),  # setsockopt
    (46, 0, 0, 0),  # sendmsg
    (444, 0, 0, 0),  # landlock_create_ruleset
    (157, 78, 1, 2, 0),  # prctl: PR_FUTEX_HASH
    # What all processes of a user share out among themselves.
    (294, 0),  # inotify_init1
    (300, 0, 0),  # fanotify_init
    (72, 1, 1031, 2**20),  # fcntl: F_SETPIPE_SZ
]
"""


@pytest.mark.parametrize(("code", "result"), ATTEMPTS.values(), ids=ATTEMPTS)
async def test_attempts_fail(code: str, result: object, sandboxes: Sandboxes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is refused by the wall that is meant for it."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "top-secret")
    assert await run_code(sandboxes, f"{ATTEMPT}{GIVEN}\n{code}", processes=5) == f"{result!r}\n"


async def test_no_descriptor_is_inherited(sandboxes: Sandboxes, tmp_path: Path) -> None:
    """A file or socket that this process would pass on, and bubblewrap's own pipes, do not reach it."""
    (tmp_path / "secret").write_text("secret")
    opened = os.open(tmp_path / "secret", os.O_RDONLY)
    os.set_inheritable(opened, True)
    try:
        code = "[fd for fd in range(1000) if attempt(os.fstat, fd) != 'Bad file descriptor']"
        # 0 to 2, and two copies of the driver's own pipes
        assert await run_code(sandboxes, ATTEMPT + code) == "[0, 1, 2, 3, 4]\n"
    finally:
        os.close(opened)


async def test_no_server_answers(sandboxes: Sandboxes, outside: Path) -> None:
    """It reaches neither TCP on loopback nor Unix sockets, those in the abstract namespace included.

    The network namespace is its own: it has loopback alone, and no route.
    """
    abstract = f"\0sandbox-{secrets.token_hex(8)}"
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_UNIX) as named,
        socket.socket(socket.AF_UNIX) as hidden,
    ):
        named.bind(str(outside / "socket"))
        hidden.bind(abstract)
        named.listen()
        hidden.listen()
        code = f"""
def connect(family, address):
    with socket.socket(family) as opened:
        opened.settimeout(5)
        opened.connect(address)
        return "connected"

print(attempt(connect, socket.AF_INET, {tcp.getsockname()}))
print(attempt(connect, socket.AF_UNIX, {str(outside / "socket")!r}))
print(attempt(connect, socket.AF_UNIX, {abstract!r}))
"""
        result = await run_code(sandboxes, ATTEMPT + code)
    assert result.splitlines() == [REFUSED] * 3
    interfaces = (await inside(sandboxes, "net/dev")).splitlines()[2:]
    assert [line.split(":")[0].strip() for line in interfaces] == ["lo"]
    assert len((await inside(sandboxes, "net/route")).splitlines()) <= 1


async def test_another_abi_of_system_calls_is_refused(sandboxes: Sandboxes) -> None:
    """The x32 numbers would go around the filter, so their use ends the program."""
    assert "exit status 159" in await run_code(sandboxes, f"{ATTEMPT}\nsystem_call(0x40000000 + 39)")  # SIGSYS


async def test_nothing_is_written_outside(sandboxes: Sandboxes, outside: Path) -> None:
    """Symbolic links and .. lead to files of the sandbox; all but /tmp is read-only."""
    victim = outside / "victim"
    victim.write_text("unharmed")
    code = f"""
os.symlink({str(victim)!r}, "link")
os.symlink("/proc/1/root{victim}", "another")
for path in ["link", "another", "../../../..{victim}", os.__file__, "/new", "/dev/new", "/proc/1/root/new"]:
    print(attempt(open, path, "w"))
"""
    result = await run_code(sandboxes, ATTEMPT + code)
    assert set(result.splitlines()) <= {MISSING, "Read-only file system", "Permission denied"}
    assert victim.read_text() == "unharmed"


async def test_signals_reach_nobody_else(sandboxes: Sandboxes) -> None:
    """It cannot kill this process, a sibling in another sandbox, or a whole process group by the ids outside."""
    async with open_tool(sandboxes, stateful=True) as sibling:
        await sibling.call({"code": "x = 1"})
        victims = [os.getpid(), os.getppid(), *(process.pid for process in descendants())]
        code = f"""
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print({{attempt(os.kill, pid, signal.SIGTERM) for pid in {victims} if pid > 2}})
print({{attempt(os.killpg, pid, signal.SIGTERM) for pid in {victims} if pid > 2}})
print(attempt(os.kill, -1, signal.SIGKILL))
"""
        assert await run_code(sandboxes, ATTEMPT + code) == "{'No such process'}\n" * 2 + "No such process\n"
        assert await sibling.call({"code": "x"}) == "1\n"


async def test_sandboxes_share_no_files(sandboxes: Sandboxes) -> None:
    """What one episode writes another does not see, and neither does the next sandbox."""
    there = {"code": "import os; os.path.exists('/tmp/note')"}
    async with open_tool(sandboxes, stateful=True) as one, open_tool(sandboxes, stateful=True) as other:
        await one.call({"code": "open('/tmp/note', 'w').write('secret')"})
        assert await other.call(there) == "False\n"
        assert await one.call(there) == "True\n"
    assert await run_code(sandboxes, there["code"]) == "False\n"


async def test_it_cannot_gain_privileges(sandboxes: Sandboxes) -> None:
    """It has no capability, not even over its own namespaces, and a setuid program would give it none."""
    status = dict(line.split(":\t") for line in (await inside(sandboxes, "status")).splitlines())
    assert {status[key].strip() for key in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
    assert status["NoNewPrivs"] == "1"


async def test_each_has_a_user_of_its_own_if_this_one_is_root(sandboxes: Sandboxes) -> None:
    """Files of root stay closed even where a mount would show them; processes of `nobody` can neither kill nor read it.

    The kernel limits processes, pipes and signals of each user.
    """
    async with open_tool(sandboxes, stateful=True) as one, open_tool(sandboxes, stateful=True) as other:
        await asyncio.gather(one.call({"code": "1"}), other.call({"code": "1"}))
        users = {process.uids().real for process in descendants() if process.name().startswith("python")}
    if os.geteuid() == 0 and bubblewrap.has_users():
        assert len(users) == 2
        assert all(0x70000000 <= user < 0x80000000 for user in users)
    else:
        assert users == {65534 if os.geteuid() == 0 else os.geteuid()}


OWNER = """
import asyncio, sys
from tasks.tools.bubblewrap import Limits, python
from tasks.tools.sandbox import Sandboxes

async def main():
    sandboxes = Sandboxes()
    sandboxes.check()
    print("ready", flush=True)
    program = "import time; time.sleep(600)  # " + sys.argv[1]
    await asyncio.gather(*(sandboxes.run(python(program), b"", Limits()) for _ in range(3)))

asyncio.run(main())
"""


@pytest.mark.parametrize("after_ms", scaled([5, 15, 1000], [*range(0, 60, 2), 1000]))
def test_it_dies_with_its_owner(after_ms: int, sandboxes: Sandboxes) -> None:
    """The kernel ends it. bubblewrap asks for that some time after its start; until then another process ends it."""
    token = secrets.token_hex(8)
    with subprocess.Popen([sys.executable, "-c", OWNER, token], cwd=ROOT, stdout=subprocess.PIPE) as owner:
        assert owner.stdout
        assert owner.stdout.readline() == b"ready\n"
        time.sleep(after_ms / 1000)
        owner.kill()
    quiet, deadline = 0, time.monotonic() + 60
    while quiet < 10:  # a process that has just been forked has its command line a little later
        assert time.monotonic() < deadline
        commands = [" ".join(each.info["cmdline"] or ()) for each in psutil.process_iter(["cmdline"])]
        quiet = 0 if any(token in command for command in commands) else quiet + 1
        time.sleep(0.1)


async def test_no_orphan_is_left(sandboxes: Sandboxes) -> None:
    """After calls, each process was reaped by its parent: in many containers nobody reaps orphans."""
    adopt = ctypes.CDLL(None).prctl
    adopt(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: orphans become children of this process
    try:
        before = psutil.Process().children()
        for code in ("1", "while True: pass", "1"):
            await run_code(sandboxes, code, timeout_s=0.2)
        assert [process.name() for process in psutil.Process().children() if process not in before] == []
    finally:
        adopt(36, 0, 0, 0, 0)
