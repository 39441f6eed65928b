"""Parts of the gateway's benchmark, programs of their own so that their CPU can be counted."""
