"""Rockmate: tried on every model, and what it says kept."""

from __future__ import annotations

from benchmarks.frontier.methods import Method, Prepared, Task, Unsupported

_TRIED = (
    "rockmate 2.0.0 needs rkgb 2.0.0, whose wheel and source archive on PyPI lack rkgb.core; rockmate 1.0.1 (with"
    " gurobipy) imports, but measures times and bytes on CUDA only, so that on the CPU all are 0 and it ends with"
    " ZeroDivisionError; transformers' models stop its tracer before"
)


def _make(task: Task, studied: None, setting: str) -> Prepared:
    try:
        import rockmate  # noqa: F401
    except ImportError as e:
        raise Unsupported(f"{type(e).__name__}: {e}. When tried: {_TRIED}") from e
    raise Unsupported(f"rockmate is here, but this benchmark does not drive it. When tried: {_TRIED}")


ROCKMATE = (Method("Rockmate", "eager", lambda task: [""], _make),)
