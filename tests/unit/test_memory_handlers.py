"""Whose exception it is that comes up in our code: the program's handlers of signals run wherever they interrupt."""

from __future__ import annotations

import signal
from functools import partial

import pytest

from pasta_otel.gpu.memory.handlers import from_a_handler


class Limit:
    """A program's object with a handler, and one that is a handler."""

    def method(self, _number, _frame):
        raise TimeoutError

    def __call__(self, _number, _frame):
        deeper()


class Inherited(Limit):
    """Has it from its base."""


def deeper():
    raise TimeoutError


def function(*_):
    deeper()


@pytest.fixture
def handled():
    before = signal.getsignal(signal.SIGALRM)
    yield partial(signal.signal, signal.SIGALRM)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(
    "handler",
    [function, Limit().method, Limit(), Inherited(), partial(partial(function), 1), lambda _number, _frame: deeper()],
)
def test_an_exception_of_a_handler_is_the_programs(handled, handler):
    handled(handler)
    with pytest.raises(TimeoutError) as caught:
        signal.raise_signal(signal.SIGALRM)
    assert from_a_handler(caught.value)


@pytest.mark.parametrize(
    ("error", "expected"), [(TimeoutError(), False), (SystemExit(3), False), (ValueError(), False)]
)
def test_an_exception_of_the_code_itself_is_not(handled, error, expected):
    handled(function)
    with pytest.raises(type(error)) as caught:
        raise error
    assert from_a_handler(caught.value) is expected


def test_ctrl_c_is_the_programs_though_no_python_function_raised_it():
    assert from_a_handler(KeyboardInterrupt())
