"""Chat templates, prompt building, streaming text decoding and saved chats."""
