"""What a program imports: runtimes, chats, streams, and queues of requests. `edgespec` exports all of it."""
