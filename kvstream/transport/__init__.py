"""Connections between workers: the contract (`base`), UCX (`ucx`) and one process without a network (`inproc`)."""
