"""Share a loaded model between a user's chats and server through Unix sockets."""
