"""Let the chats and the server of one user share a loaded model, through Unix sockets."""
