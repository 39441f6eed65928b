"""HTTP, both ways: what tenants' connections bring, what goes on to replicas, and bytes between.

    listener -> front (plain completions) | framework (everything else)      reply, relay: back
    upstream -> connection -> exchange: one request to one replica

Nothing here knows a tenant, a quota or an adapter.
"""
