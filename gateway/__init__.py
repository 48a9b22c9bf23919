"""Ingress and streamer in one process: the embedded default, with the handoff `inline`."""
