"""The gateway: one OpenAI-compatible endpoint for all tenants, in front of a fleet of replicas.

A request passes, in this order: `front` (a plain completion, read without a framework; aiohttp has
the rest), `handlers` (who is it, which model, is the body sane), `quota` (may it pass), `pump` over
`core/dispatcher` (whose turn is it, which replica), `forward` over `upstream` and `relay` (bytes to
the replica and back), `ledger` (what did it cost). `watch` follows each replica's reports, and
`engines` asks servers of other makers; `registry` holds tenants and keys; `core` takes every
decision and does no IO. `app` is where the objects meet.

This file imports nothing, so that importing a core imports only the core.
"""
