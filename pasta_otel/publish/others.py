"""Follows what runs tasks and threads besides asyncio itself: uvloop's event loop, anyio's worker threads.

Neither shows Python code its callbacks. But uvloop runs ordinary asyncio tasks: a task whose coroutine is wrapped tells
when each of its steps begins and ends. anyio runs a caller's function in the caller's context: so does the function,
wrapped. Both are hooked when they are imported, whichever comes first.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Generator
from types import ModuleType
from typing import Any

Follow = Callable[..., Any]


class FollowedCoroutine(Coroutine[Any, Any, Any]):
    """A task's coroutine, each of whose steps is run by somebody who wants to know.

    Args:
        coroutine: The task's own.
        follow: Called with a function and its arguments for each step; returns what that returns.
    """

    __slots__ = ("_coroutine", "_follow")

    def __init__(self, coroutine: Coroutine[Any, Any, Any], follow: Follow) -> None:
        self._coroutine, self._follow = coroutine, follow

    def send(self, value: Any) -> Any:
        """Run one step."""
        return self._follow(self._coroutine.send, value)

    def throw(self, *error: Any) -> Any:
        """Run one step that begins with an exception: a task that is cancelled."""
        return self._follow(self._coroutine.throw, *error)

    def close(self) -> None:
        """End it."""
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        """Be awaited as the coroutine is."""
        return self._coroutine.__await__()

    def __getattr__(self, name: str) -> Any:
        """Look like the coroutine to debuggers, and to anyio, which asks for its state."""
        return getattr(self._coroutine, name)


def follow_uvloop(module: ModuleType, follow: Follow, carry: Callable[[Any], Any]) -> list[Callable[[], None]]:
    """Follow the tasks of uvloop's loops from now on; return what undoes it."""
    loop = module.Loop
    create_task = loop.create_task

    @functools.wraps(create_task)
    def create_followed_task(self: Any, coroutine: Any, *arguments: Any, **options: Any) -> Any:
        if asyncio.iscoroutine(coroutine):
            coroutine = FollowedCoroutine(coroutine, follow)
        return create_task(self, coroutine, *arguments, **options)

    return [
        replace(loop, "create_task", create_followed_task),
        replace(loop, "run_in_executor", carry(loop.run_in_executor)),
    ]


def follow_anyio(
    module: ModuleType, publishing: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[[], None]:
    """Publish the caller's context in the threads of ``anyio.to_thread.run_sync``; return what undoes it."""
    run_sync = module.run_sync

    @functools.wraps(run_sync)
    async def run_published(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        return await run_sync(publishing(function), *arguments, **options)

    return replace(module, "run_sync", run_published)


def when_imported(name: str, hook: Callable[[ModuleType], None]) -> None:
    """Call a hook with a module when it is imported, at once if it is already."""
    from wrapt import register_post_import_hook  # noqa: PLC0415 - only a process that publishes

    register_post_import_hook(hook, name)


def replace(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Set an attribute; return what puts the old one back, unless somebody else has replaced ours."""
    inherited = name not in vars(owner)
    old = getattr(owner, name)
    setattr(owner, name, value)

    def undo() -> None:
        if getattr(owner, name) is not value:
            return
        if inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, old)

    return undo
