"""Which system calls a process may still make: a list of what Python and numpy need, by libseccomp.

Not in it: anything that starts a process or a program, opens a socket that leads out of the process, acts on another
process, or changes modes, owners and times of files. Those fail with EPERM.
"""

import ctypes
import errno
import os
from collections.abc import Iterator

_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_EQ, _MASKED_EQ = 4, 7

_FREE = """
read write readv writev pread64 pwrite64 preadv pwritev lseek close close_range dup dup2 dup3 pipe pipe2
stat fstat lstat newfstatat statx access faccessat faccessat2 readlink readlinkat getdents getdents64 getcwd
chdir fchdir mkdir mkdirat rmdir unlink unlinkat rename renameat renameat2 symlink symlinkat ftruncate fsync fdatasync
flock fallocate fadvise64 copy_file_range sendfile umask statfs fstatfs
mmap munmap mprotect mremap madvise brk mincore msync membarrier
futex futex_waitv set_robust_list get_robust_list rseq set_tid_address gettid arch_prctl
sched_yield sched_getaffinity sched_getparam sched_getscheduler sched_get_priority_max sched_get_priority_min
getpriority
exit exit_group restart_syscall rt_sigaction rt_sigprocmask rt_sigreturn rt_sigpending rt_sigtimedwait rt_sigsuspend
sigaltstack pause alarm setitimer getitimer timerfd_create timerfd_settime timerfd_gettime
clock_gettime clock_getres clock_nanosleep nanosleep gettimeofday time times getrusage getrlimit
poll ppoll select pselect6 epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait epoll_pwait2 eventfd eventfd2
getpid getppid getuid geteuid getgid getegid getgroups getresuid getresgid getpgrp getpgid getsid capget
uname sysinfo getrandom getcpu sendto recvfrom getsockname getsockopt shutdown
""".split()
_FCNTL = (0, 1, 2, 3, 4, 5, 6, 7, 1030)  # duplicate, flags, locks; not F_SETOWN and F_SETSIG, which send signals
_IOCTL = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # of a terminal, bytes to read, non-blocking, close on exec
_PR_SET_NAME = 15
_CLONE_VM, _CLONE_THREAD = 0x100, 0x10000
_AF_UNIX, _SOCK_STREAM = 1, 1


class _Argument(ctypes.Structure):
    """`struct scmp_arg_cmp`; with `_MASKED_EQ` a is the mask and b the value."""

    _fields_ = [("index", ctypes.c_uint), ("op", ctypes.c_int), ("a", ctypes.c_uint64), ("b", ctypes.c_uint64)]


def _conditional() -> Iterator[tuple[str, list[_Argument]]]:
    """System calls that are allowed with certain arguments only."""
    for name, index in (("open", 1), ("openat", 2)):  # not O_RDONLY | O_TRUNC: Landlock 1 takes it for reading
        for mode in (os.O_WRONLY, os.O_RDWR):
            yield name, [_Argument(index, _MASKED_EQ, os.O_ACCMODE, mode)]
        yield name, [_Argument(index, _MASKED_EQ, os.O_ACCMODE | os.O_TRUNC, os.O_RDONLY)]
    for command in _FCNTL:
        yield "fcntl", [_Argument(1, _EQ, command)]
    for request in _IOCTL:
        yield "ioctl", [_Argument(1, _EQ, request)]
    threads = _CLONE_VM | _CLONE_THREAD
    yield "clone", [_Argument(0, _MASKED_EQ, threads, threads)]
    yield "kill", [_Argument(0, _EQ, os.getpid())]
    yield "tgkill", [_Argument(0, _EQ, os.getpid())]
    yield "prlimit64", [_Argument(0, _EQ, 0)]
    yield "prctl", [_Argument(0, _EQ, _PR_SET_NAME)]
    # asyncio's loop wakes itself through a pair; an unconnected or datagram socket could reach other processes
    yield "socketpair", [_Argument(0, _EQ, _AF_UNIX), _Argument(1, _MASKED_EQ, 0xF, _SOCK_STREAM)]


def load() -> ctypes.CDLL:
    """The library; to be called before files are out of reach.

    Raises:
        OSError: it is not installed.
    """
    library = ctypes.CDLL("libseccomp.so.2")
    library.seccomp_init.restype = ctypes.c_void_p
    library.seccomp_init.argtypes = [ctypes.c_uint32]
    library.seccomp_rule_add_array.argtypes = [
        ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int, ctypes.c_uint, ctypes.POINTER(_Argument),
    ]  # fmt: skip
    library.seccomp_load.argtypes = [ctypes.c_void_p]
    return library


def restrict(library: ctypes.CDLL) -> None:
    """From now on this process, which must have one thread, makes only the system calls above.

    Raises:
        OSError: the kernel or the library refused.
    """
    context = library.seccomp_init(_ERRNO | errno.EPERM)
    if not context:
        raise OSError("seccomp: no filter could be made")

    def add(action: int, name: str, arguments: list[_Argument]) -> None:
        number = library.seccomp_syscall_resolve_name(name.encode())
        if number < 0:  # this architecture has no such call
            return
        array = (_Argument * max(1, len(arguments)))(*arguments)
        if (result := library.seccomp_rule_add_array(context, action, number, len(arguments), array)) < 0:
            raise OSError(-result, f"seccomp: rule for {name}: {os.strerror(-result)}")

    for name in _FREE:
        add(_ALLOW, name, [])
    for name, arguments in _conditional():
        add(_ALLOW, name, arguments)
    add(_ERRNO | errno.ENOSYS, "clone3", [])  # its flags are out of a filter's sight: libc then takes clone
    if (result := library.seccomp_load(context)) < 0:
        raise OSError(-result, f"seccomp: {os.strerror(-result)}")
