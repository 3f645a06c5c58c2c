"""Load and figures: what a server, or the engine in this process, does under a given set of requests."""
