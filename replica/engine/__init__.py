"""The engine: a Step becomes tensors, the tensors one forward pass, the logits one token a row.

The only package that knows torch. It decides nothing (`replica.core` does) and serves nobody (the
shell does); what it promises is that row i of a mixed batch equals row i run alone through
`transformers` with PEFT, whatever its neighbours are.
"""

import os

# Before torch is loaded, because OpenMP reads it then. Threads of a pass that wait by spinning keep
# the core from the thread they wait for as soon as anything else runs on the machine, such as the
# gateway or a second replica: with two busy cores a step took 273 ms spinning and 61 ms sleeping.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
