"""Run a module with the device "acc": python -m tests.accelerator_device MODULE [ARGUMENT ...]."""

from __future__ import annotations

import runpy
import sys

from tests.accelerator_device.device import load


def main() -> None:
    if len(sys.argv) < 2:
        raise SystemExit("usage: python -m tests.accelerator_device MODULE [ARGUMENT ...]")
    module, *sys.argv[1:] = sys.argv[1:]
    load()
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
