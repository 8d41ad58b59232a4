"""The public Python API: runtimes, chats, streams and request queues. `edgespec` re-exports all of it."""
