"""The runtime: the only place where scheduler, transport, discovery and memory meet."""
