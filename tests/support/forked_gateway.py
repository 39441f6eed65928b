"""Gateways to be killed: one process imports the product once and forks a gateway each time.

`python forked_gateway.py CONFIG` reads a line for each life; the gateway prints its ready line, and
then this prints `ended STATUS` when it has died.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import uvloop

from gateway.app import run
from gateway.config import GatewayConfig
from shared.settings import load


def main() -> None:
    config = load(GatewayConfig, Path(sys.argv[1]))
    for _ in sys.stdin:
        child = os.fork()
        if child == 0:
            print(f"pid {os.getpid()}", flush=True)
            uvloop.run(run(config))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print(f"ended {status}", flush=True)


main()
