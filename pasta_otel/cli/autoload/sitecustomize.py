# Found first on PYTHONPATH by every Python that `pasta-otel run` starts. The interpreter may be any version, with or
# without pasta-otel: nothing here may use newer syntax or import much, and nothing may stop the program.
# mypy: ignore-errors
# ruff: noqa: ANN202, BLE001, PLC0415, PTH100, PTH109, PTH113, PTH118, PTH120, PTH123, S102, UP031
import sys


def _start():
    try:
        from pasta_otel.autoinstrument import start
    except ImportError as error:
        return "%s has no pasta-otel (%s): %s" % (sys.executable, error, _advice())
    except BaseException as error:
        return "%s: %s" % (type(error).__name__, error)
    return start()


def _advice():
    """Say what helps: usually another Python was found first on PATH than the one that pasta-otel is installed for."""
    install = "`%s -m pip install pasta-otel`" % sys.executable
    return "install it there (%s), or run the program with the Python of the environment that has it" % install


def _chain():
    """Run the sitecustomize that this one hides."""
    import os

    # of this interpreter, since `run` and `analyze` have one each, and either may hide the other
    done = sys.__dict__.setdefault("_pasta_sitecustomize", set())
    done.add(os.path.realpath(os.path.dirname(os.path.abspath(__file__))))
    for folder in list(sys.path):
        path = os.path.join(folder or os.getcwd(), "sitecustomize.py")
        if os.path.realpath(folder or os.getcwd()) not in done and os.path.isfile(path):
            done.add(os.path.realpath(folder or os.getcwd()))
            module = type(sys)("sitecustomize")
            module.__file__ = path
            sys.modules["sitecustomize"] = module
            with open(path) as source:
                exec(compile(source.read(), path, "exec"), module.__dict__)
            return


try:
    _chain()
finally:
    _reason = _start()
    if _reason:
        sys.stderr.write("pasta-otel: not instrumented: %s\n" % " ".join(_reason.split()))
