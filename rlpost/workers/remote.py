"""Calls of Ray actors: the error that was raised there, and whether the actor itself is what is gone."""

from collections.abc import Awaitable
from typing import Any

from ray.exceptions import RayActorError, RayTaskError


async def own(reference: Awaitable[Any]) -> Any:
    """Await a Ray reference; its error is the remote one."""
    try:
        return await reference
    except Exception as error:
        raise unwrap(error) from None


def unwrap(error: BaseException) -> BaseException:
    """The remote error itself, without the layers that Ray puts around it."""
    while isinstance(error, RayTaskError) and isinstance(error.cause, BaseException):
        error = error.cause
    return error


def is_death(error: BaseException) -> bool:
    """Whether the actor that was called is gone, rather than one that it called in turn."""
    return isinstance(error, RayActorError) and not isinstance(error, RayTaskError)
