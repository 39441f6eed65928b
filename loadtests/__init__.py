"""Load: traces of arrivals, and the programs that replay or simulate them."""
