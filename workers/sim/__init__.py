"""The simulated engine's insides: a batch of requests that says a story instead of computing one.

`vocabulary → story | script → voice → text` is what a choice says; `kv → schedule → batch` is when
it may say the next token; `options` and `clock` say how large and how slow the engine is. Nothing
here knows an event loop: `workers.engine_sim` drives it.
"""
