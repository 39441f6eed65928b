"""Servers of other makers as replicas: what each shows of itself, turned into our reports."""
