"""A replica: one process, one base model, many adapters, and a batch that mixes them.

What comes in is an OpenAI request whose `model` names an adapter, or the base. What the replica
owes: text computed with exactly those weights, whoever else is in the batch; and, to every gateway
that listens, the truth about which adapters it holds and where.

Three layers, imports pointing down only:

    shell     app puts it together; handlers speak HTTP, loop drives the engine thread, tiers and
              adapters carry weights about; protocol and text make tokens of OpenAI's JSON
    engine    weights, model, kernels, sampler, runner, adapter_store: everything that owns a tensor
    core      sequence, pages, adapter_cache, scheduler, segments: every decision, and no IO

One request. `handlers` parses it and turns text into token ids; `loop` hands the sequence to the
engine thread, the only thread boundary here. There, until nothing is left to do:

    core.AdapterCache.poll     which adapters to bring into slots, which to let go
    core.Scheduler.plan        the next Step: rows of several adapters and of none, side by side
    engine.Runner.run          one forward pass over that step; one token a row that asks for it
    core.Scheduler.commit      what each sequence got, and which of them have ended

and tokens go back to the handler, which streams them.

An adapter is known by its name and its content digest. Its weights are in one of three tiers: DISK
(the store's folder), HOST (validated, in memory), GPU (in a slot that kernels index; a CPU replica
has slots all the same). A sequence that runs holds a lease on its slot, and a held slot is never
evicted; loads run beside the batch, so nobody waits for an adapter but those who asked for it, and
the base waits for none. New content under an old name is another version: who runs finishes on the
old weights, who comes gets the new ones.

After a change the replica writes a report of all this on each open `GET /reports` stream, and at
least one a heartbeat: silence means that the replica is lost.
"""
