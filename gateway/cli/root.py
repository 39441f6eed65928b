"""The command tree: every command that exists, and none that does not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import typer

from gateway.cli import (
    adapter,
    adapter_add,
    adapter_check,
    adapter_eval,
    apply,
    bench,
    chat,
    demo,
    events,
    explain,
    price,
    replica_set,
    serve,
    size,
    tenant,
    top,
    up,
    usage,
)
from gateway.cli.failure import Failure


def _group(help_text: str, example: str) -> typer.Typer:
    return typer.Typer(
        help=help_text,
        epilog=f"Example: {example}",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,  # plain text: it pipes, greps and starts quicker
        pretty_exceptions_enable=False,
    )


app = _group(
    "Serve hundreds of LoRA fine-tunes from one base model, for many tenants.", "loraplex up"
)


def _add(
    to: typer.Typer, name: str, run: Callable[..., Any], example: str, **settings: Any
) -> None:
    to.command(name, epilog=f"Example: {example}", **settings)(run)


def _noun(name: str, help_text: str, example: str) -> typer.Typer:
    noun = _group(help_text, example)
    app.add_typer(noun, name=name)
    return noun


_passed_on = {"context_settings": serve.PASSED_ON, "add_help_option": False}
_add(app, "up", up.up, "loraplex up --replicas 2 --base demo --port 8080")
_add(app, "demo", demo.demo, "loraplex demo --once")
_add(app, "chat", chat.chat, 'loraplex chat pirate "Describe the sea."')
_add(app, "gateway", serve.gateway, "loraplex gateway --config gateway.yaml", **_passed_on)
_add(
    app,
    "replica",
    serve.replica,
    "loraplex replica --base ./base --adapters ./adapters --port 9000",
    **_passed_on,
)
_add(app, "trace", serve.trace, "loraplex trace generate --adapters 500", **_passed_on)
_add(
    app,
    "plan",
    serve.plan,
    "loraplex plan --zipf 1.1 --adapters 500 --rate 40",
    **_passed_on,
)
_add(app, "simulate", serve.simulate, "loraplex simulate --zipf 1.1 --load 0.75", **_passed_on)
_add(app, "lesson", serve.lesson, "loraplex lesson cache", **_passed_on)

_tenants = _noun("tenant", "Tenants, their limits and their keys.", "loraplex tenant list")
_add(_tenants, "list", tenant.list_all, "loraplex tenant list --json")
_add(_tenants, "show", tenant.show_one, "loraplex tenant show acme")
_add(
    _tenants,
    "create",
    tenant.create,
    "loraplex tenant create acme --requests-per-min 60 --tokens-per-min 20000",
)
_add(_tenants, "set", tenant.set_fields, "loraplex tenant set acme --weight 2 --model pirate")
_add(_tenants, "delete", tenant.delete, "loraplex tenant delete acme --yes")
_add(_tenants, "key-create", tenant.key_create, "loraplex tenant key-create acme")
_add(
    _tenants,
    "key-rotate",
    tenant.key_rotate,
    "loraplex tenant key-rotate acme KEY_ID --grace 3600",
)
_add(_tenants, "key-revoke", tenant.key_revoke, "loraplex tenant key-revoke acme KEY_ID --yes")

_adapters = _noun("adapter", "Adapters the fleet serves.", "loraplex adapter list")
_add(_adapters, "list", adapter.list_all, "loraplex adapter list --json")
_add(_adapters, "show", adapter.show_one, "loraplex adapter show pirate")
_add(
    _adapters,
    "check",
    adapter_check.check,
    "loraplex adapter check ./adapters/pirate --base ./base",
)
_add(
    _adapters,
    "eval",
    adapter_eval.evaluate,
    "loraplex adapter eval ./adapters/pirate --base ./base --text sample.txt",
)

_add(
    _adapters, "add", adapter_add.add, "loraplex adapter add pirate ./adapters/pirate --base ./base"
)
_add(_adapters, "remove", adapter_add.remove, "loraplex adapter remove pirate --yes")
_add(_adapters, "set", adapter.set_fields, "loraplex adapter set pirate --owner acme --private")
_add(_adapters, "version", adapter.version, "loraplex adapter version pirate 0123456789ab")
_add(_adapters, "rollback", adapter.rollback, "loraplex adapter rollback pirate --yes")
_add(_adapters, "forget", adapter.forget, "loraplex adapter forget pirate --yes")

_prices = _noun("price", "What tokens cost.", "loraplex price list")
_add(_prices, "list", price.list_all, "loraplex price list --json")
_add(_prices, "set", price.set_one, "loraplex price set --input 0.5 --output 1.5 --tenant acme")
_add(_prices, "delete", price.delete, "loraplex price delete --tenant acme --yes")

_replicas = _noun("replica-set", "The replicas of a gateway.", "loraplex replica-set list")
_add(_replicas, "list", replica_set.list_all, "loraplex replica-set list --json")
_add(_replicas, "drain", replica_set.drain, "loraplex replica-set drain replica-1")
_add(_replicas, "resume", replica_set.resume, "loraplex replica-set resume replica-1")

_benches = _noun(
    "bench", "Measure the engine's parts on this machine's GPU.", "loraplex bench kernels"
)
_add(
    _benches,
    "kernels",
    bench.kernels,
    "loraplex bench kernels --only 'qkv r16 64' --out kernels.json",
    **_passed_on,
)
_add(
    _benches,
    "engine",
    bench.engine,
    "loraplex bench engine --concurrency 32,64 --mixes none,distinct --out engine.json",
    **_passed_on,
)
_add(
    _benches,
    "residency",
    bench.residency,
    "loraplex bench residency --adapters 500 --resident 64",
    **_passed_on,
)
_add(
    _benches,
    "agreement",
    bench.agreement,
    "loraplex bench agreement --layers 4",
    **_passed_on,
)

_add(app, "top", top.top, "loraplex top --every 0.5")
_add(app, "explain", explain.explain, "loraplex explain --tenant acme --model pirate")
_add(app, "events", events.events, "loraplex events --limit 50")
_add(app, "apply", apply.apply, "loraplex apply -f fleet.yaml --dry-run")

_usage = typer.Typer(
    help=usage.usage.__doc__,
    epilog="Example: loraplex usage --by tenant,adapter --format csv",
    invoke_without_command=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
_usage.callback()(usage.usage)
app.add_typer(_usage, name="usage")
_add(_usage, "export", usage.export, "loraplex usage export --format parquet --output july.parquet")
_add(_usage, "reconcile", usage.reconcile, "loraplex usage reconcile --json")
_add(app, "size", size.size, "loraplex size --model-config ./base/config.json --rank 16")


def run() -> None:
    """Every command ends in an exit code; a Failure is said on stderr, without a traceback."""
    try:
        app()
    except Failure as failure:
        print(f"error: {failure}", file=sys.stderr)
        sys.exit(failure.code)
