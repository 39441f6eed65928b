"""The gateway: one OpenAI-compatible endpoint for all tenants, in front of a fleet of replicas.

    edge         HTTP, both ways: bytes of tenants' connections and of replicas'
    completion   one request on its way: named, admitted, placed, sent, answered, billed
    state        tenants, quotas, the ledger: what the store holds (`store`), and who decides on it
    fleet        replicas as this gateway drives them: reports in, placements and orders out
    core         every decision, pure: no clock, no socket, no dice
    engines      servers of other makers, asked in their own ways
    admin, console, cli, probes    for operators

A request passes, in this order: `edge.front` (a plain completion, read without a framework; aiohttp
has the rest), `completion.handlers` or `short_way` (who is it, which model, is the body sane),
`state.quota` (may it pass), `fleet.pump` over `core.dispatcher` (whose turn is it, which replica),
`completion.forward` over `edge.upstream` and `edge.relay` (bytes to the replica and back),
`state.ledger` (what did it cost). `app` is where the objects meet.

This file imports nothing, so that importing a core imports only the core.
"""
