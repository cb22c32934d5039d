"""The pages under ``/console``: what the trace store holds, for people, rendered on the server, no script needed."""
