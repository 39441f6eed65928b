"""The gateway's memory outside itself: Redis's protocol, spoken in this folder only.

`redis` is the store as the rest of the gateway sees it, `wire` the connection its hot path runs
over, `embedded` a server of our own for one machine, `spool` the file that outlives an outage.
Each `.lua` file is one decision, taken atomically by the server; the comment at its head is its
contract. This file imports nothing.
"""
