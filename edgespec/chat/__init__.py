"""Conversations: messages, the prompt they make, the text that comes back, and chats that are saved."""
