"""How replicas are found that the gateway's file does not list: by DNS, and by joining.

Each source tells who is there, all of it or nothing; gateway/core/census.py decides what follows,
and gateway/members.py does it.
"""
