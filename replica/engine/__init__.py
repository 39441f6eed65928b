"""The engine: a Step becomes tensors, the tensors one forward pass, the logits one token a row.

The only package that knows torch. It decides nothing (`replica.core` does) and serves nobody (the
shell does); what it promises is that row i of a mixed batch equals row i run alone through
`transformers` with PEFT, whatever its neighbours are.
"""

import os

# Before torch is loaded, because OpenMP reads it then. Threads of a pass that wait by spinning keep
# the core from the thread they wait for as soon as anything else runs on the machine, such as the
# gateway or a second replica: beside two busy programs a step took 312 ms spinning, 120 sleeping,
# alone 67 and 89 (SmolLM2-135M, 8 rows, two cores). So who has the cores to itself says so: `spin`.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
