"""Decisions about streams: a sans-IO core and the pump that runs it on asyncio."""
