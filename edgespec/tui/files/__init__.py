"""Files in the terminal chat: references such as @src/main.py, their completion, and the attached files."""
