"""The shapes in which clients speak: bodies, answers, streams and errors of each API."""
