"""Let one user's chats and server share a loaded model through Unix sockets."""
