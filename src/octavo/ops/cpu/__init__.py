"""The CPU backend: a traced model becomes a native program that is replayed each step. The only package that imports octavo._native."""
