"""The contract between the tiers: pure values, no input or output.

`subjects` names what is on the broker, `wire` says what the messages hold, `openai` what clients
send and get, `errors` how a refusal reads, `life` which states a request passes, `prefix` where
its prompt belongs.
"""
