"""The simulator: whole clusters in one thread and in virtual time, under seeded faults.

The production runtime runs here unchanged; what is replaced, through its own seams, is the event loop, the transport,
the broker, the clock and randomness. A run is a pure function of its scenario. Nothing here is needed in production.
"""
