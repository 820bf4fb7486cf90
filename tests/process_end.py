"""Processes that a test waits for."""

import time

import psutil


def is_running(pid: int) -> bool:
    """True if a process runs; an unreaped one has ended."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def ended(pid: int) -> bool:
    """True if a process ends within 5 s."""
    for _ in range(100):
        if not is_running(pid):
            return True
        time.sleep(0.05)
    return False
