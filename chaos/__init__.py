"""What holds while everything around it dies: `orders → client → ledger`, and `faults → system`.

`faults` says what goes wrong and when, `system` runs the processes and does it to them, `links` are
the connections to NATS that can be cut. `orders` says what is asked and what must come back,
`client` asks over `http`, `ledger` counts, `report` prints; `run` composes them. Run it with
`python -m chaos`.
"""
