"""A worker: `intake → generation → engine`.

`credit` decides what to pull, `intake` pulls it, `recovery` asks whose a redelivered request is,
`course` decides how it goes on, `generation` runs one request and publishes its frames, `lease`
keeps what runs from being delivered again, `cancels` hears what is no longer wanted, `keeping`
keeps an answer for longer.
"""
