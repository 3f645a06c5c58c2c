"""The engine process: the one composition root, the loop, and its end of the wire."""
