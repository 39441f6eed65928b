"""`loraplex plan`: how many replicas, slots and gigabytes a load needs, and why."""

from __future__ import annotations

from pathlib import Path

import orjson

from gateway.cli.client import GatewayOption
from gateway.config import GatewayConfig
from loadtests import plan_options as given
from loadtests import trace as traces
from loadtests.live_plan import live_plan
from loadtests.plan_inputs import machine_of, sizes_of
from loadtests.plan_page import html as page_of
from loadtests.plan_page import text as text_of
from loadtests.plan_run import planned
from loadtests.proposal import Wish
from loadtests.recipe import Recipe
from loadtests.trace import Trace
from loadtests.usage import JsonFlag, note, or_usage, write
from shared.settings import load as load_settings


def plan(
    trace: given.TraceOption = None,
    zipf: given.ZipfOption = None,
    rate: given.RateOption = None,
    adapters: given.AdaptersOption = 500,
    tenants: given.TenantsOption = 10,
    base_share: given.BaseShareOption = 0.0,
    burstiness: given.BurstinessOption = 1.0,
    prompt_tokens: given.PromptOption = 256.0,
    output_tokens: given.OutputOption = 128.0,
    seed: given.SeedOption = 1,
    ranks: given.RanksOption = "16",
    adapter_list: given.ListOption = None,
    model_config: given.ModelOption = None,
    gpu_gb: given.GpuOption = None,
    host_gb: given.HostOption = None,
    capacity: given.CapacityOption = None,
    replica_cost: given.CostOption = None,
    machine: given.MachineOption = None,
    measured: given.MeasuredOption = None,
    ttft_p99_ms: given.TargetOption = 200.0,
    utilisation: given.BusyOption = 0.75,
    copies: given.CopiesOption = 2,
    headroom: given.HeadroomOption = 2.0,
    replicas: given.ReplicasOption = None,
    slots: given.SlotsOption = None,
    host_slots: given.HostSlotsOption = None,
    config: given.ConfigOption = None,
    live: given.LiveFlag = False,
    gateway: GatewayOption = "",
    watch: given.WatchOption = 10.0,
    budget: given.BudgetOption = 45.0,
    html: given.HtmlOption = None,
    output: given.JsonFileOption = None,
    json: JsonFlag = False,
) -> None:
    """Replicas, GPU slots, host memory, pools, pins and quotas for a load; each with its reason.

    Example: loraplex plan --zipf 1.1 --adapters 500 --rate 40
    """
    if live:
        live_plan(gateway, watch, json)
        return
    shape = (prompt_tokens, output_tokens, base_share, burstiness)
    source = or_usage(lambda: _source(trace, zipf, rate, (adapters, tenants, seed), shape))
    short = (gpu_gb, host_gb, capacity, replica_cost)
    replica = or_usage(lambda: machine_of(model_config, measured or (), short, machine or ()))
    sizes = or_usage(lambda: sizes_of(ranks, adapter_list, model_config))
    settings = or_usage(lambda: load_settings(GatewayConfig, config))
    target = (ttft_p99_ms / 1e3, utilisation, copies, settings.placement.host_share, headroom)
    wish = or_usage(lambda: Wish(*target, replicas=replicas, slots=slots, host_slots=host_slots))
    made = or_usage(lambda: planned(source, sizes, replica, wish, settings, budget, said=note))
    data = orjson.dumps(made.data(), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
    if output is not None:
        write(data, output)
    if html is not None:
        write(page_of(made).encode(), html)
    write(data if json else f"{text_of(made)}\n".encode(), None)


def _source(
    path: Path | None,
    zipf: float | None,
    rate: float | None,
    counts: tuple[int, int, int],
    shape: tuple[float, float, float, float],
) -> Trace | Recipe:
    """Raises ValueError when neither or both are given."""
    if (path is None) == (zipf is None):
        raise ValueError("give a --trace F, or --zipf S with --rate R (or --live)")
    if path is not None:
        return traces.read(path)
    if rate is None:
        raise ValueError("--zipf S needs --rate R, in requests a second")
    adapters, tenants, seed = counts
    prompt, output, base_share, burstiness = shape
    return Recipe(
        seed=seed,
        rate_per_s=rate,
        burstiness=burstiness,
        adapters=adapters,
        skew=zipf,
        base_share=base_share,
        tenants=tenants,
        prompt_tokens_mean=prompt,
        output_tokens_mean=output,
    )
