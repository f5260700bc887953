# Found first on PYTHONPATH by every Python that `pasta-otel analyze` starts. The interpreter may be any version, with
# or without pasta-otel: nothing here may use newer syntax or import much, and nothing may stop the program.
# mypy: ignore-errors
# ruff: noqa: ANN001, ANN202, BLE001, PLC0415, PTH100, PTH104, PTH109, PTH113, PTH118, PTH120, PTH123, S102, UP031
import sys


def _start():
    try:
        from pasta_otel.gpu.memory.child import start

        start()
    except ImportError as error:
        return "%s has no pasta-otel (%s)" % (sys.executable, error)
    except BaseException as error:
        return "%s: %s" % (type(error).__name__, error)
    return ""


def _tell(reason):
    """Leave the reason as this process' result, so that it is said once; without a job's folder say it here."""
    try:
        import json
        import os

        nothing = {"seen": 0, "skipped": {}, "waits": 0, "unpatched": 0, "launches": [], "problems": [reason]}
        target = os.path.join(json.loads(os.environ["PASTA_ANALYZE_JOB"])["out"], "%d" % os.getpid())
        with open(target + ".part", "w") as file:
            json.dump(nothing, file)
        os.rename(target + ".part", target + ".json")
    except Exception:
        sys.stderr.write("pasta-otel: not analysed: %s\n" % reason)


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


_reason = _start()  # first: the Sanitizer must be there before anything initialises CUDA
if _reason:
    _tell(" ".join(_reason.split()))
_chain()
