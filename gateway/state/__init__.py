"""What the store holds, and who decides on it: tenants and keys, quotas, the ledger.

registry    tenants, keys, adapters, prices: desired state, mirrored in memory
quota       may this much pass now? one script over all limits, or a local share
ledger      one durable record a request
"""
