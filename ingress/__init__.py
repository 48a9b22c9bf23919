"""The gate: `auth → prompt → cost → dispatch → handoff`.

`auth` says whose request it is, `prompt` renders and tokenises it, `cost` what it may use,
`dispatch` places it in the queue, `handoff` hands its client to a streamer. `routes` composes them,
and `idempotency` sees to it that one key runs once.
"""
