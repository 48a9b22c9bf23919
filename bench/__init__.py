"""What a unit of work costs, beside a bare server that does the same: `rows → system | client`.

`rows` says what is measured, `system` and `reference` run what is measured, `client` loads both,
`engine` runs the simulated engine alone, `command` one command, `report` prints. Run it with
`python -m bench`.
"""
