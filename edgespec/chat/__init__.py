"""Chat templates, prompts built from messages, text decoded from tokens, and saved chats."""
