"""A plan from end to end: the demand, the proposal, its trials, and what came of them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from gateway.config import GatewayConfig
from loadtests.demand import Demand, Sizes, busiest, of_recipe, of_trace
from loadtests.machine import Machine
from loadtests.neighbours import PROPOSED, Trial, Trials, arrivals_for, neighbours, settled, verdict
from loadtests.planner import proposal_of, propose
from loadtests.proposal import Advice, Level, Pool, Proposal, Wish
from loadtests.recipe import Recipe, generate
from loadtests.trace import Trace


@dataclass(frozen=True, slots=True)
class Plan:
    title: str
    demand: Demand
    machine: Machine
    wish: Wish
    proposal: Proposal
    trials: tuple[Trial, ...]  # of the shared pool; the proposal first
    others: tuple[Trial, ...]  # one of each other pool
    arrivals: int  # of the simulated trace

    @property
    def chosen(self) -> Trial | None:
        return self.trials[0] if self.trials else None

    def data(self) -> dict[str, Any]:
        """As JSON has it."""
        chosen = self.chosen
        return {
            "command": " ".join(["loraplex", *sys.argv[1:]]),
            "demand": {
                "rate_per_s": self.demand.rate_per_s,
                "prompt_tokens": self.demand.prompt_tokens,
                "output_tokens": self.demand.output_tokens,
                "base_share": self.demand.base_share,
                "adapters": len(self.demand.adapters),
                "working_set_bytes": self.demand.bytes,
            },
            "machine": asdict(self.machine),
            "wish": asdict(self.wish),
            "pools": [_pool_row(pool, self.machine) for pool in self.proposal.pools],
            "advice": [asdict(one) for one in self.proposal.advice],
            "pinned": list(self.proposal.pinned),
            "quotas": [asdict(one) for one in self.proposal.quotas],
            "cost_per_hour": self.proposal.cost_per_hour(self.machine),
            "simulated_arrivals": self.arrivals,
            "meets_target": None if chosen is None else chosen.meets,
            "simulated": None if chosen is None else chosen.figures,
            "trials": [_trial_row(trial, trial if chosen is None else chosen, self.wish)
                       for trial in (*self.trials, *self.others)],
        }  # fmt: skip


def planned(
    source: Trace | Recipe,
    sizes: Sizes,
    machine: Machine,
    wish: Wish,
    config: GatewayConfig,
    budget_s: float,
    *,
    said: Callable[[str], None],
) -> Plan:
    """`budget_s`: CPU for the trials, about; 0: none. Raises ValueError when nothing is asked."""
    if isinstance(source, Recipe):
        title = f"Zipf {source.skew:g} over {source.adapters} adapters, {source.rate_per_s:g}/s"
        demand = of_recipe(source, sizes)
        proposal = propose(demand, machine, wish)
        arrivals = arrivals_for(budget_s, demand, proposal.pools)
        rows = tuple(generate(replace(source, arrivals=arrivals)))
    else:
        title = f"A trace of {len(source)} arrivals"
        demand = of_trace(source, sizes)
        proposal = propose(demand, machine, wish)
        rows = busiest(source, arrivals_for(budget_s, demand, proposal.pools))
    if not budget_s:
        return Plan(title, demand, machine, wish, proposal, (), (), 0)
    trials = Trials(rows=rows, demand=demand, machine=machine, wish=wish, config=config, said=said)
    first = proposal.pools[0]
    pool = settled(first, trials, machine, wish)
    chosen = trials.run(pool, PROPOSED)
    if pool != first:
        proposal = proposal_of(demand, (pool, *proposal.pools[1:]), machine, wish)
    told = target(chosen, trials.run(first, PROPOSED), wish)
    proposal = replace(proposal, advice=(*proposal.advice, told))
    beside = [trials.run(other, change) for change, other in neighbours(pool, wish)]
    others = [trials.run(one, one.name) for one in proposal.pools[1:] if trials.rows_of(one)]
    return Plan(title, demand, machine, wish, proposal, (chosen, *beside), tuple(others), len(rows))


def target(chosen: Trial, first: Trial, wish: Wish) -> Advice:
    """Whether the simulator agrees."""
    most = 1e3 * wish.ttft_p99_s
    reads = f"the first token comes within {chosen.p99_ms:.0f} ms for 99 % of the requests"
    grown = first.pool != chosen.pool
    before = (
        f"{first.pool.replicas} replicas of {first.pool.slots} slots took {first.p99_ms:.0f} ms"
    )
    if chosen.meets:
        return Advice(
            "target",
            Level.OK,
            f"{reads} in the simulator; the target is {most:.0f} ms",
            f"{chosen.pool.replicas} replicas of {chosen.pool.slots} slots do, {before}"
            if grown
            else "the production cores ran the busiest stretch on what is proposed",
            "the table of neighbours says what each step away from it changes",
        )
    refused = f", and {chosen.refused} were refused" if chosen.refused else ""
    return Advice(
        "target",
        Level.WARNING,
        f"{reads} in the simulator{refused}: the target of {most:.0f} ms is missed",
        "neither more slots nor a few replicas more met it"
        if wish.replicas is None
        else "the number of replicas was given",
        "the table of neighbours says what helps most; a long prompt alone may take longer than "
        "the target allows",
    )


def _pool_row(pool: Pool, machine: Machine) -> dict[str, Any]:
    row = {name: getattr(pool, name) for name in (
        "name", "replicas", "slots", "slots_max", "host_slots", "host_bytes", "host_covers",
        "max_rank", "slot_bytes", "merged",
    )}  # fmt: skip
    return {
        **row,
        "adapters": len(pool.demand.adapters),
        "rate_per_s": pool.demand.rate_per_s,
        "cost_per_hour": pool.cost_per_hour(machine),
    }


def _trial_row(trial: Trial, chosen: Trial, wish: Wish) -> dict[str, Any]:
    return {
        "change": trial.change,
        "pool": trial.pool.name,
        "replicas": trial.pool.replicas,
        "slots": trial.pool.slots,
        "host_slots": trial.pool.host_slots,
        "busy": trial.busy,
        "fits": trial.fits,
        "meets": trial.meets,
        "cost_per_hour": trial.cost_per_hour,
        "verdict": verdict(trial, chosen, wish) if trial.pool.name == chosen.pool.name else "",
        **{
            name: trial.figures[name] for name in ("ttft_p50_ms", "ttft_p99_ms", "adapter_found_in")
        },
        "refused": trial.refused,
    }
