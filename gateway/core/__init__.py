"""Every decision of the gateway: who may pass, who is next, which replica.

The law of this package: events in, decisions out, and `now` is an argument. No IO, no clock, no
dice, no log, no lock; nothing here knows asyncio, HTTP or a configuration object. Two drivers run
these objects, the live gateway and the simulator, and both get the same decisions from the same
events. Whatever keeps state has `check()`, which raises when an invariant is broken.

    bucket      may this much pass now?                      fair_queue   whose turn is it?
    ring        which replica is an adapter's home?          residency    who holds which adapter?
    fleet       who is alive, and how busy?                  cost         what does a request weigh?
    router      the best replica for one adapter now         dispatcher   all of it, one writer

This file imports nothing.
"""
