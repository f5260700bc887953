"""Handlers: called once per change, sync or async, each isolated from the others."""

from __future__ import annotations

import asyncio
import logging
import threading

import pytest

from pasta_otel.slo.handlers import HandlerDispatcher

WAIT_SECONDS = 10


class View:
    """Flags in a dictionary."""

    def __init__(self):
        self.values, self.expiry_ns = {}, 1 << 63

    def get(self, name, default):
        return self.values.get(name, default)

    def next_expiry_ns(self):
        return self.expiry_ns


@pytest.fixture
def view():
    return View()


@pytest.fixture
def dispatcher(view):
    made = HandlerDispatcher(view, lambda: 0)
    yield made
    made.stop()


def direct(view):
    """A dispatcher without its thread, driven by the test."""
    made = HandlerDispatcher(view, lambda: 0)
    made._stopped = True
    return made


def test_a_handler_is_called_once_per_change_with_the_new_value(view):
    dispatcher, seen = direct(view), []
    dispatcher.register("degrade.x", seen.append)
    assert dispatcher.dispatch() == 0
    view.values["degrade.x"] = True
    assert (dispatcher.dispatch(), dispatcher.dispatch()) == (1, 0)
    del view.values["degrade.x"]  # expired
    dispatcher.dispatch()
    assert seen == [True, False]


def test_one_that_raises_does_not_keep_the_others_from_theirs(view, caplog):
    dispatcher, seen = direct(view), []

    def broken(_):
        raise ValueError("mine")

    async def broken_too(_):
        raise ValueError("mine too")

    for callback in (broken, broken_too, seen.append):
        dispatcher.register("degrade.x", callback)
    view.values["degrade.x"] = True
    with caplog.at_level(logging.ERROR):
        assert dispatcher.dispatch() == 3
    assert seen == [True]
    assert len(caplog.records) == 2
    dispatcher.unregister(seen.append)


def test_a_coroutine_function_without_a_loop_gets_one_for_the_call(view):
    dispatcher, seen = direct(view), []

    async def handler(on):
        await asyncio.sleep(0)
        seen.append(on)

    dispatcher.register("degrade.x", handler)
    view.values["degrade.x"] = True
    dispatcher.dispatch()
    assert seen == [True]


async def test_a_coroutine_function_runs_on_the_loop_in_which_it_was_registered(view, dispatcher):
    seen = asyncio.Queue()

    async def handler(on):
        await seen.put((on, asyncio.get_running_loop()))

    dispatcher.register("degrade.x", handler)
    view.values["degrade.x"] = True
    dispatcher.wake()
    on, loop = await asyncio.wait_for(seen.get(), WAIT_SECONDS)
    assert on is True
    assert loop is asyncio.get_running_loop()


def test_the_thread_wakes_by_itself_when_a_value_expires(view, dispatcher):
    called = threading.Event()
    view.values["degrade.x"] = True
    dispatcher.register("degrade.x", lambda on: called.set() if not on else None, default=False)
    view.expiry_ns = 1_000_000
    view.values.clear()
    dispatcher.wake()
    view.values["degrade.x"] = True
    dispatcher.wake()
    while not dispatcher._handlers[0].last:
        threading.Event().wait(0.001)
    view.values.clear()  # nobody wakes it
    assert called.wait(WAIT_SECONDS)
