"""The filter of system calls for sandboxes: what namespaces do not separate, and what resource limits do not count.

System V shared memory and memory files exceed every memory limit, vsock reaches the virtual machine's host from any
network namespace, and keyrings are inherited. Numbers are those of x86-64 (asm/unistd_64.h).
"""

import errno
import struct

MACHINE = "x86_64"
_AUDIT_ARCH_X86_64 = 0xC000003E  # linux/audit.h
_X32 = 0x40000000
"""Numbers from here on are the same calls again, in another ABI."""
_LOAD, _JUMP_EQUAL, _JUMP_GREATER_EQUAL, _RETURN = 0x20, 0x15, 0x35, 0x06  # linux/bpf_common.h
_KILL, _ERROR, _ALLOW = 0x80000000, 0x00050000 | errno.EPERM, 0x7FFF0000  # linux/seccomp.h
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data
_SOCKET, _AF_UNIX = 41, 1

REFUSED = {
    **{"shmget": 29, "msgget": 68, "semget": 64, "memfd_create": 319, "memfd_secret": 447},  # memory without a limit
    **{"add_key": 248, "request_key": 249, "keyctl": 250},  # the session's keyring is inherited
    **{"ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "pidfd_getfd": 438},
    **{"unshare": 272, "setns": 308, "mount": 165, "fsopen": 430, "open_tree": 428},
    **{"bpf": 321, "perf_event_open": 298, "userfaultfd": 323, "io_uring_setup": 425},  # where kernels had most bugs
    "io_setup": 206,  # the machine has a limit for all of its processes together
}
"""System calls that fail with EPERM. `socket` does, too, except for Unix sockets."""


def program() -> bytes:
    """Return the filter in the kernel's format, for `bwrap --seccomp`."""
    steps = [
        _step(_LOAD, _ARCHITECTURE),
        *(_step(_JUMP_EQUAL, _AUDIT_ARCH_X86_64, 1, 0), _step(_RETURN, _KILL)),
        _step(_LOAD, _NUMBER),
        *(_step(_JUMP_GREATER_EQUAL, _X32, 0, 1), _step(_RETURN, _KILL)),
    ]
    for number in REFUSED.values():
        steps += [_step(_JUMP_EQUAL, number, 0, 1), _step(_RETURN, _ERROR)]
    steps += [
        *(_step(_JUMP_EQUAL, _SOCKET, 1, 0), _step(_RETURN, _ALLOW)),
        _step(_LOAD, _FIRST_ARGUMENT),
        *(_step(_JUMP_EQUAL, _AF_UNIX, 1, 0), _step(_RETURN, _ERROR)),
        _step(_RETURN, _ALLOW),
    ]
    return b"".join(steps)


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """Return a `struct sock_filter`; a jump skips so many steps."""
    return struct.pack("=HBBI", code, if_true, if_false, value)
