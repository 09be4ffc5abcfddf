"""The program inside of a sandbox that executes the policy's code, call after call.

The interpreter gets it as text (`python -c`), so it is one file and imports only what starts fast. For each call it
reads a line `TOKEN SIZE` and SIZE bytes of code. It writes what the code prints, and at the end `TOKEN 0`, or `TOKEN 1`
if the code raised an exception. Its reader trusts nothing of it, because the code may write anything.
"""

import _ast
import os
import sys

READY = b"ready"
"""It writes this first. It gets no code before: a sandbox that was only half made when its owner died does nothing."""


def main() -> None:
    sys.set_int_max_str_digits(0)  # time and output are limited
    sys.path += sys.argv[1:]  # folders of packages
    requests, end, printed = os.fdopen(os.dup(0), "rb"), os.dup(1), sys.stdout
    os.close(0)
    os.open(os.devnull, os.O_RDONLY)  # the lowest free descriptor: the code's standard input
    printed.reconfigure(line_buffering=True)  # type: ignore[union-attr] # otherwise a time-out would lose the output
    module = sys.modules["__main__"] = type(sys)("__main__")
    module.exit = module.quit = sys.exit  # type: ignore[attr-defined] # normally `site` adds them
    os.write(end, READY)
    for calls, line in enumerate(iter(requests.readline, b""), 1):
        token, size = line.split()
        error = _run(requests.read(int(size)).decode(), f"<call {calls}>", module.__dict__)
        if not printed.closed:
            printed.flush()
        os.write(end, error.encode(errors="replace") + token + (b" 1" if error else b" 0"))


def _run(code: str, name: str, variables: dict[str, object]) -> str:
    """Run the code, and print the value of its last expression, as Python's prompt does.

    Return the text of the exception that it raised.
    """
    try:
        tree = compile(code, name, "exec", _ast.PyCF_ONLY_AST)
        assert isinstance(tree, _ast.Module)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], _ast.Expr) else None
        exec(compile(tree, name, "exec"), variables)
        if isinstance(last, _ast.Expr):
            sys.displayhook(eval(compile(_ast.Expression(last.value), name, "eval"), variables))
    except SystemExit as error:
        return f"SystemExit: {error.code}\n" if error.code else ""
    except BaseException as error:  # noqa: BLE001 - the policy reads it
        return _traceback(error, code, name)
    return ""


def _traceback(error: BaseException, code: str, name: str) -> str:
    """Return the traceback without the frames of this program."""
    import linecache  # importing them takes longer than most calls
    import traceback

    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    frame = error.__traceback__
    while frame and frame.tb_frame.f_code.co_filename == _run.__code__.co_filename:
        frame = frame.tb_next
    return "".join(traceback.format_exception(type(error), error, frame))


if __name__ == "__main__":
    main()
