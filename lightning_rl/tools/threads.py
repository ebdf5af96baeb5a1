"""Functions that block, each call in a thread of its own.

Invariant: one that never returns holds up nothing: no other call waits for its thread, nor does the interpreter's end.
That is why these are neither asyncio's pool, which all share, nor one of `concurrent.futures`, which is joined at exit.
"""

import asyncio
import contextvars
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


async def in_thread(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What the function returns or raises, called in a new thread with the caller's context variables.

    Cancelled, it is no longer waited for; a thread cannot be stopped, so it runs to its end and its result is dropped.
    """
    context = contextvars.copy_context()
    job: Future[Any] = Future()

    def work() -> None:
        if not job.set_running_or_notify_cancel():
            return
        try:
            result = context.run(function, *args, **kwargs)
        except StopIteration as error:  # which a future cannot hold
            job.set_exception(_as_runtime_error(error))
        except Exception as error:  # noqa: BLE001 - it is raised where the result is awaited
            job.set_exception(error)
        except BaseException as error:  # noqa: BLE001 - sys.exit() in it must not end the event loop
            job.set_exception(_as_runtime_error(error))
        else:
            job.set_result(result)

    threading.Thread(target=work, name=getattr(function, "__name__", None), daemon=True).start()
    return await asyncio.wrap_future(job)


def _as_runtime_error(error: BaseException) -> RuntimeError:
    shown = "".join(traceback.format_exception_only(error)).strip()  # also where the error cannot be shown
    failure = RuntimeError(f"the function raised {shown}")
    failure.__cause__ = error
    return failure
