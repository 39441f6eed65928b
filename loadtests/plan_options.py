"""The options of `loraplex plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_ASKED = "What is asked for"
_MACHINE = "A replica"
_WISH = "The target, and what is settled"
_LIVE = "A fleet that runs"
_SHOWN = "What is shown"


def _option(
    *names: str, help: str, panel: str, metavar: str | None = None
) -> typer.models.OptionInfo:
    made = typer.Option(*names, help=help, rich_help_panel=panel, metavar=metavar)
    assert isinstance(made, typer.models.OptionInfo)
    return made


TraceOption = Annotated[
    Path | None, _option("--trace", help="JSON lines of arrivals.", panel=_ASKED, metavar="F")
]
ZipfOption = Annotated[
    float | None,
    _option("--zipf", help="No trace: make one of this skew.", panel=_ASKED, metavar="S"),
]
AdaptersOption = Annotated[int, _option("--adapters", help="Without a trace.", panel=_ASKED)]
RateOption = Annotated[
    float | None, _option("--rate", help="Requests a second, without a trace.", panel=_ASKED)
]
TenantsOption = Annotated[int, _option("--tenants", help="Without a trace.", panel=_ASKED)]
BaseShareOption = Annotated[
    float, _option("--base-share", help="Part that asks for the base.", panel=_ASKED)
]
BurstinessOption = Annotated[
    float, _option("--burstiness", help="Spread of gaps over mean; 1: Poisson.", panel=_ASKED)
]
PromptOption = Annotated[float, _option("--prompt-tokens", help="Mean prompt.", panel=_ASKED)]
OutputOption = Annotated[float, _option("--output-tokens", help="Mean output.", panel=_ASKED)]
SeedOption = Annotated[int, _option("--seed", help="Of a made trace.", panel=_ASKED)]
RanksOption = Annotated[
    str,
    _option(
        "--ranks",
        help="Ranks of the adapters, with weights: 8:60,16:35,128:5.",
        panel=_ASKED,
        metavar="R:W,…",
    ),
]
ListOption = Annotated[
    Path | None,
    _option(
        "--adapter-list",
        help="Their ranks and bytes, as `loraplex adapter list --json` prints them.",
        panel=_ASKED,
        metavar="F",
    ),
]
ModelOption = Annotated[
    Path | None,
    _option(
        "--model-config",
        help="The base's config.json: its bytes, a token's keys and values, a rank's bytes.",
        panel=_MACHINE,
        metavar="F",
    ),
]
GpuOption = Annotated[float | None, _option("--gpu-gb", help="GPU memory.", panel=_MACHINE)]
HostOption = Annotated[
    float | None, _option("--host-gb", help="Host memory for adapters.", panel=_MACHINE)
]
CapacityOption = Annotated[
    int | None, _option("--capacity", help="Sequences that run at once.", panel=_MACHINE)
]
CostOption = Annotated[
    float | None, _option("--replica-cost", help="Of one, an hour.", panel=_MACHINE)
]
MachineOption = Annotated[
    list[str] | None,
    _option(
        "--machine",
        help="Anything else of loadtests/machine.py: step_s, copy_bytes_per_s, padded, …",
        panel=_MACHINE,
        metavar="NAME=VALUE",
    ),
]
MeasuredOption = Annotated[
    list[Path] | None,
    _option(
        "--measured",
        help="Times from the JSON of `loraplex bench engine`, or of an earlier plan.",
        panel=_MACHINE,
        metavar="F",
    ),
]
TargetOption = Annotated[
    float, _option("--ttft-p99-ms", help="First token of 99 % of requests.", panel=_WISH)
]
BusyOption = Annotated[
    float, _option("--utilisation", help="Of replicas in the busiest stretch.", panel=_WISH)
]
CopiesOption = Annotated[
    int, _option("--copies", help="Of an adapter in the fleet's host memory.", panel=_WISH)
]
HeadroomOption = Annotated[
    float, _option("--headroom", help="Of quotas over the fullest minute.", panel=_WISH)
]
ReplicasOption = Annotated[
    int | None, _option("--replicas", help="There are so many: do not choose.", panel=_WISH)
]
SlotsOption = Annotated[
    int | None, _option("--slots", help="Likewise, GPU slots of each.", panel=_WISH)
]
HostSlotsOption = Annotated[
    int | None, _option("--host-slots", help="Likewise, adapters in host memory.", panel=_WISH)
]
ConfigOption = Annotated[
    Path | None, _option("--config", help="A gateway's file: router, placement.", panel=_WISH)
]
LiveFlag = Annotated[
    bool, _option("--live", help="Advice for the fleet of a gateway instead.", panel=_LIVE)
]
WatchOption = Annotated[float, _option("--watch", help="Seconds to look at it.", panel=_LIVE)]
BudgetOption = Annotated[
    float,
    _option(
        "--budget",
        help="Seconds of CPU for its trials in the simulator, about; 0: none.",
        panel=_SHOWN,
    ),
]
HtmlOption = Annotated[
    Path | None, _option("--html", help="Write a page with charts there too.", panel=_SHOWN)
]
JsonFileOption = Annotated[
    Path | None, _option("-o", "--output", help="Write the JSON here too.", panel=_SHOWN)
]
