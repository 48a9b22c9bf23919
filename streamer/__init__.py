"""The way back of a reply: `mailbox → reply → buffer → sse | collect`.

`mailbox` hears the frames, `reply` puts them in order, `buffer` holds what a client has yet to
read, `chunks` says what the API calls them, `sse` and `collect` send them. `attach` opens a
reply for one more reader, `readers` knows whether there is one.
"""
