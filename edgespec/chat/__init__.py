"""Chat templates, prompt building, decoding of reply text, and saved chats."""
