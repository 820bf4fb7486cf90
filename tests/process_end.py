"""Processes that a test waits for."""

import time

import psutil


def ended(pid: int) -> bool:
    """True if a process ends within 5 s; an unreaped one has ended."""
    for _ in range(100):
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.05)
    return False
