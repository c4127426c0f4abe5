"""Everything that shows a run, in one `with`: the GPUs' readings, the page, the terminal."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from dflash_train.monitor.app import Monitor
from dflash_train.monitor.gpus import GpuSampler
from dflash_train.monitor.state import RunState
from dflash_train.monitor.terminal import TerminalView


@contextmanager
def watch(state: RunState, enabled: bool, host: str, port: int) -> Iterator[None]:
    """Show `state` while the block runs, on a page where `enabled`; then say how it ended, and end with it.

    finished() comes before the page goes, so that whoever looks at it sees the end.
    """
    with ExitStack() as views:
        views.enter_context(GpuSampler(state))
        if enabled:
            views.enter_context(Monitor(state, host, port))
        views.enter_context(TerminalView(state))
        ok = False
        try:
            yield
            ok = True
        except BaseException as error:
            state.error(f"{type(error).__name__}: {error}")
            raise
        finally:
            state.finished(ok)
