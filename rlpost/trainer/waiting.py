"""Waiting for one of several things, and ending what is no longer waited for."""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any


async def either(first: asyncio.Future[Any], second: Coroutine[Any, Any, Any]) -> None:
    """Return when one of them is done. The first goes on if it is not, the second is given up."""
    other = asyncio.create_task(second)
    try:
        await asyncio.wait({first, other}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        other.cancel()


async def end_tasks(tasks: Iterable[asyncio.Task[Any] | None]) -> None:
    """Cancel those that there are, and wait for their end."""
    found = [task for task in tasks if task is not None]
    for task in found:
        task.cancel()
    await asyncio.gather(*found, return_exceptions=True)
